"""Variations of the layer of ``softfree_*`` that were tried and left out. Runs a softfree command with one of them.

    python benchmarks/variants.py sphere train classification --model softfree_tiny --data-dir D --output OUT
    python benchmarks/variants.py sphere validate classification --checkpoint OUT/last --data-dir D

``sphere``    queries divided by their root mean square, instead of normed: their mean over the channels stays
``row-sums``  X divided by the rows' sums of weights, which a column of ones beside the values gives
``place``     each token's place, times a learned factor per head, as two more channels of queries and landmarks;
              for pictures alone

Two further variations need no script: ``--model-kwargs pre_norm=True`` and ``--model-kwargs global_pool=token
class_token=True``.
"""

import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softfree.layers import attention
from softfree.layers.pooling import Sampled
from softfree_cli import main

LEAST_SUM = 0.01  # the weights of a row may be negative, and add up to 0
PLACE = 3.0  # the start of a head's factor: half a picture away, a weight falls to exp(-9 / 11)


def sphere() -> None:
    """Let queries keep their mean."""

    def normed(q: Tensor, scale: Tensor | None) -> Tensor:
        x = F.rms_norm(q.float(), q.shape[-1:], eps=1e-5)
        return (x if scale is None else x * scale[:, None, None]).to(q.dtype)

    attention.normed = normed


def row_sums() -> None:
    """Make each token's result an average."""
    plain = attention.soft_attention

    def averaged(q: Tensor, k: Tensor, v: Tensor, landmarks: Tensor, **options: Any) -> Tensor:
        out = plain(q, k, torch.cat([v, torch.ones_like(v[..., :1])], -1), landmarks, **options)
        return out[..., :-1] / out[..., -1:].clamp(min=LEAST_SUM)

    attention.soft_attention = averaged
    attention.pooled_share = lambda *_: None  # an average needs no share of the windows


def place() -> None:
    """Let the kernel compare where tokens are, too."""
    heads = attention.SoftAttention
    create = heads.__init__

    @functools.wraps(create)  # whose keywords are the options of the attention
    def with_factors(layer: Any, dim: int, num_heads: int = 8, **options: Any) -> None:
        create(layer, dim, num_heads, **options)
        layer.log_place = nn.Parameter(torch.full((num_heads,), math.log(PLACE)))

    def with_places(
        layer: Any, q: Tensor, size: Any = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Sampled]:
        if size is None or len(size) != 2:
            raise ValueError(
                "the variant place is for pictures, got tokens without height and width"
            )
        keys = layer._compared(q)
        axes = [torch.linspace(-1, 1, side, device=q.device) for side in size]
        places = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).flatten(0, 1)
        places = layer.log_place.exp()[:, None, None] * places
        keys = torch.cat([keys, places.to(keys.dtype).expand(len(q), -1, -1, -1)], -1)
        return keys, layer.sampler(keys, size, mask)

    heads.__init__ = with_factors  # type: ignore[method-assign]
    heads.keys_and_landmarks = with_places  # type: ignore[method-assign]


VARIANTS: dict[str, Callable[[], None]] = {"sphere": sphere, "row-sums": row_sums, "place": place}


if __name__ == "__main__":
    if sys.argv[1:2] in ([], ["-h"], ["--help"]):
        sys.exit(__doc__)
    name, *arguments = sys.argv[1:]
    if name not in VARIANTS:
        sys.exit(f"the variant must be one of {', '.join(VARIANTS)}, got {name!r}")
    # The single operator for a whole layer knows no variants.
    attention.SoftAttention._is_one_operator = lambda layer, x: False  # type: ignore[method-assign]
    VARIANTS[name]()
    sys.exit(main(arguments))
