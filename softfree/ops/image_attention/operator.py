"""A pyramid's attention layer as one operator.

Projection to queries and values, landmarks, then :func:`softfree.soft_attention`, plus the convolution of the
values, projected: the same kernels that these are on their own, here one after the other. What is saved is
around them. Queries have two uses, and values too; the second writes its gradient on top of the first, straight
into the gradient of the projection, where autograd would add up and copy full-size tensors.

Landmarks come of the queries by convolution, norm and GELU, as in the papers; or, in softfree's own family, queries
are normed where they lie, and landmarks are means of their windows.

Registered as ``softfree::image_attention``, for half precision on a GPU.
"""

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from softfree.ops.attention import operator as attention
from softfree.ops.attention.settings import AttentionSettings, Inputs, InverseSettings
from softfree.ops.norm import operator as norm
from softfree.ops.query_norm import operator as query_norm
from softfree.ops.shared import devices
from softfree.ops.shared.precision import autocast_dtype
from softfree.ops.shared.registration import LEFT_OUT, register
from softfree.ops.shared.sums import column_sums
from softfree.ops.value_conv import operator as value_conv
from softfree.ops.window_product import operator as window_product


class Weights(NamedTuple):
    """The layer's parameters.

    qv_weight, qv_bias: of the projection to queries, which are the keys too, and values.
    log_bandwidth: (heads,): queries are normed, see :func:`softfree.ops.query_norm.query_norm`, divided by the
        bandwidth, and landmarks are means of windows. None: landmarks by the next three.
    landmark_weight: (d, d, down, across), see :func:`softfree.ops.window_product.window_product`.
    norm_weight, norm_bias: of the landmarks' norm, see :func:`softfree.ops.norm.landmark_norm`.
    value_weight: (heads, 1, k, k), see :func:`softfree.ops.value_conv.value_conv`.
    proj_weight, proj_bias: of the projection of the result.
    """

    qv_weight: Tensor
    qv_bias: Tensor | None
    log_bandwidth: Tensor | None
    landmark_weight: Tensor | None
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    value_weight: Tensor
    proj_weight: Tensor
    proj_bias: Tensor | None


class Places(NamedTuple):
    """Where the tokens lie.

    rows, columns: of the tokens that landmarks are made of: the last ones.
    height, width: of those that the values' convolution sees, the last ones; others pass unchanged.
    down, across: of a landmark's window.
    """

    rows: int
    columns: int
    height: int
    width: int
    down: int
    across: int

    @property
    def grid(self) -> tuple[int, int]:
        return self.rows, self.columns

    @property
    def window(self) -> tuple[int, int]:
        return self.down, self.across

    def before_grid(self, n: int) -> int:
        return n - self.rows * self.columns

    def before_image(self, n: int) -> int:
        return n - self.height * self.width

    def share(self, landmarks: int) -> float:
        """Landmarks over windows, see :func:`softfree.layers.landmarks.pooled_share`."""
        down, across = window_product.window_grid(self.grid, self.window)
        return landmarks / (down * across)


class Kept(NamedTuple):
    """What the gradient needs of the forward pass.

    qv: the projection, with queries normed if they are.
    out: the attention with the values' convolution.
    sampled: of each window: its product with the landmarks' weight, or its mean.
    deviations: 1 over those of the queries that were normed, (batch, heads, n).
    inverse, u: of the attention.
    """

    qv: Tensor
    out: Tensor
    sampled: Tensor
    deviations: Tensor
    inverse: Tensor
    u: Tensor


def image_attention(
    x: Tensor,
    weights: Weights,
    pooling: Tensor | None,
    grid: tuple[int, int],
    window: tuple[int, int],
    size: tuple[int, int],
    *,
    eps: float,
    landmark_norm: bool,
    normalize: bool,
    inverse: InverseSettings,
) -> Tensor:
    """``proj(share * soft_attention(q, None, v, landmarks) + value_conv(v))``, ``q, v = qv(x)``.

    Args:
        x: (batch, n, channels); see :func:`fits`.
        weights: the layer's.
        pooling: (landmarks, windows), by which windows' landmarks are averaged; ``share`` is landmarks over
            windows. None: each window has its landmark.
        grid: (rows, columns) of the tokens that landmarks are made of: the last ones.
        window: (down, across), the tokens of one landmark.
        size: (H, W) of those that the values' convolution sees, the last ones; others pass unchanged.
        eps: of the norm of landmarks by convolution.
        landmark_norm: whether the means that are landmarks are normed as the queries are.
        normalize, inverse: see :func:`softfree.soft_attention`.

    Returns:
        (batch, n, channels)
    """
    dtype = autocast_dtype(x)
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *weights))
    if not x.dtype == weights.qv_weight.dtype == weights.proj_weight.dtype == dtype:
        x = x.to(dtype)
        weights = weights._replace(
            qv_weight=weights.qv_weight.to(dtype), proj_weight=weights.proj_weight.to(dtype)
        )
    head_dim = x.shape[2] // weights.value_weight.shape[0]
    settings = AttentionSettings(head_dim**-0.5, normalize, inverse)
    places = Places(*grid, *size, *window)
    return FORWARD(x, weights, pooling, places, eps, landmark_norm, settings, keep)[0]


def fits(x: Tensor, value_weight: Tensor) -> bool:
    """Whether this operator takes the tokens ``x``."""
    return (
        devices.usable(x, dtype=autocast_dtype(x))
        and x.shape[2] <= value_conv.MAX_CHANNELS * value_weight.shape[0]
        and value_weight.shape[-1] <= value_conv.MAX_KERNEL
    )


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
    """The result and, to ``keep``, what its gradient needs; else None."""
    qv = _linear(x.contiguous(), weights.qv_weight, weights.qv_bias)
    filters, windows = weights.value_weight, weights.landmark_weight
    plan = _plan(
        qv.shape, qv.dtype, qv.device, filters.shape, None if windows is None else windows.shape,
        places, None if pooling is None else pooling.shape[0], settings, keep,
    )  # fmt: skip
    room = plan.room.empty(qv)
    sampled = torch.empty(plan.sampled, dtype=qv.dtype, device=qv.device)
    deviations = inverse = u = room
    if keep:
        deviations, inverse, u = (
            torch.empty(sizes, dtype=torch.float32, device=qv.device)
            for sizes in (plan.deviations, plan.inverse, plan.u)
        )
    if windows is None:
        sampler = _of(weights.log_bandwidth).contiguous()
    else:
        sampler = window_product.matrices(windows, qv)
    plan.sample(qv, sampled, sampler, room, deviations)
    landmarks, _ = _landmarks(sampled, weights, pooling, eps, landmark_norm)
    if plan.attend is None:
        out, inverse, u = _attend(qv, landmarks, filters, places, settings)
    else:
        out = torch.empty(plan.out, dtype=qv.dtype, device=qv.device)
        plan.attend(qv, landmarks, out, room, filters.contiguous(), inverse, u)
    first = places.before_image(out.shape[1])
    if first:
        values = qv[:, :first, out.shape[2] :]
        out[:, :first].mul_(places.share(landmarks.shape[2])).add_(values)
    if keep:
        return _project(out, weights), qv, out, sampled, deviations, inverse, u
    del qv, room, sampled, deviations, landmarks, inverse, u  # their memory is free for the result
    return _project(out, weights), *(LEFT_OUT,) * len(Kept._fields)


class _Plan(NamedTuple):
    """The launches of a forward pass, the memory they need, and the sizes of what they write.

    sample: of the projection, what is sampled, the log of the bandwidth (or the matrices of the landmarks' weight),
        room and deviations.
    attend: of the projection, landmarks, the result, room, the values' filters, inverse and u. None: there are
        too many landmarks for one program.
    """

    sample: Any
    attend: Any
    room: Any
    sampled: tuple[int, ...]
    deviations: tuple[int, ...]
    out: tuple[int, ...]
    inverse: tuple[int, ...]
    u: tuple[int, ...]


@functools.lru_cache(maxsize=1024)
def _plan(
    size: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    filters: torch.Size,
    windows: torch.Size | None,
    places: Places,
    pooled: int | None,
    settings: AttentionSettings,
    keep: bool,
) -> _Plan:
    """From sizes and settings alone; what is not to be ``keep``-t has its place in the room."""
    from softfree.ops.attention.kernels import launch
    from softfree.ops.shared.launching import Chain, Part, Room, Step

    qv, sampled, sampler, deviations = Part(0), Part(1), Part(2), Part(4)
    landmarks, out, value_weight, inverse, u = Part(1), Part(2), Part(4), Part(5), Part(6)
    room = Room(3)
    q, v = _split(torch.empty(size, dtype=dtype, device="meta"), filters[0])
    batch, heads, n, d = q.shape
    token = q.stride(2) * dtype.itemsize  # bytes from one to the next
    counts = window_product.window_grid(places.grid, places.window)
    count = counts[0] * counts[1] if pooled is None else pooled
    means = (batch, heads, counts[0] * counts[1], d)
    rows = (n * heads * d, heads * d)  # strides of the result, by samples and tokens
    call = launch.remembered_call(
        (q.shape, None, v.shape, torch.Size((batch, heads, count, d))), (False, False), dtype, device,
        settings, ("q", "keys", "v", "x"), (q.stride(), q.stride(), v.stride(), (rows[0], d, rows[1], 1)),
    )  # fmt: skip
    plan = _Plan(
        Chain([]), Chain([]) if call.shape.fused else None, room, means,
        (batch, heads, n) if windows is None else (0,), (batch, n, heads * d), call.inverse, call.sums,
    )  # fmt: skip
    if batch == 0:
        return plan
    before = places.before_grid(n)
    of_grid = Part(0, before * token)
    if windows is None:
        if not keep:
            deviations = room.part(plan.deviations)

        def norm(tokens: int, *where: Any) -> Any:
            sizes = torch.Size((batch, heads, tokens, d))
            return query_norm.norm_launch(sizes, q.stride(), q.stride(), n, *where, True)

        after = deviations._replace(offset=deviations.offset + 4 * before)
        run = norm(n - before, places.grid, places.window, True)
        steps: list[Step] = [(run, (of_grid, sampler, of_grid, after, sampled))]
        if before:
            run = norm(before, (1, before), (1, 1), False)
            steps.append((run, (qv, sampler, qv, deviations, sampled)))
    else:
        run = window_product.forward_launch(
            torch.Size(means), dtype, device, windows, *places.grid, q.stride()
        )
        steps = [(run, (of_grid, sampler, sampled))]
    plan = plan._replace(sample=Chain(steps))
    if plan.attend is None:
        return plan
    if not keep:
        inverse, u = room.part(plan.inverse), room.part(plan.u)
    values = Part(0, size[2] // 2 * dtype.itemsize)
    # Masks there are none; what stands in their place is not read.
    steps = call.forward_steps((qv, qv, values, landmarks, qv, qv), out, inverse, u, room)
    first = places.before_image(n)
    image = Part(2, first * rows[1] * dtype.itemsize)
    band_size, write_band, run = value_conv.launches(
        torch.Size((batch, n - first, heads * d)), filters, (n * size[2], size[2], *rows, *rows),
        places.height, places.width, places.share(count), True, False,
    )  # fmt: skip
    band = room.part(band_size, dtype)
    values = values._replace(offset=values.offset + first * token)
    steps += [(write_band, (value_weight, band)), (run, (values, band, image, image))]
    return plan._replace(attend=Chain(steps))


def _attend(
    qv: Tensor, landmarks: Tensor, filters: Tensor, places: Places, settings: AttentionSettings
) -> tuple[Tensor, Tensor, Tensor]:
    """The attention to landmarks too many for one program, with the convolution of the values."""
    from softfree.ops.attention.kernels import launch

    q, v = _split(qv, filters.shape[0])
    by_head, inverse, u = launch.forward(Inputs(q, None, v, landmarks), settings)
    out = _merge(by_head)
    first = places.before_image(qv.shape[1])
    image = _after(first, out, 1)
    value_conv.convolve(
        _after(first, _merge(v), 1), filters, image, image, places.height, places.width,
        base_scale=places.share(landmarks.shape[2]),
    )  # fmt: skip
    return out, inverse, u


def _fake(x, weights, pooling, places, eps, landmark_norm, settings, keep):
    result = x.new_empty(*x.shape[:2], weights.proj_weight.shape[0])
    if not keep:
        return result, *(x.new_empty(0) for _ in Kept._fields)
    qv = x.new_empty(*x.shape[:2], weights.qv_weight.shape[0])
    q, v = _split(qv, weights.value_weight.shape[0])
    down, across = window_product.window_grid(places.grid, places.window)
    sampled = q.new_empty(*q.shape[:2], down * across, q.shape[3])
    deviations = q.new_empty(0, dtype=torch.float32)
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
    """Gradients of x, of weight and bias of qv, bandwidth, landmarks, norm (both), values, and weight and bias of proj.

    Those of the biases are in float32; what the layer does not have is empty.
    """
    from softfree.ops.attention.kernels import launch

    height, width = places.height, places.width
    before_image = places.before_image(x.shape[1])
    q, v = _split(kept.qv, weights.value_weight.shape[0])
    grad_qv = torch.empty(kept.qv.shape, dtype=kept.qv.dtype, device=kept.qv.device)
    grad_q, grad_v = _split(grad_qv, weights.value_weight.shape[0])
    grad_out, grad_proj_weight, grad_proj_bias = _linear_backward(
        grad, kept.out, weights.proj_weight
    )
    landmarks, deviations = _landmarks(kept.sampled, weights, pooling, eps, landmark_norm)
    by_head = grad_out.unflatten(2, (q.shape[1], q.shape[3])).transpose(1, 2)
    *_, grad_landmarks = launch.backward(
        by_head, Inputs(q, None, v, landmarks), kept.inverse, kept.u, settings,
        into=(grad_q, grad_v),
    )  # fmt: skip
    share = places.share(landmarks.shape[2])
    grad_width = None
    if pooling is not None:
        grad_landmarks.mul_(share)
    if landmark_norm:
        grad_width = query_norm.write_gradient(
            grad_landmarks, landmarks, _of(weights.log_bandwidth), _of(deviations), None, grad_landmarks,
            (1, landmarks.shape[2]), (1, 1), log=True,
        )  # fmt: skip
    if pooling is not None:
        grad_landmarks = pooling.T.to(landmarks.dtype) @ grad_landmarks
    grad_sampler = _sample_backward(
        grad_landmarks, grad_width, grad_q, q, kept, weights, places, share, eps
    )
    values, grad_values = _merge(v), _merge(grad_v)
    grad_value_weight = value_conv.write_gradient(
        _after(before_image, grad_out, 1), _after(before_image, values, 1), weights.value_weight,
        height, width, _after(before_image, grad_values, 1), kept=share,
    )  # fmt: skip
    if before_image:
        grad_values[:, :before_image].mul_(share).add_(grad_out[:, :before_image])
    return (
        *_linear_backward(grad_qv, x, weights.qv_weight),
        *grad_sampler,
        grad_value_weight,
        grad_proj_weight,
        grad_proj_bias,
    )


def _fake_backward(grad, x, weights, *_):
    def like(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, memory_format=torch.contiguous_format)

    def bias_of(weight: Tensor) -> Tensor:
        return weight.new_empty(weight.shape[0], dtype=torch.float32)

    none = x.new_empty(0)
    normed = weights.log_bandwidth is not None
    return (
        like(x),
        like(weights.qv_weight),
        bias_of(weights.qv_weight),
        like(weights.log_bandwidth) if normed else none,
        none.clone() if normed else like(weights.landmark_weight),
        none.clone() if normed else weights.norm_weight.new_empty(2, *weights.norm_weight.shape),
        like(weights.value_weight),
        like(weights.proj_weight),
        bias_of(weights.proj_weight),
    )


def _setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    x, weights, pooling, *settings, _ = inputs
    ctx.save_for_backward(x, *weights, pooling, *output[1:])
    ctx.settings = settings
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, grad, *_):
    if grad is None:
        return ()
    saved = ctx.saved_tensors  # read once: under gradient checkpointing reading recomputes
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
    qv_bias, proj_bias = (
        None if bias is None else found.to(bias.dtype)
        for found, bias in ((qv_bias, weights.qv_bias), (proj_bias, weights.proj_bias))
    )
    return x, qv_weight, qv_bias, *sampler, value_weight, proj_weight, proj_bias


def _flops(x, weights, pooling, places, eps, landmark_norm, settings, keep) -> int:
    """Of its parts."""
    around, q, landmarks = _flops_around(x, weights, pooling, places)
    return around + attention.flops(Inputs(q, None, q, landmarks), settings, "triton")


def _backward_flops(grad, x, weights, pooling, kept, places, eps, landmark_norm, settings) -> int:
    around, q, landmarks = _flops_around(x, weights, pooling, places)
    inputs = Inputs(q, None, q, landmarks)
    return 2 * around + attention.backward_flops(inputs, settings, "triton")


def _flops_around(x, weights, pooling, places) -> tuple[int, Any, Any]:
    """Of projections, convolutions and pooling; shapes of queries and landmarks."""
    batch, n, channels = x
    heads = weights.value_weight[0]
    q = (batch, heads, n, channels // heads)
    down, across = window_product.window_grid(places.grid, places.window)
    landmarks, pooled = down * across, 0
    if pooling is not None:
        landmarks = pooling[0]
        pooled = 2 * batch * channels * landmarks * pooling[1]
    image = places.height * places.width
    convolution = 2 * batch * image * channels * weights.value_weight[-1] ** 2
    projections = 2 * batch * n * channels * (weights.qv_weight[0] + weights.proj_weight[0])
    products = 0
    if weights.landmark_weight is not None:
        products = window_product.flops(q, weights.landmark_weight, *places.grid)
    around = projections + products + pooled + convolution
    return around, q, (batch, heads, landmarks, q[3])


BACKWARD = register("image_attention_backward", _backward, _fake_backward, flops=_backward_flops)
FORWARD = register("image_attention", _forward, _fake, _setup, _gradient, _flops, keeps=True)


def _project(out: Tensor, weights: Weights) -> Tensor:
    return _linear(out, weights.proj_weight, weights.proj_bias)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias if bias is None or bias.dtype == x.dtype else bias.to(x.dtype))


def _linear_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the input, the weight and, in float32, the bias."""
    rows = grad.reshape(-1, grad.shape[2])
    grad_x = (rows @ weight).view(x.shape)
    return grad_x, rows.T @ x.reshape(-1, x.shape[2]), column_sums(rows)


def _split(qv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Queries and values by head, (batch, heads, n, d) each, where they lie."""
    batch, n, both = qv.shape
    q, v = qv.view(batch, n, 2, heads, both // heads // 2).transpose(1, 3).unbind(2)
    return q, v


def _after(first: int, tokens: Tensor, dim: int) -> Tensor:
    """The tokens but for the first ones."""
    return tokens.narrow(dim, first, tokens.shape[dim] - first) if first else tokens


def _merge(tokens: Tensor) -> Tensor:
    """(batch, heads, n, d) as (batch, n, heads * d), where they lie."""
    return tokens.transpose(1, 2).flatten(2)


def _sample_backward(
    grad_landmarks: Tensor,
    grad_width: Tensor | None,
    grad_q: Tensor,
    q: Tensor,
    kept: Kept,
    weights: Weights,
    places: Places,
    share: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Write the gradient of the projection's queries over that of what was compared, ``grad_q``.

    Returns the gradients of the log of the bandwidth (added to what it has so far), landmarks' weight and norm; empty
    where there is none.
    """
    before, none = places.before_grid(q.shape[2]), q.new_empty(0)
    of_grid, grad_of_grid = _after(before, q, 2), _after(before, grad_q, 2)
    if weights.log_bandwidth is None:
        grad_products, grad_norm = norm.landmark_backward(
            grad_landmarks, kept.sampled, _of(weights.norm_weight), _of(weights.norm_bias),
            q.shape[3] ** -0.25, eps,
        )  # fmt: skip
        grad_weight = window_product.write_gradient(
            grad_products, of_grid, _of(weights.landmark_weight), *places.grid, grad_of_grid,
            kept=share,
        )  # fmt: skip
        if before:
            grad_q[:, :, :before].mul_(share)
        return none, grad_weight, grad_norm
    width = weights.log_bandwidth
    through_queries = query_norm.write_gradient(
        grad_of_grid, of_grid, width, _after(before, kept.deviations, 2), grad_landmarks,
        grad_of_grid, places.grid, places.window, kept=share, log=True,
    )  # fmt: skip
    if before:
        first, grad_first = q[:, :, :before], grad_q[:, :, :before]
        through_queries += query_norm.write_gradient(
            grad_first, first, width, kept.deviations[:, :, :before], None, grad_first,
            (1, before), (1, 1), kept=share, log=True,
        )  # fmt: skip
    if grad_width is not None:
        through_queries += grad_width
    return through_queries.to(width.dtype), none, none.clone()


def _landmarks(
    sampled: Tensor, weights: Weights, pooling: Tensor | None, eps: float, landmark_norm: bool
) -> tuple[Tensor, Tensor | None]:
    """The landmarks and, of those that are normed, 1 over their deviations."""
    landmarks = sampled
    if weights.log_bandwidth is None:
        landmarks = norm.landmark_forward(
            sampled,
            _of(weights.norm_weight),
            _of(weights.norm_bias),
            sampled.shape[3] ** -0.25,
            eps,
        )
    if pooling is not None:
        landmarks = pooling.to(landmarks.dtype) @ landmarks
    if not landmark_norm:
        return landmarks, None
    normed, deviations = torch.empty_like(landmarks), query_norm.inverse_deviations(landmarks)
    query_norm.norm(
        landmarks, _of(weights.log_bandwidth), normed, deviations, (1, normed.shape[2]), (1, 1),
        means=False, log=True,
    )  # fmt: skip
    return normed, deviations


def _of(weight: Tensor | None) -> Tensor:
    """A weight that the form of the landmarks has."""
    assert weight is not None
    return weight
