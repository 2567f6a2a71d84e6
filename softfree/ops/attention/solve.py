"""The regularised inverse of a landmark kernel matrix by one factorisation.

With ``B = A + r I`` and ``G = B^-1`` the inverse is ``Y = G`` (order 1) or ``Y = G + r G^2`` (order 2). On an
eigenvalue ``lam`` of ``A`` that is ``1 / (lam + r)`` or ``(lam + 2 r) / (lam + r)^2``: the fraction
``1 - r / (lam + r)`` or ``1 - (r / (lam + r))^2`` of the exact inverse. No eigenvalue is cut off, and nothing
is iterated.

Y is never formed, because that would lose digits. ``B = C C^T`` is factored once, with pivots of at least r.
In :func:`ridge_solve`, the definition, ``Y X`` takes two or four triangular solves. Most backends multiply by
``M = C^-1`` as often instead.
"""

import torch
from torch import Tensor

from softfree.ops.attention.inverse import _check_matrix, add_ridge
from softfree.ops.attention.settings import InverseSettings
from softfree.ops.shared.precision import compute_dtype

# For :func:`iterated_solve`: the coinciding landmarks that its steps are designed for, the error that they leave
# before one correction squares it, and the ridge below which float32 has too few digits for them.
MOST_LANDMARKS = 2000
LEFT_OVER = 1e-3
FLOAT32_RIDGE = 0.01


def inverse_factor(a: Tensor, ridge: float) -> Tensor:
    """``M = C^-1`` with ``A + ridge I = C C^T``: lower triangular, (..., m, m). Then ``G = M^T M``."""
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    lower = torch.linalg.cholesky_ex(torch.add(a, eye, alpha=ridge)).L
    return torch.linalg.solve_triangular(lower, eye, upper=False)


def apply_inverse(factor: Tensor, x: Tensor) -> Tensor:
    """``G X = M^T (M X)``."""
    return factor.mT @ (factor @ x)


def solve(
    factor: Tensor, x: Tensor, ridge: float, order: int, root: Tensor | None = None
) -> Tensor:
    """``Y X`` from M (..., m, m) and X (..., m, c); with a diagonal ``root`` (..., m, 1), ``root Y root X``.

    ``Y X = M^T Z`` with ``Z = M X``; at order 2, ``Y X = M^T (Z + r M M^T Z)``.
    """
    last = factor if root is None else factor * root.mT
    z = last @ x
    if order == 2:
        z = torch.add(z, factor @ (factor.mT @ z), alpha=ridge)
    return last.mT @ z


def solve_backward(
    factor: Tensor, x: Tensor, grad: Tensor, ridge: float, order: int
) -> tuple[Tensor, Tensor, Tensor]:
    """``Y X``, ``Y grad``, and the exact gradient of A, where ``grad`` is the gradient of ``Y X``.

    ``dA = -(G grad) (G X)^T`` at order 1. At order 2, ``Y X = G (X + r G X)`` uses G twice:
    ``dA = -(G grad) (Y X)^T - r (G^2 grad) (G X)^T``. The rank of each term is at most the number of
    channels.
    """
    channels = x.shape[-1]
    both = apply_inverse(factor, torch.cat([x, grad], -1))
    once, back = both[..., :channels], both[..., channels:]
    if order == 1:
        return once, back, (back @ once.mT).neg_()
    second = ridge * both
    second[..., :channels].add_(x)
    second = apply_inverse(factor, second)
    right, again = second[..., :channels], second[..., channels:]
    grad_a = (back @ right.mT).add_(again @ once.mT).neg_()
    return right, back + again, grad_a


def recentrings(condition: float) -> list[float]:
    """The factors ``c_k`` of :func:`iterated_solve` for a condition number of B.

    A Newton step maps eigenvalues of ``B G`` in ``[1 - e, 1 + e]`` to ``[1 - e^2, 1]``. Multiplied by
    ``2 / (2 - e^2)`` they are centred on 1 again, within ``e^2 / (2 - e^2)``. While ``1 - e`` is small, each
    step makes it about four times as large; without the factor it would only double.

    Example:
        >>> [round(factor, 3) for factor in recentrings(10)]
        [1.503, 1.145, 1.011, 1.0]
    """
    apart = (condition - 1) / (condition + 1)
    factors = []
    while apart > LEFT_OVER:
        factors.append(2 / (2 - apart**2))
        apart = apart**2 / (2 - apart**2)
    return factors


def iterated_solve(a: Tensor, x: Tensor, ridge: float, order: int) -> Tensor:
    """``Y X`` from a few matrix products, for exporters, which support no factorisation.

    ``G_{k+1} = c_k (2 G_k - G_k B G_k)`` from ``G_0 = 2 I / (||B||_1 + r)``, with the factors of
    :func:`recentrings`. One correction by the residual of X recovers the last digits of float32; with a ridge below
    FLOAT32_RIDGE that is not enough, and the products are float64.
    """
    given = x.dtype
    if ridge < FLOAT32_RIDGE:
        a, x = a.double(), x.double()
    matrix, columns = a.flatten(0, -3), x.flatten(0, -3)
    b = add_ridge(matrix, ridge)
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    inverse = 2 * eye / (b.abs().sum(-1).amax(-1) + ridge)[:, None, None]
    for factor in recentrings(1 + MOST_LANDMARKS / ridge):
        inverse = torch.baddbmm(
            inverse, torch.bmm(inverse, b), inverse, beta=2 * factor, alpha=-factor
        )

    def apply(x: Tensor) -> Tensor:
        once = torch.bmm(inverse, x)
        return once + torch.bmm(inverse, x - torch.bmm(b, once))

    once = apply(columns)
    return (once if order == 1 else apply(columns + ridge * once)).view(x.shape).to(given)


def ridge_solve(a: Tensor, x: Tensor, *, ridge: float | None = None, order: int = 2) -> Tensor:
    """``Y X`` with the regularised inverse ``Y`` of symmetric positive semi-definite matrices ``A``.

    ``Y = G`` (order 1) or ``Y = G + r G^2`` (order 2) with ``G = (A + r I)^-1``. Differentiable in both
    arguments; the gradient is exact, even if A is singular.

    Args:
        a: (..., m, m), symmetric. Half precision is computed in float32.
        x: (..., m, c).
        ridge: r, at least 1e-4; None: 0.1 for order 2, 0.01 for order 1.
        order: 2 has the smaller relative bias, ``(r / (lam + r))^2`` for an eigenvalue instead of
            ``r / (lam + r)``.

    Returns:
        (..., m, c) of ``x``'s dtype.

    Example:
        >>> import torch, softfree
        >>> a = torch.tensor([[1.0, 0.5], [0.5, 1.0]])
        >>> torch.allclose(softfree.ridge_solve(a, a, ridge=1e-4), torch.eye(2), atol=1e-5)
        True
    """
    _check_matrix(a)
    if not isinstance(x, Tensor) or x.ndim < 2 or x.shape[-2] != a.shape[-1]:
        given = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"x must have shape (..., {a.shape[-1]}, channels), got {given}")
    if not x.is_floating_point():
        raise TypeError(f"x must be a floating-point tensor, got {x.dtype}")
    ridge = InverseSettings.solve(ridge, order).ridge
    with torch.autocast(a.device.type, enabled=False):
        dtype = torch.promote_types(compute_dtype(a.dtype), compute_dtype(x.dtype))
        lower = torch.linalg.cholesky(add_ridge(a.to(dtype), ridge))
        once = torch.cholesky_solve(x.to(dtype), lower)
        result = once if order == 1 else torch.cholesky_solve(x + ridge * once, lower)
        return result.to(x.dtype)


def solve_spectrum(eigenvalues: Tensor, *, ridge: float | None = None, order: int = 2) -> Tensor:
    """Eigenvalues of Y given those of A: ``1 / (lam + r)`` or ``(lam + 2 r) / (lam + r)^2``.

    Example:
        >>> import torch, softfree
        >>> softfree.solve_spectrum(torch.tensor([1.0, 0.1, 0.0]), ridge=0.1)
        tensor([ 0.9917,  7.5000, 20.0000])
    """
    ridge = InverseSettings.solve(ridge, order).ridge
    once = 1 / (eigenvalues + ridge)
    return once if order == 1 else once + ridge * once.square()


@torch.no_grad()
def solve_residual(a: Tensor, *, ridge: float | None = None, order: int = 2) -> Tensor:
    """How far Y is from an inverse: ``||A Y A - A||_2 / ||A||_2``, (...) of matrices (..., m, m).

    Example:
        >>> import torch, softfree
        >>> softfree.solve_residual(torch.eye(3), ridge=0.1).round(decimals=4)
        tensor(0.0083)
    """
    _check_matrix(a)
    with torch.autocast(a.device.type, enabled=False):
        a = a.to(compute_dtype(a.dtype))
        size = torch.linalg.matrix_norm(a, 2)
        error = a @ ridge_solve(a, a, ridge=ridge, order=order) - a
        return torch.linalg.matrix_norm(error, 2) / size
