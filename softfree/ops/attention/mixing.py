"""The m x m part of the operator: from landmarks to the matrix between the two kernels, and back.

The mixing matrix ``Y'`` is the inverse ``Y`` of the landmark kernel ``A`` (SOFT) or its normalised form
``D^-1/2 Y D^-1/2`` with ``D = diag(A 1)`` (SOFT++). No function here looks at a token.
"""

import torch
from torch import Tensor

from softfree.ops.attention.inverse import newton_iterate
from softfree.ops.attention.reference import landmark_kernel, normalize_inverse
from softfree.ops.attention.settings import AttentionSettings


def landmark_matrix(landmarks: Tensor, landmark_mask: Tensor | None, scale: float) -> Tensor:
    """``A`` of landmarks (batch, heads, m, d) and their mask (batch, m): (batch, heads, m, m)."""
    mask = None if landmark_mask is None else landmark_mask[:, None, :]
    return landmark_kernel(landmarks, mask, scale)


def invert_landmarks(
    landmarks: Tensor, landmark_mask: Tensor | None, settings: AttentionSettings
) -> tuple[Tensor, Tensor]:
    """Kernel matrix and inverse of landmarks (batch, heads, m, d): two (batch, heads, m, m)."""
    a = landmark_matrix(landmarks, landmark_mask, settings.scale)
    on_cpu = a.device.type == "cpu"
    return a, newton_iterate(a, settings.inverse, may_stop_early=on_cpu)


def mixing_matrix(a: Tensor, inverse: Tensor, normalize: bool) -> Tensor:
    """``Y'``, (batch, heads, m, m)."""
    return normalize_inverse(inverse, a) if normalize else inverse


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

    ``dY' = dW U^T`` has the rank of the channels, so Eq. 12 needs no m x m x m product: with
    ``left = Y^T D^-1/2 dW`` and ``right = Y D^-1/2 U``, ``dA = -Y^T dY Y^T = -left right^T``. What
    reaches ``A`` through ``D`` is the same in a whole row. Through the exponential,
    ``dL_i = scale * sum_j (E_ij + E_ji) (L_j - L_i)`` with ``E = A * dA``.

    Args:
        grad_w, u: (batch, heads, m, d_v); a, inverse: (batch, heads, m, m);
            landmarks: (batch, heads, m, d), 0 where masked.
    """
    root = a.sum(-1, keepdim=True).rsqrt() if settings.normalize else a.new_ones(())
    root_u, root_grad_w = root * u, root * grad_w
    right = inverse @ root_u
    left = inverse.mT @ root_grad_w
    grad_a = -(left @ right.mT)
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
