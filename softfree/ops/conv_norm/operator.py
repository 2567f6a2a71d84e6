"""The bias, batch norm and ReLU after a convolution in evaluation, as one operator.

Registered as ``softfree::norm_relu``, for half precision on a GPU without a gradient. PyTorch launches a
kernel for each of the three, and for a single picture most of the time is spent on launching them.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import _C, Tensor
from torch.autograd import forward_ad

from softfree.ops.norm.operator import MAX_CHANNELS, tiles_of_rows
from softfree.ops.shared import devices
from softfree.ops.shared.precision import autocast_dtype
from softfree.ops.shared.registration import register


def norm_relu(
    x: Tensor,
    shift: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
) -> Tensor:
    """``relu((x + shift - mean) / sqrt(variance + eps) * weight + bias)`` per channel, computed in float32.

    Args:
        x: (batch, channels, H, W), the result of a convolution without its bias; see :func:`fits`.
        shift: the bias of the convolution, (channels,).
        mean, variance: running statistics of the norm, (channels,).
        weight, bias: parameters of the norm, (channels,).
        eps: added to the variance.

    Returns:
        (batch, channels, H, W), channels last in memory if our kernel computes it.

    Example:
        >>> import torch
        >>> zeros, ones = torch.zeros(8), torch.ones(8)
        >>> norm_relu(torch.randn(2, 8, 5, 7), zeros, zeros, ones, ones, zeros, 1e-5).shape
        torch.Size([2, 8, 5, 7])
    """
    if x.is_cuda:
        return FORWARD(x, shift, mean, variance, weight, bias, eps)
    x = x + shift.to(x.dtype)[:, None, None]
    return F.relu(F.batch_norm(x, mean, variance, weight, bias, False, 0.0, eps))


def fits(x: Tensor, channels: int) -> bool:
    """Whether :func:`norm_relu` should be used after a convolution of ``x`` to ``channels`` channels."""
    if torch.compiler.is_dynamo_compiling():
        return False  # torch.compile fuses these itself
    if torch.is_grad_enabled() or forward_ad._current_level >= 0:
        return False
    if type(x) is not Tensor or _C._are_functorch_transforms_active():
        return False
    return channels <= MAX_CHANNELS and devices.usable(x, dtype=autocast_dtype(x))


def _forward(
    x: Tensor,
    shift: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
) -> Tensor:
    x = x.contiguous(memory_format=torch.channels_last)
    out = torch.empty_like(x)
    numel = x.numel()
    if numel > 0:
        vectors = [t.contiguous() for t in (shift, mean, variance, weight, bias)]
        _launch(numel, x.shape[1], eps)(x, *vectors, out)
    return out


@functools.lru_cache(maxsize=1024)
def _launch(numel: int, channels: int, eps: float) -> Any:
    from softfree.ops.conv_norm.kernels import norm_relu_kernel
    from softfree.ops.shared.launching import Launch

    rows, tiles, options = tiles_of_rows(numel, channels)
    return Launch(norm_relu_kernel, (tiles,), (rows, channels, eps), **options)


def _fake(x, shift, mean, variance, weight, bias, eps):
    return torch.empty_like(x.contiguous(memory_format=torch.channels_last))


FORWARD = register("norm_relu", _forward, _fake, launches=True)
