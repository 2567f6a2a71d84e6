"""Two linear layers with a depthwise 3 x 3 convolution and GELU between them, on a GPU in half precision.

The convolution is over the image. As in :mod:`softfree.ops.mlp`, ``softfree::conv_mlp`` keeps only the first
linear layer's result, and nothing computed from it: the hidden layer is the widest tensor of a block. The
backward pass convolves again and computes the gradients of the filters and biases, and GELU's result, in
passes that it makes anyway. Convolution and GELU are one pass over memory each way; the gradient of the
hidden layer is another.

Without a gradient (``softfree::conv_mlp_in_parts``) the hidden layer of many images is computed in parts.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from softfree.ops.mlp.operator import PART_BYTES, are_trained
from softfree.ops.shared import devices
from softfree.ops.shared.precision import autocast, autocast_dtype
from softfree.ops.shared.registration import register
from softfree.ops.shared.shapes import power_of_two, tiles_of
from softfree.ops.shared.sums import column_sums, sum_of_parts

SIDE = 3  # the only filter size that the kernels support
ROWS = 28  # per strip; for few pictures a quarter of it, so that all processors have work
COLUMNS = 4, 7  # per program; whichever leaves fewer beyond the image
BLOCK_C = 128  # channels per program, two of them in each thread
# Programs per processor of the two backward kernels; each of the second kernel's leaves ten sums per channel to
# be added up. With fewer than PROGRAMS, strips are cut to a quarter, in the forward pass, too.
GELU_PROGRAMS = 48
PROGRAMS = 16


class Weights(NamedTuple):
    """The weights of the three layers.

    weight1, bias1: first linear layer, (hidden, channels) and (hidden,).
    filters, bias: convolution, (hidden, 1, k, k) with k odd, and (hidden,).
    weight2, bias2: second linear layer, (out, hidden) and (out,).
    """

    weight1: Tensor
    bias1: Tensor
    filters: Tensor
    bias: Tensor
    weight2: Tensor
    bias2: Tensor


def conv_mlp(x: Tensor, weights: Weights, size: tuple[int, int], *, unseen: bool = False) -> Tensor:
    """``gelu(conv(x weight1^T + bias1) + bias) weight2^T + bias2``, in GELU's tanh form.

    ``conv(h)[y, x, c] = sum filters[c, 0, dy, dx] h[y + dy, x + dx, c]``, zeros outside.

    Args:
        x: (batch, prefix + H * W, channels); the convolution skips the prefix tokens.
        weights: the weights of the three layers.
        size: (H, W).
        unseen: as in :func:`softfree.ops.mlp.mlp`.

    Returns:
        (batch, prefix + H * W, out)

    Example:
        >>> import torch
        >>> first, second = torch.nn.Linear(8, 32), torch.nn.Linear(32, 8)
        >>> conv = torch.nn.Conv2d(32, 32, 3, padding=1, groups=32)
        >>> weights = [p for layer in (first, conv, second) for p in (layer.weight, layer.bias)]
        >>> conv_mlp(torch.randn(2, 20, 8), Weights(*weights), (4, 5)).shape
        torch.Size([2, 20, 8])
    """
    trained: bool | None = False
    if not unseen:
        trained = are_trained(x, weights)
        if trained is None or not devices.usable(x, dtype=autocast_dtype(x)):
            return _by_library(x, weights, size)
    if weights.filters.shape[-1] != SIDE or x.shape[1] != size[0] * size[1]:
        return _by_library(x, weights, size)
    if not unseen:
        x, weight1, weight2 = autocast(x, weights.weight1, weights.weight2)
        weights = weights._replace(weight1=weight1, weight2=weight2)
    if trained:
        return FORWARD(x, weights, *size)[0]
    return (_in_parts if unseen else IN_PARTS)(x, weights, *size)


def _by_library(x: Tensor, weights: Weights, size: tuple[int, int]) -> Tensor:
    filters = weights.filters

    def convolve(image: Tensor) -> Tensor:
        side, hidden = filters.shape[-1], filters.shape[0]
        return F.conv2d(image, filters, weights.bias, padding=side // 2, groups=hidden)

    hidden = over_grid(F.linear(x, weights.weight1, weights.bias1), size, convolve)
    return F.linear(F.gelu(hidden, approximate="tanh"), weights.weight2, weights.bias2)


def over_grid(x: Tensor, size: tuple[int, ...], convolve: Callable[[Tensor], Tensor]) -> Tensor:
    """Convolve the tokens of a sequence, an image or a volume; prefix tokens before them stay unchanged.

    Args:
        x: (batch, prefix + tokens, channels).
        size: (tokens,), (H, W) or (T, H, W).
        convolve: maps (batch, channels, *size) to the same shape.

    Returns:
        (batch, prefix + tokens, channels)

    Example:
        >>> import torch
        >>> over_grid(torch.ones(2, 1 + 12, 8), (4, 3), torch.neg)[0, :3, 0]
        tensor([ 1., -1., -1.])
    """
    prefix = x.shape[1] - math.prod(size)
    image = (x[:, prefix:] if prefix else x).unflatten(1, size).movedim(-1, 1)
    out = convolve(image).movedim(1, -1).flatten(1, -2)
    return torch.cat([x[:, :prefix], out], 1) if prefix else out


def _in_parts(x: Tensor, weights: Weights, height: int, width: int) -> Tensor:
    """:func:`conv_mlp` without a gradient, with the images in parts."""
    batch, tokens, channels = x.shape
    weight1, bias1, filters, bias, weight2, bias2 = weights
    bias1, bias2 = bias1.to(x.dtype), bias2.to(x.dtype)
    # The hidden layer before and after the convolution.
    hidden_bytes = 2 * batch * tokens * weight1.shape[0] * x.itemsize
    step = tiles_of(batch, max(1, tiles_of(hidden_bytes, PART_BYTES)))
    out = x.new_empty((batch, tokens, weight2.shape[0]))
    for images, found in zip(x.split(step or 1), out.split(step or 1), strict=True):
        hidden = torch.addmm(bias1, images.reshape(-1, channels), weight1.T)
        hidden = _conv_gelu(hidden, filters, bias, len(images), height, width)
        torch.addmm(bias2, hidden, weight2.T, out=found.view(-1, found.shape[2]))
        del hidden  # frees its memory for the next part
    return out


def _fake_in_parts(x, weights, height, width):
    return x.new_empty(x.shape[0], x.shape[1], weights.weight2.shape[0])


def _forward(x: Tensor, weights: Weights, height: int, width: int) -> tuple[Tensor, Tensor]:
    """The result and the hidden layer before the convolution.

    Filters and biases may have a different dtype.
    """
    weight1, bias1, filters, bias, weight2, bias2 = weights
    hidden = F.linear(x, weight1, bias1.to(x.dtype))
    activation = _conv_gelu(hidden, filters, bias, x.shape[0], height, width)
    return F.linear(activation, weight2, bias2.to(x.dtype)), hidden


def _fake(x, weights, height, width):
    batch, tokens, _ = x.shape
    hidden = x.new_empty(batch, tokens, weights.weight1.shape[0])
    return _fake_in_parts(x, weights, height, width), hidden


def _backward(
    grad: Tensor, x: Tensor, hidden: Tensor, weights: Weights, height: int, width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x and of the weights, in their order; those of filters and biases in float32."""
    rows, grad_rows = x.reshape(-1, x.shape[2]), grad.reshape(-1, grad.shape[2])
    filters, sizes = weights.filters, (x.shape[0], height, width)
    hidden = hidden.contiguous()
    activation = grad_rows @ weights.weight2  # at first this is the activation's gradient
    grad_conv, grad_bias = _conv_gelu_backward(activation, hidden, filters, weights.bias, *sizes)
    grad_weight2 = grad_rows.T @ activation
    del activation  # frees its memory for the gradients that follow
    grad_hidden, grad_filters, grad_bias1 = _conv_backward(grad_conv, hidden, filters, *sizes)
    del grad_conv
    return (
        (grad_hidden @ weights.weight1).view(x.shape),
        grad_hidden.T @ rows,
        grad_bias1,
        grad_filters,
        grad_bias,
        grad_weight2,
        column_sums(grad_rows),
    )


def _fake_backward(grad, x, hidden, weights, height, width):
    def empty(like, dtype=None):
        return torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)

    single = torch.float32
    return empty(x), *map(empty, weights, (None, single, single, single, None, single))


def _conv_gelu(
    hidden: Tensor, filters: Tensor, bias: Tensor, images: int, height: int, width: int
) -> Tensor:
    """GELU of the convolution, for contiguous tokens."""
    activation = torch.empty_like(hidden)
    if hidden.numel() > 0:
        sizes = images, height, width, hidden.shape[-1]
        run = _forward_launch(*sizes, devices.processors(hidden.device))
        run(hidden, filters.contiguous(), bias.contiguous(), activation)
    return activation


def _conv_gelu_backward(
    grad: Tensor, hidden: Tensor, filters: Tensor, bias: Tensor,
    images: int, height: int, width: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of the convolution's result and of its bias; GELU's result overwrites ``grad``."""
    channels = hidden.shape[-1]
    stretches, run = _backward_launch(
        "conv_gelu_backward_kernel", GELU_PROGRAMS, images, height, width, channels,
        devices.processors(hidden.device), FAST=devices.knows_ptx(),
    )  # fmt: skip
    grad_conv = torch.empty_like(grad)
    parts = hidden.new_empty((stretches, channels), dtype=torch.float32)
    run(grad, hidden, filters.contiguous(), bias.contiguous(), grad_conv, parts)
    return grad_conv, sum_of_parts(parts, (1,), torch.float32)


def _conv_backward(
    grad: Tensor, hidden: Tensor, filters: Tensor, images: int, height: int, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the convolution's input and of the filters, and the former's sum over the tokens."""
    channels = grad.shape[-1]
    stretches, run = _backward_launch(
        "conv_backward_kernel", PROGRAMS, images, height, width, channels,
        devices.processors(grad.device),
    )  # fmt: skip
    found = torch.empty_like(grad)
    parts = grad.new_empty((stretches, SIDE * SIDE + 1, channels), dtype=torch.float32)
    run(grad, hidden, filters.contiguous(), found, parts)
    *turned, total = sum_of_parts(parts, (1, 2), torch.float32).unbind()
    return found, torch.stack(turned[::-1], 1).view(filters.shape), total.clone()


@functools.lru_cache(maxsize=1024)
def _forward_launch(images: int, height: int, width: int, channels: int, processors: int) -> Any:
    from softfree.ops.conv_mlp.kernels import conv_gelu_kernel
    from softfree.ops.shared.launching import Launch

    tiles = _Tiles(images, height, width, channels, processors)
    return Launch(
        conv_gelu_kernel, (tiles.items * tiles.of_channels,), tiles.sizes,
        FAST=devices.knows_ptx(), **tiles.blocks,
    )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def _backward_launch(
    kernel: str, programs: int, images: int, height: int, width: int, channels: int,
    processors: int, **options: Any,
) -> tuple[int, Any]:  # fmt: skip
    """The number of stretches that leave parts of sums, and the launch of a backward kernel.

    There are up to so many ``programs`` per processor.
    """
    from softfree.ops.conv_mlp import kernels
    from softfree.ops.shared.launching import Launch

    tiles = _Tiles(images, height, width, channels, processors)
    stretches = max(1, min(tiles.items, programs * processors // tiles.of_channels))
    return stretches, Launch(
        getattr(kernels, kernel), (stretches * tiles.of_channels,),
        (*tiles.sizes, tiles.items, stretches), **tiles.blocks, **options,
    )  # fmt: skip


class _Tiles:
    """The work of a kernel's programs: strips of rows, with a few columns and channels each."""

    def __init__(self, images: int, height: int, width: int, channels: int, processors: int):
        columns = min(COLUMNS, key=lambda columns: columns * tiles_of(width, columns))
        block_c = min(BLOCK_C, power_of_two(channels))
        self.blocks = dict(COLUMNS=columns, CHANNELS=channels, BLOCK_C=block_c, num_warps=2)
        self.of_channels = tiles_of(channels, block_c)
        across = tiles_of(width, columns)
        strips = tiles_of(height, ROWS)
        if images * strips * across * self.of_channels < PROGRAMS * processors:
            strips = tiles_of(height, ROWS // 4)
        self.items = images * strips * across
        self.sizes = height, width, strips, across, tiles_of(height, strips)


def _setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    x, weights, *ctx.size = inputs
    ctx.save_for_backward(x, output[1], *weights)
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, grad, _):
    if grad is None:
        return ()
    x, hidden, *weights = ctx.saved_tensors
    found = BACKWARD(grad, x, hidden, Weights(*weights), *ctx.size)
    return tuple(t.to(of.dtype) for t, of in zip(found, (x, *weights), strict=True))


def _flops(x, weights, height, width) -> int:
    """FLOPs of the two products and the convolution."""
    hidden, channels = weights.weight1
    return 2 * x[0] * x[1] * hidden * (channels + weights.weight2[0] + SIDE * SIDE)


def _backward_flops(grad, x, hidden, weights, height, width) -> int:
    return 2 * _flops(x, weights, height, width)


BACKWARD = register("conv_mlp_backward", _backward, _fake_backward, flops=_backward_flops)
IN_PARTS = register("conv_mlp_in_parts", _in_parts, _fake_in_parts, flops=_flops)
FORWARD = register("conv_mlp", _forward, _fake, _setup, _gradient, _flops, keeps=True)
