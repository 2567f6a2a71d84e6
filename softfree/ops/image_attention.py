"""A pyramid's attention, from one projection to the other, as one operator.

Landmarks by convolution, norm and GELU, then :func:`softfree.soft_attention`, plus the convolution of the
values: the same kernels that these are on their own, here one after the other. What is saved is around them.
Queries have two uses, and values too; the second writes its gradient on top of the first, straight into the
gradient of the projection's result, where autograd would add up and copy full-size tensors.

Registered as ``softfree::image_attention``, for half precision on a GPU.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from softfree.ops import attention, norm, value_conv, window_product
from softfree.ops.exportable import exporting
from softfree.ops.inverse import full_precision
from softfree.ops.kernels import HAS_TRITON, has_matrix_units, on
from softfree.ops.registration import register


def image_attention(
    qv: Tensor,
    landmark_weight: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    value_weight: Tensor,
    grid: tuple[int, int],
    size: tuple[int, int],
    *,
    eps: float,
    normalize: bool,
    iterations: int,
    start: str,
    ridge: float,
) -> Tensor:
    """``soft_attention(q, v, landmarks) + value_conv(v)``.

    Args:
        qv: queries, which are the keys too, and values: (batch, n, 2 * channels); see :func:`fits`.
        landmark_weight: (d, d, down, across), see :func:`softfree.ops.window_product.window_product`.
        norm_weight, norm_bias, eps: of the landmarks' norm,
            see :func:`softfree.ops.norm.landmark_norm`.
        value_weight: (heads, 1, k, k), see :func:`softfree.ops.value_conv.value_conv`.
        grid: (rows, columns) of the tokens that landmarks are made of: the last ones.
        size: (H, W) of those that the values' convolution sees, the last ones; others pass unchanged.
        normalize, iterations, start, ridge: see :func:`softfree.soft_attention`.

    Returns:
        (batch, n, channels)
    """
    return FORWARD(
        qv, landmark_weight, norm_weight, norm_bias, value_weight, *grid, *size,
        eps, normalize, iterations, start, ridge,
    )[0]  # fmt: skip


def fits(qv: Tensor, value_weight: Tensor) -> bool:
    """Whether this operator takes a projection to queries and values."""
    return (
        HAS_TRITON
        and not exporting()
        and qv.device.type == "cuda"
        and has_matrix_units(qv.device)
        and qv.dtype in (torch.float16, torch.bfloat16)
        and qv.shape[2] <= 2 * value_conv.MAX_CHANNELS * value_weight.shape[0]
        and value_weight.shape[-1] <= value_conv.MAX_KERNEL
    )


def _forward(
    qv: Tensor,
    landmark_weight: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    value_weight: Tensor,
    rows: int,
    columns: int,
    height: int,
    width: int,
    eps: float,
    normalize: bool,
    iterations: int,
    start: str,
    ridge: float,
) -> tuple[Tensor, Tensor, Tensor]:
    from softfree.ops.kernels import launch

    q, v = _split(qv, value_weight)
    before_grid, before_image = qv.shape[1] - rows * columns, qv.shape[1] - height * width
    with torch.autocast(qv.device.type, enabled=False), full_precision(qv.device), on(qv.device):
        products = window_product._forward(q[:, :, before_grid:], landmark_weight, rows, columns)
        landmarks = _landmarks(products, norm_weight, norm_bias, eps)
        out, inverse = launch.forward(
            q, None, v, landmarks, None, None, _scale(q), normalize, iterations, start, ridge
        )
        out, values = _merge(out), _merge(v)
        image = out[:, before_image:]
        value_conv.convolve(values[:, before_image:], value_weight, image, image, height, width)
        if before_image:
            out[:, :before_image] += values[:, :before_image]
    return out, products, inverse


def _fake(
    qv, landmark_weight, norm_weight, norm_bias, value_weight, rows, columns, height, width,
    eps, normalize, iterations, start, ridge,
):  # fmt: skip
    q, v = _split(qv, value_weight)
    products = window_product._empty_result(q, landmark_weight, rows, columns)
    out, inverse = attention._fake(
        q, None, v, products, None, None, 1.0, normalize, iterations, start, ridge, "triton"
    )
    return _merge(out), products, inverse


def _backward(
    grad: Tensor,
    qv: Tensor,
    landmark_weight: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    value_weight: Tensor,
    products: Tensor,
    inverse: Tensor,
    rows: int,
    columns: int,
    height: int,
    width: int,
    eps: float,
    normalize: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from softfree.ops.kernels import launch

    q, v = _split(qv, value_weight)
    grad_qv = torch.empty(qv.shape, dtype=qv.dtype, device=qv.device)
    grad_q, grad_v = _split(grad_qv, value_weight)
    grad = grad if grad.stride(2) == 1 else grad.contiguous()
    before_grid, before_image = qv.shape[1] - rows * columns, qv.shape[1] - height * width
    with torch.autocast(qv.device.type, enabled=False), full_precision(qv.device), on(qv.device):
        landmarks = _landmarks(products, norm_weight, norm_bias, eps)
        by_head = grad.unflatten(2, (q.shape[1], q.shape[3])).transpose(1, 2)
        *_, grad_landmarks = launch.backward(
            by_head, q, None, v, landmarks, None, None, inverse, _scale(q), normalize,
            into=(grad_q, grad_v),
        )  # fmt: skip
        grad_products, grad_norm = norm.landmark_backward(
            grad_landmarks, products, norm_weight, norm_bias, q.shape[3] ** -0.25, eps
        )
        grad_landmark_weight = window_product.write_gradient(
            grad_products, q[:, :, before_grid:], landmark_weight, rows, columns,
            grad_q[:, :, before_grid:], add=True,
        )  # fmt: skip
        values, grad_values = _merge(v), _merge(grad_v)
        grad_value_weight = value_conv.write_gradient(
            grad[:, before_image:], values[:, before_image:], value_weight, height, width,
            grad_values[:, before_image:], add=True,
        )  # fmt: skip
        if before_image:
            grad_values[:, :before_image] += grad[:, :before_image]
    return grad_qv, grad_landmark_weight, grad_norm, grad_value_weight


def _fake_backward(
    grad, qv, landmark_weight, norm_weight, norm_bias, value_weight, products, inverse,
    rows, columns, height, width, eps, normalize,
):  # fmt: skip
    return (
        torch.empty(qv.shape, dtype=qv.dtype, device=qv.device),
        torch.empty_like(landmark_weight, memory_format=torch.contiguous_format),
        norm_weight.new_empty(2, *norm_weight.shape),
        torch.empty_like(value_weight, memory_format=torch.contiguous_format),
    )


def _setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*inputs[:5], *output[1:])
    ctx.settings = inputs[5:11]
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, grad, *_):
    if grad is None:
        return (None,) * 14
    grad_qv, grad_landmark_weight, grad_norm, grad_value_weight = BACKWARD(
        grad, *ctx.saved_tensors, *ctx.settings
    )
    return grad_qv, grad_landmark_weight, *grad_norm.unbind(), grad_value_weight, *(None,) * 9


BACKWARD = register("image_attention_backward", _backward, _fake_backward)
FORWARD = register("image_attention", _forward, _fake, _setup, _gradient)


@register_flop_formula(torch.ops.softfree.image_attention)
def _flops(
    qv_shape, landmark_shape, _weight, _bias, value_shape, rows, columns, height, width,
    _eps, normalize, iterations, *_, **__,
) -> int:  # fmt: skip
    """Of its three parts, each multiply-add counted twice."""
    batch, n, both = qv_shape
    heads = value_shape[0]
    q_shape = (batch, heads, n, both // heads // 2)
    products = window_product._flops(q_shape, landmark_shape, rows, columns)
    down, across = window_product.window_grid((rows, columns), landmark_shape[2:])
    landmarks_shape = (batch, heads, down * across, q_shape[3])
    convolution = batch * height * width * both * value_shape[-1] ** 2
    return products + convolution + attention._attention_flops(
        q_shape, None, q_shape, landmarks_shape, None, None, 1.0, normalize, iterations
    )  # fmt: skip


def _split(qv: Tensor, value_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and values by head, (batch, heads, n, d) each, where they lie."""
    heads = value_weight.shape[0]
    q, v = qv.unflatten(2, (2, heads, qv.shape[2] // heads // 2)).transpose(1, 3).unbind(2)
    return q, v


def _merge(tokens: Tensor) -> Tensor:
    """(batch, heads, n, d) as (batch, n, heads * d), where they lie."""
    return tokens.transpose(1, 2).flatten(2)


def _landmarks(products: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return norm.landmark_forward(products, weight, bias, products.shape[3] ** -0.25, eps)


def _scale(q: Tensor) -> float:
    return q.shape[3] ** -0.5
