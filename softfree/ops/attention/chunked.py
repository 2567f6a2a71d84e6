"""The operator in plain PyTorch at a bounded memory: backend ``"torch"``.

Tokens are read in chunks whose kernel values stay in the processor's cache. Those of the first chunks are kept
for the second pass, the others computed again. Nothing of size n x m outlives a call: beside the result,
the forward pass keeps O(m^2 + m d) per head for the backward pass. Buffers are made once per call and
reused by every chunk, since on a CPU fresh memory costs more than the arithmetic done in it.

Kernel values of a chunk come from one matrix product. With ``c`` the mean landmark and ``x~ = sqrt(scale) (x - c)``,

    -scale ||q - l||^2 / 2 = q~ . l~ - ||q~||^2 / 2 - ||l~||^2 / 2 = (q~, ||q~||^2, 1) . (l~, -1/2, -||l~||^2 / 2),

where the shift by ``c`` keeps the terms as small as the distances themselves, so that their difference
stays accurate. The 1 also gives the backward pass its sums over tokens. The scale has a factor log2 e, since
powers of 2 are several times as fast as those of e on some processors.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from softfree.ops.attention.mixing import (
    LOG2_E,
    invert_landmarks,
    landmark_matrix,
    mix,
    mixing_backward,
)
from softfree.ops.attention.reference import squared_distance
from softfree.ops.attention.settings import AttentionSettings, Inputs
from softfree.ops.shared.precision import compute_dtype
from softfree.ops.shared.shapes import tiles_of, token_tensor

# Kernel values a chunk may hold. On a CPU they are meant to stay in cache; elsewhere launches should be
# few.
CHUNK_ELEMENTS = {"cpu": 2**19}
CHUNK_ELEMENTS_ELSEWHERE = 2**25
# Chunks whose kernels are kept for the second pass; elsewhere the last alone. More memory than this the allocator
# returns to the system after each call, and new pages cost as much as computing again.
KEPT_CHUNKS = {"cpu": 3}
# Beyond this scale * ||l - c||^2 the float32 terms of the exponent cancel too many digits, and the product
# is taken in float64; where that would cancel as many, differences are. On a CPU only: elsewhere looking
# would wait for the device.
FAR = 32.0
APART = FAR * 2**29
FEW_TOKENS = 1024  # up to so many, U is computed again for the backward pass instead of kept


def forward(inputs: Inputs, settings: AttentionSettings) -> tuple[Tensor, Tensor, Tensor]:
    """Result (batch, heads, n_q, d_v), inverse (batch, heads, m, m), ``U = P V`` in :func:`sums_shape`."""
    q, k, v, landmarks, key_mask, landmark_mask = inputs
    points = _Landmarks(landmarks, landmark_mask, settings.scale)
    a, inverse = invert_landmarks(points.values, landmark_mask, settings)
    x = token_tensor(q, v.shape[-1])
    u = points.values.new_empty(*landmarks.shape[:3], v.shape[-1])
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
        u = points.values.new_empty(*landmarks.shape[:3], v.shape[-1])
    grad_w = torch.empty_like(u)
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
            _add_product(grad_w[batch], queries.kernel(batch, chunk).mT, g, chunk)
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
            points_of = queries.points(batch, chunk)
            points.through_exponential(
                e.mul_(r), points_of, batch, grad_q[batch, :, chunk], grad_landmarks[batch]
            )
        if k is None:
            continue
        for chunk in reversed(key_chunks):
            p, values = keys.kernel(batch, chunk), load("values", v[batch, :, chunk])
            points_of = keys.points(batch, chunk)
            if key_mask is not None:  # NaN at a masked key must reach no gradient
                p, values = _masked(p, values, key_mask[batch, chunk])
                points_of.masked_fill_(_absent(key_mask[batch, chunk], points_of), 0)
            e = torch.bmm(values, grad_u.mT, out=points.scratch("scores", p.shape))
            product(grad_v[batch, :, chunk], p, grad_u)
            points.through_exponential(
                e.mul_(p), points_of, batch, grad_k[batch, :, chunk], grad_landmarks[batch]
            )
    return grad_q, grad_k, grad_v, grad_landmarks.to(landmarks.dtype)


class _Scratch:
    """Named buffers of one dtype and device, grown when a larger one is asked for."""

    def __init__(self, like: Tensor):
        self.like = like
        self.buffers: dict[str, Tensor] = {}

    def __call__(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> Tensor:
        size = math.prod(shape)
        buffer = self.buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self.buffers[name] = self.like.new_empty(size, dtype=dtype)
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
        self.root = math.sqrt(scale * LOG2_E)
        self.heads, self.count = landmarks.shape[1:3]
        self.values = landmarks.to(compute_dtype(landmarks.dtype))
        self.absent = None
        if mask is None:
            self.centre = self.values.mean(2, keepdim=True)
        else:
            self.absent = ~mask[:, None, None, :]
            self.values = torch.where(mask[:, None, :, None], self.values, 0)
            count = mask.sum(1).clamp(min=1)[:, None, None, None]
            self.centre = self.values.sum(2, keepdim=True) / count
        self.scratch = _Scratch(self.values)
        self.on_cpu = self.values.device.type == "cpu"
        self.far = self.apart = False
        norms = self._prepare(self.values - self.centre)
        if self.on_cpu and norms.numel() > 0:
            farthest = norms.max().item() / LOG2_E
            self.far = farthest > FAR and norms.dtype == torch.float32
            self.apart = farthest > APART
        if self.far:
            self.centre = self.centre.double()
            self._prepare(self.values - self.centre)

    def _prepare(self, centred: Tensor) -> Tensor:
        """Keep centred landmarks (batch, heads, m, d), scaled, as a side of the exponent; return their squared norms."""
        scaled = centred.flatten(0, 1).mul_(self.root)
        norms = scaled.square().sum(-1, keepdim=True)
        ends = (torch.full_like(norms, -0.5), norms * -0.5)
        self.side = torch.cat([scaled, *ends], -1)  # (batch * heads, m, d + 2)
        return norms

    def rows(self, batch: slice) -> slice:
        """Of batch * heads."""
        return slice(batch.start * self.heads, batch.stop * self.heads)

    def through_exponential(
        self, e: Tensor, points: Tensor, batch: slice, grad: Tensor, grad_landmarks: Tensor
    ) -> None:
        """Write the ``grad`` of a chunk; add the landmarks' part to ``grad_landmarks``.

        ``points`` (rows, chunk, d + 2) end in a 1, so that a product with them sums E as well; so do the landmarks here.
        """
        factor, channels = self.root / LOG2_E, grad.shape[-1]
        scaled = self.side[self.rows(batch), :, :channels]
        e = e.to(scaled.dtype)  # what cancels in the exponent cancels here, too
        into = torch.bmm(e.mT, points)
        into = into[..., :channels].addcmul_(into[..., -1:], scaled, value=-1)
        grad_landmarks.add_(into.view(grad_landmarks.shape), alpha=factor)
        summing = torch.nn.functional.pad(scaled * factor, (0, 1), value=factor)
        rows = torch.bmm(e, summing).view(*grad.shape[:3], -1)
        points = points.view(*grad.shape[:3], -1)[..., :channels]
        torch.addcmul(rows[..., :channels], rows[..., -1:], points, value=-1, out=grad)


class _Tokens:
    """Queries or keys, and their kernel with the landmarks, a chunk at a time."""

    def __init__(self, name: str, tokens: Tensor, landmarks: _Landmarks):
        self.name = name
        self.tokens = tokens
        self.landmarks = landmarks
        self.kept = KEPT_CHUNKS.get(tokens.device.type, 1)
        self.batch: slice | None = None
        self.kernels: list[tuple[slice, Tensor]] = []

    def points(self, batch: slice, chunk: slice) -> Tensor:
        """Centred and scaled tokens, their squared norm and 1: (batch * heads, chunk, d + 2)."""
        marks = self.landmarks
        tokens = self.tokens[batch, :, chunk]
        rows, heads, length, channels = tokens.shape
        points = marks.scratch(self.name, (rows, heads, length, channels + 2), marks.side.dtype)
        scaled, norms = points[..., :channels], points[..., channels]
        torch.sub(tokens, marks.centre[batch], out=scaled).mul_(marks.root)
        torch.linalg.vector_norm(scaled, dim=-1, out=norms).square_()
        points[..., -1] = 1
        return points.flatten(0, 1)

    def kernel(self, batch: slice, chunk: slice) -> Tensor:
        """``kappa(tokens, landmarks)``, (batch * heads, chunk, m); valid until others are computed."""
        if batch != self.batch:
            self.batch, self.kernels = batch, []
        for known, values in self.kernels:
            if known == chunk:
                return values
        del self.kernels[self.kept - 1 :]
        values = self._kernel(batch, chunk, f"{self.name} {len(self.kernels)}")
        self.kernels.append((chunk, values))
        return values

    def _kernel(self, batch: slice, chunk: slice, name: str) -> Tensor:
        marks = self.landmarks
        tokens = self.tokens[batch, :, chunk]
        rows, heads, length, _ = tokens.shape
        exponent = marks.scratch(name, (rows * heads, length, marks.count))
        if marks.apart:
            points = tokens.to(exponent.dtype).flatten(0, 1)
            distance = squared_distance(points, marks.values[batch].flatten(0, 1))
            torch.mul(distance, -0.5 * marks.root**2, out=exponent)
        else:
            side = marks.side[marks.rows(batch)].mT
            if marks.far:
                exponent.copy_(torch.bmm(self.points(batch, chunk), side))
            else:
                torch.bmm(self.points(batch, chunk), side, out=exponent)
        if not marks.on_cpu:
            exponent.clamp_(max=0)  # nobody has looked whether terms are small enough
        values = exponent.exp2_()
        if marks.absent is not None:
            values.view(rows, heads, length, -1).masked_fill_(marks.absent[batch], 0)
        return values

    def collect(
        self, u: Tensor, v: Tensor, mask: Tensor | None, batch: slice, chunk: slice
    ) -> None:
        """Add a chunk's part to ``U = P V``."""
        p = self.kernel(batch, chunk)
        values = self.landmarks.scratch.load("values", v[batch, :, chunk])
        if mask is not None:
            p, values = _masked(p, values, mask[batch, chunk])
        _add_product(u[batch], p.mT, values, chunk)


def _add_product(total: Tensor, left: Tensor, right: Tensor, chunk: slice) -> None:
    """Add a chunk's product to (batch, heads, m, d), which may hold anything before the first."""
    total.flatten(0, 1).baddbmm_(left, right, beta=int(chunk.start > 0))


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


def _slices(length: int, most: int) -> list[slice]:
    """Of nearly the same length, at most ``most``."""
    step = tiles_of(length, max(1, tiles_of(length, most)))
    return [slice(begin, min(begin + step, length)) for begin in range(0, length, step or 1)]
