"""What follows a convolution in evaluation, as one function."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from softfree.ops import conv_norm
from softfree.ops.shared import devices


def test_it_is_relu_of_the_batch_norm_of_the_sum():
    torch.manual_seed(0)
    norm = torch.nn.BatchNorm2d(8, eps=1e-3).double().eval()
    for tensor in (norm.weight, norm.bias, norm.running_mean):
        torch.nn.init.normal_(tensor)
    torch.nn.init.uniform_(norm.running_var, 0.1, 2)
    x, shift = torch.randn(2, 8, 5, 3).double(), torch.randn(8).double()
    vectors = norm.running_mean, norm.running_var, norm.weight, norm.bias
    found = conv_norm.norm_relu(x, shift, *vectors, norm.eps)
    torch.testing.assert_close(found, F.relu(norm(x + shift[:, None, None])))


def test_it_takes_what_our_kernels_take_where_no_derivative_is_wanted(monkeypatch):
    x = torch.zeros(1, 3, 4, 4, dtype=torch.bfloat16)
    assert not conv_norm.fits(x, 8)  # on no GPU
    monkeypatch.setattr(devices, "usable", lambda x, **_: True)
    assert not conv_norm.fits(x, 8)  # autograd would look for its gradient
    with torch.no_grad():
        assert conv_norm.fits(x, 8)
        assert not conv_norm.fits(x, 4096)
        assert not conv_norm.fits(torch.nn.Parameter(x), 8)
        with forward_ad.dual_level():
            assert not conv_norm.fits(x, 8)
        torch.func.vmap(lambda x: pytest.fail("fits") if conv_norm.fits(x, 8) else x)(x)
