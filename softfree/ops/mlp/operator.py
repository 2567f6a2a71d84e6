"""Two linear layers with GELU between them, on a GPU in half precision.

``softfree::mlp``, for training, does not keep GELU's result for the backward pass, because it is as wide as
the hidden layer, the widest tensor of a block. The backward pass reads the hidden layer for GELU's slope
anyway and recomputes GELU's result on the way. It also sums the gradient of the first bias, which would
otherwise be a separate pass.

Without a gradient, the first layer's product applies GELU before it writes, which saves a pass over the
hidden layer. For many rows (``softfree::mlp_in_parts``) the hidden layer, by far the largest tensor in
inference, is computed in parts.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import _C, Tensor
from torch.autograd import forward_ad

from softfree.ops.shared import devices
from softfree.ops.shared.precision import autocast, autocast_dtype
from softfree.ops.shared.registration import register
from softfree.ops.shared.shapes import tiles_of
from softfree.ops.shared.sums import column_sums, sum_of_parts

ROWS, COLUMNS = 16, 128
PROGRAMS_PER_PROCESSOR = 8
# The largest part of the hidden layer without a gradient; smaller parts took longer on an H200.
PART_BYTES = 2**29


def mlp(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor,
    weight2: Tensor,
    bias2: Tensor,
    *,
    unseen: bool = False,
) -> Tensor:
    """``gelu(x weight1^T + bias1) weight2^T + bias2``, in GELU's tanh form.

    Args:
        x: (..., channels).
        weight1, bias1: (hidden, channels), (hidden,).
        weight2, bias2: (out, hidden), (out,).
        unseen: whether :func:`softfree.ops.shared.registration.unseen` holds for all these tensors and ``x``
            is :func:`softfree.ops.shared.devices.usable`.

    Returns:
        (..., out)

    Example:
        >>> import torch
        >>> first, second = torch.nn.Linear(8, 32), torch.nn.Linear(32, 8)
        >>> mlp(torch.randn(2, 5, 8), first.weight, first.bias, second.weight, second.bias).shape
        torch.Size([2, 5, 8])
    """
    trained: bool | None = False
    if not unseen:
        trained = are_trained(x, (weight1, bias1, weight2, bias2))
        if (
            trained is None
            or not devices.usable(x, dtype=autocast_dtype(x))
            or (not trained and _is_followed())
        ):
            return F.linear(F.gelu(F.linear(x, weight1, bias1), approximate="tanh"), weight2, bias2)
        x, weight1, weight2 = autocast(x, weight1, weight2)
    rows = x.reshape(-1, x.shape[-1])
    if trained:
        out = FORWARD(rows, weight1, bias1, weight2, bias2)[0]
    else:
        compute = _parts if _is_long(rows, weight1) else _at_once
        out = compute(rows, weight1, bias1.to(x.dtype), weight2, bias2.to(x.dtype))
    return out.view(*x.shape[:-1], out.shape[1])


def are_trained(x: Tensor, parameters: Sequence[Tensor]) -> bool | None:
    """Whether all parameters need a gradient; None if only some of them do, or only ``x``.

    An operator would compute the gradients of frozen parameters for nothing.
    """
    if not torch.is_grad_enabled():
        return False
    trained = all(p.requires_grad for p in parameters)
    wanted = trained or any(t.requires_grad for t in (x, *parameters))
    return trained if wanted == trained else None


def _is_followed() -> bool:
    """Whether a mode or transform follows PyTorch's operations and may not know the fused product."""
    return not torch.compiler.is_dynamo_compiling() and (
        _C._len_torch_dispatch_stack() > 0
        or _C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )


def _is_long(x: Tensor, weight1: Tensor) -> bool:
    """Whether the hidden layer of (rows, channels) exceeds one part. Always True under ``torch.compile``."""
    if torch.compiler.is_dynamo_compiling():
        return True
    return x.shape[0] * weight1.shape[0] * x.itemsize > PART_BYTES


def _at_once(x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor) -> Tensor:
    """:func:`mlp` for (rows, channels) without a gradient."""
    hidden = torch._addmm_activation(bias1, x, weight1.T, use_gelu=True)
    return F.linear(hidden, weight2, bias2)


def _in_parts(x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor) -> Tensor:
    """The same, with the rows in parts."""
    parts = max(1, tiles_of(x.shape[0] * weight1.shape[0] * x.itemsize, PART_BYTES))
    if parts == 1:
        return _at_once(x, weight1, bias1, weight2, bias2)
    step = ROWS * tiles_of(x.shape[0], ROWS * parts)
    out = x.new_empty((x.shape[0], weight2.shape[0]))
    for rows, found in zip(x.split(step), out.split(step), strict=True):
        hidden = torch._addmm_activation(bias1, rows, weight1.T, use_gelu=True)
        torch.addmm(bias2, hidden, weight2.T, out=found)
        del hidden  # frees its memory for the next part
    return out


def _fake_in_parts(x, weight1, bias1, weight2, bias2):
    return x.new_empty(x.shape[0], weight2.shape[0])


def _forward(
    x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor
) -> tuple[Tensor, Tensor]:
    """The result and the hidden layer for (rows, channels).

    Biases may have a different dtype from the rest.
    """
    hidden = F.linear(x, weight1, bias1.to(x.dtype))
    return F.linear(F.gelu(hidden, approximate="tanh"), weight2, bias2.to(x.dtype)), hidden


def _fake(x, weight1, bias1, weight2, bias2):
    rows = x.shape[0]
    return x.new_empty(rows, weight2.shape[0]), x.new_empty(rows, weight1.shape[0])


def _backward(
    grad: Tensor, x: Tensor, hidden: Tensor, weight1: Tensor, weight2: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of :func:`mlp`'s arguments, in their order; those of the biases in float32."""
    grad, hidden = grad.contiguous(), hidden.contiguous()
    grad_hidden, activation, grad_bias1 = _gelu_backward(grad @ weight2, hidden)
    grad_weight2 = grad.T @ activation
    del activation  # frees its memory for the gradients that follow
    grad_bias2 = column_sums(grad)
    return grad_hidden @ weight1, grad_hidden.T @ x, grad_bias1, grad_weight2, grad_bias2


def _fake_backward(grad, x, hidden, weight1, weight2):
    return (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        torch.empty_like(weight1, memory_format=torch.contiguous_format),
        x.new_empty(weight1.shape[0], dtype=torch.float32),
        torch.empty_like(weight2, memory_format=torch.contiguous_format),
        x.new_empty(weight2.shape[0], dtype=torch.float32),
    )


def _gelu_backward(grad: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of ``hidden``, GELU of it (overwriting ``grad``), and the sum of the gradient's rows."""
    stretches, run = _launch(*hidden.shape, devices.processors(hidden.device))
    grad_hidden = torch.empty_like(hidden)
    parts = hidden.new_empty((stretches, hidden.shape[1]), dtype=torch.float32)
    run(grad, hidden, grad_hidden, parts)
    return grad_hidden, grad, sum_of_parts(parts, (1,), torch.float32)


@functools.lru_cache(maxsize=1024)
def _launch(rows: int, columns: int, processors: int) -> tuple[int, Any]:
    """The number of stretches that the rows are divided into, and the launch."""
    from softfree.ops.mlp.kernels import mlp_backward_kernel
    from softfree.ops.shared.launching import Launch

    tiles = tiles_of(columns, COLUMNS)
    stretches = max(1, PROGRAMS_PER_PROCESSOR * processors // tiles)
    steps = tiles_of(rows, ROWS * stretches)
    return stretches, Launch(
        mlp_backward_kernel, (stretches, tiles), (rows, columns, steps),
        ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4,
    )  # fmt: skip


def _setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    x, weight1, bias1, weight2, bias2 = inputs
    ctx.save_for_backward(x, output[1], weight1, weight2)
    ctx.dtypes = bias1.dtype, bias2.dtype
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, grad, _):
    if grad is None:
        return ()
    grad_x, grad_weight1, grad_bias1, grad_weight2, grad_bias2 = BACKWARD(grad, *ctx.saved_tensors)
    first, second = ctx.dtypes
    return grad_x, grad_weight1, grad_bias1.to(first), grad_weight2, grad_bias2.to(second)


def _flops(x, weight1, bias1, weight2, bias2) -> int:
    """FLOPs of the two products."""
    hidden, channels = weight1
    return 2 * x[0] * hidden * (channels + weight2[0])


def _backward_flops(grad, x, hidden, weight1, weight2) -> int:
    return 2 * _flops(x, weight1, None, weight2, None)


BACKWARD = register("mlp_backward", _backward, _fake_backward, flops=_backward_flops)
_parts = register("mlp_in_parts", _in_parts, _fake_in_parts, flops=_flops)
FORWARD = register("mlp", _forward, _fake, _setup, _gradient, _flops, keeps=True)
