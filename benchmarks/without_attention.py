"""What is left of SOFT++ without its attention? Any command of softfree, with that term of the layers at 0.

    python benchmarks/without_attention.py train classification --model softpp_tiny --data-dir D --output OUT
    python benchmarks/without_attention.py validate classification --checkpoint OUT/last --data-dir D

A layer of SOFT or SOFT++ then is its projections and the depthwise convolution of its values; parameters, blocks and training
are as ever. Beside it, ``softfree train ... --model-kwargs value_convs=0,0,0,0`` keeps the attention and leaves the
convolution out.
"""

import sys
from typing import Any

import torch
from torch import Tensor

from softfree.layers import attention
from softfree_cli import main


def nothing(q: Tensor, v: Tensor, landmarks: Tensor, **options: Any) -> Tensor:
    """What :func:`softfree.soft_attention` gives in shape, and 0."""
    return torch.zeros_like(v)


if __name__ == "__main__":
    attention.soft_attention = nothing
    # The one operator for a whole layer would attend all the same.
    attention.SoftAttention._is_one_operator = lambda layer, x: False  # type: ignore[method-assign]
    sys.exit(main(sys.argv[1:]))
