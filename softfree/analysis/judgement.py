"""Whether a layer attends: to something, to next to nothing ("dead"), or to everything alike ("flat").

`inspect`, `train`, `figure heatmap` and the explorer all judge, and draw, by these functions.
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from softfree.analysis.capture import AttentionLayer

Word = Literal["", "dead", "flat"]
WORDS: tuple[Word, ...] = ("", "dead", "flat")
# Weights of a token that add up to less than this change the sum that follows in its third digit.
NEXT_TO_NOTHING = 1e-2
# Weights that differ by less than this part of the greatest look alike on any scale that begins at 0.
ALIKE = 0.05


class Judgement(NamedTuple):
    """What rows of attention weights are like.

    Attributes:
        total: what the sizes of a row's weights add up to (softmax: 1), of the head with most.
        contrast: how far a row's weights are apart, in parts of its greatest size, of the head with most.
        word: "dead", "flat", or "" if the layer attends to something.
    """

    total: float
    contrast: float
    word: Word

    @property
    def text(self) -> str:
        """What is wrong, in words; empty if nothing is."""
        if self.word == "dead":
            return (
                f"attends to next to nothing: a token's weights add up to {self.total:.2g} at most; "
                "landmarks are far from all tokens"
            )
        if self.word == "flat":
            return (
                f"attends to everything alike: a token's weights differ by {self.contrast:.1%} of the "
                "greatest at most"
            )
        return ""


def judge(rows: Tensor) -> Judgement:
    """Judge rows of attention weights (heads, rows, tokens): means over the rows, of the head that has most.

    Example:
        >>> import torch
        >>> judge(torch.full((1, 1, 64), 1 / 64)).word, judge(torch.eye(4)[None]).word
        ('flat', '')
        >>> judge(torch.full((2, 1, 64), 1e-6)).word
        'dead'
    """
    total = rows.abs().sum(-1).mean(-1).max().item()
    contrast = contrasts(rows).mean(-1).max().item()
    return Judgement(total, contrast, _word(total, contrast, rows.shape[-1]))


def judge_layer(layer: AttentionLayer) -> Judgement:
    """Judge a layer by evenly chosen rows."""
    return judge(layer.sampled_rows())


def judge_maps(maps: Tensor) -> list[Judgement]:
    """Judge each of the maps (..., H, W) by itself, in the order in which they lie in memory."""
    rows = maps.reshape(-1, maps.shape[-2] * maps.shape[-1])
    figures = torch.stack([rows.abs().sum(-1), contrasts(rows)], -1).tolist()
    tokens = rows.shape[-1]
    return [
        Judgement(total, contrast, _word(total, contrast, tokens)) for total, contrast in figures
    ]


def contrasts(rows: Tensor) -> Tensor:
    """Greatest less least value over the greatest size, (...,) of (..., tokens); 0 where all are 0."""
    greatest = rows.abs().amax(-1)
    return (rows.amax(-1) - rows.amin(-1)) / torch.where(greatest > 0, greatest, 1)


def scale_maps(maps: Tensor) -> Tensor:
    """Maps (..., H, W) between 0 and 1 for a colour scale.

    0 at the least value and 1 at the greatest, as in the papers; but a dead map is 0 and a flat one 1 throughout, for
    full contrast over nearly equal values would show what is not there.
    """
    least, greatest = (part[..., None, None] for part in (maps.amin((-2, -1)), maps.amax((-2, -1))))
    span = greatest - least
    scaled = torch.where(span > 0, (maps - least) / torch.where(span > 0, span, 1), 0)
    words = [judged.word for judged in judge_maps(maps)]
    for word, value in (("dead", 0.0), ("flat", 1.0)):
        found = torch.tensor([each == word for each in words], device=maps.device)
        scaled = torch.where(found.view(*maps.shape[:-2], 1, 1), value, scaled)
    return scaled


def warnings_of(layers: Iterable[AttentionLayer]) -> dict[str, str]:
    """By the layers' names, what is wrong with those that attend to nothing, or to everything alike."""
    found = {layer.name: judge_layer(layer).text for layer in layers}
    return {name: text for name, text in found.items() if text}


def _word(total: float, contrast: float, tokens: int) -> Word:
    if total < NEXT_TO_NOTHING:
        return "dead"
    # A single token is like all others.
    return "flat" if contrast < ALIKE and tokens > 1 else ""
