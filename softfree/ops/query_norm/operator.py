"""The norm of each head's queries over its channels, times a factor per head.

Registered as ``softfree::query_norm``, for half precision on a GPU; everything else uses PyTorch's norm.
:mod:`softfree.ops.image_attention` norms in place and computes the means of windows that become landmarks.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from softfree.ops.shared import devices
from softfree.ops.shared.precision import compute_dtype
from softfree.ops.shared.registration import register
from softfree.ops.shared.shapes import block, power_of_two, tiles_of, token_tensor
from softfree.ops.shared.sums import sum_of_parts
from softfree.ops.window_product import window_grid

EPS = 1e-5
MAX_CHANNELS = 256
# Elements per tile and warps per program. The forward pass waits for its loads, so its threads have many at a time,
# but where channels are absent from a tile, or more than 128, registers would spill.
FORWARD_TILE = (8192, 2)
SMALL_FORWARD_TILE = (4096, 4)
BACKWARD_TILE = (4096, 4)

Grid = tuple[int, int]


def query_norm(q: Tensor, scale: Tensor | None = None) -> Tensor:
    """``scale (q - mean) / sqrt(variance + 1e-5)`` over the last dimension, rounded to the dtype of ``q``.

    All queries of a head then lie on one sphere, so the kernel compares only directions, and the scale of the
    distances changes neither with depth nor during training.

    Args:
        q: (batch, heads, n, d), any strides.
        scale: (heads,), the radius of each head's sphere over sqrt(d); None: 1.

    Example:
        >>> import torch
        >>> query_norm(torch.tensor([[[[1.0, 3.0], [-20.0, 20.0]]]]), torch.tensor([2.0]))
        tensor([[[[-2.0000,  2.0000],
                  [-2.0000,  2.0000]]]])
    """
    # torch.compile fuses the norm with its neighbours itself.
    if _fits(q) and not torch.compiler.is_dynamo_compiling():
        if scale is None:
            scale = torch.ones(q.shape[1], device=q.device)
        return FORWARD(q, scale.float())[0]
    x = q.to(compute_dtype(q.dtype))
    x = F.layer_norm(x, (x.shape[-1],), eps=EPS)
    return (x if scale is None else x * scale.to(x.dtype)[:, None, None]).to(q.dtype)


def _fits(q: Tensor) -> bool:
    return devices.usable(q) and q.stride(3) == 1 and q.shape[3] <= MAX_CHANNELS


def _forward(q: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    out = token_tensor(q, q.shape[3])
    inverse = inverse_deviations(q)
    norm(q, scale, out, inverse, (1, q.shape[2]), (1, 1), means=False)
    return out, inverse


def _fake(q, scale):
    return token_tensor(q, q.shape[3]), inverse_deviations(q)


def _backward(
    grad: Tensor, normed: Tensor, scale: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    grad_q = token_tensor(grad, grad.shape[3])
    grad = grad if grad.stride(3) == 1 else grad.contiguous()
    grid = (1, grad.shape[2])
    return grad_q, write_gradient(grad, normed, scale, inverse, None, grad_q, grid, (1, 1))


def _fake_backward(grad, normed, scale, inverse):
    return token_tensor(grad, grad.shape[3]), torch.empty_like(scale)


def _setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(output[0], inputs[1], output[1])
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, grad, _):
    return () if grad is None else BACKWARD(grad, *ctx.saved_tensors)


BACKWARD = register("query_norm_backward", _backward, _fake_backward)
FORWARD = register("query_norm", _forward, _fake, _setup, _gradient, keeps=True)


def inverse_deviations(q: Tensor) -> Tensor:
    """Memory for 1 over the deviation of each query: (batch, heads, n), float32."""
    return torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)


def norm(
    q: Tensor,
    scale: Tensor,
    out: Tensor,
    inverse: Tensor,
    grid: Grid,
    window: Grid,
    *,
    means: bool,
    log: bool = False,
) -> Tensor:
    """Write normed queries into ``out``, which may be ``q``, and 1 over their deviations into ``inverse``.

    Args:
        q, out: (batch, heads, H * W, d).
        scale: (heads,), the radius over sqrt(d); with ``log`` its negative logarithm, the log of the
            bandwidth.
        inverse: (batch, heads, H * W), float32: 1 over the deviation.
        grid: (H, W).
        window: (down, across).
        means: whether to return the windows' means, (batch, heads, windows, d); windows at the border average
            the tokens that exist.
    """
    batch, heads, _, d = q.shape
    rows, columns = window_grid(grid, window)
    averages = q.new_empty((batch, heads, rows * columns, d) if means else 0)
    if batch * heads * rows * columns > 0:
        run = norm_launch(
            q.shape, q.stride(), out.stride(), inverse.stride(1), grid, window, means, log
        )
        run(q, scale, out, inverse, averages)
    return averages


@functools.lru_cache(maxsize=1024)
def norm_launch(
    size: torch.Size,
    strides: tuple[int, ...],
    out_strides: tuple[int, ...],
    inverse_stride: int,
    grid: Grid,
    window: Grid,
    means: bool,
    log: bool,
) -> Any:
    """The launch behind :func:`norm`, called with q, scale, out, inverse and the means."""
    from softfree.ops.query_norm.kernels import query_norm_kernel
    from softfree.ops.shared.launching import Launch

    batch, heads, _, d = size
    rows, columns = window_grid(grid, window)
    windows = batch * heads * rows * columns
    tokens = min(64, power_of_two(window[0] * window[1]))
    elements, warps = FORWARD_TILE if d == block(d) <= 128 else SMALL_FORWARD_TILE
    at_once = max(1, elements // (tokens * block(d)))
    return Launch(
        query_norm_kernel, (tiles_of(windows, at_once),),
        (
            windows, rows, columns, heads, *grid, inverse_stride,
            *strides[:3], *out_strides[:3], EPS,
        ),
        LOG=log, DOWN=window[0], ACROSS=window[1], MEANS=means,
        WINDOWS=at_once, TOKENS=tokens, CHANNELS=d, BLOCK_D=block(d), num_warps=warps,
    )  # fmt: skip


def write_gradient(
    grad: Tensor,
    normed: Tensor,
    scale: Tensor,
    inverse: Tensor,
    grad_means: Tensor | None,
    grad_q: Tensor,
    grid: Grid,
    window: Grid,
    kept: float = 1.0,
    log: bool = False,
) -> Tensor:
    """Write the gradient of ``q`` into ``grad_q``, which may be ``grad``; return ``scale``'s, in float32.

    The gradient of the normed queries is ``kept * grad`` plus what comes back through the means of their
    windows.
    """
    run, sizes = gradient_launch(
        normed.shape, (grad.stride(), normed.stride(), grad_q.stride()), inverse.stride(1), grid,
        window, grad_means is not None, float(kept), log,
    )  # fmt: skip
    parts = grad.new_empty(sizes, dtype=torch.float32)
    if parts.numel() > 0:
        means = grad if grad_means is None else grad_means.contiguous()
        run(grad, normed, scale, inverse, means, grad_q, parts)
    return sum_of_parts(parts, (1,), torch.float32)


@functools.lru_cache(maxsize=1024)
def gradient_launch(
    size: torch.Size,
    strides: tuple[tuple[int, ...], ...],
    inverse_stride: int,
    grid: Grid,
    window: Grid,
    means: bool,
    kept: float,
    log: bool,
) -> tuple[Any, tuple[int, int, int]]:
    """The launch behind :func:`write_gradient`, and the sizes of the parts of the scale's gradient."""
    from softfree.ops.query_norm.kernels import query_norm_backward_kernel
    from softfree.ops.shared.launching import Launch

    batch, heads, n, d = size
    elements, warps = BACKWARD_TILE
    at_once = min(elements // block(d), power_of_two(n))
    tiles = tiles_of(n, at_once)
    run = Launch(
        query_norm_backward_kernel, (batch * heads, tiles),
        (
            *window_grid(grid, window), heads, *grid, inverse_stride,
            *(stride for tensor in strides for stride in tensor[:3]), kept,
        ),
        LOG=log, DOWN=window[0], ACROSS=window[1], MEANS=means,
        ROWS=at_once, CHANNELS=d, BLOCK_D=block(d), num_warps=warps,
    )  # fmt: skip
    return run, (batch, heads, tiles)
