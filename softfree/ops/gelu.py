"""A linear layer and GELU, whose gradient is summed up for the bias as it is computed.

The bias's gradient is the sum of GELU's over all tokens. As a sum of its own it would read the widest
tensor of a block once more. Registered as ``softfree::gelu``, for training on a GPU in half precision.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from softfree.ops.exportable import exporting
from softfree.ops.kernels import HAS_TRITON, has_matrix_units, on, tiles_of
from softfree.ops.registration import register

ROWS, COLUMNS = 16, 128
PROGRAMS_PER_PROCESSOR = 8


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``gelu(x weight^T + bias)``, in GELU's tanh form.

    Args:
        x: (..., channels).
        weight: (hidden, channels).
        bias: (hidden,).

    Example:
        >>> import torch
        >>> linear_gelu(torch.randn(2, 5, 8), torch.randn(32, 8), torch.randn(32)).shape
        torch.Size([2, 5, 32])
    """
    if not _fits(x, bias):
        return F.gelu(F.linear(x, weight, bias), approximate="tanh")
    return FORWARD(F.linear(x, weight, bias.detach()), bias)


def _fits(x: Tensor, bias: Tensor) -> bool:
    device = x.device.type
    if not HAS_TRITON or exporting() or device != "cuda" or not has_matrix_units(x.device):
        return False
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    trained = torch.is_grad_enabled() and bias.requires_grad
    half = dtype in (torch.float16, torch.bfloat16) and x.dtype != torch.float64
    return trained and half


def _forward(hidden: Tensor, bias: Tensor) -> Tensor:
    """GELU of ``hidden``, which has ``bias`` in it already: the bias is here for its gradient alone."""
    return F.gelu(hidden, approximate="tanh")


def _fake(hidden, bias):
    return torch.empty_like(hidden)


def _backward(grad: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    from softfree.ops.kernels.gelu import gelu_backward_kernel
    from softfree.ops.kernels.launch import processors

    grad, hidden = grad.contiguous(), hidden.contiguous()
    columns = hidden.shape[-1]
    rows = hidden.numel() // columns
    tiles = tiles_of(columns, COLUMNS)
    stretches = max(1, PROGRAMS_PER_PROCESSOR * processors(hidden.device) // tiles)
    steps = tiles_of(rows, ROWS * stretches)
    grad_hidden = torch.empty_like(hidden)
    parts = torch.empty((stretches, columns), dtype=torch.float32, device=hidden.device)
    with on(hidden.device):
        gelu_backward_kernel[(stretches, tiles)](
            grad, hidden, grad_hidden, parts, rows, columns, steps,
            ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4,
        )  # fmt: skip
    return grad_hidden, parts.sum(0)


def _fake_backward(grad, hidden):
    return (
        torch.empty_like(hidden, memory_format=torch.contiguous_format),
        hidden.new_empty(hidden.shape[-1], dtype=torch.float32),
    )


def _setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    hidden, bias = inputs
    ctx.save_for_backward(hidden)
    ctx.dtype = bias.dtype


def _gradient(ctx: Any, grad: Tensor):
    grad_hidden, grad_bias = BACKWARD(grad, *ctx.saved_tensors)
    return grad_hidden, grad_bias.to(ctx.dtype)


BACKWARD = register("gelu_backward", _backward, _fake_backward)
FORWARD = register("gelu", _forward, _fake, _setup, _gradient)
