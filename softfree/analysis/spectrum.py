"""The spectrum behind softmax-free attention, and the effect of the normalisation (Fig. 6 of the papers)."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from softfree.analysis.capture import SoftLayer
from softfree.analysis.plots import COLOURS, STYLES, new_figure, shades
from softfree.ops.attention.reference import gaussian_kernel, normalize_inverse

LEAST = 1e-16  # eigenvalue drawn


class SpectralNorms(NamedTuple):
    """``||A+||_2`` and ``||D^-1/2 A+ D^-1/2||_2`` of each matrix, with the exact pseudo-inverse ``A+``."""

    without: Tensor
    normalized: Tensor


def spectral_norms(landmarks: Tensor, scale: float) -> SpectralNorms:
    """Spectral norms of the matrix between the kernels, (...,) each, for landmarks (..., m, d).

    The pseudo-inverse is exact, as in the papers' Fig. 6b. T Newton steps would cut off small eigenvalues and
    so bound the norm, which would hide how it grows with m.
    """
    landmarks = landmarks.double()
    a = gaussian_kernel(landmarks, landmarks, scale)
    values, vectors = torch.linalg.eigh(a)
    cut_off = values[..., -1:] * a.shape[-1] * torch.finfo(a.dtype).eps
    inverted = torch.where(values > cut_off, 1 / values, 0)
    inverse = vectors * inverted[..., None, :] @ vectors.mT
    normalized = torch.linalg.eigvalsh(normalize_inverse(inverse, a))
    return SpectralNorms(inverted.amax(-1), normalized.abs().amax(-1))


def draw_spectrum(
    layers: Sequence[SoftLayer],
    norms: Mapping[int, Sequence[SpectralNorms]],
    title: str,
    colour: str,
) -> Any:
    """Draw the eigenvalues of A by stage (left) and spectral norms against m (right).

    ``title`` names the model. ``colour`` is that of its attention; stages have shades of it.
    """
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(11, 4.6)
    figure.suptitle(f"Spectrum of the kernel between landmarks, A: {title}", fontsize=11)
    left, right = figure.subplots(1, 2)
    stages = sorted({layer.stage for layer in layers})
    # The two lightest shades are not used, since thin lines would hardly be visible in them.
    lines = zip(stages, shades(colour, len(stages) + 2), itertools.cycle(STYLES), strict=False)
    for stage, shade, style in lines:
        members = [layer for layer in layers if layer.stage == stage]
        values = torch.cat([layer.eigenvalues for layer in members]).clamp(min=LEAST).cpu().numpy()
        number = np.arange(1, values.shape[1] + 1)
        left.plot(number, values.T, color=shade, alpha=0.15, linewidth=0.6)
        mean = np.exp(np.log(values).mean(0))
        kept = torch.cat([layer.kept_eigenvalues() for layer in members]).double().mean().item()
        label = f"stage {stage}: {kept:.0f} of {len(mean)} inverted"
        left.plot(number, mean, style, color=shade, linewidth=2, label=label)
    left.set(yscale="log", xlabel="number of the eigenvalue", ylabel="eigenvalue")
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    left.set_title("(a) Eigenvalues of A: each head, and their mean", fontsize=10)
    counts = sorted(norms)
    labels = {
        "soft": r"without normalisation, $\|A^\dagger\|_2$ (SOFT)",
        "softpp": r"with, $\|D^{-1/2} A^\dagger D^{-1/2}\|_2$ (SOFT++)",
    }
    for index, (name, label) in enumerate(labels.items()):
        spread = [torch.cat([found[index] for found in norms[m]]).cpu() for m in counts]
        for m, found in zip(counts, spread, strict=True):
            right.plot([m] * len(found), found, "+", color=COLOURS[name], alpha=0.25)
        means = [found.mean() for found in spread]
        right.plot(counts, means, "-o", color=COLOURS[name], label=label)
    right.set(yscale="log", xlabel="landmarks m", ylabel="spectral norm")
    right.set_title("(b) Spectral norm: + each head, o the mean", fontsize=10)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    return figure
