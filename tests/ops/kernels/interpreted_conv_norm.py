"""What follows a convolution, and a block without a gradient, in Triton's interpreter.

The first against PyTorch in float64, the second against its parts one by one, to the bit. Fresh memory is filled with
NaN, so that a place no kernel writes shows. It prints one JSON line per case.
"""

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
from interpreted import poison

import softfree
from softfree.layers import block as blocks
from softfree.ops.conv_norm import operator as conv_norm
from softfree.ops.norm import operator as norm
from softfree.ops.shared import devices

SHAPES = [(2, 16, 7, 5), (1, 20, 30, 1), (3, 130, 2, 2), (1, 1, 3, 3), (0, 8, 4, 4), (2, 8, 1, 1)]
OWN = dict(
    landmarks="average:4", drop_path=0.5, query_norm=True, bandwidth="learned", inverse="solve"
)


def problem(shape: tuple) -> list[torch.Tensor]:
    x = torch.randn(shape).half().contiguous(memory_format=torch.channels_last)
    shift, mean, variance, weight, bias = torch.randn(5, shape[1]).half()
    return [x, shift, mean, variance.square(), weight, bias]


def error(shape: tuple, *, channels_last: bool) -> float:
    x, *vectors = problem(shape)
    if not channels_last:
        x = x.contiguous()
    found = conv_norm.FORWARD(x, *vectors, 1e-5)
    assert found.is_contiguous(memory_format=torch.channels_last)
    wanted = conv_norm.norm_relu(x.double(), *(t.double() for t in vectors), 1e-5)
    return ((found - wanted).norm() / wanted.norm().clamp(min=1e-6)).item()


def block_error(options: dict) -> float:
    """1 if a block without a gradient differs from its parts, or is not computed at once."""
    block = softfree.SoftBlock(32, 2, stride=2, value_conv=3, **options).half().eval()
    x, at_once, evaluate = torch.randn(2, 30, 32).half(), [], blocks._evaluate
    blocks._evaluate = lambda *parts: at_once.append(evaluate(*parts)) or at_once[-1]
    with torch.no_grad():
        found = block(x, (6, 5))
        blocks._evaluate = lambda *parts: None
        expected = block(x, (6, 5))
    blocks._evaluate = evaluate
    return 1.0 - (at_once[0] is found and torch.equal(found, expected))


def main() -> None:
    torch.manual_seed(0)
    norm.ELEMENTS = 512
    with torch.no_grad():
        tests = "test_schema", "test_faketensor"
        arguments = (*problem((2, 8, 5, 3)), 1e-5)
        torch.library.opcheck(torch.ops.softfree.norm_relu, arguments, test_utils=tests)
    poison()
    for shape in SHAPES:
        for channels_last in (True, False):
            found = error(shape, channels_last=channels_last)
            print(json.dumps({"case": [*shape, channels_last], "errors": {"out": found}}))
    x, *vectors = problem((1, 4, 2, 2))
    x[0, 0, 0, 0] = float("nan")
    lost = not conv_norm.FORWARD(x, *vectors, 1e-5)[0, 0, 0, 0].isnan()
    print(json.dumps({"case": "NaN stays", "errors": {"out": float(lost)}}))
    devices.usable = lambda x, *_, **__: True
    for options in ({}, OWN):
        print(json.dumps({"case": "block", "errors": {"out": block_error(options)}}))


if __name__ == "__main__":
    main()
