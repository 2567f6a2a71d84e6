"""The value convolution's kernels in Triton's interpreter, against PyTorch's convolution in float64.

It prints one JSON line per case: relative errors of the result, alone and added to a base, and of both gradients.
"""

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from softfree.ops.shared import devices
from softfree.ops.value_conv import operator as value_conv

# heads, channels per head, kernel, height, width
CASES = [(2, 8, 3, 5, 7), (1, 20, 5, 9, 3), (3, 16, 9, 4, 58), (2, 16, 3, 1, 1)]


def main() -> None:
    torch.manual_seed(0)
    devices.processors = lambda device: 3  # several stretches
    for heads, channels, kernel, height, width in CASES:
        both = torch.randn(2, height * width, 2, heads * channels).half()
        v = both[:, :, 1]
        weight = torch.randn(heads, 1, kernel, kernel)
        grad = torch.randn(2, height * width, heads * channels).half()
        base = torch.randn_like(both)[:, :, 0]
        wide = [t.double().requires_grad_() for t in (v, weight)]
        expected = value_conv._by_library(*wide, (height, width))
        gradients = torch.autograd.grad(expected, wide, grad.double())
        found = (
            value_conv._forward(v, weight, None, height, width),
            value_conv._forward(v, weight, base, height, width),
            *value_conv._backward(grad, v, weight, height, width),
        )
        wanted = (expected, base + expected, *gradients)
        names = ("out", "sum", "grad_v", "grad_weight")
        errors = {
            name: ((f - e).norm() / e.norm()).item()
            for name, f, e in zip(names, found, wanted, strict=True)
        }
        print(json.dumps({"case": [heads, channels, kernel, height, width], "errors": errors}))


if __name__ == "__main__":
    main()
