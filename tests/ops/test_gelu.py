"""The linear layer with GELU by the library; the kernel is in ``kernels/``."""

import pytest
import torch
import torch.nn.functional as F

from softfree.ops.gelu import linear_gelu


@pytest.mark.parametrize("frozen", [None, "x", "weight", "bias"])
def test_it_is_a_linear_layer_and_gelu_with_any_of_its_inputs_frozen(frozen):
    inputs = {"x": torch.randn(2, 5, 4), "weight": torch.randn(7, 4), "bias": torch.randn(7)}
    trained = [t.requires_grad_() for name, t in inputs.items() if name != frozen]
    found = linear_gelu(**inputs)
    expected = F.gelu(F.linear(*inputs.values()), approximate="tanh")
    assert torch.equal(found, expected)
    grad = torch.randn_like(found)
    for a, b in zip(
        torch.autograd.grad(found, trained, grad),
        torch.autograd.grad(expected, trained, grad),
        strict=True,
    ):
        assert torch.equal(a, b)
