"""The operator in plain PyTorch at a bounded memory: backend ``"torch"``.

Tokens are read in chunks whose kernel values stay in the processor's cache, and the kernel is computed
again wherever it is needed a second time. Nothing of size n x m outlives a chunk: beside the result,
the forward pass keeps O(m^2 + m d) per head for the backward pass. Buffers are made once per call and
reused by every chunk, since on a CPU fresh memory costs more than the arithmetic done in it.

Kernel values of a chunk come from one matrix product. With ``c`` the mean landmark and ``x~ = x - c``,

    -||q - l||^2 / 2 = q~ . l~ - ||q~||^2 / 2 - ||l~||^2 / 2,

where the shift by ``c`` keeps the terms as small as the distances themselves, so that their difference
stays accurate, and a bound at 0 makes the squared distance non-negative.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from softfree.ops.attention.mixing import (
    invert_landmarks,
    landmark_matrix,
    mix,
    mixing_backward,
)
from softfree.ops.attention.settings import AttentionSettings, Inputs
from softfree.ops.shared.precision import compute_dtype
from softfree.ops.shared.shapes import token_tensor

# Kernel values a chunk may hold. On a CPU they are meant to stay in cache; elsewhere launches should be
# few.
CHUNK_ELEMENTS = {"cpu": 2**19}
CHUNK_ELEMENTS_ELSEWHERE = 2**25
# Beyond this scale * ||l - c||^2 the float32 terms of the exponent cancel too many digits, and the product
# is taken in float64. On a CPU only: elsewhere looking would wait for the device.
FAR = 32.0
FEW_TOKENS = 1024  # up to so many, U is computed again for the backward pass instead of kept


def forward(inputs: Inputs, settings: AttentionSettings) -> tuple[Tensor, Tensor, Tensor]:
    """Result (batch, heads, n_q, d_v), inverse (batch, heads, m, m), ``U = P V`` in :func:`sums_shape`."""
    q, k, v, landmarks, key_mask, landmark_mask = inputs
    points = _Landmarks(landmarks, landmark_mask, settings.scale)
    a, inverse = invert_landmarks(points.values, landmark_mask, settings)
    x = token_tensor(q, v.shape[-1])
    u = points.values.new_zeros(*landmarks.shape[:3], v.shape[-1])
    keys = _Tokens("keys", q if k is None else k, points)
    queries = keys if k is None else _Tokens("queries", q, points)
    product = points.scratch.product
    for batch, key_chunks, query_chunks in _plan(q, keys.tokens, landmarks.shape[2]):
        for chunk in key_chunks:
            keys.collect(u, v, key_mask, batch, chunk)
        w = mix(u[batch], a[batch], inverse[batch], settings).flatten(0, 1)
        for chunk in reversed(query_chunks):  # the last chunk's kernel is still there
            product(x[batch, :, chunk], queries.kernel(batch, chunk), w)
    kept = sums_shape(v, landmarks)
    return x, inverse, u if kept == u.shape else u.new_empty(kept)


def inverse_shape(landmarks: Tensor, settings: AttentionSettings) -> tuple[int, ...]:
    """Of what :func:`forward` keeps of the inverse."""
    batch, heads, m, _ = landmarks.shape
    return batch, heads, m, m


def sums_shape(v: Tensor, landmarks: Tensor) -> tuple[int, ...]:
    """Of U as kept for the backward pass: empty where tokens are few, and U is not small beside them."""
    batch, heads, m, _ = landmarks.shape
    # Not by a comparison, which would fix a compiled program to one side of it.
    many = torch.sym_min(1, v.shape[2] // (FEW_TOKENS + 1))
    return batch, heads, m * many, v.shape[3]


def backward(
    grad: Tensor, inputs: Inputs, inverse: Tensor, u: Tensor, settings: AttentionSettings
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k (an empty tensor where k is None), v and landmarks.

    ``dW = R^T G`` and, unless it was kept, ``U = P V`` again; then ``dU = Y'^T dW`` and ``dY' = dW U^T``; a
    second pass gives the tokens' gradients.
    With ``E = R * (G W^T)`` for queries and ``E = P^T * (V dU^T)`` for keys, the exponential's part is
    ``dQ = scale (E L - rowsum(E) Q)`` and ``dL = scale (E^T Q - colsum(E) L)``.
    """
    q, k, v, landmarks, key_mask, landmark_mask = inputs
    points = _Landmarks(landmarks, landmark_mask, settings.scale)
    a = landmark_matrix(points.values, landmark_mask, settings.scale)
    kept = u.numel() > 0
    if not kept:
        u = points.values.new_zeros(*landmarks.shape[:3], v.shape[-1])
    grad_w = torch.zeros_like(u)
    grad_landmarks = torch.empty_like(points.values, memory_format=torch.contiguous_format)
    grad_q = token_tensor(q, q.shape[-1])
    grad_k = q.new_empty(0) if k is None else token_tensor(k, k.shape[-1])
    grad_v = token_tensor(v, v.shape[-1])
    keys = _Tokens("keys", q if k is None else k, points)
    queries = keys if k is None else _Tokens("queries", q, points)
    load, product = points.scratch.load, points.scratch.product
    for batch, key_chunks, query_chunks in _plan(q, keys.tokens, landmarks.shape[2]):
        for chunk in query_chunks:
            g = load("grad", grad[batch, :, chunk])
            grad_w[batch].flatten(0, 1).baddbmm_(queries.kernel(batch, chunk).mT, g)
            if k is None and not kept:  # the chunk's kernel is still there
                keys.collect(u, v, key_mask, batch, chunk)
        for chunk in () if k is None or kept else key_chunks:
            keys.collect(u, v, key_mask, batch, chunk)
        w, grad_u, through_inverse = mixing_backward(
            grad_w[batch],
            u[batch],
            a[batch],
            inverse[batch],
            points.values[batch],
            None if landmark_mask is None else landmark_mask[batch],
            settings,
        )
        w, grad_u = w.flatten(0, 1), grad_u.flatten(0, 1)
        grad_landmarks[batch] = through_inverse
        for chunk in reversed(query_chunks):
            g = load("grad", grad[batch, :, chunk])
            r = queries.kernel(batch, chunk)
            e = torch.bmm(g, w.mT, out=points.scratch("scores", r.shape))
            if k is None:  # queries are the keys: one kernel and one pass serve both roles
                p, values = r, load("values", v[batch, :, chunk])
                if key_mask is not None:
                    p, values = _masked(p, values, key_mask[batch, chunk])
                e.baddbmm_(values, grad_u.mT)
                product(grad_v[batch, :, chunk], p, grad_u)
            queries.through_exponential(e.mul_(r), grad_q[batch, :, chunk], grad_landmarks[batch])
        if k is None:
            continue
        for chunk in reversed(key_chunks):
            p, values = keys.kernel(batch, chunk), load("values", v[batch, :, chunk])
            if key_mask is not None:
                p, values = _masked(p, values, key_mask[batch, chunk])
                keys.forget(key_mask[batch, chunk])
            e = torch.bmm(values, grad_u.mT, out=points.scratch("scores", p.shape))
            product(grad_v[batch, :, chunk], p, grad_u)
            keys.through_exponential(e.mul_(p), grad_k[batch, :, chunk], grad_landmarks[batch])
    return grad_q, grad_k, grad_v, grad_landmarks.to(landmarks.dtype)


class _Scratch:
    """Named buffers of one dtype and device, grown when a larger one is asked for."""

    def __init__(self, like: Tensor):
        self.like = like
        self.buffers: dict[str, Tensor] = {}

    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor:
        size = 1
        for length in shape:
            size *= length
        buffer = self.buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self.buffers[name] = self.like.new_empty(size)
        return buffer[:size].view(shape)

    def load(self, name: str, tokens: Tensor) -> Tensor:
        """(batch, heads, chunk, d) of any dtype and strides as (batch * heads, chunk, d), rows contiguous."""
        one_stride = tokens.shape[0] == 1 or tokens.stride(0) == tokens.shape[1] * tokens.stride(1)
        if tokens.dtype == self.like.dtype and one_stride and tokens.stride(3) == 1:
            return tokens.flatten(0, 1)
        return self(name, tokens.shape).copy_(tokens).flatten(0, 1)

    def product(self, out: Tensor, left: Tensor, right: Tensor) -> None:
        """``left @ right`` of (batch * heads, ..., ...) into ``out`` (batch, heads, chunk, d)."""
        if out.shape[0] == 1 and out.dtype == left.dtype:
            for head in range(out.shape[1]):  # a matrix product may write rows that lie apart
                torch.mm(left[head], right[head], out=out[0, head])
            return
        rows = self("rows", (left.shape[0], left.shape[1], right.shape[2]))
        out.copy_(torch.bmm(left, right, out=rows).view(out.shape))


class _Landmarks:
    """Landmarks prepared once for all chunks: centred, and as one side of the exponent."""

    def __init__(self, landmarks: Tensor, mask: Tensor | None, scale: float):
        self.scale = scale
        self.values = landmarks.to(compute_dtype(landmarks.dtype))
        self.absent = None
        if mask is None:
            self.centre = self.values.mean(2, keepdim=True)
        else:
            self.absent = ~mask[:, None, None, :]
            self.values = torch.where(mask[:, None, :, None], self.values, 0)
            count = mask.sum(1).clamp(min=1)[:, None, None, None]
            self.centre = self.values.sum(2, keepdim=True) / count
        self.centred = self.values - self.centre
        norms = self.centred.square().sum(-1)
        self.factor = self.centred.mT * scale
        self.bias = norms[:, :, None, :] * (-0.5 * scale)
        self.count = landmarks.shape[2]
        looks = norms.device.type == "cpu" and norms.dtype == torch.float32 and norms.numel() > 0
        self.far = looks and scale * norms.max().item() > FAR
        self.scratch = _Scratch(self.values)

    def exponent_in_float64(self, points: Tensor, batch: slice) -> Tensor:
        """The exponent of centred tokens (batch * heads, chunk, d) in float64."""
        points, landmarks = points.double(), self.centred[batch].flatten(0, 1).double()
        norms = points.square().sum(-1, keepdim=True) + landmarks.square().sum(-1)[:, None, :]
        return self.scale * (torch.bmm(points, landmarks.mT) - 0.5 * norms)


class _Tokens:
    """Queries or keys, and their kernel with the landmarks, a chunk at a time."""

    def __init__(self, name: str, tokens: Tensor, landmarks: _Landmarks):
        self.name = name
        self.tokens = tokens
        self.landmarks = landmarks
        self.batch: slice | None = None
        self.chunk: slice | None = None
        self.points = self.values = tokens.new_empty(0)

    def kernel(self, batch: slice, chunk: slice) -> Tensor:
        """``kappa(tokens, landmarks)``, (batch * heads, chunk, m); valid until the next call."""
        marks = self.landmarks
        if (batch, chunk) == (self.batch, self.chunk):
            return self.values
        self.batch, self.chunk = batch, chunk
        tokens = self.tokens[batch, :, chunk]
        rows, heads, length, channels = tokens.shape
        points = marks.scratch(self.name, (rows, heads, length, channels))
        torch.sub(tokens, marks.centre[batch], out=points)
        self.points = points.flatten(0, 1)
        exponent = marks.scratch(self.name + " kernel", (rows * heads, length, marks.count))
        if marks.far:
            exponent.copy_(marks.exponent_in_float64(self.points, batch))
        else:
            bias, factor = marks.bias[batch].flatten(0, 1), marks.factor[batch].flatten(0, 1)
            torch.baddbmm(bias, self.points, factor, out=exponent)
            norms = torch.linalg.vector_norm(self.points, dim=-1, keepdim=True)
            exponent.sub_(norms.square_().mul_(0.5 * marks.scale))
        self.values = exponent.clamp_(max=0).exp_()
        if marks.absent is not None:
            self.values.view(rows, heads, length, -1).masked_fill_(marks.absent[batch], 0)
        return self.values

    def collect(
        self, u: Tensor, v: Tensor, mask: Tensor | None, batch: slice, chunk: slice
    ) -> None:
        """Add a chunk's part to ``U = P V``."""
        p = self.kernel(batch, chunk)
        values = self.landmarks.scratch.load("values", v[batch, :, chunk])
        if mask is not None:
            p, values = _masked(p, values, mask[batch, chunk])
        u[batch].flatten(0, 1).baddbmm_(p.mT, values)

    def forget(self, mask: Tensor) -> None:
        """Set the last chunk's masked tokens to 0, so that NaN there reaches no gradient."""
        self.points.masked_fill_(_absent(mask, self.points), 0)

    def through_exponential(self, e: Tensor, grad: Tensor, grad_landmarks: Tensor) -> None:
        """Write the last chunk's ``grad``; add the landmarks' part to ``grad_landmarks``."""
        marks = self.landmarks
        points, centred = self.points, marks.centred[self.batch].flatten(0, 1)
        rows = marks.scratch("rows", points.shape)
        if marks.far:  # what cancels in the exponent cancels here, too
            e, points, centred, rows = e.double(), points.double(), centred.double(), rows.double()
        into = torch.bmm(e.mT, points).addcmul_(e.sum(1)[..., None], centred, value=-1)
        grad_landmarks.add_(into.view(grad_landmarks.shape), alpha=marks.scale)
        torch.bmm(e, centred, out=rows)
        rows.addcmul_(e.sum(2, keepdim=True), points, value=-1).mul_(marks.scale)
        grad.copy_(rows.view(grad.shape))


def _masked(kernel: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Kernel rows and values of masked keys set to 0, whatever they were, NaN included."""
    absent = _absent(mask, kernel)
    return kernel.masked_fill(absent, 0), values.masked_fill(absent, 0)


def _absent(mask: Tensor, rows: Tensor) -> Tensor:
    """A mask (batch, chunk) turned round, for ``rows`` (batch * heads, chunk, ...)."""
    return ~mask.repeat_interleave(rows.shape[0] // mask.shape[0], 0)[..., None]


def _plan(q: Tensor, k: Tensor, landmarks: int) -> Iterator[tuple[slice, list[slice], list[slice]]]:
    """Slices of the batch, each with slices of the keys and of the queries."""
    batch, heads, queries = q.shape[:3]
    budget = CHUNK_ELEMENTS.get(q.device.type, CHUNK_ELEMENTS_ELSEWHERE)
    tokens = max(1, budget // (heads * landmarks))
    longest = min(tokens, max(queries, k.shape[2]))
    samples = max(1, tokens // longest)
    for rows in _slices(batch, samples):
        yield rows, _slices(k.shape[2], tokens), _slices(queries, tokens)


def _slices(length: int, step: int) -> list[slice]:
    return [slice(begin, min(begin + step, length)) for begin in range(0, length, step)]
