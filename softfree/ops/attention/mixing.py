"""The m x m part of the operator: from landmarks to the matrix between the two kernels, and back.

The mixing matrix ``Y'`` is the inverse ``Y`` of the landmark kernel ``A`` (SOFT) or its normalised form
``D^-1/2 Y D^-1/2`` with ``D = diag(A 1)`` (SOFT++). No function here looks at a token.

What is kept of the inverse for the backward pass is Y itself, by Newton's iteration, or the inverse Cholesky factor
of ``A + ridge I``, by a solve.
"""

import math

import torch
from torch import Tensor

from softfree.ops.attention.inverse import factored_newton, newton_iterate
from softfree.ops.attention.reference import (
    among_present,
    normalize_inverse,
    normalizers,
    squared_distance,
)
from softfree.ops.attention.settings import AttentionSettings, InverseSettings
from softfree.ops.attention.solve import inverse_factor, solve, solve_backward

LOG2_E = math.log2(math.e)  # exp(x) is 2^(x log2 e), several times as fast on some processors


def landmark_matrix(landmarks: Tensor, landmark_mask: Tensor | None, scale: float) -> Tensor:
    """``A`` of landmarks (batch, heads, m, d) and their mask (batch, m): (batch, heads, m, m)."""
    a = squared_distance(landmarks, landmarks).mul_(-0.5 * scale * LOG2_E).exp2_()
    return a if landmark_mask is None else among_present(a, landmark_mask[:, None, :])


def invert_landmarks(
    landmarks: Tensor, landmark_mask: Tensor | None, settings: AttentionSettings
) -> tuple[Tensor, Tensor]:
    """Kernel matrix and what is kept of its inverse, of landmarks (batch, heads, m, d): two (batch, heads, m, m)."""
    a = landmark_matrix(landmarks, landmark_mask, settings.scale)
    if settings.inverse.method == "solve":
        return a, inverse_factor(a, settings.inverse.ridge)
    # Elsewhere float64 is slow or absent.
    newton = factored_newton if a.device.type == "cpu" else newton_iterate
    return a, newton(a, settings.inverse)


def mix(u: Tensor, a: Tensor, inverse: Tensor, settings: AttentionSettings) -> Tensor:
    """``W = Y' U``, (batch, heads, m, d_v)."""
    if settings.inverse.method == "solve":
        root = normalizers(a, settings.normalize)
        return root * solve(inverse, root * u, settings.inverse.ridge, settings.inverse.order)
    return (normalize_inverse(inverse, a) if settings.normalize else inverse) @ u


def mixing_backward(
    grad_w: Tensor,
    u: Tensor,
    a: Tensor,
    inverse: Tensor,
    landmarks: Tensor,
    landmark_mask: Tensor | None,
    settings: AttentionSettings,
) -> tuple[Tensor, Tensor, Tensor]:
    """From dW to ``W = Y' U``, ``dU = Y'^T dW`` and the gradient of the landmarks through ``Y'`` alone.

    ``dY' = dW U^T`` has the rank of the channels, so no m x m x m product is needed: with
    ``left = Y^T D^-1/2 dW`` and ``right = Y D^-1/2 U``, Eq. 12 is ``dA = -Y^T dY Y^T = -left right^T``; for a solve
    see :func:`softfree.ops.attention.solve.solve_backward`. What reaches ``A`` through ``D`` is the same in a whole row. Through the exponential,
    ``dL_i = scale * sum_j (E_ij + E_ji) (L_j - L_i)`` with ``E = A * dA``.

    Args:
        grad_w, u: (batch, heads, m, d_v); a, inverse: (batch, heads, m, m);
            landmarks: (batch, heads, m, d), 0 where masked.
    """
    root = normalizers(a, settings.normalize)
    root_u, root_grad_w = root * u, root * grad_w
    right, left, grad_a = _inverse_backward(inverse, root_u, root_grad_w, settings.inverse)
    if settings.normalize:
        rows = (root_grad_w * right + root_u * left).sum(-1, keepdim=True)
        grad_a = grad_a - 0.5 * root.square() * rows
    e = settings.scale * a * (grad_a + grad_a.mT)
    if landmark_mask is not None:
        e = torch.where(landmark_mask[:, None, :, None] & landmark_mask[:, None, None, :], e, 0)
    # Close landmarks far from the origin: the difference cancels most digits of its terms, and at this
    # size float64 costs little.
    e, points = e.double(), landmarks.double()
    grad_landmarks = (e @ points - e.sum(-1, keepdim=True) * points).to(landmarks.dtype)
    return root * right, root * left, grad_landmarks


def _inverse_backward(
    inverse: Tensor, x: Tensor, grad: Tensor, settings: InverseSettings
) -> tuple[Tensor, Tensor, Tensor]:
    """``Y x``, ``Y^T grad`` and the gradient of A."""
    if settings.method == "solve":
        return solve_backward(inverse, x, grad, settings.ridge, settings.order)
    right, left = inverse @ x, inverse.mT @ grad
    return right, left, -(left @ right.mT)
