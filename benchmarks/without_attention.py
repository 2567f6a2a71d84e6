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


def leave_attention_out() -> None:
    """Make every layer of SOFT and SOFT++ in this process add nothing to the convolution of its values."""

    def nothing(q: Tensor, k: Tensor, v: Tensor, landmarks: Tensor, **options: Any) -> Tensor:
        return torch.zeros_like(v)

    attention.soft_attention = nothing
    # The one operator for a whole layer would attend all the same.
    attention.SoftAttention._is_one_operator = lambda layer, x: False  # type: ignore[method-assign]


if __name__ == "__main__":
    leave_attention_out()
    sys.exit(main(sys.argv[1:]))
