"""The window product's kernels in Triton's interpreter, against the copy and product in float64.

Fresh memory is filled with NaN, so that a place no kernel writes shows. It prints one JSON line per case:
relative errors of the result and of both gradients.
"""

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
from interpreted import poisoned

from softfree.layers.landmarks import ConvLandmarks
from softfree.ops.shared import devices
from softfree.ops.window_product import operator as product

# heads, channels, channels of the result, window, height, width
CASES = [
    (2, 8, 8, (2, 2), 5, 7),
    (1, 20, 16, (3, 3), 9, 8),
    (3, 32, 32, (1, 1), 3, 5),
    (2, 16, 24, (4, 4), 3, 2),
    (2, 8, 8, (1, 4), 1, 11),
    (1, 16, 16, (2, 2), 30, 31),
]
DTYPES = (torch.float32, torch.float16)


def errors(case: tuple, dtype: torch.dtype) -> dict[str, float]:
    heads, d_in, d_out, window, height, width = case
    both = torch.randn(2, height * width, 2, heads, d_in, dtype=dtype)
    q = both[:, :, 1].transpose(1, 2)
    weight = torch.randn(d_out, d_in, *window)
    wide = [q.double().requires_grad_(), weight.to(dtype).double().requires_grad_()]
    expected = product._by_library(*wide, (height, width))
    grad = torch.randn(expected.shape, dtype=dtype)
    gradients = torch.autograd.grad(expected, wide, grad.double())
    leaves = [q.detach().requires_grad_(), weight.requires_grad_()]
    out = product.window_product(*leaves, (height, width))
    found = (out, *torch.autograd.grad(out, leaves, grad))
    return {
        name: ((f.double() - e).norm() / e.norm()).item()
        for name, f, e in zip(
            ("out", "grad_q", "grad_weight"), found, (expected, *gradients), strict=True
        )
    }


def layer_errors() -> dict[str, float]:
    """The sampler with its kernels against itself without, with prefix tokens, masks and sequences."""
    found = {}
    for name, stride, size, masked in [
        ("prefix", 1, (3, 4), False),
        ("image", 2, (3, 4), True),
        ("sequence", 4, None, False),
    ]:
        sampler = ConvLandmarks(16, stride, sequence=size is None)
        q = torch.randn(2, 2, 13, 16)
        mask = torch.rand(2, 13) > 0.3 if masked else None
        ours, _ = sampler(q, size, mask)
        wide, _ = sampler.double()(q.double(), size, mask)
        found[name] = ((ours - wide).norm() / wide.norm()).item()
    return found


def main() -> None:
    torch.manual_seed(0)
    fits = product._fits
    product._fits = lambda q, weight: q.dtype in DTYPES  # else float64 and the CPU take the library
    devices.processors = lambda device: 3  # several stretches
    q, weight = torch.randn(1, 2, 15, 8), torch.randn(8, 8, 2, 2)
    assert not fits(q, weight)
    arguments = (q.requires_grad_(), weight.requires_grad_(), 5, 3)
    torch.library.opcheck(torch.ops.softfree.window_product, arguments)
    torch.empty = poisoned(torch.empty)
    product.token_tensor = poisoned(product.token_tensor)
    product.empty_result = poisoned(product.empty_result)
    print(json.dumps({"case": "layer", "dtype": "torch.float32", "errors": layer_errors()}))
    for case in CASES:
        for dtype in DTYPES:
            line = {"case": case, "dtype": str(dtype), "errors": errors(case, dtype)}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
