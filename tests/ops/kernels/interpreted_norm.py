"""The norms' kernels in Triton's interpreter, against PyTorch's in float64.

Fresh memory is filled with NaN, so that a place no kernel writes shows. It prints one JSON line per case:
relative errors of the result and of the gradients of all inputs.
"""

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
from interpreted import poisoned

from softfree.ops.norm import operator as norm
from softfree.ops.shared import devices

SHAPES = [(2, 3, 49, 16), (700, 20), (1, 128), (3, 5, 130)]


def errors(function, tensors: int, shape: tuple, settings: tuple) -> dict[str, float]:
    """Of a norm of ``tensors`` inputs with a weight and a bias."""
    inputs = [torch.randn(s).half() for s in (*[shape] * tensors, shape[-1:], shape[-1:])]
    grad = torch.randn(shape).half()
    results = []
    for leaves in ([t.double() for t in inputs], inputs):
        leaves = [t.requires_grad_() for t in leaves]
        out = function(*leaves, *settings)
        results.append((out, *torch.autograd.grad(out, leaves, grad.to(out.dtype))))
    return {
        str(index): ((found - wanted).norm() / wanted.norm()).item()
        for index, (wanted, found) in enumerate(zip(*results, strict=True))
    }


def main() -> None:
    torch.manual_seed(0)
    devices.processors = lambda device: 1  # several tiles a stretch
    norm.ELEMENTS = 512
    x, y = (torch.randn(3, 7, 16).half().requires_grad_() for _ in range(2))
    weights = [torch.randn(16, requires_grad=True) for _ in range(2)]
    torch.library.opcheck(torch.ops.softfree.landmark_norm, (x, *weights, 0.5, 1e-5))
    torch.library.opcheck(torch.ops.softfree.add_norm, (x, y, *weights, 1e-5, True))
    norm._fits = lambda x: x.dtype == torch.float16
    torch.empty = poisoned(torch.empty)
    torch.empty_like = poisoned(torch.empty_like)
    for shape in SHAPES:
        for function, tensors, settings in (
            (norm.landmark_norm, 1, (0.4, 1e-5)),
            (norm.add_norm, 2, (1e-5,)),
            (norm.add_norm, 2, (0.0,)),
        ):
            found = errors(function, tensors, shape, settings)
            print(json.dumps({"case": [function.__name__, *shape], "errors": found}), flush=True)
    with torch.no_grad():
        out = norm.add_norm(x, y, *weights, 1e-5)
    same = torch.equal(out, norm.add_norm(x, y, *weights, 1e-5))
    print(json.dumps({"case": ["without a gradient"], "errors": {"out": 1.0 - same}}))


if __name__ == "__main__":
    main()
