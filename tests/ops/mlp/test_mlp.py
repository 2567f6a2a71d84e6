"""The MLP by the library, and what is known of the operator without a GPU; the kernel is in ``kernels/``."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from softfree.ops.mlp import operator
from softfree.ops.mlp.operator import FORWARD, mlp

SHAPES = {"x": (2, 5, 4), "weight1": (7, 4), "bias1": (7,), "weight2": (3, 7), "bias2": (3,)}


def layers(x, weight1, bias1, weight2, bias2):
    return F.linear(F.gelu(F.linear(x, weight1, bias1), approximate="tanh"), weight2, bias2)


@pytest.mark.parametrize("frozen", [None, *SHAPES])
def test_it_is_two_linear_layers_and_gelu_with_any_of_its_inputs_frozen(frozen):
    inputs = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    trained = [t.requires_grad_() for name, t in inputs.items() if name != frozen]
    found, expected = mlp(**inputs), layers(**inputs)
    assert torch.equal(found, expected)
    grad = torch.randn_like(found)
    for a, b in zip(
        torch.autograd.grad(found, trained, grad),
        torch.autograd.grad(expected, trained, grad),
        strict=True,
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("rows", [1, 16, 100, 1000])
def test_parts_of_the_rows_are_all_of_them(rows, monkeypatch):
    monkeypatch.setattr(operator, "PART_BYTES", 32 * 7 * 4)  # of 32 rows
    x, *parameters = (torch.randn(rows, 4), *map(torch.randn, list(SHAPES.values())[1:]))
    lengths = []

    def gelu_linear(bias, x, weight, use_gelu):
        lengths.append(len(x))
        return F.gelu(torch.addmm(bias, x, weight), approximate="tanh")

    monkeypatch.setattr(torch, "_addmm_activation", gelu_linear)
    found = operator._in_parts(x, *parameters)
    assert torch.allclose(found, layers(x, *parameters), atol=1e-6)
    assert sum(lengths) == rows and max(lengths) <= 32


def test_rows_in_parts_can_be_traced():
    inputs = [torch.randn(10, 4), *map(torch.randn, list(SHAPES.values())[1:])]
    torch.library.opcheck(torch.ops.softfree.mlp_in_parts, inputs)


def test_the_operators_flops_are_those_of_the_layers():
    shapes = ((10, 4), *list(SHAPES.values())[1:])
    counts = []
    for function in (layers, lambda *inputs: FORWARD(*inputs)[0]):
        inputs = [torch.empty(shape, device="meta", requires_grad=True) for shape in shapes]
        with FlopCounterMode(display=False) as forward:
            out = function(*inputs)
        with FlopCounterMode(display=False) as backward:
            out.sum().backward()
        counts.append((forward.get_total_flops(), backward.get_total_flops()))
    assert counts[0] == counts[1] == (2 * 10 * 7 * (4 + 3), 4 * 10 * 7 * (4 + 3))
