"""LayerNorm fused with the landmarks' GELU after it or a block's sum before it, as one operator.

Registered as ``softfree::landmark_norm`` and ``softfree::add_norm``, for half precision on a GPU. As separate
operations, autocast's casts, scalings, sums and the norm itself would read and write the tensor a dozen
times, and keep it in float32 for the gradient.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from softfree.ops.shared import devices
from softfree.ops.shared.registration import LEFT_OUT, register
from softfree.ops.shared.shapes import block, tiles_of
from softfree.ops.shared.sums import sum_of_parts

MAX_CHANNELS = 2048
ELEMENTS = 2048  # per tile
PROGRAMS_PER_PROCESSOR = 8


def landmark_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, scale: float, eps: float
) -> Tensor:
    """``GELU(LayerNorm(scale x)) / scale`` over the last dimension.

    Args:
        x: (..., channels).
        weight, bias: parameters of the norm, (channels,), or None.
        scale: only affects the norm's ``eps`` and the size of the result.
        eps: added to the variance.

    Example:
        >>> import torch
        >>> landmark_norm(torch.randn(2, 3, 49, 32), torch.ones(32), torch.zeros(32), 0.5, 1e-5).shape
        torch.Size([2, 3, 49, 32])
    """
    if weight is not None and bias is not None and _fits(x):
        return LANDMARK_FORWARD(x, weight, bias, scale, eps)
    return F.gelu(F.layer_norm(x * scale, (x.shape[-1],), weight, bias, eps)) / scale


def add_norm(
    x: Tensor, branch: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """``LayerNorm(x + branch)`` over the last dimension, in the dtype of ``x``.

    Under autocast the norm is computed in float32, and rounded if ``x`` came in half precision.

    Args:
        x, branch: (..., channels).
        weight, bias: parameters of the norm, (channels,), or None.
        eps: added to the variance.

    Example:
        >>> import torch
        >>> add_norm(*torch.randn(2, 3, 49, 32), torch.ones(32), torch.zeros(32), 1e-5).shape
        torch.Size([3, 49, 32])
    """
    same = branch.dtype == x.dtype and branch.shape == x.shape
    # torch.compile fuses the norm with its neighbours itself.
    by_hand = same and _fits(x) and not torch.compiler.is_dynamo_compiling()
    if weight is not None and bias is not None and by_hand:
        keep = torch.is_grad_enabled() and any(t.requires_grad for t in (x, branch, weight, bias))
        return ADD_FORWARD(x, branch, weight, bias, eps, keep)[0]
    return F.layer_norm(x + branch, (x.shape[-1],), weight, bias, eps).to(x.dtype)


def add_norm_over(
    x: Tensor, branch: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """:func:`add_norm` that may overwrite ``branch``.

    For tensors that are :func:`softfree.ops.shared.registration.unseen` and
    :func:`softfree.ops.shared.devices.usable`.

    Args:
        x, weight, bias, eps: as in :func:`add_norm`.
        branch: the result may overwrite it, so no other tensor may share its memory.
    """
    shape = x.shape
    if (
        weight is None
        or bias is None
        or branch.dtype != x.dtype
        or branch.shape != shape
        or shape[-1] > MAX_CHANNELS
        or not branch.is_contiguous()
    ):
        return add_norm(x, branch, weight, bias, eps)
    numel = x.numel()
    if numel > 0:
        x = x.contiguous()
        run = _add_launch(numel, shape[-1], eps, False)
        # A program reads its rows of the branch before it overwrites them.
        run(x, branch, weight.contiguous(), bias.contiguous(), x, branch)
    return branch


def _fits(x: Tensor) -> bool:
    return devices.usable(x) and x.shape[-1] <= MAX_CHANNELS


def landmark_forward(x: Tensor, weight: Tensor, bias: Tensor, scale: float, eps: float) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel() > 0:
        run = landmark_launch(x.numel(), x.shape[-1], scale, eps)
        run(x, weight.contiguous(), bias.contiguous(), out)
    return out


@functools.lru_cache(maxsize=1024)
def landmark_launch(numel: int, channels: int, scale: float, eps: float) -> Any:
    from softfree.ops.norm.kernels import landmark_norm_kernel
    from softfree.ops.shared.launching import Launch

    rows, tiles, options = tiles_of_rows(numel, channels)
    return Launch(landmark_norm_kernel, (tiles,), (rows, channels, scale, eps), **options)


def _fake_landmark(x, weight, bias, scale, eps):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def landmark_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor, scale: float, eps: float
) -> tuple[Tensor, Tensor]:
    """The gradient of ``x``, and of weight and bias as the rows of one tensor."""
    grad, x = grad.contiguous(), x.contiguous()
    grad_x = torch.empty_like(x)
    run, sizes = landmark_backward_launch(
        x.numel(), x.shape[-1], scale, eps, devices.processors(x.device)
    )
    parts = x.new_empty(sizes, dtype=torch.float32)
    if x.numel() > 0:
        run(grad, x, weight.contiguous(), bias.contiguous(), grad_x, parts)
    return grad_x, sum_of_parts(parts, (1, 2), weight.dtype)


def landmark_backward_launch(
    numel: int, channels: int, scale: float, eps: float, processors: int
) -> tuple[Any, tuple[int, int, int]]:
    """The launch of the backward pass, and the sizes of the parts of the gradients of weight and bias.

    It is called with the result's gradient, x, weight, bias, the gradient of x, and the parts.
    """
    values = (float(scale), eps)
    return _backward_launch("landmark_norm_backward_kernel", numel, channels, values, processors)


def _fake_landmark_backward(grad, x, weight, bias, scale, eps):
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    return grad_x, weight.new_empty(2, x.shape[-1])


def _setup_landmark(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, weight, bias, ctx.scale, ctx.eps = inputs
    ctx.save_for_backward(x, weight, bias)


def _landmark_gradient(ctx: Any, grad: Tensor):
    grad_x, grad_norm = LANDMARK_BACKWARD(grad, *ctx.saved_tensors, ctx.scale, ctx.eps)
    return grad_x, *grad_norm.unbind()


LANDMARK_BACKWARD = register("landmark_norm_backward", landmark_backward, _fake_landmark_backward)
LANDMARK_FORWARD = register(
    "landmark_norm", landmark_forward, _fake_landmark, _setup_landmark, _landmark_gradient,
    launches=True,
)  # fmt: skip


def _add_forward(
    x: Tensor, branch: Tensor, weight: Tensor, bias: Tensor, eps: float, keep: bool
) -> tuple[Tensor, Tensor]:
    """The result and, with ``keep``, the sum that was normed."""
    x, branch = x.contiguous(), branch.contiguous()
    out = torch.empty_like(x)
    total = torch.empty_like(x) if keep else LEFT_OUT
    if x.numel() > 0:
        run = _add_launch(x.numel(), x.shape[-1], eps, keep)
        run(x, branch, weight.contiguous(), bias.contiguous(), total if keep else x, out)
    return out, total


@functools.lru_cache(maxsize=1024)
def _add_launch(numel: int, channels: int, eps: float, keep: bool) -> Any:
    from softfree.ops.norm.kernels import add_norm_kernel
    from softfree.ops.shared.launching import Launch

    rows, tiles, options = tiles_of_rows(numel, channels)
    return Launch(add_norm_kernel, (tiles,), (rows, channels, eps), KEEP=keep, **options)


def _fake_add(x, branch, weight, bias, eps, keep):
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    return out, torch.empty_like(out) if keep else x.new_empty(0)


def _add_backward(grad: Tensor, total: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The gradient of the sum, and of weight and bias as the rows of one tensor."""
    grad = grad.contiguous()
    grad_sum = torch.empty_like(total)
    run, sizes = _backward_launch(
        "add_norm_backward_kernel", total.numel(), total.shape[-1], (eps,),
        devices.processors(total.device),
    )  # fmt: skip
    parts = total.new_empty(sizes, dtype=torch.float32)
    if total.numel() > 0:
        run(grad, total, weight.contiguous(), grad_sum, parts)
    return grad_sum, sum_of_parts(parts, (1, 2), weight.dtype)


def _fake_add_backward(grad, total, weight, eps):
    return torch.empty_like(total), weight.new_empty(2, total.shape[-1])


def _setup_add(ctx: Any, inputs: tuple, output: tuple) -> None:
    _, _, weight, _, ctx.eps, _ = inputs
    ctx.save_for_backward(output[1], weight)
    ctx.set_materialize_grads(False)


def _add_gradient(ctx: Any, grad, _):
    if grad is None:
        return ()
    grad_sum, grad_norm = ADD_BACKWARD(grad, *ctx.saved_tensors, ctx.eps)
    return grad_sum, grad_sum, *grad_norm.unbind()


ADD_BACKWARD = register("add_norm_backward", _add_backward, _fake_add_backward)
ADD_FORWARD = register(
    "add_norm", _add_forward, _fake_add, _setup_add, _add_gradient, keeps=True, launches=True
)


def tiles_of_rows(numel: int, channels: int) -> tuple[int, int, dict[str, int]]:
    """The number of rows, the number of tiles, and the compile-time options of a kernel."""
    blocks = dict(ROWS=max(1, ELEMENTS // block(channels)), BLOCK_C=block(channels))
    rows = numel // channels
    return rows, tiles_of(rows, blocks["ROWS"]), dict(**blocks, num_warps=4)


@functools.lru_cache(maxsize=1024)
def _backward_launch(
    kernel: str, numel: int, channels: int, values: tuple[float, ...], processors: int
) -> tuple[Any, tuple[int, int, int]]:
    """The launch of a backward kernel, and the sizes of the parts of the gradients of weight and bias."""
    from softfree.ops.norm import kernels
    from softfree.ops.shared.launching import Launch

    rows, tiles, options = tiles_of_rows(numel, channels)
    steps = max(1, tiles_of(tiles, PROGRAMS_PER_PROCESSOR * processors))
    stretches = tiles_of(tiles, steps)
    values = (rows, channels, steps, *values)
    run = Launch(getattr(kernels, kernel), (stretches,), values, **options)
    return run, (stretches, 2, channels)
