"""The spectrum behind softmax-free attention, and what the normalisation does to it (Fig. 6 of the papers)."""

from typing import NamedTuple

import torch
from torch import Tensor

from softfree.ops.attention.reference import gaussian_kernel, normalize_inverse


class SpectralNorms(NamedTuple):
    """``||A+||_2`` and ``||D^-1/2 A+ D^-1/2||_2`` of each matrix, with the exact pseudo-inverse ``A+``."""

    without: Tensor
    normalized: Tensor


def spectral_norms(landmarks: Tensor, scale: float) -> SpectralNorms:
    """Spectral norms of the matrix between the kernels, (...,) each, for landmarks (..., m, d).

    The pseudo-inverse is exact, as in the papers' Fig. 6b: T Newton steps cut small eigenvalues off and so
    bound the norm, which would hide how it grows with m.
    """
    landmarks = landmarks.double()
    a = gaussian_kernel(landmarks, landmarks, scale)
    values, vectors = torch.linalg.eigh(a)
    cut_off = values[..., -1:] * a.shape[-1] * torch.finfo(a.dtype).eps
    inverted = torch.where(values > cut_off, 1 / values, 0)
    inverse = vectors * inverted[..., None, :] @ vectors.mT
    normalized = torch.linalg.eigvalsh(normalize_inverse(inverse, a))
    return SpectralNorms(inverted.amax(-1), normalized.abs().amax(-1))
