"""The m x m part of the operator: from landmarks to the matrix between the two kernels, and back.

The mixing matrix ``Y'`` is the inverse ``Y`` of the landmark kernel ``A`` (SOFT) or its normalised form
``D^-1/2 Y D^-1/2`` with ``D = diag(A 1)`` (SOFT++). No function here reads a token.

For the backward pass, Newton's iteration keeps Y itself, and a solve keeps the inverse Cholesky factor of
``A + ridge I``.
"""

import math

import torch
from torch import Tensor

from softfree.ops.attention.inverse import factored_newton, newton_iterate
from softfree.ops.attention.reference import normalize_inverse, normalizers
from softfree.ops.attention.settings import AttentionSettings, InverseSettings
from softfree.ops.attention.solve import inverse_factor, solve, solve_backward

# exp(x) = 2^(x log2 e), and powers of 2 are several times faster on some processors.
LOG2_E = math.log2(math.e)


def invert_landmarks(a: Tensor, settings: InverseSettings, dtype: torch.dtype) -> Tensor:
    """The inverse of kernel matrices (..., m, m), in the form that is kept for the backward pass.

    A solve computes in the dtype of the matrices, Newton's iteration in ``dtype``.
    """
    if settings.method == "solve":
        return inverse_factor(a, settings.ridge)
    # The factored form needs float64, which is slow or missing on other devices.
    newton = factored_newton if a.device.type == "cpu" else newton_iterate
    return newton(a.to(dtype), settings)


def mix(u: Tensor, a: Tensor, inverse: Tensor, settings: AttentionSettings) -> Tensor:
    """``W = Y' U``, (..., m, d_v).

    A solve casts U to the dtype of ``inverse``. Newton's iteration multiplies U as it is.
    """
    if settings.inverse.method == "solve":
        return solve(
            inverse,
            u.to(inverse.dtype),
            settings.inverse.ridge,
            settings.inverse.order,
            normalizers(a, True) if settings.normalize else None,
        )
    if settings.normalize:
        inverse = normalize_inverse(inverse, a.to(inverse.dtype))
    return inverse @ u


def mixing_backward(
    grad_w: Tensor,
    u: Tensor,
    a: Tensor,
    inverse: Tensor,
    landmarks: Tensor,
    mask: Tensor | None,
    settings: AttentionSettings,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``W = Y' U``, ``dU = Y'^T dW`` and the landmarks' gradient through ``Y'``, given dW.

    The rank of ``dY' = dW U^T`` is at most the number of channels, so no m x m x m product is needed. With
    ``left = Y^T D^-1/2 dW`` and ``right = Y D^-1/2 U``, Eq. 12 is ``dA = -Y^T dY Y^T = -left right^T``. For a
    solve see :func:`softfree.ops.attention.solve.solve_backward`. The gradient that reaches ``A`` through
    ``D`` is constant along each row. Through the exponential, with ``E = A * dA``,
    ``dL_i = scale * sum_j (E_ij + E_ji) (L_j - L_i)``.

    Args:
        grad_w, u: (..., m, d_v).
        a, inverse: (..., m, m), in the dtype of the computation.
        landmarks: (..., m, d), with any values where masked.
        mask: (..., m), True for landmarks that take part.
    """
    root = normalizers(a, settings.normalize)
    root_u, root_grad_w = root * u.to(a.dtype), root * grad_w.to(a.dtype)
    right, left, grad_a = _inverse_backward(inverse, root_u, root_grad_w, settings.inverse)
    if settings.normalize:
        rows = (root_grad_w * right).addcmul_(root_u, left).sum(-1, keepdim=True)
        grad_a.sub_(rows.mul_(root.square()), alpha=0.5)
    e = a * (grad_a + grad_a.mT)
    if mask is not None:
        e = torch.where(mask[..., :, None] & mask[..., None, :], e, 0)
    # For close landmarks far from the origin, the difference cancels most digits of its terms. At this size
    # float64 costs little.
    e, points = e.double(), landmarks.double()
    grad_landmarks = (e @ points).addcmul_(e.sum(-1, keepdim=True), points, value=-1)
    return root * right, root * left, grad_landmarks.mul_(settings.scale).to(landmarks.dtype)


def _inverse_backward(
    inverse: Tensor, x: Tensor, grad: Tensor, settings: InverseSettings
) -> tuple[Tensor, Tensor, Tensor]:
    """``Y x``, ``Y^T grad`` and the gradient of A."""
    if settings.method == "solve":
        return solve_backward(inverse, x, grad, settings.ridge, settings.order)
    right, left = inverse @ x, inverse.mT @ grad
    return right, left, (left @ right.mT).neg_()
