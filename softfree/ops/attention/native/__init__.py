"""The operator in C: backend ``"native"``, for CPUs with a C compiler.

In plain PyTorch, one call of the operator makes about forty PyTorch calls. Each costs as much as thousands of
multiplications, and kernel values leave the cache in between. ``attention.c`` finishes all work on a tile of
tokens before it starts the next. Newton's iteration and its gradient, solves of many landmarks, and inputs
whose scales need care, are left to PyTorch, as in the backend ``"torch"``. Both backends keep the same tensors
for the backward pass.
"""

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from softfree.ops.attention import chunked
from softfree.ops.attention.chunked import FAR, inverse_shape
from softfree.ops.attention.mixing import invert_landmarks, mix, mixing_backward
from softfree.ops.attention.settings import AttentionSettings, Inputs
from softfree.ops.shared import compiled_c
from softfree.ops.shared.devices import remembered
from softfree.ops.shared.registration import LEFT_OUT
from softfree.ops.shared.shapes import tiles_of, token_tensor

__all__ = ["available", "backward", "forward", "inverse_shape", "obstacle"]

SOURCE = Path(__file__).with_name("attention.c")
TILE, PAD = 64, 16  # as in attention.c
KEPT_ELEMENTS = 2**19  # up to this many kernel values are kept from one pass to the next
# Beyond these sizes PyTorch's products are faster, which work on blocks of a matrix.
SOLVED_LANDMARKS = 256
GRADIENT_ELEMENTS = 12_800  # landmarks times channels

SIZE, ADDRESS = ctypes.c_int64, ctypes.c_void_p


class _Tokens(ctypes.Structure):
    _fields_ = [("data", ADDRESS), ("by_batch", SIZE), ("by_head", SIZE), ("by_token", SIZE)]


class _Points(ctypes.Structure):
    _fields_ = [
        *[(name, SIZE) for name in ("batch", "heads", "count", "channels", "landmarks", "threads")],
        ("tokens", _Tokens),
        *[(name, ADDRESS) for name in ("centre", "side", "kernels")],
        ("known", SIZE),
    ]


POINTS, TOKENS = ctypes.POINTER(_Points), ctypes.POINTER(_Tokens)
ARGUMENTS = {
    "spans": (SIZE,),
    "collect": (POINTS, ADDRESS, TOKENS, SIZE, ADDRESS, ADDRESS),
    "spread": (POINTS, ADDRESS, SIZE, TOKENS),
    "backward": (
        POINTS, ADDRESS, ctypes.c_float, ADDRESS, TOKENS, ADDRESS, TOKENS, ADDRESS, SIZE, TOKENS, TOKENS,
        ADDRESS, ADDRESS,
    ),
    "prepare": (TOKENS, ADDRESS, *[SIZE] * 4, ctypes.c_double, *[ADDRESS] * 5, SIZE),
    "solve_backward": (
        *[ADDRESS] * 3, *[SIZE] * 3, ctypes.c_double, ctypes.c_double, SIZE, SIZE, ADDRESS, ADDRESS, SIZE,
        ADDRESS, ADDRESS, ADDRESS, SIZE,
    ),
    "solve": (ADDRESS, SIZE, SIZE, ctypes.c_double, SIZE, SIZE, ADDRESS, SIZE, ADDRESS, ADDRESS, SIZE),
}  # fmt: skip


@functools.cache
def _functions() -> dict | None:
    library = compiled_c.load(SOURCE)
    if library is None:
        return None
    functions = {name: getattr(library, f"softfree_{name}") for name in ARGUMENTS}
    for name, function in functions.items():
        function.argtypes = ARGUMENTS[name]
    functions["spans"].restype = SIZE
    return functions


@remembered
def available() -> bool:
    """Whether the C code can be compiled here. The first call compiles it."""
    return _functions() is not None


def obstacle(q: Tensor) -> str | None:
    """Why this backend can't take queries; None if it can."""
    if q.device.type != "cpu":
        return f"it computes on a CPU, got {q.device}"
    if q.dtype == torch.float64:
        return "it computes in float32, got torch.float64"
    if available():
        return None
    if compiled_c.is_off():
        return "SOFTFREE_NATIVE=0 turns it off"
    return "there is no C compiler (cc, or the one in CC), or it failed"


def forward(
    inputs: Inputs, settings: AttentionSettings, keep: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`softfree.ops.attention.chunked.forward`."""
    points = _Landmarks(inputs, settings.scale)
    if points.far is not None and points.far.all():
        return chunked.forward(inputs, settings, keep)
    queries, keys = _passes(points, inputs)
    u = keys.collect(inputs.v, inputs.key_mask)
    if settings.inverse.method == "solve" and u.shape[1] <= SOLVED_LANDMARKS:
        inverse, w = points.solve(u, settings, keep)
    else:
        inverse = invert_landmarks(points.matrix, settings.inverse, torch.float32)
        w = mix(u, points.matrix, inverse, settings)
    x = queries.spread(w).to(inputs.q.dtype)
    kept = chunked.to_keep(inverse, u, inputs, settings) if keep else (LEFT_OUT, LEFT_OUT)
    if points.far is not None:
        careful = chunked.forward(chunked.samples(points.far, inputs), settings, keep)
        chunked.replace(points.far, (x, *kept), careful)
    return x, *kept


def backward(
    grad: Tensor, inputs: Inputs, inverse: Tensor, u: Tensor, settings: AttentionSettings
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As :func:`softfree.ops.attention.chunked.backward`."""
    points = _Landmarks(inputs, settings.scale)
    if points.far is not None and points.far.all():
        return chunked.backward(grad, inputs, inverse, u, settings)
    q, k, v, landmarks, mask, _ = inputs
    queries, keys = _passes(points, inputs)
    grad_w = queries.collect(grad, None)  # the mask is for keys only
    sums_of_keys = u.flatten(0, 1) if u.numel() > 0 else keys.collect(v, mask)
    w, grad_u, grad_landmarks = points.mixing_backward(
        grad_w, sums_of_keys, inverse.flatten(0, 1), settings
    )
    scale = settings.scale
    if k is None:
        grad_q, grad_v, sums = queries.backward(scale, (grad, w), (v, grad_u), mask)
        grad_k = LEFT_OUT
    else:
        grad_q, _, of_queries = queries.backward(scale, (grad, w), None, None)
        grad_k, grad_v, of_keys = keys.backward(scale, None, (v, grad_u), mask)
        grad_k, sums = grad_k.to(k.dtype), of_queries + of_keys
    products, totals = sums[..., : q.shape[-1]], sums[..., -1:]
    grad_landmarks.add_(products - totals * points.centred, alpha=scale)
    grad_landmarks = grad_landmarks.to(landmarks.dtype).view(landmarks.shape)
    grads = grad_q.to(q.dtype), grad_k, grad_v.to(v.dtype), grad_landmarks
    if points.far is not None:
        far, far_inputs = points.far, chunked.samples(points.far, inputs)
        careful = chunked.backward(grad[far], far_inputs, inverse[far], u[far], settings)
        chunked.replace(far, grads, careful)
    return grads


class _Landmarks:
    """The landmarks as all passes need them.

    centre, side: (batch * heads, d) and (batch * heads, m, d + 2), as in attention.c.
    centred: the landmarks minus their centre, (batch * heads, m, d), float64.
    matrix: A, (batch * heads, m, m), float64.
    far: (batch,), whether float32 would cancel too many digits, see :mod:`softfree.ops.attention.chunked`;
        None, as nearly always, if it would for no sample.
    """

    def __init__(self, inputs: Inputs, scale: float):
        landmarks = _readable(inputs.landmarks)
        batch, heads, m, channels = landmarks.shape
        mask = inputs.landmark_mask
        self.mask = None if mask is None else mask.contiguous()
        self.centre = landmarks.new_empty(batch * heads, channels)
        self.side = landmarks.new_empty(batch * heads, m, channels + 2)
        self.centred = torch.empty(batch * heads, m, channels, dtype=torch.float64)
        self.matrix = torch.empty(batch * heads, m, m, dtype=torch.float64)
        farthest = torch.zeros(batch, heads, dtype=torch.float64)
        _call(
            "prepare", _tokens(landmarks), _address(self.mask), batch, heads, m, channels, scale,
            *map(_address, (self.centre, self.centred, self.side, self.matrix, farthest)),
            torch.get_num_threads(),
        )  # fmt: skip
        self.far: Tensor | None = None
        most = farthest.max().item() if farthest.numel() > 0 else 0.0
        if not scale * most <= FAR:  # also for NaN, beside which another sample may be far
            self.far = (scale * farthest > FAR).any(1)

    def solve(self, u: Tensor, settings: AttentionSettings, keep: bool) -> tuple[Tensor, Tensor]:
        """The inverse factor of ``A + ridge I`` (only with ``keep``), and ``W = Y' U``.

        U and W are (batch * heads, m, channels).
        """
        heads, m, channels = u.shape
        u = _with_padding(u)
        w = torch.empty_like(u)
        factor = u.new_empty(heads, m, m) if keep else LEFT_OUT
        _call(
            "solve", _address(self.matrix), heads, m, settings.inverse.ridge, settings.inverse.order,
            settings.normalize, _address(u), channels, _address(factor), _address(w), torch.get_num_threads(),
        )  # fmt: skip
        return factor, w[..., :channels]

    def mixing_backward(
        self, grad_w: Tensor, u: Tensor, inverse: Tensor, settings: AttentionSettings
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As :func:`softfree.ops.attention.mixing.mixing_backward`, of what the forward pass kept."""
        heads, m, channels = u.shape
        few = m <= SOLVED_LANDMARKS and m * channels <= GRADIENT_ELEMENTS
        if settings.inverse.method == "newton" or not few:
            mask = self.mask
            if mask is not None and len(mask) > 0:
                mask = mask.repeat_interleave(heads // len(mask), 0)
            return mixing_backward(
                grad_w, u, self.matrix, inverse.double(), self.centred, mask, settings
            )
        u, grad_w = _with_padding(u), _with_padding(grad_w)
        inverse = inverse.contiguous()
        w, grad_u, grad_landmarks = (torch.empty_like(of) for of in (u, u, self.centred))
        _call(
            "solve_backward", *map(_address, (self.matrix, inverse, self.centred)),
            heads, m, self.centred.shape[2], settings.scale, settings.inverse.ridge,
            settings.inverse.order, settings.normalize, _address(u), _address(grad_w), channels,
            *map(_address, (w, grad_u, grad_landmarks)), torch.get_num_threads(),
        )  # fmt: skip
        return w[..., :channels], grad_u[..., :channels], grad_landmarks


def _passes(points: _Landmarks, inputs: Inputs) -> tuple["_Passes", "_Passes"]:
    """The passes over queries and over keys."""
    queries = _Passes(points, inputs.q, keep=inputs.k is None and inputs.key_mask is None)
    return queries, queries if inputs.k is None else _Passes(points, inputs.k, keep=False)


class _Passes:
    """Passes over tokens (batch, heads, n, d); the kernel values may be kept from one pass to the next."""

    def __init__(self, points: _Landmarks, tokens: Tensor, keep: bool):
        batch, heads, count, channels = tokens.shape
        m = points.side.shape[1]
        values = batch * heads * m * TILE * tiles_of(count, TILE)
        self.points, self.tokens = points, _readable(tokens)
        self.kernels = points.side.new_empty(values) if keep and values <= KEPT_ELEMENTS else None
        self.record = _Points(
            batch, heads, count, channels, m, torch.get_num_threads(), _tokens(self.tokens),
            *map(_address, (points.centre, points.side, self.kernels)),
        )  # fmt: skip

    def collect(self, values: Tensor, mask: Tensor | None) -> Tensor:
        """``U = P V``, (batch * heads, m, channels), from values (batch, heads, n, channels)."""
        values, channels = _readable(values), values.shape[-1]
        mask = None if mask is None else mask.contiguous()
        parts, sums = self._room_for_sums(_padded(channels))
        self._call(
            "collect", _address(mask), _tokens(values), channels, _address(parts), _address(sums)
        )
        return sums[..., :channels]

    def spread(self, w: Tensor) -> Tensor:
        """``X = P^T W``, (batch, heads, n, channels), from W (batch * heads, m, channels)."""
        result = token_tensor(self.tokens, w.shape[-1])
        w = _with_padding(w)
        self._call("spread", _address(w), result.shape[-1], _tokens(result))
        return result

    def backward(
        self,
        scale: float,
        as_queries: tuple[Tensor, Tensor] | None,
        as_keys: tuple[Tensor, Tensor] | None,
        mask: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the tokens and of their values, and sums as in attention.c.

        The sums are (batch * heads, m, padded d + 1).

        Args:
            scale: scale of the kernel.
            as_queries: the gradient of X, and W; None if the tokens are only keys.
            as_keys: the values, and the gradient of U; None if the tokens are only queries.
            mask: mask of the keys.
        """
        channels, grad, w, values, grad_u, grad_values = 0, None, None, None, None, LEFT_OUT
        if as_queries is not None:
            grad, w = _readable(as_queries[0]), _with_padding(as_queries[1])
            channels = grad.shape[-1]
        if as_keys is not None:
            values, grad_u = _readable(as_keys[0]), _with_padding(as_keys[1])
            channels = values.shape[-1]
            grad_values = token_tensor(values, channels)
        mask = None if mask is None else mask.contiguous()
        landmarks = _with_padding(self.points.centred)
        grad_tokens = token_tensor(self.tokens, self.tokens.shape[-1])
        parts, sums = self._room_for_sums(_padded(self.tokens.shape[-1]) + 1)
        self._call(
            "backward", _address(mask), scale, _address(landmarks), _tokens(grad), _address(w), _tokens(values),
            _address(grad_u), channels, _tokens(grad_tokens), _tokens(grad_values), _address(parts),
            _address(sums),
        )  # fmt: skip
        return grad_tokens, grad_values, sums

    def _room_for_sums(self, channels: int) -> tuple[Tensor, Tensor]:
        """Memory for the sums over each span of tokens and over all tokens.

        They are (batch * heads, spans, m, channels) and (batch * heads, m, channels).
        """
        heads, m, _ = self.points.side.shape
        spans = _call("spans", self.tokens.shape[2])
        sums = self.tokens.new_empty(heads, m, channels)
        return sums if spans == 1 else sums.new_empty(heads, spans, m, channels), sums

    def _call(self, name: str, *arguments: Any) -> None:
        _call(name, self.record, *arguments)
        self.record.known = 1


def _call(name: str, *arguments: Any) -> Any:
    functions = _functions()
    assert functions is not None, "this backend is chosen only where it is available"
    result = functions[name](*arguments)
    if result < 0:
        raise MemoryError("there is not enough memory for the attention")
    return result


def _readable(tokens: Tensor) -> Tensor:
    """Tokens in float32 with contiguous channels."""
    tokens = tokens.to(torch.float32)
    return tokens if tokens.stride(-1) == 1 else tokens.contiguous()


def _tokens(tokens: Tensor | None) -> _Tokens | None:
    return None if tokens is None else _Tokens(tokens.data_ptr(), *tokens.stride()[:3])


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _padded(channels: int) -> int:
    return PAD * tiles_of(channels, PAD)


def _with_padding(matrix: Tensor) -> Tensor:
    """A contiguous float32 matrix with rows padded by zeros."""
    missing = _padded(matrix.shape[-1]) - matrix.shape[-1]
    matrix = torch.nn.functional.pad(matrix, (0, missing)) if missing else matrix
    return matrix.to(torch.float32).contiguous()
