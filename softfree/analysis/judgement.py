"""Whether a layer attends to something, to next to nothing ("dead"), or to everything alike ("flat").

`inspect`, `train`, `figure heatmap` and the explorer all use these functions to judge and to draw.
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from softfree.analysis.capture import AttentionLayer

Word = Literal["", "dead", "flat"]
WORDS: tuple[Word, ...] = ("", "dead", "flat")
# If a token's weights add up to less than this, they change the following sum only in its third digit.
NEXT_TO_NOTHING = 1e-2
# Weights that differ by less than this fraction of the largest look alike on a scale that starts at 0.
ALIKE = 0.05


class Judgement(NamedTuple):
    """A judgement on rows of attention weights.

    Attributes:
        total: sum of the absolute weights of a row (softmax: 1), for the head with the largest sum.
        contrast: range of a row's weights relative to its largest absolute weight, for the head with the
            largest; of a flat layer, dead heads are left out.
        word: "" if any head attends to something; otherwise "flat", or "dead" if all heads are.
    """

    total: float
    contrast: float
    word: Word

    @property
    def text(self) -> str:
        """The problem in words; empty if there is none."""
        if self.word == "dead":
            return (
                f"attends to next to nothing: a token's weights add up to at most {self.total:.2g}; "
                "landmarks are far from all tokens"
            )
        if self.word == "flat":
            return (
                f"attends to everything alike: a token's weights differ by at most {self.contrast:.1%} of "
                "the largest"
            )
        return ""


def judge(rows: Tensor) -> Judgement:
    """Judge rows of attention weights (heads, rows, tokens) by their means over the rows.

    Each head is judged by itself, since a flat head beside a dead one attends to nothing in particular.

    Example:
        >>> import torch
        >>> judge(torch.full((1, 1, 64), 1 / 64)).word, judge(torch.eye(4)[None]).word
        ('flat', '')
        >>> judge(torch.full((2, 1, 64), 1e-6)).word
        'dead'
    """
    totals = rows.abs().sum(-1).mean(-1)
    spreads = contrasts(rows).mean(-1)
    heads = zip(totals.tolist(), spreads.tolist(), strict=True)
    words = {_word(total, contrast, rows.shape[-1]) for total, contrast in heads}
    word = next(word for word in ("", "flat", "dead") if word in words)
    if word == "flat":  # what a dead head's few weights are like does not count
        spreads = spreads[totals >= NEXT_TO_NOTHING]
    return Judgement(totals.max().item(), spreads.max().item(), word)


def judge_layer(layer: AttentionLayer) -> Judgement:
    """Judge a layer by evenly chosen rows."""
    return judge(layer.sampled_rows())


def judge_maps(maps: Tensor) -> list[Judgement]:
    """Judge each of the maps (..., H, W) separately, in row-major order."""
    rows = maps.reshape(-1, maps.shape[-2] * maps.shape[-1])
    figures = torch.stack([rows.abs().sum(-1), contrasts(rows)], -1).tolist()
    tokens = rows.shape[-1]
    return [
        Judgement(total, contrast, _word(total, contrast, tokens)) for total, contrast in figures
    ]


def contrasts(rows: Tensor) -> Tensor:
    """Range of the values divided by the largest absolute value, (...,) of (..., tokens); 0 if all are 0."""
    greatest = rows.abs().amax(-1)
    return (rows.amax(-1) - rows.amin(-1)) / torch.where(greatest > 0, greatest, 1)


def scale_maps(maps: Tensor) -> Tensor:
    """Scale maps (..., H, W) to values between 0 and 1, for a colour scale that includes the weight 0.

    The largest weight (or 0, if all are negative) becomes 1, and the smallest (or 0, if all are positive)
    becomes 0. So nearly equal weights get nearly the same colour; a scale from the smallest weight to the
    largest, as in the papers, would show contrast that is not there. A dead map is 0 everywhere.
    """
    least, greatest = (part[..., None, None] for part in (maps.amin((-2, -1)), maps.amax((-2, -1))))
    least, greatest = least.clamp(max=0), greatest.clamp(min=0)
    span = greatest - least
    dead = torch.tensor([judged.word == "dead" for judged in judge_maps(maps)], device=maps.device)
    blank = dead.view(*maps.shape[:-2], 1, 1) | (span <= 0)
    return torch.where(blank, 0, (maps - least) / torch.where(blank, 1, span))


def warnings_of(layers: Iterable[AttentionLayer]) -> dict[str, str]:
    """Warnings, by the name of the layer, for layers that attend to nothing, or to everything alike."""
    found = {layer.name: judge_layer(layer).text for layer in layers}
    return {name: text for name, text in found.items() if text}


def _word(total: float, contrast: float, tokens: int) -> Word:
    if total < NEXT_TO_NOTHING:
        return "dead"
    # With a single token, all weights are trivially alike.
    return "flat" if contrast < ALIKE and tokens > 1 else ""
