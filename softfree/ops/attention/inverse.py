"""The regularised inverse of a landmark kernel matrix by Newton-Raphson iteration.

With ``B = A + ridge * I`` the iteration is ``Y_0 = alpha B``, ``Y_{k+1} = 2 Y_k - Y_k B Y_k``. On an
eigenvalue ``lam`` of ``B`` it gives after ``T`` steps ``(1 - (1 - alpha lam^2)^(2^T)) / lam``: the
inverse where ``lam`` is large, a smooth fall to 0 where it is small. ``T`` is therefore a regulariser
and not only an accuracy.
"""

import torch
from torch import Tensor

from softfree.ops.attention.settings import InverseSettings
from softfree.ops.shared.precision import compute_dtype

# The largest alpha, as a part of the papers' 2 / ||A||_1^2, which is the edge of divergence. The
# authors' code uses 0.9 (their 1.8).
SAFE_FACTOR = 0.9
# The same for the matrix with its ridge. It is a little larger so that the ridge of 0.01 that the authors
# add after choosing alpha leaves alpha as they chose it; larger ridges lower it.
RIDGE_FACTOR = 0.95
HALVINGS = 10
# Steps after which the CPU looks whether it may stop: about where well-conditioned matrices converge from
# either start. A look costs about as much as a step.
EARLY_STOPS = (7, 13)
HALVING_TOLERANCE = 0.01


def add_ridge(a: Tensor, ridge: float) -> Tensor:
    """``A + ridge * I``; ``a`` itself when there is no ridge."""
    if ridge == 0:
        return a
    return a + ridge * torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)


def start_value(a: Tensor, start: str, ridge: float = 0.0) -> Tensor:
    """The factor ``alpha`` of ``Y_0 = alpha (A + ridge I)``, one per matrix, shape (..., 1, 1).

    ``"scaled"`` is ``1.8 / ||A||_1^2``. ``"halving"`` begins at ``2 / ||A||_1^2`` and is halved, at
    most ten times, until ``||I - alpha B^2||_1 <= 1.01``, then bounded by the scaled value. Both make
    ``alpha lam^2 < 2`` for every eigenvalue, which is what convergence needs.
    """
    norm = a.abs().sum(-2).amax(-1)
    alpha = 2 / norm.square()
    bound = SAFE_FACTOR * alpha
    if ridge > 0:
        bound = torch.minimum(bound, RIDGE_FACTOR * 2 / (norm + ridge).square())
    if start == "scaled":
        return bound[..., None, None]
    b = add_ridge(a, ridge)
    square = b @ b
    columns = square.abs().sum(-2)
    # ||I - alpha B^2||_1 <= 1 + t, column by column, is alpha (o - d) <= t and alpha (o + d) <= 2 + t
    # with d the column's diagonal entry (a sum of squares) and o the sum of its others.
    excess = columns.sub(square.diagonal(dim1=-2, dim2=-1), alpha=2)
    excess = torch.maximum(excess, columns * (HALVING_TOLERANCE / (2 + HALVING_TOLERANCE)))
    halvings = (alpha * excess.amax(-1) / HALVING_TOLERANCE).log2().ceil().clamp(0, HALVINGS)
    return torch.minimum(alpha * torch.exp2(-halvings), bound)[..., None, None]


def newton_iterate(a: Tensor, settings: InverseSettings, *, may_stop_early: bool = False) -> Tensor:
    """Run the iteration on matrices of shape (..., m, m); differentiable step by step.

    ``may_stop_early`` reuses its buffers and ends the loop once a further step would change nothing but
    rounding: not differentiable, and since it reads the residual meant for the CPU.
    """
    b = add_ridge(a, settings.ridge)
    y = start_value(a, settings.start, settings.ridge) * b
    if may_stop_early:
        return _iterate_in_place(b, y, settings.iterations)
    for _ in range(settings.iterations):
        y = 2 * y - y @ b @ y
    return y


def _iterate_in_place(b: Tensor, y: Tensor, iterations: int) -> Tensor:
    shape = b.shape
    b, y = b.flatten(0, -3), y.flatten(0, -3)
    by, spare = torch.empty_like(y), torch.empty_like(y)
    for step in range(iterations):
        torch.bmm(b, y, out=by)
        torch.baddbmm(y, y, by, beta=2, alpha=-1, out=spare)
        y, spare = spare, y
        if step in EARLY_STOPS and y.numel() > 0:
            # From the first step on the eigenvalues of I - BY lie in [0, 1), so their sum bounds them
            # all; the step just taken has squared it.
            least_trace = by.diagonal(dim1=1, dim2=2).sum(1).amin().item()
            if b.shape[-1] - least_trace < torch.finfo(b.dtype).eps ** 0.5:
                break
    return y.view(shape)


class _NewtonInverse(torch.autograd.Function):
    """The iteration with the gradient of an inverse, dA = -Y^T dY Y^T (Eq. 12)."""

    @staticmethod
    def forward(ctx, a: Tensor, settings: InverseSettings) -> Tensor:
        y = newton_iterate(a, settings)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad_y: Tensor):
        (y,) = ctx.saved_tensors
        with torch.autocast(y.device.type, enabled=False):
            return -(y.mT @ grad_y.to(y.dtype) @ y.mT), None


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
    inverse, ``dA = -Y^T dY Y^T`` (Eq. 12 of the papers): one formula, nothing kept per step.

    Args:
        a: (..., m, m), symmetric. Half precision is computed in float32.
        iterations: Newton steps.
        start: how ``alpha`` is chosen, ``"halving"`` or ``"scaled"``, per matrix
            (see :func:`softfree.ops.inverse.start_value`).
        ridge: added to the diagonal.

    Returns:
        (..., m, m) of ``a``'s dtype.

    Example:
        >>> import torch, softfree
        >>> a = torch.tensor([[1.0, 0.5], [0.5, 1.0]])
        >>> (softfree.newton_inverse(a) @ a).round(decimals=4)
        tensor([[1., 0.],
                [0., 1.]])
    """
    _check_matrix(a)
    return invert(a, InverseSettings.newton(iterations, start, ridge))


def invert(a: Tensor, settings: InverseSettings) -> Tensor:
    """:func:`softfree.newton_inverse` without its checks."""
    with torch.autocast(a.device.type, enabled=False):
        y = _NewtonInverse.apply(a.to(compute_dtype(a.dtype)), settings)
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
