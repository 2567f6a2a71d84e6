"""Windows of tokens times one weight: a convolution whose stride is its window, shared by all heads.

Registered as ``softfree::window_product``. On a GPU our own kernels
(:mod:`softfree.ops.window_product.kernels`) read the tokens in place; everything else copies the tokens by
window and uses one matrix product.
"""

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from softfree.ops.shared import devices
from softfree.ops.shared.precision import autocast
from softfree.ops.shared.registration import register
from softfree.ops.shared.shapes import block, certain, power_of_two, tiles_of, token_tensor
from softfree.ops.shared.sums import part_sum_launch, sum_of_parts

# The most channels of q and of the result that the kernels take; more would spill registers.
MAX_CHANNELS = {torch.float16: 128, torch.bfloat16: 128, torch.float32: 64}
PROGRAMS_PER_PROCESSOR = 4


class Tile(NamedTuple):
    """Windows per tile, tokens of each window at a time, warps per program, software pipeline depth."""

    windows: int
    tokens: int
    warps: int
    stages: int


# For 16-bit inputs of at most 32 channels.
TILES = {
    "result": Tile(64, 4, 4, 3),
    "tokens": Tile(64, 4, 4, 3),
    "weight": Tile(64, 4, 4, 3),
}


def window_product(q: Tensor, weight: Tensor, size: tuple[int, ...]) -> Tensor:
    """``out[b, h, w] = sum_t weight[:, :, t] q[b, h, t of window w]``, with zeros beyond the border.

    Args:
        q: (batch, heads, H * W, d_in), any strides.
        weight: (d_out, d_in, down, across): one matrix per token of a window; (down, across) is the windows'
            size and stride.
        size: (H, W); or (T, H, W), with a weight that has one more dimension.

    Returns:
        (batch, heads, windows, d_out), with ceil(H / down) * ceil(W / across) windows, row by row.

    Example:
        >>> import torch
        >>> window_product(torch.randn(2, 3, 7 * 5, 8), torch.randn(4, 8, 2, 2), (7, 5)).shape
        torch.Size([2, 3, 12, 4])
    """
    if not _fits(q, weight):
        return _by_library(q, weight, size)
    return FORWARD(*autocast(q), weight, size[0], size[1])


def windows(tokens: Tensor, size: tuple[int, ...], window: tuple[int, ...]) -> Tensor:
    """Tokens (batch, heads, H * W, d) by window: (batch, heads, windows, window, d), padded with 0.

    ``size`` and ``window`` are (H, W) or (T, H, W).
    """
    if all(side == 1 for side in window):
        return tokens[:, :, :, None]
    tokens = tokens.unflatten(2, size)
    if cross_the_border(size, window):
        filling = [0, 0]
        for over in reversed(_over_the_border(size, window)):
            filling += [0, over]
        tokens = F.pad(tokens, filling)
    # Not a reshape: torch.export would conclude from it that images consist of whole windows.
    for axis, side in enumerate(window, 2):
        tokens = tokens.unfold(axis, side, side)
    channels = 2 + len(size)
    return tokens.movedim(channels, -1).flatten(channels, -2).flatten(2, channels - 1)


def window_grid(size: tuple[int, ...], window: tuple[int, ...]) -> tuple[int, ...]:
    """The number of windows that cover (H, W), or (T, H, W), along each dimension."""
    # Not -(-n // k): exporters round the quotient of a negative number toward 0.
    return tuple((length - 1) // side + 1 for length, side in zip(size, window, strict=True))


def _over_the_border(size: tuple[int, ...], window: tuple[int, ...]) -> list[int]:
    """By how much the windows exceed (H, W), or (T, H, W), along each dimension."""
    counts = window_grid(size, window)
    return [n * side - length for n, side, length in zip(counts, window, size, strict=True)]


def cross_the_border(size: tuple[int, ...], window: tuple[int, ...]) -> bool:
    """Whether windows at the border are incomplete, or may be where the size is symbolic.

    Padding by 0 does no harm if the size is symbolic; asking for its value would specialize the program to
    it.
    """
    if all(side == 1 for side in window):
        return False
    return not all(certain(amount == 0) for amount in _over_the_border(size, window))


def _fits(q: Tensor, weight: Tensor) -> bool:
    return (
        weight.ndim == 4
        and devices.usable(q, MAX_CHANNELS)
        and q.stride(3) == 1
        and max(weight.shape[:2]) <= MAX_CHANNELS[q.dtype]
    )


def _by_library(q: Tensor, weight: Tensor, size: tuple[int, ...]) -> Tensor:
    by_window = windows(q, size, tuple(weight.shape[2:]))
    matrices = weight.flatten(2).permute(2, 1, 0)
    return by_window.flatten(3) @ matrices.reshape(-1, matrices.shape[2])


def empty_result(q: Tensor, weight: Tensor, height: int, width: int) -> Tensor:
    rows, columns = window_grid((height, width), (weight.shape[2], weight.shape[3]))
    return q.new_empty(q.shape[0], q.shape[1], rows * columns, weight.shape[0])


def forward(q: Tensor, weight: Tensor, height: int, width: int) -> Tensor:
    out = empty_result(q, weight, height, width)
    if out.numel() > 0:
        run = forward_launch(
            out.shape, out.dtype, out.device, weight.shape, height, width, q.stride()
        )
        run(q, matrices(weight, q), out)
    return out


@functools.lru_cache(maxsize=1024)
def forward_launch(size, dtype, device, weight_size, height, width, strides) -> Any:
    """The launch of the product, from sizes only."""
    from softfree.ops.shared.launching import Launch
    from softfree.ops.window_product.kernels import window_product_kernel

    out = torch.empty(size, dtype=dtype, device="meta")
    weight = torch.empty(weight_size, device="meta")
    tile = _tile("result", out, weight, device)
    return Launch(
        window_product_kernel, (_tiles(out, tile),),
        (*_sizes(out, weight, height, width), *strides[:3]), **_options(tile, out, weight),
    )  # fmt: skip


def _backward(
    grad: Tensor, q: Tensor, weight: Tensor, height: int, width: int
) -> tuple[Tensor, Tensor]:
    grad_q = token_tensor(q, q.shape[3])
    return grad_q, write_gradient(grad, q, weight, height, width, grad_q)


def write_gradient(
    grad: Tensor,
    q: Tensor,
    weight: Tensor,
    height: int,
    width: int,
    grad_q: Tensor,
    kept: float = 0.0,
) -> Tensor:
    """Write the gradient of ``q``, plus ``kept`` times ``grad_q``, into ``grad_q``.

    Return the weight's gradient.
    """
    if grad.numel() == 0:
        return torch.zeros_like(weight, memory_format=torch.contiguous_format)
    grad = grad.contiguous()
    _token_gradient(grad, weight, height, width, grad_q, kept)
    return _weight_gradient(grad, q, weight, height, width)


def _fake_backward(grad, q, weight, height, width):
    return token_tensor(q, q.shape[3]), torch.empty_like(
        weight, memory_format=torch.contiguous_format
    )


def _token_gradient(
    grad: Tensor, weight: Tensor, height: int, width: int, grad_q: Tensor, kept: float
) -> None:
    run = token_launch(
        grad.shape, grad_q.dtype, grad.device, weight.shape, height, width, grad_q.stride(), kept
    )
    run(grad, matrices(weight, grad_q), grad_q)


def _weight_gradient(grad: Tensor, q: Tensor, weight: Tensor, height: int, width: int) -> Tensor:
    run, sizes = weight_launch(
        grad.shape, q.dtype, q.device, weight.shape, height, width, q.stride()
    )
    parts = q.new_empty(sizes, dtype=torch.float32)
    run(q, grad, parts)
    return sum_of_parts(parts, (1, 2, 3), weight.dtype, weight.shape, (0, 2, 1))


@functools.lru_cache(maxsize=1024)
def token_launch(size, dtype, device, weight_size, height, width, strides, kept) -> Any:
    """The launch of the tokens' gradient, called with the result's gradient, the matrices and the output."""
    from softfree.ops.shared.launching import Launch
    from softfree.ops.window_product.kernels import window_product_token_kernel

    grad = torch.empty(size, dtype=dtype, device="meta")
    weight = torch.empty(weight_size, device="meta")
    tile = _tile("tokens", grad, weight, device)
    return Launch(
        window_product_token_kernel, (_tiles(grad, tile),),
        (*_sizes(grad, weight, height, width), *strides[:3], float(kept)),
        ADD=kept != 0, **_options(tile, grad, weight),
    )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def weight_launch(
    size, dtype, device, weight_size, height, width, strides
) -> tuple[Any, tuple[int, int, int, int]]:
    """The launch that writes the parts of the weight's gradient, and the sizes of the parts.

    It is called with the tokens, the result's gradient and the parts.
    """
    from softfree.ops.shared.launching import Launch
    from softfree.ops.window_product.kernels import window_product_weight_kernel

    grad = torch.empty(size, dtype=dtype, device="meta")
    weight = torch.empty(weight_size, device="meta")
    d_out, d_in, down, across = weight_size
    tile = _tile("weight", grad, weight, device)
    groups = tiles_of(down * across, tile.tokens)
    programs = PROGRAMS_PER_PROCESSOR * devices.processors(device)
    stretches = max(1, min(_tiles(grad, tile), programs // groups))
    run = Launch(
        window_product_weight_kernel, (groups, stretches),
        (*_sizes(grad, weight, height, width), stretches, *strides[:3]),
        **_options(tile, grad, weight),
    )  # fmt: skip
    return run, (stretches, d_out, down * across, d_in)


def _setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    q, weight, ctx.height, ctx.width = inputs
    ctx.save_for_backward(q, weight)


def _gradient(ctx: Any, grad: Tensor):
    grad_q, grad_weight = BACKWARD(grad, *ctx.saved_tensors, ctx.height, ctx.width)
    return grad_q, grad_weight


def flops(q, weight, height, width) -> int:
    d_out, d_in, down, across = weight
    rows, columns = window_grid((height, width), (down, across))
    return 2 * q[0] * q[1] * rows * columns * down * across * d_in * d_out


def _backward_flops(grad, q, weight, height, width) -> int:
    return 2 * flops(q, weight, height, width)


BACKWARD = register("window_product_backward", _backward, _fake_backward, flops=_backward_flops)
FORWARD = register("window_product", forward, empty_result, _setup, _gradient, flops)


def matrices(weight: Tensor, q: Tensor) -> Tensor:
    """The weight as (window, d_in, d_out), in q's dtype."""
    d_out, d_in, down, across = weight.shape
    found = q.new_empty((down * across, d_in, d_out))
    weight = weight.contiguous()
    matrices_launch(weight.shape)(weight, weight, found)
    return found


def matrices_launch(size: tuple[int, ...]) -> Any:
    """The launch behind :func:`matrices`, called with the weight, the weight again, and the result."""
    d_out, d_in, down, across = size
    return part_sum_launch((1, d_out, d_in, down * across), (1, 2, 3), (2, 1, 0))


def _sizes(out: Tensor, weight: Tensor, height: int, width: int) -> tuple[int, ...]:
    """The arguments common to all kernels: windows, rows and columns of windows, heads, H, W, d_in, d_out."""
    batch, heads, count, d_out = out.shape
    rows, columns = window_grid((height, width), (weight.shape[2], weight.shape[3]))
    return batch * heads * count, rows, columns, heads, height, width, weight.shape[1], d_out


def _tile(kernel: str, out: Tensor, weight: Tensor, device: torch.device) -> Tile:
    d_out, d_in, down, across = weight.shape
    widest = block(max(d_in, d_out))
    if out.dtype.itemsize == 2 and widest <= 32:
        tile = TILES[kernel]
    else:
        tile = Tile(32, 1, 8 if widest > 32 else 4, 2)
    tokens = min(tile.tokens, power_of_two(down * across))
    few = _tiles(out, tile) < devices.processors(device)
    return tile._replace(windows=16 if few else tile.windows, tokens=tokens)


def _tiles(out: Tensor, tile: Tile) -> int:
    return tiles_of(out.numel(), out.shape[3] * tile.windows)


def _options(tile: Tile, q: Tensor, weight: Tensor) -> dict[str, Any]:
    d_out, d_in, down, across = weight.shape
    return dict(
        DOWN=down, ACROSS=across, WINDOWS=tile.windows, TOKENS=tile.tokens,
        BLOCK_D=block(d_in), BLOCK_O=block(d_out),
        PRECISION="tf32x3" if q.dtype == torch.float32 else "tf32",
        num_warps=tile.warps, num_stages=tile.stages, **devices.as_for_ampere(),
    )  # fmt: skip
