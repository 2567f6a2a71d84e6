"""The m x m part of the operator: from landmarks to the matrix between the two kernels, and back.

The mixing matrix ``Y'`` is the inverse ``Y`` of the landmark kernel ``A`` (SOFT) or its normalised form
``D^-1/2 Y D^-1/2`` with ``D = diag(A 1)`` (SOFT++). No function here looks at a token.
"""

import torch
from torch import Tensor

from softfree.ops.inverse import newton_iterate
from softfree.ops.reference import landmark_kernel, normalize_inverse


def invert_landmarks(
    landmarks: Tensor,
    landmark_mask: Tensor | None,
    *,
    scale: float,
    iterations: int,
    start: str,
    ridge: float,
) -> tuple[Tensor, Tensor]:
    """Kernel matrix and inverse of landmarks (batch, heads, m, d): two (batch, heads, m, m)."""
    mask = None if landmark_mask is None else landmark_mask[:, None, :]
    a = landmark_kernel(landmarks, mask, scale)
    on_cpu = a.device.type == "cpu"
    return a, newton_iterate(a, iterations, start, ridge, may_stop_early=on_cpu)


def mixing_matrix(a: Tensor, inverse: Tensor, normalize: bool) -> Tensor:
    """``Y'``, (batch, heads, m, m)."""
    return normalize_inverse(inverse, a) if normalize else inverse


def mixing_backward(
    grad_mixing: Tensor,
    a: Tensor,
    inverse: Tensor,
    landmarks: Tensor,
    landmark_mask: Tensor | None,
    *,
    scale: float,
    normalize: bool,
) -> Tensor:
    """Gradient of the landmarks through ``Y'`` alone, (batch, heads, m, d).

    ``dA = -Y^T dY Y^T`` (Eq. 12), plus what reaches ``A`` through ``D``; then through the exponential,
    ``dL_i = scale * sum_j (E_ij + E_ji) (L_j - L_i)`` with ``E = A * dA``.
    """
    grad_inverse = grad_mixing
    grad_rows = None
    if normalize:
        root = a.sum(-1, keepdim=True).rsqrt()
        grad_inverse = root * grad_mixing * root.mT
        weighted = grad_inverse * inverse
        # d/dD_i of D^-1/2 Y D^-1/2, taken over row and column i
        grad_rows = (
            -0.5 * root.square() * (weighted.sum(-1, keepdim=True) + weighted.sum(-2)[..., None])
        )
    grad_a = -(inverse.mT @ grad_inverse @ inverse.mT)
    if grad_rows is not None:
        grad_a = grad_a + grad_rows
    e = a * grad_a
    e = scale * (e + e.mT)
    if landmark_mask is not None:
        e = torch.where(landmark_mask[:, None, :, None] & landmark_mask[:, None, None, :], e, 0)
        landmarks = torch.where(landmark_mask[:, None, :, None], landmarks, 0)
    return e @ landmarks - e.sum(-1, keepdim=True) * landmarks
