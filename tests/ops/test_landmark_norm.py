"""The norm of landmarks as one function."""

import pytest
import torch
import torch.nn.functional as F

from softfree.ops.landmark_norm import landmark_norm


@pytest.mark.parametrize("scale", [0.4, 1.0])
def test_it_is_gelu_of_the_norm_of_the_scaled_input_on_the_scale_of_the_input(scale):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    weight, bias = torch.randn(2, 8, dtype=torch.float64)
    norm = torch.nn.LayerNorm(8, eps=1e-3).double()
    torch.nn.utils.vector_to_parameters(torch.cat([weight, bias]), norm.parameters())
    expected = F.gelu(norm(x * scale)) / scale
    torch.testing.assert_close(landmark_norm(x, weight, bias, scale, 1e-3), expected)
