"""The norm of queries against the library's, and against its own derivative."""

import pytest
import torch
import torch.nn.functional as F

from softfree.ops.query_norm import query_norm


def queries(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Of the layout that a projection gives them: (batch, heads, n, d) of (batch, n, heads, d)."""
    torch.manual_seed(0)
    batch, heads, n, d = shape
    return torch.randn(batch, n, heads, d, dtype=torch.float64).to(dtype).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_it_is_the_librarys_norm_times_the_scale_of_the_head_in_the_queries_dtype(dtype):
    q, scale = queries(2, 3, 7, 20, dtype=dtype), torch.tensor([0.5, 1.0, 3.0])
    expected = F.layer_norm(q.double(), (20,)) * scale.double()[:, None, None]
    assert query_norm(q, scale).dtype == dtype
    torch.testing.assert_close(query_norm(q, scale), expected.to(dtype))
    torch.testing.assert_close(query_norm(q), F.layer_norm(q.double(), (20,)).to(dtype))


def test_it_keeps_the_dtype_under_autocast():
    q = queries(1, 2, 5, 8, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert query_norm(q, torch.ones(2)).dtype == torch.bfloat16


def test_normed_queries_lie_on_a_sphere_and_equal_channels_on_its_centre():
    normed = query_norm(1e3 * queries(2, 3, 7, 20), torch.full((3,), 2.0))
    torch.testing.assert_close(normed.norm(dim=-1), torch.full_like(normed[..., 0], 2 * 20**0.5))
    assert not query_norm(torch.full((1, 1, 3, 8), 5.0)).any()


def test_gradients_are_the_derivatives():
    q, scale = queries(1, 2, 3, 5).requires_grad_(), torch.rand(2, dtype=torch.float64) + 0.5
    assert torch.autograd.gradcheck(query_norm, (q, scale.requires_grad_()))
