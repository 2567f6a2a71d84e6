"""The window product by the library, against torch's convolution; the kernels are in ``kernels/``."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from softfree.ops.window_product import window_product

HEADS, D_IN, D_OUT = 3, 4, 5


@pytest.mark.parametrize("size", [(8, 8), (7, 5), (1, 9), (2, 1)])
@pytest.mark.parametrize("window", [(1, 1), (2, 2), (3, 3), (1, 4)])
def test_it_is_a_convolution_of_the_windows_stride(size, window):
    q = torch.randn(2, size[0] * size[1], HEADS, D_IN, dtype=torch.float64).transpose(1, 2)
    weight = torch.randn(D_OUT, D_IN, *window, dtype=torch.float64)
    maps = q.flatten(0, 1).mT.unflatten(2, size)
    pad = (0, -size[1] % window[1], 0, -size[0] % window[0])
    expected = F.conv2d(F.pad(maps, pad), weight, stride=window)
    found = window_product(q, weight, size)
    torch.testing.assert_close(found, expected.flatten(2).mT.unflatten(0, (2, HEADS)))


def test_its_gradients_are_those_of_the_formula():
    q = torch.randn(1, 2, 15, 2, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 2, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda q, w: window_product(q, w, (5, 3)), (q, weight))


def test_an_exported_program_has_no_operator_of_ours():
    class Product(torch.nn.Module):
        def forward(self, q, weight):
            return window_product(q, weight, (6, 4))

    q, weight = torch.randn(1, 2, 24, 4), torch.randn(4, 4, 2, 2)
    program = torch.export.export(Product(), (q, weight))
    assert "softfree" not in str(program.graph)
    torch.testing.assert_close(program.module()(q, weight), window_product(q, weight, (6, 4)))


def test_the_operator_costs_the_flops_of_the_matrix_product():
    q = torch.empty(2, HEADS, 35, D_IN, device="meta")
    weight = torch.empty(D_OUT, D_IN, 2, 2, device="meta")
    with FlopCounterMode(display=False) as by_library:
        expected = window_product(q, weight, (7, 5))
    with FlopCounterMode(display=False) as by_kernels:
        out = torch.ops.softfree.window_product(q, weight, 7, 5)
        torch.ops.softfree.window_product_backward(out, q, weight, 7, 5)
    assert out.shape == expected.shape
    assert by_kernels.get_total_flops() == 3 * by_library.get_total_flops()
