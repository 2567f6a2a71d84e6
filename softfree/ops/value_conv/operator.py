"""Depthwise convolution of the attention's values over the image, one filter per head.

Registered as ``softfree::value_conv``. On a GPU, half-precision inputs go to our own kernels
(:mod:`softfree.ops.value_conv.kernels`); everything else uses PyTorch's convolution.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from softfree.ops.shared import devices
from softfree.ops.shared.registration import register
from softfree.ops.shared.shapes import block, power_of_two, tiles_of
from softfree.ops.shared.sums import sum_of_parts

MAX_CHANNELS = 128
MAX_KERNEL = 15


def value_conv(
    v: Tensor, weight: Tensor, size: tuple[int, ...], base: Tensor | None = None
) -> Tensor:
    """``out[b, y, x, h, c] = sum weight[h, 0, dy, dx] v[b, y + dy, x + dx, h, c]``, zeros outside.

    Args:
        v: (batch, H * W, channels), the channels of a head adjacent; the kernels need contiguous channels.
        weight: (heads, 1, k, k) with k odd; (heads, 1, k, k, k) for a volume.
        size: (H, W); (T, H, W) for a volume.
        base: (batch, H * W, channels), a tensor that the result is added to. The kernels add it as they
            write, so the sum needs no separate pass.

    Returns:
        (batch, H * W, channels)

    Example:
        >>> import torch
        >>> value_conv(torch.randn(2, 12, 8), torch.randn(4, 1, 3, 3), (4, 3)).shape
        torch.Size([2, 12, 8])
    """
    if _fits(v, weight, base):
        return FORWARD(v, weight, base, size[0], size[1])
    out = _by_library(v, weight, size)
    return out if base is None else base + out


def _fits(v: Tensor, weight: Tensor, base: Tensor | None) -> bool:
    return (
        weight.ndim == 4
        and devices.usable(v)
        and v.stride(2) == 1
        and (base is None or (base.dtype == v.dtype and base.shape == v.shape))
        and v.shape[2] // weight.shape[0] <= MAX_CHANNELS
        and weight.shape[-1] <= MAX_KERNEL
    )


def _by_library(v: Tensor, weight: Tensor, size: tuple[int, ...]) -> Tensor:
    channels = v.shape[2]
    filters = weight.repeat_interleave(channels // weight.shape[0], 0)
    image = v.unflatten(1, size).movedim(-1, 1)
    convolve = F.conv2d if len(size) == 2 else F.conv3d
    out = convolve(image, filters, padding=weight.shape[-1] // 2, groups=channels)
    return out.movedim(1, -1).flatten(1, -2)


def _forward(v: Tensor, weight: Tensor, base: Tensor | None, height: int, width: int) -> Tensor:
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    convolve(v, weight, base, out, height, width)
    return out


def _fake(v, weight, base, height, width):
    return torch.empty(v.shape, dtype=v.dtype, device=v.device)


def _backward(
    grad: Tensor, v: Tensor, weight: Tensor, height: int, width: int
) -> tuple[Tensor, Tensor]:
    grad_v = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    return grad_v, write_gradient(grad, v, weight, height, width, grad_v)


def write_gradient(
    grad: Tensor,
    v: Tensor,
    weight: Tensor,
    height: int,
    width: int,
    grad_v: Tensor,
    kept: float = 0.0,
) -> Tensor:
    """Write the gradient of ``v``, plus ``kept`` times ``grad_v``, into ``grad_v``.

    Return the weight's gradient.
    """
    grad = grad if grad.stride(2) == 1 else grad.contiguous()
    base = grad_v if kept else None
    convolve(grad, weight, base, grad_v, height, width, base_scale=kept, flip=True)
    return _weight_gradient(grad, v, weight, height, width)


def _fake_backward(grad, v, weight, height, width):
    return torch.empty(v.shape, dtype=v.dtype, device=v.device), torch.empty_like(
        weight, memory_format=torch.contiguous_format
    )


def _setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    v, weight, base, ctx.height, ctx.width = inputs
    ctx.has_base = base is not None
    ctx.save_for_backward(v, weight)


def _gradient(ctx: Any, grad: Tensor):
    grad_v, grad_weight = BACKWARD(grad, *ctx.saved_tensors, ctx.height, ctx.width)
    return grad_v, grad_weight, grad if ctx.has_base else None


BACKWARD = register("value_conv_backward", _backward, _fake_backward)
FORWARD = register("value_conv", _forward, _fake, _setup, _gradient)


def convolve(
    v: Tensor,
    weight: Tensor,
    base: Tensor | None,
    out: Tensor,
    height: int,
    width: int,
    *,
    base_scale: float = 1.0,
    flip: bool = False,
) -> None:
    """Write ``base_scale * base`` plus the convolution into ``out``, which may be ``base`` itself.

    ``flip`` rotates the filters by 180 degrees.
    """
    if base is not None and base.stride(2) != 1:
        base = base.contiguous()
    added = out if base is None else base
    if out.numel() == 0:
        return
    strides = (*v.stride()[:2], *added.stride()[:2], *out.stride()[:2])
    band_shape, write_band, run = launches(
        v.shape, weight.shape, strides, height, width, base_scale, base is not None, flip
    )
    band = torch.empty(band_shape, dtype=v.dtype, device=v.device)
    write_band(weight.contiguous(), band)
    run(v, band, added, out)


@functools.lru_cache(maxsize=1024)
def launches(
    size: torch.Size,
    filters: torch.Size,
    strides: tuple[int, ...],
    height: int,
    width: int,
    base_scale: float,
    has_base: bool,
    flip: bool,
) -> tuple[tuple[int, ...], Any, Any]:
    """The shape of the filters as banded matrices, the launch that writes them, and the convolution."""
    from softfree.ops.shared.launching import Launch
    from softfree.ops.value_conv.kernels import value_band_kernel, value_conv_kernel

    batch, _, channels = size
    heads, kernel = filters[0], filters[-1]
    blocks, tiles_y, tiles_x = _tiles(channels, heads, kernel, height, width)
    side = blocks["BLOCK_X"]
    write_band = Launch(
        value_band_kernel, (heads * kernel,), (), KERNEL=kernel, FLIP=flip, BLOCK_X=side
    )
    run = Launch(
        value_conv_kernel, (batch * heads * tiles_y * tiles_x,),
        (heads, height, width, channels // heads, tiles_y, tiles_x, *strides, base_scale),
        KERNEL=kernel, HAS_BASE=has_base, **blocks, num_warps=4, **devices.as_for_ampere(),
    )  # fmt: skip
    return (heads, kernel, side, side), write_band, run


def _weight_gradient(grad: Tensor, v: Tensor, weight: Tensor, height: int, width: int) -> Tensor:
    run, sizes = weight_launch(
        v.shape, weight.shape, (*grad.stride()[:2], *v.stride()[:2]), height, width,
        devices.processors(v.device),
    )  # fmt: skip
    parts = v.new_empty(sizes, dtype=torch.float32)
    run(grad, v, parts)
    return sum_of_parts(parts, (0, 2, 3), weight.dtype, weight.shape)


@functools.lru_cache(maxsize=1024)
def weight_launch(
    size: torch.Size,
    filters: torch.Size,
    strides: tuple[int, ...],
    height: int,
    width: int,
    processors: int,
) -> tuple[Any, tuple[int, ...]]:
    """The launch that writes the parts of the filters' gradient, and their sizes."""
    from softfree.ops.shared.launching import Launch
    from softfree.ops.value_conv.kernels import value_conv_weight_kernel

    batch, _, channels = size
    heads, kernel = filters[0], filters[-1]
    blocks, tiles_y, tiles_x = _tiles(channels, heads, kernel, height, width)
    items = batch * tiles_y * tiles_x
    stretches = max(1, min(items, tiles_of(4 * processors, heads * kernel)))
    run = Launch(
        value_conv_weight_kernel, (kernel, stretches, heads),
        (batch, heads, height, width, channels // heads, tiles_y, tiles_x, stretches, *strides),
        KERNEL=kernel, **blocks, num_warps=4, **devices.as_for_ampere(),
    )  # fmt: skip
    return run, (heads, stretches, kernel, kernel)


def _tiles(
    channels: int, heads: int, kernel: int, height: int, width: int
) -> tuple[dict[str, int], int, int]:
    """The block sizes of a program, and the numbers of blocks that cover the image's rows and columns."""
    block_c = block(channels // heads)
    block_x = min(64, block(width + kernel - 1))
    rows = max(1, min(128 // block_c, power_of_two(height)))
    columns = block_x - kernel + 1
    blocks = dict(BLOCK_X=block_x, ROWS=rows, BLOCK_C=block_c)
    return blocks, tiles_of(height, rows), tiles_of(width, columns)
