"""Norms with what stands before or after them as one function."""

import pytest
import torch
import torch.nn.functional as F

from softfree.ops.norm import add_norm, landmark_norm
from softfree.ops.norm import operator as norms


@pytest.mark.parametrize("scale", [0.4, 1.0])
def test_landmarks_are_gelu_of_the_norm_of_the_scaled_input_on_the_inputs_scale(scale):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    weight, bias = torch.randn(2, 8, dtype=torch.float64)
    norm = torch.nn.LayerNorm(8, eps=1e-3).double()
    torch.nn.utils.vector_to_parameters(torch.cat([weight, bias]), norm.parameters())
    expected = F.gelu(norm(x * scale)) / scale
    torch.testing.assert_close(landmark_norm(x, weight, bias, scale, 1e-3), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_blocks_norm_is_that_of_the_sum_in_the_dtype_of_the_tokens_under_autocast(dtype):
    torch.manual_seed(0)
    x, branch = torch.randn(2, 3, 5, 8).to(dtype)
    norm = torch.nn.LayerNorm(8)
    with torch.autocast("cpu", torch.bfloat16):
        found = add_norm(x, branch, norm.weight, norm.bias, norm.eps)
    assert found.dtype == dtype
    torch.testing.assert_close(found, norm((x + branch).float()).to(dtype))


@pytest.mark.parametrize("options", [dict(bias=False), dict(elementwise_affine=False)], ids=str)
def test_norms_without_weight_or_bias_are_the_librarys(options, monkeypatch):
    monkeypatch.setattr(norms, "_fits", lambda x: True)
    norm = torch.nn.LayerNorm(8, **options)
    x, branch = torch.randn(2, 3, 8)
    found = add_norm(x, branch, norm.weight, norm.bias, norm.eps)
    torch.testing.assert_close(found, norm(x + branch))
    found = landmark_norm(x, norm.weight, norm.bias, 0.5, norm.eps)
    torch.testing.assert_close(found, F.gelu(norm(x * 0.5)) / 0.5)
