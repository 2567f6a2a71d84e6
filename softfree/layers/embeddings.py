"""From pixels to tokens: convolutional stem, downsampling, learned positions."""

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import BatchNormAct2d, ConvNormAct, trunc_normal_
from torch import Tensor, nn

from softfree.layers.plain import are_plain, parameter, weight_and_bias
from softfree.ops import conv_norm
from softfree.ops.shared.devices import exporting
from softfree.ops.shared.shapes import certain


def stem(in_chans: int, dim: int, *, overlap: bool = True) -> nn.Sequential:
    """Image (batch, in_chans, H, W) to a map at a quarter of the size, (batch, dim, H/4, W/4).

    Three 3x3 conv-BN-ReLU with strides 2, 1, 2; without ``overlap``, one 4x4 with stride 4. Sizes that are
    not divisible by 4 are rounded up.
    """
    if not overlap:
        return nn.Sequential(_NonOverlapping(in_chans, dim, 4))
    return nn.Sequential(
        _conv_bn_relu(in_chans, 32, 2), _conv_bn_relu(32, 32, 1), _conv_bn_relu(32, dim, 2)
    )


def downsample(in_dim: int, dim: int, *, overlap: bool = True) -> nn.Module:
    """One conv-BN-ReLU with stride 2, 3x3 or (without ``overlap``) 2x2."""
    return _conv_bn_relu(in_dim, dim, 2) if overlap else _NonOverlapping(in_dim, dim, 2)


def _conv_bn_relu(in_dim: int, dim: int, stride: int) -> ConvNormAct:
    return _ConvBnRelu(in_dim, dim, 3, stride=stride, bias=True)


class _ConvBnRelu(ConvNormAct):
    """timm's ``ConvNormAct``, except that evaluation does not call its modules one by one.

    Each of those calls would cost as much as a kernel launch.
    """

    def forward(self, x: Tensor) -> Tensor:
        conv: Any = self._modules["conv"]
        norm: Any = self._modules["bn"]
        drop, act = norm._modules.get("drop"), norm._modules.get("act")
        if norm.training or not are_plain(
            (conv, nn.Conv2d), (norm, BatchNormAct2d), (drop, nn.Identity), (act, nn.ReLU)
        ):
            return super().forward(x)
        mean, variance = norm._buffers.get("running_mean"), norm._buffers.get("running_var")
        if mean is None or variance is None:
            return super().forward(x)
        filters, shift = weight_and_bias(conv)
        weight, bias = weight_and_bias(norm)
        affine = shift is not None and weight is not None and bias is not None
        if affine and conv_norm.fits(x, conv.out_channels):
            x = conv._conv_forward(x, filters, None)
            return conv_norm.norm_relu(x, shift, mean, variance, weight, bias, norm.eps)
        x = conv._conv_forward(x, filters, shift)
        x = F.batch_norm(x, mean, variance, weight, bias, False, norm.momentum or 0.0, norm.eps)
        return F.relu(x, inplace=act.inplace)


class _NonOverlapping(_ConvBnRelu):
    def __init__(self, in_dim: int, dim: int, stride: int):
        super().__init__(in_dim, dim, stride, stride=stride, padding=0, bias=True)
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[2:]
        if not (certain(height % self.stride == 0) and certain(width % self.stride == 0)):
            # Enough for any size: windows that start in the padding are left out.
            x = F.pad(x, (0, self.stride - 1, 0, self.stride - 1))
        return super().forward(x)


class PositionEmbedding(nn.Module):
    """Learned position embeddings of a grid, resized bilinearly to the input's grid, and of prefix tokens.

    Args:
        grid: (H, W) that they are learned for.
        dim: channels.
        prefix: number of tokens before the grid, which have their own positions.
    """

    def __init__(self, grid: tuple[int, int], dim: int, prefix: int = 0):
        super().__init__()
        self.grid = (grid[0], grid[1])
        self.prefix = prefix
        self.weight = nn.Parameter(torch.empty(1, prefix + grid[0] * grid[1], dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        trunc_normal_(self.weight, std=0.02)

    def extra_repr(self) -> str:
        return f"grid={self.grid}, prefix={self.prefix}, dim={self.weight.shape[2]}"

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        """Add the positions to tokens (batch, prefix + H * W, dim)."""
        weight: Tensor = parameter(self, "weight")
        if must_resize(self.grid, size):
            weight = resize_positions(weight, self.grid, size, self.prefix)
        return x + (weight if weight.dtype == x.dtype else weight.to(x.dtype))


def resize_positions(
    weight: Tensor, grid: tuple[int, int], size: tuple[int, int], prefix: int = 0
) -> Tensor:
    """Resize positions (1, prefix + H * W, dim) from ``grid`` to ``size``."""
    image = resize(weight[:, prefix:].unflatten(1, grid).permute(0, 3, 1, 2), size)
    image = image.permute(0, 2, 3, 1).flatten(1, 2)
    return torch.cat([weight[:, :prefix], image], 1) if prefix else image


def must_resize(grid: tuple[int, ...], size: tuple[int, int]) -> bool:
    """Whether parameters learned for ``grid`` have to be resized to ``size``."""
    # A traced program must always resize, even if the example has the learned size. Comparing symbolic sizes
    # would specialize the program to the outcome.
    if exporting() or torch.jit.is_tracing():
        return True
    for a, b in zip(size, grid, strict=True):  # noqa: SIM110  (a generator would cost a call per item)
        if not certain(a == b):
            return True
    return False


def resize(image: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize maps (batch, channels, H, W) bilinearly, in at least float32."""
    wide = image.to(torch.promote_types(image.dtype, torch.float32))
    wide = F.interpolate(wide, size=tuple(size), mode="bilinear", align_corners=False)
    return wide.to(image.dtype)
