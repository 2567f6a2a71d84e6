"""The operator in plain PyTorch in bounded memory: backend ``"torch"``, for any device and dtype.

Tokens are read in chunks whose kernel values stay in the processor's cache. A few chunks' values are kept for
the second pass; the others are computed again. Nothing of size n x m outlives a call: besides the result, the
forward pass keeps O(m^2 + m d) per head for the backward pass. Buffers are allocated once per call and reused
by every chunk, because on a CPU fresh memory costs more than the arithmetic done in it. A call with few
tokens makes few PyTorch calls, because each of them costs as much as thousands of multiplications.

The kernel values of a chunk come from one matrix product. With ``c`` the mean landmark and ``x~ = x - c``,

    -||q - l||^2 / 2 = q~ . l~ - ||q~||^2 / 2 - ||l~||^2 / 2 = (q~, ||q~||^2, 1) . (l~, -1/2, -||l~||^2 / 2),

where the shift by ``c`` keeps the terms as small as the distances themselves, so that their difference
stays accurate. The 1 also gives the backward pass its sums over tokens. The scale includes a factor log2 e,
because powers of 2 are several times faster than powers of e on some processors.

Internally batch and heads are one dimension: (batch * heads, ...). On a CPU the m x m part is computed in
float64, which costs little there.
"""

import functools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from softfree.ops.attention.mixing import LOG2_E, invert_landmarks, mix, mixing_backward
from softfree.ops.attention.reference import among_present, squared_distance
from softfree.ops.attention.settings import AttentionSettings, Inputs
from softfree.ops.shared.precision import compute_dtype
from softfree.ops.shared.registration import LEFT_OUT
from softfree.ops.shared.shapes import tiles_of, token_tensor

# Kernel values per chunk. On a CPU they should stay in the cache; elsewhere launches should be few.
CHUNK_ELEMENTS = {"cpu": 2**19}
CHUNK_ELEMENTS_ELSEWHERE = 2**25
# Chunks whose kernels are kept for the second pass; on other devices only the last one is. With more than
# this, the allocator would return the memory to the system after each call, and new pages cost as much as
# computing again.
KEPT_CHUNKS = {"cpu": 3}
# If scale * ||l - c||^2 exceeds FAR, the terms of the exponent cancel too many digits of the inputs' dtype.
# The product of float32 is then computed in float64. For float64, and beyond APART, where float64 cancels
# digits that the gradient of a solve needs, differences are used instead. On a CPU only: elsewhere the check
# would have to wait for the device.
FAR = 32.0
APART = FAR * 2**20
PRODUCT, WIDE_PRODUCT, DIFFERENCES = range(3)
# Tokens farther from the centre are taken for as far: their kernel is 0 at either distance, and the product
# of larger ones would overflow.
FARTHEST = {torch.float32: 1e17, torch.float64: 1e150}
FEW_TOKENS = 1024  # up to this many, U is computed again for the backward pass instead of kept


def forward(
    inputs: Inputs, settings: AttentionSettings, keep: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Result (batch, heads, n_q, d_v), inverse (batch, heads, m, m), and ``U = P V`` in :func:`sums_shape`.

    Without ``keep`` the last two are left out.
    """
    points = _Landmarks(inputs, settings.scale)
    results = _forward(points, inputs, settings, keep)
    for others in points.others:
        replace(others, results, forward(samples(others, inputs), settings, keep))
    return results


def _forward(
    points: "_Landmarks", inputs: Inputs, settings: AttentionSettings, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, _, key_mask, _ = inputs
    a = points.matrix()
    inverse = invert_landmarks(a, settings.inverse, points.dtype)
    x = token_tensor(q, v.shape[-1])
    u = points.empty(v.shape[-1])
    keys = _Tokens("keys", q if k is None else k, points)
    queries = keys if k is None else _Tokens("queries", q, points)
    for batch, key_chunks, query_chunks in _plan(q, keys.tokens, points.count):
        rows = points.rows(batch)
        sums = _of(u, rows)
        for chunk in key_chunks:
            keys.collect(sums, v, key_mask, batch, chunk)
        w = mix(sums, _of(a, rows), _of(inverse, rows), settings).to(points.dtype)
        for chunk in reversed(query_chunks):  # the last chunk's kernel is still available
            points.product(_of(x, batch, chunk), queries.kernel(batch, chunk), w)
    if not keep:
        return x, LEFT_OUT, LEFT_OUT
    return x, *to_keep(inverse, u, inputs, settings)


def to_keep(
    inverse: Tensor, u: Tensor, inputs: Inputs, settings: AttentionSettings
) -> tuple[Tensor, Tensor]:
    """The inverse and U for the backward pass."""
    # LAPACK returns column-major matrices; operators promise row-major ones.
    rows = torch.empty(inverse.shape, dtype=u.dtype, device=u.device).copy_(inverse)
    shape = sums_shape(inputs.v, inputs.landmarks)
    u = u.contiguous().view(shape) if math.prod(shape) == u.numel() else u.new_empty(shape)
    return rows.view(inverse_shape(inputs.landmarks, settings)), u


def inverse_shape(landmarks: Tensor, settings: AttentionSettings) -> tuple[int, ...]:
    """The shape of the inverse that :func:`forward` keeps."""
    batch, heads, m, _ = landmarks.shape
    return batch, heads, m, m


def sums_shape(v: Tensor, landmarks: Tensor) -> tuple[int, ...]:
    """The shape of U as kept for the backward pass: empty for few tokens, next to which U is not small."""
    batch, heads, m, _ = landmarks.shape
    # Not a comparison: that would specialize a compiled program to its outcome.
    many = torch.sym_min(1, v.shape[2] // (FEW_TOKENS + 1))
    return batch, heads, m * many, v.shape[3]


def backward(
    grad: Tensor, inputs: Inputs, inverse: Tensor, u: Tensor, settings: AttentionSettings
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k (left out if k is None), v and landmarks.

    The first pass computes ``dW = R^T G`` and, unless it was kept, ``U = P V`` again. Then ``dU = Y'^T dW``
    and ``dY' = dW U^T``. A second pass computes the tokens' gradients. With ``E = R * (G W^T)`` for queries
    and ``E = P^T * (V dU^T)`` for keys, the exponential contributes ``dQ = scale (E L - rowsum(E) Q)`` and
    ``dL = scale (E^T Q - colsum(E) L)``.
    """
    points = _Landmarks(inputs, settings.scale)
    grads = _backward(points, grad, inputs, inverse, u, settings)
    for others in points.others:
        of_others = grad[others], samples(others, inputs), inverse[others], u[others]
        replace(others, grads, backward(*of_others, settings))
    return grads


def _backward(
    points: "_Landmarks",
    grad: Tensor,
    inputs: Inputs,
    inverse: Tensor,
    u: Tensor,
    settings: AttentionSettings,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v, landmarks, key_mask, _ = inputs
    a, inverse = points.matrix(), inverse.flatten(0, 1).to(points.wide)
    kept = u.numel() > 0
    u = u.flatten(0, 1) if kept else points.empty(v.shape[-1])
    grad_w = points.empty(v.shape[-1])
    grad_landmarks = torch.empty_like(points.centred)
    grad_q = token_tensor(q, q.shape[-1])
    grad_k = LEFT_OUT if k is None else token_tensor(k, k.shape[-1])
    grad_v = token_tensor(v, v.shape[-1])
    keys = _Tokens("keys", q if k is None else k, points)
    queries = keys if k is None else _Tokens("queries", q, points)
    load, product = points.load, points.product
    for batch, key_chunks, query_chunks in _plan(q, keys.tokens, points.count):
        rows = points.rows(batch)
        sums, grad_sums = _of(u, rows), _of(grad_w, rows)
        for chunk in query_chunks:
            g = load("grad", _of(grad, batch, chunk))
            _add_product(grad_sums, queries.kernel(batch, chunk).mT, g, chunk)
            if k is None and not kept:  # the chunk's kernel is still available
                keys.collect(sums, v, key_mask, batch, chunk)
        for chunk in () if k is None or kept else key_chunks:
            keys.collect(sums, v, key_mask, batch, chunk)
        of_landmarks = _of(grad_landmarks, rows)
        w, grad_u, through_inverse = mixing_backward(
            grad_sums,
            sums,
            _of(a, rows),
            _of(inverse, rows),
            _of(points.centred, rows),
            None if points.mask is None else points.mask[rows],
            settings,
        )
        of_landmarks.copy_(through_inverse)
        w, grad_u = w.to(points.dtype), grad_u.to(points.dtype)
        for chunk in reversed(query_chunks):
            g = load("grad", _of(grad, batch, chunk))
            r = queries.kernel(batch, chunk)
            e = torch.bmm(g, w.mT, out=points.buffer("scores", r.shape))
            if k is None:  # queries are the keys: one kernel and one pass serve both roles
                p, values = r, load("values", _of(v, batch, chunk))
                if key_mask is not None:
                    p, values = _masked(p, values, key_mask[batch, chunk])
                e.baddbmm_(values, grad_u.mT)
                product(_of(grad_v, batch, chunk), p, grad_u)
            points_of = queries.points(batch, chunk)
            points.through_exponential(
                e.mul_(r), points_of, rows, _of(grad_q, batch, chunk), of_landmarks
            )
        if k is None:
            continue
        for chunk in reversed(key_chunks):
            p, values = keys.kernel(batch, chunk), load("values", _of(v, batch, chunk))
            points_of = keys.points(batch, chunk)
            if key_mask is not None:  # NaN at a masked key must not reach any gradient
                p, values = _masked(p, values, key_mask[batch, chunk])
                points_of.masked_fill_(_absent(key_mask[batch, chunk], points_of), 0)
            e = torch.bmm(values, grad_u.mT, out=points.buffer("scores", p.shape))
            product(_of(grad_v, batch, chunk), p, grad_u)
            points.through_exponential(
                e.mul_(p), points_of, rows, _of(grad_k, batch, chunk), of_landmarks
            )
    return grad_q, grad_k, grad_v, grad_landmarks.to(landmarks.dtype).view(landmarks.shape)


def samples(chosen: Tensor, inputs: Inputs) -> Inputs:
    """The samples of a batch that a mask chooses."""
    return Inputs._make(None if each is None else each[chosen] for each in inputs)


def replace(chosen: Tensor, results: tuple[Tensor, ...], better: tuple[Tensor, ...]) -> None:
    """Put what was computed of the samples that a mask chooses in the place of theirs."""
    for result, of_chosen in zip(results, better, strict=True):
        if result is not LEFT_OUT:
            result[chosen] = of_chosen


class _Landmarks:
    """Landmarks prepared once for all chunks: centred, as one side of the exponent. Also the shared buffers.

    dtype: dtype of tensors as large as the tokens.
    wide: dtype of the m x m part.
    values: (batch * heads, m, d), wide; 0 where masked.
    centred: ``values`` minus the centre.
    side: (batch * heads, m, d + 2), the factor that tokens are multiplied by.
    others: masks (batch,) of samples whose exponents must be computed in another way than these are; nearly
        always none.
    """

    def __init__(self, inputs: Inputs, scale: float):
        landmarks, mask = inputs.landmarks, inputs.landmark_mask
        self.heads, self.count = landmarks.shape[1:3]
        self.scale = scale
        self.dtype = compute_dtype(landmarks.dtype)
        self.device = landmarks.device
        self.on_cpu = self.device.type == "cpu"
        self.wide = torch.float64 if self.on_cpu else self.dtype
        self.buffers: dict[str, Tensor] = {}
        values, self.mask = landmarks.flatten(0, 1).to(self.wide), None
        if mask is None:
            centre = values.mean(1, keepdim=True)
        else:
            self.mask = mask.repeat_interleave(self.heads, 0)
            values = torch.where(self.mask[..., None], values, 0)
            count = self.mask.sum(1)[:, None, None].clamp(min=1)
            centre = values.sum(1, keepdim=True) / count
        centre = centre.to(self.dtype).to(self.wide)  # tokens and landmarks must lose the same
        self.values, self.centred = values, values - centre
        if self.mask is not None:  # else the origin would count as a landmark far from the others
            self.centred.masked_fill_(~self.mask[..., None], 0)
        norms = torch.linalg.vector_norm(self.centred, dim=-1).square_()
        way, self.others = self._way(norms, len(landmarks)) if self.on_cpu else (PRODUCT, [])
        self.apart = way == DIFFERENCES
        kind = self.dtype if way == PRODUCT else self.wide
        self.centre = centre.to(kind).view(len(landmarks), self.heads, 1, centre.shape[2])
        self.wide_side = torch.nn.functional.pad(self.centred, (0, 2), value=-0.5)
        self.wide_side[..., -1].mul_(norms)
        self.wide_side.mul_(scale * LOG2_E)
        self.side = self.wide_side.to(kind)
        self.norms = norms

    def _way(self, norms: Tensor, batch: int) -> tuple[int, list[Tensor]]:
        """How to compute exponents, and masks (batch,) of the samples that need another way."""
        if norms.numel() == 0 or self.scale * norms.max().item() <= FAR:
            return PRODUCT, []
        # What is NaN must not decide for the other heads and samples.
        farthest = self.scale * norms.nan_to_num(0, math.inf).view(batch, -1).amax(1)
        apart = FAR if self.dtype == self.wide else APART
        ways = (farthest > FAR).int() + (farthest > apart).int()
        first, *others = ways.unique().tolist()
        return first, [ways == other for other in others]

    def matrix(self) -> Tensor:
        """``A = kappa(L, L)``, (batch * heads, m, m), wide."""
        if self.on_cpu and not self.apart:
            points = torch.nn.functional.pad(self.centred, (0, 2), value=1.0)
            points[..., -2].copy_(self.norms)
            a = torch.bmm(points, self.wide_side.mT)
        else:
            a = squared_distance(self.values, self.values).mul_(-0.5 * self.scale * LOG2_E)
        a.exp2_()
        return a if self.mask is None else among_present(a, self.mask)

    @functools.cached_property
    def summing(self) -> Tensor:
        """``scale (l~, 1)``, (batch * heads, m, d + 1). The 1 makes products with it include the row sums."""
        ends = torch.nn.functional.pad(self.centred, (0, 1), value=1.0)
        return ends.mul_(self.scale).to(self.side.dtype)

    def empty(self, channels: int) -> Tensor:
        """An empty tensor for U or dW."""
        shape = self.centred.shape[0], self.count, channels
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """Memory shared by all requests for this name; it grows when more is requested."""
        buffer = self.buffers.get(name)
        if buffer is not None and buffer.shape == shape:
            return buffer
        size = math.prod(shape)
        if buffer is not None and buffer.numel() > size:
            return buffer.view(-1)[:size].view(shape)
        buffer = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        self.buffers[name] = buffer
        return buffer

    def load(self, name: str, tokens: Tensor) -> Tensor:
        """(batch, heads, chunk, d) of any dtype and strides as (batch * heads, chunk, d), rows contiguous."""
        batch, heads, length, channels = tokens.shape
        by_batch, by_head, by_token, by_channel = tokens.stride()
        if (
            tokens.dtype == self.dtype
            and (batch == 1 or by_batch == heads * by_head)
            and by_channel == 1
        ):
            return tokens.as_strided(
                (batch * heads, length, channels), (by_head, by_token, by_channel)
            )
        return self.buffer(name, tokens.shape).copy_(tokens).flatten(0, 1)

    def product(self, out: Tensor, left: Tensor, right: Tensor) -> None:
        """``left @ right`` of (batch * heads, ..., ...) into ``out`` (batch, heads, chunk, d)."""
        if out.shape[0] == 1 and out.dtype == left.dtype:  # products can write separate rows
            torch.bmm(left, right, out=out[0])
            return
        rows = self.buffer("rows", (left.shape[0], left.shape[1], right.shape[2]))
        out.copy_(torch.bmm(left, right, out=rows).view(out.shape))

    def rows(self, batch: slice) -> slice:
        """The rows of (batch * heads, ...) that belong to a slice of the batch."""
        return slice(batch.start * self.heads, batch.stop * self.heads)

    def through_exponential(
        self, e: Tensor, points: Tensor, rows: slice, grad: Tensor, grad_landmarks: Tensor
    ) -> None:
        """Write the ``grad`` of a chunk; add the landmarks' part to ``grad_landmarks``.

        ``points`` (rows, chunk, d + 2) end in a 1, so that a product with them also sums E. So do the
        landmarks here.
        """
        channels = grad.shape[-1]
        summing = _of(self.summing, rows)
        e = e.to(summing.dtype)  # terms that cancel in the exponent cancel here, too
        into = torch.bmm(e.mT, points)
        part = into[..., -1:] * _of(self.centred, rows)
        part.sub_(into[..., :channels])
        grad_landmarks.add_(part, alpha=-self.scale)
        found = torch.bmm(e, summing).view(*grad.shape[:3], channels + 1)
        points = points.view(*grad.shape[:3], channels + 2)[..., :channels]
        torch.addcmul(found[..., :channels], found[..., -1:], points, value=-1, out=grad)


class _Tokens:
    """Queries or keys, and their kernel with the landmarks, a chunk at a time."""

    def __init__(self, name: str, tokens: Tensor, landmarks: _Landmarks):
        self.name = name
        self.tokens = tokens
        self.landmarks = landmarks
        self.kept = KEPT_CHUNKS.get(tokens.device.type, 1)
        self.batch: slice | None = None
        self.kernels: list[tuple[slice, Tensor]] = []
        self.last: tuple[slice, slice, Tensor] | None = None

    def points(self, batch: slice, chunk: slice) -> Tensor:
        """Centred tokens, their squared norm and 1: (batch * heads, chunk, d + 2).

        Valid until the next call.
        """
        if self.last is not None and self.last[:2] == (batch, chunk):
            return self.last[2]
        marks = self.landmarks
        tokens = _of(self.tokens, batch, chunk)
        rows, heads, length, channels = tokens.shape
        points = marks.buffer(self.name, (rows, heads, length, channels + 2), marks.side.dtype)
        centred, norms = points[..., :channels], points[..., channels]
        torch.sub(tokens, _of(marks.centre, batch), out=centred)
        centred.clamp_(-FARTHEST[points.dtype], FARTHEST[points.dtype])
        torch.linalg.vector_norm(centred, dim=-1, out=norms).square_()
        points[..., -1].fill_(1)
        self.last = batch, chunk, points.flatten(0, 1)
        return self.last[2]

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
        tokens = _of(self.tokens, batch, chunk)
        rows, heads, length, _ = tokens.shape
        of_batch = marks.rows(batch)
        exponent = marks.buffer(name, (rows * heads, length, marks.count))
        if marks.apart:
            points = tokens.to(marks.wide).flatten(0, 1)
            distance = squared_distance(points, _of(marks.values, of_batch))
            torch.mul(distance, -0.5 * marks.scale * LOG2_E, out=exponent)
        else:
            side = _of(marks.side, of_batch).mT
            if marks.side.dtype == exponent.dtype:
                torch.bmm(self.points(batch, chunk), side, out=exponent)
            else:
                exponent.copy_(torch.bmm(self.points(batch, chunk), side))
        if not marks.on_cpu:
            exponent.clamp_(max=0)  # there is no check here that the terms are small enough
        values = exponent.exp2_()
        if marks.mask is not None:
            values.masked_fill_(~_of(marks.mask, of_batch)[:, None, :], 0)
        return values

    def collect(
        self, u: Tensor, v: Tensor, mask: Tensor | None, batch: slice, chunk: slice
    ) -> None:
        """Add a chunk's part to ``U = P V``."""
        p = self.kernel(batch, chunk)
        values = self.landmarks.load("values", _of(v, batch, chunk))
        if mask is not None:
            p, values = _masked(p, values, mask[batch, chunk])
        _add_product(u, p.mT, values, chunk)


def _of(tensor: Tensor, first: slice, chunk: slice | None = None) -> Tensor:
    """A slice of the first dimension and, for tokens (batch, heads, n, d), of the third."""
    if first.stop - first.start < tensor.shape[0]:
        tensor = tensor[first]
    if chunk is not None and chunk.stop - chunk.start < tensor.shape[2]:
        tensor = tensor[:, :, chunk]
    return tensor


def _add_product(total: Tensor, left: Tensor, right: Tensor, chunk: slice) -> None:
    """Add a chunk's product to ``total`` (batch * heads, m, d), which the first chunk overwrites."""
    if chunk.start > 0:
        total.baddbmm_(left, right)
    else:
        torch.bmm(left, right, out=total)


def _masked(kernel: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Kernel rows and values with those of masked keys set to 0, even if they were NaN."""
    absent = _absent(mask, kernel)
    return kernel.masked_fill(absent, 0), values.masked_fill(absent, 0)


def _absent(mask: Tensor, rows: Tensor) -> Tensor:
    """A mask (batch, chunk) inverted and expanded for ``rows`` (batch * heads, chunk, ...)."""
    return ~mask.repeat_interleave(rows.shape[0] // mask.shape[0], 0)[..., None]


def _plan(q: Tensor, k: Tensor, landmarks: int) -> Iterator[tuple[slice, list[slice], list[slice]]]:
    """Slices of the batch, each with slices of the keys and of the queries."""
    batch, heads, queries = q.shape[:3]
    budget = CHUNK_ELEMENTS.get(q.device.type, CHUNK_ELEMENTS_ELSEWHERE)
    tokens = max(1, budget // max(1, heads * landmarks))
    longest = min(tokens, max(queries, k.shape[2]))
    for rows in _slices(batch, max(1, tokens // longest)):
        yield rows, _slices(k.shape[2], tokens), _slices(queries, tokens)


def _slices(length: int, most: int) -> list[slice]:
    """Slices of nearly equal length, at most ``most``, that cover ``length``."""
    step = tiles_of(length, max(1, tiles_of(length, most)))
    return [slice(begin, min(begin + step, length)) for begin in range(0, length, step or 1)]
