"""Softmax-free attention as one call: argument checks, choice of backend, registration with PyTorch.

The operator is registered as ``softfree::attention`` with its gradient ``softfree::attention_backward``,
so ``torch.compile`` traces through it as one node and the FLOP counter knows its cost.
"""

import functools
import math
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from softfree.ops.attention import chunked, native, reference
from softfree.ops.attention.settings import AttentionSettings, Inputs, InverseSettings
from softfree.ops.shared import devices
from softfree.ops.shared.memo import computed_once
from softfree.ops.shared.precision import autocast, compute_dtype, exactly
from softfree.ops.shared.registration import register
from softfree.ops.shared.shapes import token_tensor

BACKENDS = ("auto", "reference", "torch", "native", "triton")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
KERNEL_DTYPES = DTYPES[:3]
MAX_CHANNELS = 128  # per head, that the kernels take


# Default of required arguments, so that a call with too few tensors raises our own error.
REQUIRED: Any = None
CALL = "soft_attention(q, k, v, landmarks), or with k=None where the queries are the keys"


def soft_attention(
    q: Tensor,
    k: Tensor | None = REQUIRED,
    v: Tensor = REQUIRED,
    landmarks: Tensor = REQUIRED,
    *,
    key_mask: Tensor | None = None,
    landmark_mask: Tensor | None = None,
    scale: float | None = None,
    normalize: bool = True,
    inverse: str = "newton",
    iterations: int = 20,
    start: str = "halving",
    ridge: float | None = None,
    order: int = 2,
    backend: str = "auto",
) -> Tensor:
    r"""Softmax-free attention through landmarks, linear in the number of tokens.

    With the Gaussian kernel :math:`\kappa(x, y) = \exp(-\tfrac{scale}{2} \|x - y\|^2)`,

    .. math:: X = \kappa(Q, L)\, Y'\, (\kappa(L, K)\, V), \qquad A = \kappa(L, L),\; Y = A^{-1}

    where :math:`Y' = D^{-1/2} Y D^{-1/2}`, :math:`D = \mathrm{diag}(A 1)` (SOFT++) or :math:`Y' = Y`
    (SOFT, ``normalize=False``). The inverse is regularised: see :func:`softfree.newton_inverse` and
    :func:`softfree.ridge_solve`.

    On a CPU, some landmarks may be far apart and others close together. The Triton kernels lose digits if
    ``scale * ||l - mean(l)||^2`` exceeds about 1e4. float16 gradients above 65,504 become infinite even if
    every input is finite: train in bfloat16, or with ``torch.amp.GradScaler``.

    Args:
        q: queries, (batch, heads, n_q, d); float16, bfloat16, float32 or float64. Scores, exponentials,
            sums and the inverse are computed in float32 (float64 for float64) whatever the dtype.
        k: keys, (batch, heads, n_k, d). None or ``q`` itself: the queries are the keys (the papers'
            ``W_q = W_k``), which is faster than passing equal keys separately.
        v: values, (batch, heads, n_k, d_v).
        landmarks: (batch, heads, m, d), usually pooled from the keys.
        key_mask: (batch, n_k) bool, True for the keys that take part.
        landmark_mask: (batch, m) bool, True for the landmarks that take part; for padded sequences,
            where some pooling windows are empty.
        scale: factor of the squared distances; None: ``1 / sqrt(d)``.
        normalize: True for SOFT++, False for SOFT.
        inverse: ``"newton"``, the papers' iteration; or ``"solve"``, one factorisation of ``A + ridge I``,
            which is faster, has the exact gradient and does not cut off small eigenvalues.
        iterations: Newton steps. Fewer steps cut off more small eigenvalues.
        start: start value of Newton's iteration, ``"halving"`` or ``"scaled"``, chosen per matrix.
        ridge: added to the diagonal of ``A`` before it is inverted (the authors' SOFT uses 0.01). None: 0 for
            ``"newton"``; for ``"solve"``, 0.1 at order 2 and 0.01 at order 1. A solve needs at least 1e-4.
        order: order of the solve: 1 for ``Y = G``, or 2 for ``Y = G + ridge G^2`` with
            ``G = (A + ridge I)^-1``, which is closer to the inverse.
        backend: ``"auto"``: fused Triton kernels on a CUDA device if they accept the input, C code on a CPU
            if there is a compiler, otherwise ``"torch"``. ``"torch"``: plain PyTorch, on any device, in
            bounded memory. ``"triton"`` and ``"native"`` require the kernels or the C code and raise an error
            that says why they are unavailable. ``"reference"``: the definition, for tests.

    Returns:
        (batch, heads, n_q, d_v) of ``q``'s dtype. Merging its heads with
        ``x.transpose(1, 2).flatten(2)`` copies nothing.

    References:
        Lu et al., SOFT: Softmax-free Transformer with Linear Complexity, NeurIPS 2021, Eq. 9;
        Lu et al., Softmax-free Linear Transformers, IJCV 2024, Eq. 17.

    Example:
        >>> import torch, softfree
        >>> q, v = torch.randn(2, 1, 4, 1024, 32)         # 1 image, 4 heads, 1024 tokens of 32 channels
        >>> landmarks = q.unflatten(2, (64, 16)).mean(3)  # 64 landmarks, each the mean of 16 tokens
        >>> softfree.soft_attention(q, None, v, landmarks).shape
        torch.Size([1, 4, 1024, 32])
    """
    k = None if k is q else k
    q, k, v, landmarks = autocast(q, k, v, landmarks)
    inputs = Inputs(q, k, v, landmarks, key_mask, landmark_mask)
    # In an exported program the reference stands for every backend.
    chosen = _check(inputs, backend, devices.exporting())
    settings = _settings(q.shape[-1], scale, normalize, inverse, iterations, start, ridge, order)
    if chosen == "reference":
        return reference.soft_attention(inputs, settings, exportable=backend != "reference")
    return FORWARD(inputs, settings, chosen)[0]


def check_backend(backend: str) -> None:
    """Raise if there is no backend of that name."""
    if backend not in BACKENDS:
        raise ValueError(
            f"backend must be one of {', '.join(map(repr, BACKENDS))}, got {backend!r}"
        )


@functools.cache  # even a repeated import takes a microsecond
def _implementation(backend: str) -> Any:
    if backend == "triton":
        from softfree.ops.attention.kernels import launch

        return launch
    return native if backend == "native" else chunked


@computed_once
def _settings(
    channels: int,
    scale: float | None,
    normalize: bool,
    inverse: str,
    iterations: int,
    start: str,
    ridge: float | None,
    order: int,
) -> AttentionSettings:
    settings = AttentionSettings(
        scale=1 / math.sqrt(channels) if scale is None else scale,
        normalize=bool(normalize),
        inverse=InverseSettings.of(inverse, iterations, start, ridge, order),
    )
    settings.check()
    return settings._replace(scale=float(settings.scale))


_CHECKED: dict[tuple, str] = {}


def _check(inputs: Inputs, backend: str, exporting: bool) -> str:
    """``"reference"`` or the backend that :func:`_choose` selects; raises if the tensors don't fit.

    Sizes, dtypes and devices that passed are not checked again.
    """
    if exporting or torch.compiler.is_dynamo_compiling():
        return _check_all(inputs, backend, exporting)
    try:
        q, k, v, landmarks, key_mask, landmark_mask = inputs
        kinds: tuple = (
            backend, q.shape, q.dtype, q.device, v.shape, v.dtype, v.device,
            landmarks.shape, landmarks.dtype, landmarks.device,
        )  # fmt: skip
        if k is not None or key_mask is not None or landmark_mask is not None:
            others: Any = (k, key_mask, landmark_mask)
            kinds += (*[None if t is None else (t.shape, t.dtype, t.device) for t in others],)
        chosen = _CHECKED.get(kinds)
    except (AttributeError, TypeError):  # not a tensor, or a symbolic size
        return _check_all(inputs, backend, False)
    if chosen is None:
        chosen = _check_all(inputs, backend, False)
        if chosen == "torch" == backend or chosen == "triton" or q.device.type != "cuda":
            if len(_CHECKED) >= 1024:
                _CHECKED.clear()
            _CHECKED[kinds] = chosen  # a choice that comes with a warning is not kept
    return chosen


def _check_all(inputs: Inputs, backend: str, exporting: bool) -> str:
    _check_tensors(inputs)
    check_backend(backend)
    return "reference" if exporting or backend == "reference" else _choose(backend, inputs)


def _choose(backend: str, inputs: Inputs) -> str:
    """``"torch"``, ``"native"`` or ``"triton"``."""
    q, v = inputs.q, inputs.v
    if backend == "native" or (backend == "auto" and q.device.type == "cpu"):
        obstacle = native.obstacle(q)
        if obstacle is None:
            return "native"
        if backend == "native":
            raise ValueError(f"backend 'native' can't take this input: {obstacle}")
    if backend == "torch" or (backend == "auto" and q.device.type != "cuda"):
        return "torch"
    channels = max(q.shape[3], v.shape[3])
    if channels <= MAX_CHANNELS and devices.usable(q, KERNEL_DTYPES):
        return "triton"
    obstacle = devices.obstacle(q.device, q.dtype, KERNEL_DTYPES)
    if obstacle is None and channels > MAX_CHANNELS:
        obstacle = f"they take up to {MAX_CHANNELS} channels per head, got {channels}"
    if obstacle is None:
        return "triton"
    if backend == "triton":
        raise ValueError(f"backend 'triton': the kernels can't take this input: {obstacle}")
    if not torch.compiler.is_compiling():
        # The location and the text are always the same, so Python shows it once.
        warnings.warn(
            f"softfree's kernels can't take this input: {obstacle}. Using the slower backend 'torch'.",
            stacklevel=1,
        )
    return "torch"


def _check_tensors(inputs: Inputs) -> None:
    q, k, v, landmarks, key_mask, landmark_mask = inputs
    named = {"q": q, "v": v, "landmarks": landmarks}
    if k is not None:
        named["k"] = k
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{name} must be a tensor, got {type(tensor).__name__}"
                + (f"; call {CALL}" if tensor is None else "")
            )
        if tensor.ndim != 4:
            raise ValueError(
                f"{name} must have shape (batch, heads, tokens, channels), got {tuple(tensor.shape)}"
            )
        if tensor.dtype not in DTYPES:
            raise TypeError(
                f"{name} must be float16, bfloat16, float32 or float64, got {tensor.dtype}"
            )
        if tensor.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {tensor.device}")
        if tensor.dtype != q.dtype:
            raise TypeError(f"{name} must have q's dtype {q.dtype}, got {tensor.dtype}")
        if tensor.shape[:2] != q.shape[:2]:
            raise ValueError(
                f"{name} must have q's batch and heads {tuple(q.shape[:2])}, "
                f"got {tuple(tensor.shape[:2])}"
            )
        if tensor.shape[2] == 0 or tensor.shape[3] == 0:
            raise ValueError(
                f"{name} must have at least one token and one channel, got shape {tuple(tensor.shape)}"
            )
    for name in ("landmarks", "k"):
        if name in named and named[name].shape[3] != q.shape[3]:
            raise ValueError(
                f"{name} must have q's {q.shape[3]} channels, got shape {tuple(named[name].shape)}"
            )
    keys = q if k is None else k
    if v.shape[2] != keys.shape[2]:
        raise ValueError(
            f"v must have one token per key, {keys.shape[2]}, got shape {tuple(v.shape)}"
            + ("; pass k for cross-attention" if k is None else "")
        )
    _check_mask("key_mask", key_mask, q, keys.shape[2])
    _check_mask("landmark_mask", landmark_mask, q, landmarks.shape[2])


def _check_mask(name: str, mask: Tensor | None, q: Tensor, length: int) -> None:
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        given = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"{name} must be a bool tensor, True where a token takes part, got {given}")
    if mask.shape != (q.shape[0], length):
        raise ValueError(f"{name} must have shape {(q.shape[0], length)}, got {tuple(mask.shape)}")
    if mask.device != q.device:
        raise ValueError(f"{name} must be on q's device {q.device}, got {mask.device}")


def _forward(
    inputs: Inputs, settings: AttentionSettings, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    if backend == "triton":
        return _implementation(backend).forward(inputs, settings)
    with exactly(inputs.q.device):
        return _implementation(backend).forward(inputs, settings)


def _forward_unkept(inputs: Inputs, settings: AttentionSettings, backend: str) -> tuple:
    if backend == "triton":
        return _implementation(backend).forward(inputs, settings, False)
    with exactly(inputs.q.device):
        return _implementation(backend).forward(inputs, settings, False)


def fake(inputs, settings, backend):
    q, v, landmarks = inputs.q, inputs.v, inputs.landmarks
    small = landmarks.new_empty(0, dtype=compute_dtype(q.dtype))
    return (
        token_tensor(q, v.shape[-1]),
        small.new_empty(_implementation(backend).inverse_shape(landmarks, settings)),
        small.new_empty(chunked.sums_shape(v, landmarks)),
    )


def flops(inputs, settings, backend) -> int:
    """FLOPs of one evaluation: kernels, P V, inverse, Y' U and R W."""
    batch, heads, n, d = inputs.q
    m, n_k, d_v = inputs.landmarks[2], inputs.v[2], inputs.v[3]
    tokens = n * m * (d + d_v) + n_k * m * (d_v if inputs.k is None else d + d_v)
    matrices = m * m * d + m * m * d_v
    if settings.inverse.method == "solve":
        # The Cholesky factor and its inverse, each m^3 / 6; order 2 applies G twice.
        matrices += m**3 // 3 + (settings.inverse.order - 1) * m * m * d_v
    else:
        matrices += 2 * settings.inverse.iterations * m**3
    return 2 * batch * heads * (tokens + matrices)


class Given(NamedTuple):
    """What the gradient is computed from: the result's gradient, :class:`Inputs`, and what was kept."""

    grad: Tensor
    q: Tensor
    k: Tensor | None
    v: Tensor
    landmarks: Tensor
    key_mask: Tensor | None
    landmark_mask: Tensor | None
    inverse: Tensor
    u: Tensor


def _backward(
    given: Given, settings: AttentionSettings, backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    arguments = given.grad, Inputs(*given[1:7]), given.inverse, given.u, settings
    if backend == "triton":
        return _implementation(backend).backward(*arguments)
    with exactly(given.grad.device):
        return _implementation(backend).backward(*arguments)


def _fake_backward(given, *_):
    _, q, k, v, landmarks, *_ = given
    return (
        token_tensor(q, q.shape[-1]),
        q.new_empty(0) if k is None else token_tensor(k, k.shape[-1]),
        token_tensor(v, v.shape[-1]),
        torch.empty_like(landmarks, memory_format=torch.contiguous_format),
    )


def backward_flops(given, settings, backend) -> int:
    """FLOPs of the gradient.

    Counts the kernels again, R^T G, G W^T, V dU^T, P dU, the exponential's two products per side, W, dU and
    dA; with few tokens also P V.
    """
    batch, heads, n, d = given.q
    m, n_k, d_v = given.landmarks[2], given.v[2], given.v[3]
    queries = n * m * (3 * d + 2 * d_v)
    again = n_k <= chunked.FEW_TOKENS
    keys = n_k * m * ((2 + again) * d_v + (0 if given.k is None else 3 * d))
    # A solve of order 2 applies G twice to U and dW, and its dA has two terms.
    twice = settings.inverse.method == "solve" and settings.inverse.order == 2
    matrices = (6 if twice else 3) * m * m * d_v + 2 * m * m * d
    return 2 * batch * heads * (queries + keys + matrices)


def _setup_context(ctx, inputs, output):
    tensors, *ctx.settings = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.set_materialize_grads(False)


def _gradient(ctx, grad, *_):
    if grad is None:
        return ()
    saved = ctx.saved_tensors  # read once: under gradient checkpointing, each read recomputes
    given = Given(grad, *saved)
    grad_q, grad_k, grad_v, grad_landmarks = BACKWARD(given, *ctx.settings)
    return grad_q, None if given.k is None else grad_k, grad_v, grad_landmarks


BACKWARD = register(
    "attention_backward", _backward, _fake_backward, flops=backward_flops, launches=True
)
FORWARD = register(
    "attention",
    _forward,
    fake,
    _setup_context,
    _gradient,
    flops,
    keeps=True,
    passing=_forward_unkept,
    launches=True,
)
