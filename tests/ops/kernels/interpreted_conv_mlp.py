"""An MLP with a convolution in Triton's interpreter, against PyTorch's in float64.

Fresh memory is filled with NaN, so that a place no kernel writes shows. It prints one JSON line per case:
relative errors of the results with and without a gradient and of the gradients of all inputs.
"""

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
from interpreted import poisoned

from softfree.ops.conv_mlp import Weights, conv_mlp
from softfree.ops.shared import devices

CHANNELS, OUT = 6, 10
CASES = [  # images, height, width, hidden channels, how
    (2, 5, 7, 20, "half"),
    (1, 1, 1, 130, "half"),
    (2, 1, 5, 8, "half"),
    (1, 30, 3, 8, "half"),  # strips of several rows
    (2, 3, 18, 12, "autocast"),
]
NAMES = ("x", "weight1", "bias1", "filters", "bias", "weight2", "bias2")


def evaluate(images: int, height: int, width: int, hidden: int, how: str) -> dict:
    shapes = (
        (images, height * width, CHANNELS), (hidden, CHANNELS), (hidden,), (hidden, 1, 3, 3),
        (hidden,), (OUT, hidden), (OUT,),
    )  # fmt: skip
    inputs = [torch.randn(shape).half().requires_grad_() for shape in shapes]
    grad = torch.randn(OUT, images, height * width).half().permute(1, 2, 0)  # not contiguous
    size = height, width
    devices.usable = lambda x, **_: False
    wide = [t.detach().double().requires_grad_() for t in inputs]
    out = conv_mlp(wide[0], Weights(*wide[1:]), size)
    wanted = (out, *torch.autograd.grad(out, wide, grad.double()))
    if how == "autocast":
        inputs = [t.detach().float().requires_grad_() for t in inputs]
    devices.usable = lambda x, **_: True
    with torch.autocast("cpu", torch.float16, enabled=how == "autocast"):
        out = conv_mlp(inputs[0], Weights(*inputs[1:]), size)
        found = (out, *torch.autograd.grad(out, inputs, grad))
        with torch.no_grad():
            evaluated = conv_mlp(inputs[0], Weights(*inputs[1:]), size)
    for gradient, of in zip(found[1:], inputs, strict=True):
        assert gradient.dtype == of.dtype and gradient.shape == of.shape
    pairs = zip(
        ("out", *NAMES, "evaluated"), (*found, evaluated), (*wanted, wanted[0]), strict=True
    )
    errors = {name: ((f - w).norm() / w.norm()).item() for name, f, w in pairs}
    return {"case": [images, height, width, hidden, how], "errors": errors}


def main() -> None:
    torch.manual_seed(0)
    devices.processors = lambda device: 1  # several items for each program
    shapes = (2, 12, 6), (20, 6), (20,), (20, 1, 3, 3), (20,), (10, 20), (10,)
    inputs = [torch.randn(shape).half() for shape in shapes]
    trained = [t.clone().requires_grad_() for t in inputs]
    torch.library.opcheck(torch.ops.softfree.conv_mlp, (*trained, 4, 3))
    torch.library.opcheck(torch.ops.softfree.conv_mlp_in_parts, (*inputs, 4, 3))
    empty = [t.clone().requires_grad_() for t in (inputs[0][:0], *inputs[1:])]
    devices.usable = lambda x, **_: True
    for gradient in torch.autograd.grad(
        conv_mlp(empty[0], Weights(*empty[1:]), (4, 3)).sum(), empty
    ):
        assert not gradient.any()
    torch.empty = poisoned(torch.empty)
    torch.empty_like = poisoned(torch.empty_like)
    for case in CASES:
        print(json.dumps(evaluate(*case)), flush=True)


if __name__ == "__main__":
    main()
