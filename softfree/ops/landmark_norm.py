"""LayerNorm and GELU, which landmarks pass after their convolution, as one operator.

Registered as ``softfree::landmark_norm``, for half precision on a GPU. Landmarks are small: as operators of
their own the scalings, casts, norm and GELU cost more to start than to run, and keep float32 copies for the
gradient.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from softfree.ops.exportable import exporting
from softfree.ops.kernels import HAS_TRITON, block, has_matrix_units, on, tiles_of
from softfree.ops.registration import register

MAX_CHANNELS = 128
ELEMENTS = 2048  # of a tile
PROGRAMS_PER_PROCESSOR = 8


def landmark_norm(x: Tensor, weight: Tensor, bias: Tensor, scale: float, eps: float) -> Tensor:
    """``GELU(LayerNorm(scale x)) / scale`` over the last dimension.

    Args:
        x: (..., d).
        weight, bias: of the norm, (d,).
        scale: matters to the norm's ``eps`` alone, and to the size of the result.
        eps: added to the variance.

    Example:
        >>> import torch
        >>> landmark_norm(torch.randn(2, 3, 49, 32), torch.ones(32), torch.zeros(32), 0.5, 1e-5).shape
        torch.Size([2, 3, 49, 32])
    """
    if _fits(x):
        return FORWARD(x, weight, bias, scale, eps)
    return F.gelu(F.layer_norm(x * scale, (x.shape[-1],), weight, bias, eps)) / scale


def _fits(x: Tensor) -> bool:
    return (
        HAS_TRITON
        and not exporting()
        and x.device.type == "cuda"
        and has_matrix_units(x.device)
        and x.dtype in (torch.float16, torch.bfloat16)
        and x.shape[-1] <= MAX_CHANNELS
    )


def _forward(x: Tensor, weight: Tensor, bias: Tensor, scale: float, eps: float) -> Tensor:
    from softfree.ops.kernels.landmark_norm import landmark_norm_kernel

    x = x.contiguous()
    out = torch.empty_like(x)
    if out.numel() > 0:
        d = x.shape[-1]
        blocks = _blocks(d)
        rows = x.numel() // d
        with on(x.device):
            landmark_norm_kernel[(tiles_of(rows, blocks["ROWS"]),)](
                x, weight.contiguous(), bias.contiguous(), out, rows, d, scale, eps,
                **blocks, num_warps=4,
            )  # fmt: skip
    return out


def _fake(x, weight, bias, scale, eps):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor, scale: float, eps: float
) -> tuple[Tensor, Tensor]:
    """The gradient of ``x``, and of weight and bias as the rows of one tensor."""
    from softfree.ops.kernels.landmark_norm import landmark_norm_backward_kernel
    from softfree.ops.kernels.launch import processors

    grad, x = grad.contiguous(), x.contiguous()
    d = x.shape[-1]
    blocks = _blocks(d)
    rows = x.numel() // d
    tiles = tiles_of(rows, blocks["ROWS"])
    steps = tiles_of(tiles, PROGRAMS_PER_PROCESSOR * processors(x.device))
    stretches = tiles_of(tiles, max(1, steps))
    grad_x = torch.empty_like(x)
    parts = torch.empty((stretches, 2, d), dtype=torch.float32, device=x.device)
    if stretches > 0:
        with on(x.device):
            landmark_norm_backward_kernel[(stretches,)](
                grad, x, weight.contiguous(), bias.contiguous(), grad_x, parts, rows, d, steps,
                scale, eps, **blocks, num_warps=4,
            )  # fmt: skip
    return grad_x, parts.sum(0).to(weight.dtype)


def _fake_backward(grad, x, weight, bias, scale, eps):
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    return grad_x, weight.new_empty(2, x.shape[-1])


def _setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, weight, bias, ctx.scale, ctx.eps = inputs
    ctx.save_for_backward(x, weight, bias)


def _gradient(ctx: Any, grad: Tensor):
    grad_x, grad_norm = BACKWARD(grad, *ctx.saved_tensors, ctx.scale, ctx.eps)
    return grad_x, *grad_norm.unbind(), None, None


BACKWARD = register("landmark_norm_backward", _backward, _fake_backward)
FORWARD = register("landmark_norm", _forward, _fake, _setup, _gradient)


def _blocks(d: int) -> dict[str, int]:
    return dict(ROWS=ELEMENTS // block(d), BLOCK_D=block(d))
