"""What is left of a model without its attention? Runs any softfree command with softmax-free attention switched off.

    python benchmarks/without_attention.py train classification --model softpp_tiny --data-dir D --output OUT
    python benchmarks/without_attention.py validate classification --checkpoint OUT/last --data-dir D
    python benchmarks/without_attention.py --own-values train classification --model softfree_tiny --data-dir D --output OUT

Nothing passes from token to token by softmax-free attention; parameters, blocks and training stay the same. Softmax layers,
such as the last stage of ``*_release`` models, and rivals are left as they are. There are two controls:

- By default the attention adds 0. In SOFT and SOFT++ the depthwise convolution of the values still uses the layer's
  projections. In ``softfree_*`` there is no such convolution, so that these projections do nothing, and part of what
  the model loses is their capacity.
- With ``--own-values`` each token gets its own value (where landmarks are pooled to fewer, times their share of the
  windows, as the layer scales its result), so that every projection still acts.

``softfree train ... --model-kwargs value_convs=0,0,0,0`` does the opposite: it keeps the attention and leaves the
convolution of the values out.
"""

import sys
from typing import Any

import torch
from torch import Tensor

from softfree.layers import attention
from softfree_cli import main

OWN_VALUES = "--own-values"


def leave_attention_out(own_values: bool = False) -> None:
    """Let every softmax-free layer of this process attend to nothing, or with ``own_values`` each token to itself."""

    def nothing(q: Tensor, k: Tensor, v: Tensor, landmarks: Tensor, **options: Any) -> Tensor:
        return v if own_values else torch.zeros_like(v)

    attention.soft_attention = nothing
    # The single operator for a whole layer would still attend.
    attention.SoftAttention._is_one_operator = lambda layer, x: False  # type: ignore[method-assign]


if __name__ == "__main__":
    arguments = sys.argv[1:]
    leave_attention_out(own_values=OWN_VALUES in arguments)
    sys.exit(main([argument for argument in arguments if argument != OWN_VALUES]))
