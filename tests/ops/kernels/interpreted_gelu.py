"""GELU's gradient in Triton's interpreter, against PyTorch's in float64.

It prints one JSON line a case: relative errors of the result and of the gradients of x, weight and bias.
"""

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
import torch.nn.functional as F

from softfree.ops import gelu
from softfree.ops.kernels import launch

CHANNELS = 6
CASES = [  # batch, tokens, hidden channels, compiled
    (5, 7, 20, False),
    (1, 1, 128, False),
    (3, 50, 130, False),
    (0, 5, 20, False),
    (2, 5, 20, True),
]


def main() -> None:
    torch.manual_seed(0)
    launch.processors = lambda device: 1  # several stretches of several steps
    gelu._fits = lambda x, bias: True
    for batch, tokens, hidden, compiled in CASES:
        shapes = ((batch, tokens, CHANNELS), (hidden, CHANNELS), (hidden,))
        inputs = [torch.randn(shape).half().requires_grad_() for shape in shapes]
        wide = [t.detach().double().requires_grad_() for t in inputs]
        function = gelu.linear_gelu
        if compiled:
            function = torch.compile(function, backend="aot_eager", fullgraph=True)
        out = function(*inputs)
        expected = F.gelu(F.linear(*wide), approximate="tanh")
        grad = torch.randn(hidden, batch, tokens).half().permute(1, 2, 0)  # not contiguous
        found = (out, *torch.autograd.grad(out, inputs, grad))
        wanted = (expected, *torch.autograd.grad(expected, wide, grad.double()))
        errors = {
            name: ((f - w).norm() / w.norm().clamp(min=1e-30)).item()
            for name, f, w in zip(("out", "x", "weight", "bias"), found, wanted, strict=True)
        }
        print(json.dumps({"case": [batch, tokens, hidden, compiled], "errors": errors}))


if __name__ == "__main__":
    main()
