"""The attention layer of a pyramid backbone as one operator.

It projects to queries and values, samples landmarks, applies :func:`softfree.soft_attention`, adds the
convolution of the values, and projects the result. The kernels are the same as in the separate operators, run
one after the other; the savings are in between. Queries and values are each used twice. The second use adds
its gradient to the first one's in place, in the gradient of the projection, whereas autograd would add and
copy full-size tensors.

As in the papers, landmarks are computed from the queries by convolution, norm and GELU. In softfree's own
family, queries are normed in place and landmarks are means of their windows.

Registered as ``softfree::image_attention``, for half precision on a GPU.
"""

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from softfree.ops.attention import operator as attention
from softfree.ops.attention.settings import AttentionSettings, Inputs, InverseSettings
from softfree.ops.image_attention.places import Places, split
from softfree.ops.query_norm import operator as query_norm
from softfree.ops.shared import devices
from softfree.ops.shared.precision import NOTHING, autocast_dtype, full_precision
from softfree.ops.shared.registration import LEFT_OUT, register
from softfree.ops.value_conv import operator as value_conv
from softfree.ops.window_product import operator as window_product


class Weights(NamedTuple):
    """The layer's parameters.

    qv_weight, qv_bias: projection to queries (which are also the keys) and values.
    log_bandwidth: (heads,). If given, queries are normed (:func:`softfree.ops.query_norm.query_norm`) and
        divided by the bandwidth, and landmarks are means of windows. If None, the next three weights make the
        landmarks.
    landmark_weight: (d, d, down, across), see :func:`softfree.ops.window_product.window_product`.
    norm_weight, norm_bias: the landmarks' norm, see :func:`softfree.ops.norm.landmark_norm`.
    value_weight: (heads, 1, k, k), see :func:`softfree.ops.value_conv.value_conv`; None: no convolution of
    the values.
    proj_weight, proj_bias: projection of the result.
    """

    qv_weight: Tensor
    qv_bias: Tensor | None
    log_bandwidth: Tensor | None
    landmark_weight: Tensor | None
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    value_weight: Tensor | None
    proj_weight: Tensor
    proj_bias: Tensor | None


class Kept(NamedTuple):
    """What the gradient needs from the forward pass.

    qv: the projection; its queries are normed if the layer norms them.
    out: the attention plus the values' convolution.
    sampled: for each window, its product with the landmarks' weight, or its mean.
    deviations: 1 over the deviation of each normed query, (batch, heads, n); None if queries are not normed.
    inverse, u: as kept by the attention.
    """

    qv: Tensor
    out: Tensor
    sampled: Tensor
    deviations: Tensor | None
    inverse: Tensor
    u: Tensor


def image_attention(
    x: Tensor,
    weights: Weights,
    pooling: Tensor | None,
    grid: tuple[int, int],
    window: tuple[int, int],
    size: tuple[int, int],
    eps: float,
    *,
    landmark_norm: bool,
    normalize: bool,
    inverse: InverseSettings,
    unseen: bool = False,
) -> Tensor:
    """``proj(share * soft_attention(q, None, v, landmarks) + value_conv(v))``, ``q, v = qv(x)``.

    Args:
        x: (batch, n, channels); see :func:`fits`.
        weights: the layer's weights.
        pooling: (landmarks, windows), the matrix that averages the windows' landmarks; ``share`` is landmarks
            over windows. None: each window has its own landmark.
        grid: (rows, columns) of the tokens that landmarks are made from, which are the last ones.
        window: (down, across), the tokens of one landmark.
        size: (H, W) of the tokens that the values' convolution sees, which are the last ones; the values of
            earlier tokens are added unchanged.
        eps: eps of the norm of convolution landmarks.
        landmark_norm: whether landmarks that are means are normed like the queries.
        normalize, inverse: see :func:`softfree.soft_attention`.
        unseen: whether :func:`softfree.ops.shared.registration.unseen` holds for all these tensors.

    Returns:
        (batch, n, channels)
    """
    dtype = x.dtype if unseen else autocast_dtype(x)
    if not x.dtype == weights.qv_weight.dtype == weights.proj_weight.dtype == dtype:
        x = x.to(dtype)
        weights = weights._replace(
            qv_weight=weights.qv_weight.to(dtype), proj_weight=weights.proj_weight.to(dtype)
        )
    head_dim = x.shape[2] // _heads(weights, weights.proj_weight.shape[1])
    settings = AttentionSettings(head_dim**-0.5, normalize, inverse)
    places = Places(*grid, *size, *window)
    if unseen:
        return _pass(x, weights, pooling, places, eps, landmark_norm, settings)
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *weights))
    return FORWARD(x, weights, pooling, places, eps, landmark_norm, settings, keep)[0]


def fits(x: Tensor, heads: int, value_weight: Tensor | None) -> bool:
    """Whether this operator accepts the tokens ``x``."""
    return (
        devices.usable(x, dtype=autocast_dtype(x))
        and x.shape[2] <= value_conv.MAX_CHANNELS * heads
        and (value_weight is None or value_weight.shape[-1] <= value_conv.MAX_KERNEL)
    )


def _heads(weights: Any, channels: int) -> int:
    """The number of heads of a layer with ``channels`` channels, from its weights."""
    if weights.log_bandwidth is not None:
        return weights.log_bandwidth.shape[0]
    return channels // weights.landmark_weight.shape[0]


def _forward(
    x: Tensor,
    weights: Weights,
    pooling: Tensor | None,
    places: Places,
    eps: float,
    landmark_norm: bool,
    settings: AttentionSettings,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The result and, with ``keep``, what its gradient needs."""
    if not keep:
        out = _pass(x, weights, pooling, places, eps, landmark_norm, settings)
        return out, *(LEFT_OUT,) * len(Kept._fields)
    qv = _linear(x.contiguous(), weights.qv_weight, weights.qv_bias)
    plan = _plan(qv, weights, pooling, places, eps, landmark_norm, settings)
    program = plan.keeping
    out = qv.new_empty(plan.out)
    tensors = [qv, out, program.room.empty(qv), *_small(weights)]
    first = len(tensors)
    tensors.append(qv.new_empty(plan.sampled))
    tensors += [qv.new_empty(sizes, dtype=torch.float32) for sizes in plan.kept]
    program(tensors, pooling)
    sampled, inverse, u, *deviations = tensors[first:]
    kept = sampled, deviations[0] if deviations else LEFT_OUT, inverse, u
    return _linear(out, weights.proj_weight, weights.proj_bias), qv, out, *kept


def _pass(
    x: Tensor,
    weights: Weights,
    pooling: Tensor | None,
    places: Places,
    eps: float,
    landmark_norm: bool,
    settings: AttentionSettings,
) -> Tensor:
    """The result without anything kept for the gradient."""
    qv = _linear(x.contiguous(), weights.qv_weight, weights.qv_bias)
    plan = _plan(qv, weights, pooling, places, eps, landmark_norm, settings)
    program = plan.passing
    out = qv.new_empty(plan.out)
    # With too many landmarks for one program, PyTorch computes float32 products.
    with NOTHING if plan.fused else full_precision(qv.device):
        program([qv, out, program.room.empty(qv), *_small(weights)], pooling)
    del qv  # frees its memory for the result
    return _linear(out, weights.proj_weight, weights.proj_bias)


@functools.cache  # even a repeated import takes a microsecond
def _remembered_plan() -> Any:
    from softfree.ops.image_attention.plan import remembered_plan

    return remembered_plan


def _plan(
    qv: Tensor,
    weights: Weights,
    pooling: Tensor | None,
    places: Places,
    eps: float,
    landmark_norm: bool,
    settings: AttentionSettings,
) -> Any:
    windows, filters = weights.landmark_weight, weights.value_weight
    return _remembered_plan()(
        qv.shape, qv.dtype, qv.device, _heads(weights, qv.shape[2] // 2),
        None if filters is None else filters.shape, None if windows is None else windows.shape,
        (weights.qv_bias is not None, weights.proj_bias is not None),
        places, None if pooling is None else pooling.shape[0], eps, landmark_norm, settings,
        weights.proj_weight.shape[0],
    )  # fmt: skip


def _small(weights: Weights) -> list[Tensor]:
    """The weights that kernels read: the filters of the values, if any, and the weights of the landmarks."""
    filters = [] if weights.value_weight is None else [weights.value_weight]
    of_landmarks = weights[2:3] if weights.landmark_weight is None else weights[3:6]
    return [_of(weight).contiguous() for weight in (*filters, *of_landmarks)]


def _fake(x, weights, pooling, places, eps, landmark_norm, settings, keep):
    result = x.new_empty(*x.shape[:2], weights.proj_weight.shape[0])
    if not keep:
        return result, *(x.new_empty(0) for _ in Kept._fields)
    qv = x.new_empty(*x.shape[:2], weights.qv_weight.shape[0])
    q, v = split(qv, _heads(weights, qv.shape[2] // 2))
    down, across = window_product.window_grid(places.grid, places.window)
    sampled = q.new_empty(*q.shape[:2], down * across, q.shape[3])
    deviations = q.new_empty(0)
    if weights.log_bandwidth is not None:
        deviations = query_norm.inverse_deviations(q)
    landmarks = sampled if pooling is None else sampled[:, :, : pooling.shape[0]]
    out, inverse, u = attention.fake(Inputs(q, None, v, landmarks), settings, "triton")
    return result, qv, _merge(out), sampled, deviations, inverse, u


def _backward(
    grad: Tensor,
    x: Tensor,
    weights: Weights,
    pooling: Tensor | None,
    kept: Kept,
    places: Places,
    eps: float,
    landmark_norm: bool,
    settings: AttentionSettings,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the input and of the weights.

    They are those of x, the weight and bias of qv, the bandwidth, the landmarks' weight, their norm (weight
    and bias in one tensor), the values' filters, and the weight and bias of proj. Those of weights that the
    layer lacks are left out.
    """
    qv, out, sampled, deviations, inverse, u = kept
    plan = _plan(qv, weights, pooling, places, eps, landmark_norm, settings)
    rows, channels = grad.contiguous().view(-1, grad.shape[2]), out.shape[2]
    grad_out = torch.mm(rows, weights.proj_weight)
    grad_proj_weight = torch.mm(rows.t(), out.view(-1, channels))
    grad_qv = qv.new_empty((rows.shape[0], 2 * channels))
    found = _room_for_gradients(weights)
    if plan.batch:
        program = plan.backward
        room = program.room.empty(qv)
        tensors = [qv, grad_qv, room, rows, grad_out, *_small(weights), sampled, inverse, u]
        if weights.log_bandwidth is not None:
            tensors.append(deviations)
        program([*tensors, *[tensor for tensor in found if tensor is not None]], pooling)
    else:
        for tensor in found:
            if tensor is not None:
                tensor.zero_()
    grad_x = torch.mm(grad_qv, weights.qv_weight).view(x.shape)
    grad_qv_weight = torch.mm(grad_qv.t(), x.reshape(-1, x.shape[2]))
    value_weight, width, landmark_weight, norms, qv_bias, proj_bias = found
    return (
        grad_x, grad_qv_weight, qv_bias, width, landmark_weight, norms, value_weight,
        grad_proj_weight, proj_bias,
    )  # fmt: skip


def _room_for_gradients(weights: Weights) -> tuple[Any, ...]:
    """Empty gradients that a plan's backward pass writes.

    They are those of the filters, bandwidth, landmarks' weight, their norm, and the biases of both
    projections.
    """
    norm_weight = weights.norm_weight
    return (
        _like(weights.value_weight),
        _like(weights.log_bandwidth),
        _like(weights.landmark_weight),
        None if norm_weight is None else norm_weight.new_empty((2, *norm_weight.shape)),
        _like(weights.qv_bias),
        _like(weights.proj_bias),
    )


def _like(weight: Tensor | None) -> Any:
    return None if weight is None else weight.new_empty(weight.shape)


def _fake_backward(grad, x, weights, *_):
    def there(tensor: Tensor | None) -> Tensor:
        return x.new_empty(0) if tensor is None else tensor

    value_weight, width, landmark_weight, norms, qv_bias, proj_bias = map(
        there, _room_for_gradients(weights)
    )
    qv_weight, proj_weight = _like(weights.qv_weight), _like(weights.proj_weight)
    return (
        _like(x), qv_weight, qv_bias, width, landmark_weight, norms, value_weight, proj_weight, proj_bias
    )  # fmt: skip


def _setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    x, weights, pooling, *settings, _ = inputs
    ctx.save_for_backward(x, *weights, pooling, *output[1:])
    ctx.settings = settings
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, grad, *_):
    if grad is None:
        return ()
    saved = ctx.saved_tensors  # read once: under gradient checkpointing, each read recomputes
    fields = 1 + len(Weights._fields)
    weights, pooling, kept = Weights(*saved[1:fields]), saved[fields], Kept(*saved[fields + 1 :])
    x, qv_weight, qv_bias, width, landmark_weight, norms, value_weight, proj_weight, proj_bias = (
        BACKWARD(grad, saved[0], weights, pooling, kept, *ctx.settings)
    )
    sampler = (
        (None, landmark_weight, *norms.unbind())
        if weights.log_bandwidth is None
        else (width, None, None, None)
    )
    qv_bias = None if weights.qv_bias is None else qv_bias
    proj_bias = None if weights.proj_bias is None else proj_bias
    value_weight = None if weights.value_weight is None else value_weight
    return x, qv_weight, qv_bias, *sampler, value_weight, proj_weight, proj_bias


def _flops(x, weights, pooling, places, eps, landmark_norm, settings, keep) -> int:
    """FLOPs of the layer: those of the attention and of everything around it."""
    around, q, landmarks = _flops_around(x, weights, pooling, places)
    return around + attention.flops(Inputs(q, None, q, landmarks), settings, "triton")


def _backward_flops(grad, x, weights, pooling, kept, places, eps, landmark_norm, settings) -> int:
    around, q, landmarks = _flops_around(x, weights, pooling, places)
    inputs = Inputs(q, None, q, landmarks)
    return 2 * around + attention.backward_flops(inputs, settings, "triton")


def _flops_around(x, weights, pooling, places) -> tuple[int, Any, Any]:
    """FLOPs of projections, convolutions and pooling, and the shapes of queries and landmarks."""
    batch, n, channels = x
    width, windows = weights.log_bandwidth, weights.landmark_weight
    heads = channels // windows[0] if width is None else width[0]
    q = (batch, heads, n, channels // heads)
    down, across = window_product.window_grid(places.grid, places.window)
    landmarks, pooled = down * across, 0
    if pooling is not None:
        landmarks = pooling[0]
        pooled = 2 * batch * channels * landmarks * pooling[1]
    convolution = 0
    if weights.value_weight is not None:
        image = places.height * places.width
        convolution = 2 * batch * image * channels * weights.value_weight[-1] ** 2
    projections = 2 * batch * n * channels * (weights.qv_weight[0] + weights.proj_weight[0])
    products = 0
    if windows is not None:
        products = window_product.flops(q, windows, *places.grid)
    around = projections + products + pooled + convolution
    return around, q, (batch, heads, landmarks, q[3])


BACKWARD = register("image_attention_backward", _backward, _fake_backward, flops=_backward_flops)
FORWARD = register("image_attention", _forward, _fake, _setup, _gradient, _flops, keeps=True)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias if bias is None or bias.dtype == x.dtype else bias.to(x.dtype))


def _merge(tokens: Tensor) -> Tensor:
    """(batch, heads, n, d) as (batch, n, heads * d), without a copy."""
    return tokens.transpose(1, 2).flatten(2)


def _of(weight: Tensor | None) -> Tensor:
    """A weight that is known to exist for this kind of landmarks."""
    assert weight is not None
    return weight
