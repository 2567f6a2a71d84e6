"""A pyramid's attention layer as one operator.

Projection to queries and values, landmarks by convolution, norm and GELU, then
:func:`softfree.soft_attention`, plus the convolution of the values, projected: the same kernels that these are
on their own, here one after the other. What is saved is around them. Queries have two uses, and values too;
the second writes its gradient on top of the first, straight into the gradient of the projection, where
autograd would add up and copy full-size tensors.

Registered as ``softfree::image_attention``, for half precision on a GPU.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from softfree.ops.attention import operator as attention
from softfree.ops.norm import operator as norm
from softfree.ops.shared import devices
from softfree.ops.shared.precision import autocast_dtype, full_precision
from softfree.ops.shared.registration import register
from softfree.ops.shared.sums import column_sums
from softfree.ops.value_conv import operator as value_conv
from softfree.ops.window_product import operator as window_product


def image_attention(
    x: Tensor,
    qv_weight: Tensor,
    qv_bias: Tensor | None,
    landmark_weight: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    value_weight: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor | None,
    pooling: Tensor | None,
    grid: tuple[int, int],
    size: tuple[int, int],
    *,
    eps: float,
    normalize: bool,
    iterations: int,
    start: str,
    ridge: float,
) -> Tensor:
    """``proj(share * soft_attention(q, None, v, landmarks) + value_conv(v))``, ``q, v = qv(x)``.

    Args:
        x: (batch, n, channels); see :func:`fits`.
        qv_weight, qv_bias: of the projection to queries, which are the keys too, and values.
        landmark_weight: (d, d, down, across), see :func:`softfree.ops.window_product.window_product`.
        norm_weight, norm_bias, eps: of the landmarks' norm, see :func:`softfree.ops.norm.landmark_norm`.
        value_weight: (heads, 1, k, k), see :func:`softfree.ops.value_conv.value_conv`.
        proj_weight, proj_bias: of the projection of the result.
        pooling: (landmarks, windows), by which windows' landmarks are averaged; ``share`` is landmarks over
            windows. None: each window has its landmark.
        grid: (rows, columns) of the tokens that landmarks are made of: the last ones.
        size: (H, W) of those that the values' convolution sees, the last ones; others pass unchanged.
        normalize, iterations, start, ridge: see :func:`softfree.soft_attention`.

    Returns:
        (batch, n, channels)
    """
    dtype = autocast_dtype(x)
    inputs = (
        x, qv_weight, qv_bias, landmark_weight, norm_weight, norm_bias, value_weight, proj_weight, proj_bias
    )  # fmt: skip
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    return FORWARD(
        x.to(dtype), qv_weight.to(dtype), qv_bias, landmark_weight, norm_weight, norm_bias,
        value_weight, proj_weight.to(dtype), proj_bias, pooling, *grid, *size,
        eps, normalize, iterations, start, ridge, keep,
    )[0]  # fmt: skip


def fits(x: Tensor, value_weight: Tensor) -> bool:
    """Whether this operator takes the tokens ``x``."""
    return (
        devices.usable(x, dtype=autocast_dtype(x))
        and x.shape[2] <= value_conv.MAX_CHANNELS * value_weight.shape[0]
        and value_weight.shape[-1] <= value_conv.MAX_KERNEL
    )


def _forward(
    x: Tensor,
    qv_weight: Tensor,
    qv_bias: Tensor | None,
    landmark_weight: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    value_weight: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor | None,
    pooling: Tensor | None,
    rows: int,
    columns: int,
    height: int,
    width: int,
    eps: float,
    normalize: bool,
    iterations: int,
    start: str,
    ridge: float,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The result and, to ``keep``, what its gradient needs: qv, the attention, window products, inverse, U."""
    from softfree.ops.attention.kernels import launch

    n = x.shape[1]
    before_grid, before_image = n - rows * columns, n - height * width
    with (
        torch.autocast(x.device.type, enabled=False),
        full_precision(x.device),
        devices.on(x.device),
    ):
        qv = _linear(x.contiguous(), qv_weight, qv_bias)
        q, v = _split(qv, value_weight)
        products = window_product._forward(q[:, :, before_grid:], landmark_weight, rows, columns)
        landmarks = _landmarks(products, norm_weight, norm_bias, pooling, eps)
        by_head, inverse, u = launch.forward(
            q, None, v, landmarks, None, None, _scale(q), normalize, iterations, start, ridge
        )
        out, values = _merge(by_head), _merge(v)
        image = out[:, before_image:]
        share = _share(pooling)
        value_conv.convolve(
            values[:, before_image:], value_weight, image, image, height, width, base_scale=share
        )
        if before_image:
            out[:, :before_image].mul_(share).add_(values[:, :before_image])
        if keep:
            return _linear(out, proj_weight, proj_bias), qv, out, products, inverse, u
        del qv, q, v, values, image, by_head  # their memory is free for the result
        return _linear(out, proj_weight, proj_bias), *_nothing(x)


def _fake(
    x, qv_weight, qv_bias, landmark_weight, norm_weight, norm_bias, value_weight, proj_weight,
    proj_bias, pooling, rows, columns, height, width, eps, normalize, iterations, start, ridge, keep,
):  # fmt: skip
    result = x.new_empty(*x.shape[:2], proj_weight.shape[0])
    if not keep:
        return result, *_nothing(x)
    qv = x.new_empty(*x.shape[:2], qv_weight.shape[0])
    q, v = _split(qv, value_weight)
    products = window_product._empty_result(q, landmark_weight, rows, columns)
    landmarks = products if pooling is None else products[:, :, : pooling.shape[0]]
    out, inverse, u = attention._fake(
        q, None, v, landmarks, None, None, 1.0, normalize, iterations, start, ridge, "triton"
    )
    return result, qv, _merge(out), products, inverse, u


def _backward(
    grad: Tensor,
    x: Tensor,
    qv_weight: Tensor,
    landmark_weight: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    value_weight: Tensor,
    proj_weight: Tensor,
    pooling: Tensor | None,
    qv: Tensor,
    out: Tensor,
    products: Tensor,
    inverse: Tensor,
    u: Tensor,
    rows: int,
    columns: int,
    height: int,
    width: int,
    eps: float,
    normalize: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, of weight and bias of qv, landmarks, norm (both), values, and weight and bias of proj."""
    from softfree.ops.attention.kernels import launch

    q, v = _split(qv, value_weight)
    grad_qv = torch.empty(qv.shape, dtype=qv.dtype, device=qv.device)
    grad_q, grad_v = _split(grad_qv, value_weight)
    n = x.shape[1]
    before_grid, before_image = n - rows * columns, n - height * width
    with (
        torch.autocast(x.device.type, enabled=False),
        full_precision(x.device),
        devices.on(x.device),
    ):
        grad_out, grad_proj_weight, grad_proj_bias = _linear_backward(grad, out, proj_weight)
        landmarks = _landmarks(products, norm_weight, norm_bias, pooling, eps)
        by_head = grad_out.unflatten(2, (q.shape[1], q.shape[3])).transpose(1, 2)
        *_, grad_landmarks = launch.backward(
            by_head, q, None, v, landmarks, None, None, inverse, u, _scale(q), normalize,
            into=(grad_q, grad_v),
        )  # fmt: skip
        share = _share(pooling)
        if pooling is not None:
            grad_landmarks = pooling.T.to(landmarks.dtype) @ grad_landmarks.mul_(share)
        grad_products, grad_norm = norm.landmark_backward(
            grad_landmarks, products, norm_weight, norm_bias, q.shape[3] ** -0.25, eps
        )
        grad_landmark_weight = window_product.write_gradient(
            grad_products, q[:, :, before_grid:], landmark_weight, rows, columns,
            grad_q[:, :, before_grid:], kept=share,
        )  # fmt: skip
        if before_grid:
            grad_q[:, :, :before_grid].mul_(share)
        values, grad_values = _merge(v), _merge(grad_v)
        grad_value_weight = value_conv.write_gradient(
            grad_out[:, before_image:], values[:, before_image:], value_weight, height, width,
            grad_values[:, before_image:], kept=share,
        )  # fmt: skip
        if before_image:
            grad_values[:, :before_image].mul_(share).add_(grad_out[:, :before_image])
        return (
            *_linear_backward(grad_qv, x, qv_weight),
            grad_landmark_weight,
            grad_norm,
            grad_value_weight,
            grad_proj_weight,
            grad_proj_bias,
        )


def _fake_backward(
    grad, x, qv_weight, landmark_weight, norm_weight, norm_bias, value_weight, proj_weight,
    pooling, qv, out, products, inverse, u, rows, columns, height, width, eps, normalize,
):  # fmt: skip
    def like(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, memory_format=torch.contiguous_format)

    def bias_of(weight: Tensor) -> Tensor:
        return weight.new_empty(weight.shape[0], dtype=torch.float32)

    return (
        like(x),
        like(qv_weight),
        bias_of(qv_weight),
        like(landmark_weight),
        norm_weight.new_empty(2, *norm_weight.shape),
        like(value_weight),
        like(proj_weight),
        bias_of(proj_weight),
    )


def _setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    x, qv_weight, qv_bias, *middle, proj_weight, proj_bias, pooling = inputs[:10]
    ctx.save_for_backward(x, qv_weight, *middle, proj_weight, pooling, *output[1:])
    ctx.settings = inputs[10:16]
    ctx.bias_dtypes = [None if bias is None else bias.dtype for bias in (qv_bias, proj_bias)]
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, grad, *_):
    if grad is None:
        return (None,) * 20
    x, qv_weight, qv_bias, landmark_weight, grad_norm, value_weight, proj_weight, proj_bias = (
        BACKWARD(grad, *ctx.saved_tensors, *ctx.settings)
    )
    qv_bias, proj_bias = (
        None if dtype is None else bias.to(dtype)
        for bias, dtype in zip((qv_bias, proj_bias), ctx.bias_dtypes, strict=True)
    )
    norm_weight, norm_bias = grad_norm.unbind()
    return (
        x, qv_weight, qv_bias, landmark_weight, norm_weight, norm_bias, value_weight, proj_weight,
        proj_bias, *(None,) * 11,
    )  # fmt: skip


BACKWARD = register("image_attention_backward", _backward, _fake_backward)
FORWARD = register("image_attention", _forward, _fake, _setup, _gradient)


@register_flop_formula(torch.ops.softfree.image_attention)
def _flops(
    x_shape, qv_shape, _qv_bias, landmark_shape, _weight, _bias, value_shape, proj_shape, _proj_bias,
    pooling_shape, rows, columns, height, width, _eps, normalize, iterations, *_, **__,
) -> int:  # fmt: skip
    """Of its parts, each multiply-add counted twice."""
    shapes = (x_shape, qv_shape, landmark_shape, value_shape, proj_shape, pooling_shape)
    around, q_shape, landmarks_shape = _flops_around(*shapes, rows, columns, height, width)
    return around + attention._attention_flops(
        q_shape, None, q_shape, landmarks_shape, None, None, 1.0, normalize, iterations
    )


@register_flop_formula(torch.ops.softfree.image_attention_backward)
def _backward_flops(
    _grad, x_shape, qv_shape, landmark_shape, _weight, _bias, value_shape, proj_shape, pooling_shape,
    _qv, _out, _products, _inverse, _u, rows, columns, height, width, *_, **__,
) -> int:  # fmt: skip
    shapes = (x_shape, qv_shape, landmark_shape, value_shape, proj_shape, pooling_shape)
    around, q_shape, landmarks_shape = _flops_around(*shapes, rows, columns, height, width)
    return 2 * around + attention._attention_backward_flops(
        None, q_shape, None, q_shape, landmarks_shape
    )


def _flops_around(
    x_shape, qv_shape, landmark_shape, value_shape, proj_shape, pooling_shape,
    rows, columns, height, width,
) -> tuple[int, tuple[int, ...], tuple[int, ...]]:  # fmt: skip
    """Of projections, convolutions and pooling; shapes of queries and landmarks."""
    batch, n, channels = x_shape
    heads = value_shape[0]
    q_shape = (batch, heads, n, channels // heads)
    down, across = window_product.window_grid((rows, columns), landmark_shape[2:])
    landmarks, pooled = down * across, 0
    if pooling_shape is not None:
        landmarks = pooling_shape[0]
        pooled = 2 * batch * channels * landmarks * pooling_shape[1]
    convolution = 2 * batch * height * width * channels * value_shape[-1] ** 2
    projections = 2 * batch * n * channels * (qv_shape[0] + proj_shape[0])
    products = window_product._flops(q_shape, landmark_shape, rows, columns)
    around = projections + products + pooled + convolution
    return around, q_shape, (batch, heads, landmarks, q_shape[3])


def _nothing(like: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """In the place of what is kept for the gradient."""
    a, b, c, d, e = (like.new_empty(0) for _ in range(5))
    return a, b, c, d, e


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, None if bias is None else bias.to(x.dtype))


def _linear_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the input, the weight and, in float32, the bias."""
    rows = grad.reshape(-1, grad.shape[2])
    grad_x = (rows @ weight).view(x.shape)
    return grad_x, rows.T @ x.reshape(-1, x.shape[2]), column_sums(rows)


def _split(qv: Tensor, value_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and values by head, (batch, heads, n, d) each, where they lie."""
    heads = value_weight.shape[0]
    q, v = qv.unflatten(2, (2, heads, qv.shape[2] // heads // 2)).transpose(1, 3).unbind(2)
    return q, v


def _merge(tokens: Tensor) -> Tensor:
    """(batch, heads, n, d) as (batch, n, heads * d), where they lie."""
    return tokens.transpose(1, 2).flatten(2)


def _landmarks(
    products: Tensor, weight: Tensor, bias: Tensor, pooling: Tensor | None, eps: float
) -> Tensor:
    landmarks = norm.landmark_forward(products, weight, bias, products.shape[3] ** -0.25, eps)
    return landmarks if pooling is None else pooling.to(landmarks.dtype) @ landmarks


def _share(pooling: Tensor | None) -> float:
    """Landmarks over windows, see :func:`softfree.layers.landmarks.pooled_share`."""
    return 1.0 if pooling is None else pooling.shape[0] / pooling.shape[1]


def _scale(q: Tensor) -> float:
    return q.shape[3] ** -0.5
