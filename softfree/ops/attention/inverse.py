"""The regularised inverse of a landmark kernel matrix by Newton-Raphson iteration.

With ``B = A + ridge * I`` the iteration is ``Y_0 = alpha B``, ``Y_{k+1} = 2 Y_k - Y_k B Y_k``. On an
eigenvalue ``lam`` of ``B``, ``T`` steps give ``(1 - (1 - alpha lam^2)^(2^T)) / lam``: the inverse where
``lam`` is large, falling smoothly to 0 where it is small. ``T`` therefore sets the regularisation, not only
the accuracy.

The steps are the definition. Many steps give nearly ``(1 - exp(-x)) / lam`` with ``x = 2^T alpha lam^2``.
:func:`factored_newton` computes this with one factorisation and a third of the products.
"""

import torch
from torch import Tensor

from softfree.ops.attention.settings import InverseSettings
from softfree.ops.shared.precision import compute_dtype

# The largest alpha, as a fraction of the papers' 2 / ||A||_1^2, which is itself the edge of divergence. The
# authors' code uses 0.9 (their 1.8).
SAFE_FACTOR = 0.9
# The same for the matrix with its ridge. It is a little larger, so that the authors' ridge of 0.01, which
# they add after choosing alpha, leaves alpha unchanged; larger ridges lower it.
RIDGE_FACTOR = 0.95
HALVINGS = 10
HALVING_TOLERANCE = 0.01
# For the factored form: with g = 1 / (1 + POLE x), exp(-x) is nearly 1 - x g (w_0 + w_1 g + w_2 g^2). Among
# all poles and weights that sum to 1, these are closest to the exponential after SQUARINGS squarings: within
# 7.4e-7 at the worst x, found numerically.
POLE = 0.15839838
WEIGHTS = (0.22394557, -0.60504419, 1.38109862)
SQUARINGS = 4
# Fewer steps are not close enough to an exponential (they differ by 0.27 * 2^-T); more steps lead to matrices
# that float64 can't factor accurately.
FACTORED_STEPS = range(14, 41)


def add_ridge(a: Tensor, ridge: float) -> Tensor:
    """``A + ridge * I``; ``a`` itself when there is no ridge."""
    if ridge == 0:
        return a
    return a + ridge * torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)


def start_value(a: Tensor, start: str, ridge: float = 0.0, square: Tensor | None = None) -> Tensor:
    """The factor ``alpha`` of ``Y_0 = alpha (A + ridge I)``, one per matrix, shape (..., 1, 1).

    ``"scaled"`` is ``1.8 / ||A||_1^2``, or less with a large ridge. ``"halving"`` starts at ``2 / ||A||_1^2``
    and is halved, at most ten times, until ``||I - alpha B^2||_1 <= 1.01``; the scaled value is its upper
    bound. Both ensure ``alpha lam^2 < 2`` for every eigenvalue, which convergence requires. ``square`` is
    ``B^2`` if already known.
    """
    norm = a.abs().sum(-2).amax(-1)
    alpha = 2 / norm.square()
    bound = SAFE_FACTOR * alpha
    if ridge > 0:
        bound = torch.minimum(bound, RIDGE_FACTOR * 2 / (norm + ridge).square())
    if start == "scaled":
        return bound[..., None, None]
    if square is None:
        b = add_ridge(a, ridge)
        square = b @ b
    columns = square.abs().sum(-2)
    # ||I - alpha B^2||_1 <= 1 + t, column by column, is alpha (o - d) <= t and alpha (o + d) <= 2 + t
    # with d the column's diagonal entry (a sum of squares) and o the sum of its others.
    excess = columns.sub(square.diagonal(dim1=-2, dim2=-1), alpha=2)
    excess = torch.maximum(excess, columns * (HALVING_TOLERANCE / (2 + HALVING_TOLERANCE)))
    halvings = (alpha * excess.amax(-1) / HALVING_TOLERANCE).log2().ceil().clamp(0, HALVINGS)
    return torch.minimum(alpha * torch.exp2(-halvings), bound)[..., None, None]


def newton_iterate(a: Tensor, settings: InverseSettings) -> Tensor:
    """Run the iteration on matrices of shape (..., m, m); differentiable step by step."""
    b = add_ridge(a, settings.ridge)
    y = start_value(a, settings.start, settings.ridge) * b
    for _ in range(settings.iterations):
        y = 2 * y - y @ b @ y
    return y


def factored_newton(a: Tensor, settings: InverseSettings) -> Tensor:
    """:func:`newton_iterate` for float32 matrices (..., m, m), with one factorisation and twelve products.

    With ``x = 2^(T - s) alpha B^2`` and ``G = (I + p x)^-1``, where p is POLE and s is SQUARINGS, the matrix
    ``Y_0 = 2^(T - s) alpha B G (w_0 + w_1 G + w_2 G^2)`` has a residual of nearly ``exp(-x)``, and ``s``
    Newton steps square it ``s`` times. The condition number of ``B^2`` is the square of B's, so ``B^2`` is
    formed and factored in float64. Each step corrects earlier rounding, so all but the last run in float32.

    Not differentiable. Other dtypes, and step counts for which the results would differ (see FACTORED_STEPS),
    fall back to :func:`newton_iterate`.
    """
    if settings.iterations not in FACTORED_STEPS or a.dtype != torch.float32:
        return newton_iterate(a, settings)
    wide = a.flatten(0, -3).double()
    b = add_ridge(wide, settings.ridge)
    square = torch.bmm(b, b)
    start = start_value(wide, settings.start, settings.ridge, square)
    size = start * 2.0 ** (settings.iterations - SQUARINGS)
    matrix = square.mul_(POLE * size)
    matrix.diagonal(dim1=1, dim2=2).add_(1)
    g = torch.cholesky_inverse(torch.linalg.cholesky_ex(matrix).L)
    sum_of_powers = torch.baddbmm(g, g, g, beta=WEIGHTS[1], alpha=WEIGHTS[2])
    sum_of_powers.diagonal(dim1=1, dim2=2).add_(WEIGHTS[0])
    y = torch.bmm(b, torch.bmm(g, sum_of_powers)).mul_(size).float()
    narrow = b.float()
    for _ in range(SQUARINGS - 1):
        y = torch.baddbmm(y, y, torch.bmm(narrow, y), beta=2, alpha=-1)
    y = y.double()
    return torch.baddbmm(y, y, torch.bmm(b, y), beta=2, alpha=-1).float().view(a.shape)


class _NewtonInverse(torch.autograd.Function):
    """The iteration with the gradient of an inverse, dA = -Y^T dY Y^T (Eq. 12)."""

    @staticmethod
    def forward(a: Tensor, settings: InverseSettings) -> Tensor:
        return newton_iterate(a, settings)

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, grad_y: Tensor):
        (y,) = ctx.saved_tensors
        with torch.autocast(y.device.type, enabled=False):
            return -(y.mT @ grad_y.to(y.dtype) @ y.mT), None


class _TransformableInverse(_NewtonInverse):
    """For ``torch.func`` and forward mode. Dynamo accepts no autograd function with a ``jvp``."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def jvp(ctx, da: Tensor, _):
        (y,) = ctx.saved_tensors
        return -(y @ da @ y)


def _check_matrix(a: Tensor) -> None:
    if not isinstance(a, Tensor):
        raise TypeError(f"a must be a tensor, got {type(a).__name__}")
    if a.ndim < 2 or a.shape[-1] != a.shape[-2] or a.shape[-1] == 0:
        raise ValueError(f"a must have shape (..., m, m) with m >= 1, got {tuple(a.shape)}")
    if not a.is_floating_point():
        raise TypeError(f"a must be a floating-point tensor, got {a.dtype}")


def newton_inverse(
    a: Tensor, iterations: int = 20, *, start: str = "halving", ridge: float = 0.0
) -> Tensor:
    """Regularised inverse of symmetric positive semi-definite matrices.

    ``Y_0 = alpha B``, ``Y_{k+1} = 2 Y_k - Y_k B Y_k`` with ``B = A + ridge I``; eigenvalues ``lam`` of
    ``B`` become ``(1 - (1 - alpha lam^2)^(2^iterations)) / lam``. The gradient is that of an exact
    inverse, ``dA = -Y^T dY Y^T`` (Eq. 12 of the papers): one formula, with nothing stored per step.

    Args:
        a: (..., m, m), symmetric. Half precision is computed in float32.
        iterations: Newton steps.
        start: how ``alpha`` is chosen, ``"halving"`` or ``"scaled"``, per matrix
            (see :func:`softfree.ops.attention.inverse.start_value`).
        ridge: added to the diagonal.

    Returns:
        (..., m, m) of ``a``'s dtype.

    Example:
        >>> import torch, softfree
        >>> a = torch.tensor([[1.0, 0.5], [0.5, 1.0]])
        >>> torch.allclose(softfree.newton_inverse(a) @ a, torch.eye(2), atol=1e-5)
        True
    """
    _check_matrix(a)
    return invert(a, InverseSettings.newton(iterations, start, ridge))


def invert(a: Tensor, settings: InverseSettings) -> Tensor:
    """:func:`softfree.newton_inverse` without its checks."""
    with torch.autocast(a.device.type, enabled=False):
        kind = _NewtonInverse if torch.compiler.is_compiling() else _TransformableInverse
        y = kind.apply(a.to(compute_dtype(a.dtype)), settings)
    return y.to(a.dtype)


@torch.no_grad()
def newton_residuals(
    a: Tensor, iterations: int = 20, *, start: str = "halving", ridge: float = 0.0
) -> Tensor:
    """How far each Newton step is from an inverse: ``||B Y_k B - B||_2 / ||B||_2``, ``B = A + ridge I``.

    Args:
        a: (..., m, m), symmetric positive semi-definite.
        iterations, start, ridge: as in :func:`softfree.newton_inverse`.

    Returns:
        (..., iterations + 1): entry ``k`` belongs to ``Y_k``, the first to the start value.

    Example:
        >>> import torch, softfree
        >>> softfree.newton_residuals(torch.eye(3), iterations=6).shape
        torch.Size([7])
    """
    _check_matrix(a)
    InverseSettings.newton(iterations, start, ridge)
    with torch.autocast(a.device.type, enabled=False):
        a = a.to(compute_dtype(a.dtype))
        b = add_ridge(a, ridge)
        y = start_value(a, start, ridge) * b
        size = torch.linalg.matrix_norm(b, 2)
        residuals = []
        for step in range(iterations + 1):
            if step > 0:
                y = 2 * y - y @ b @ y
            residuals.append(torch.linalg.matrix_norm(b @ y @ b - b, 2) / size)
    return torch.stack(residuals, -1)
