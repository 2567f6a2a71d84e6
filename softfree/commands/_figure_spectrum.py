"""`softfree figure spectrum`: eigenvalues of A, and the spectral norm against m (Fig. 6 of the papers)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from softfree.analysis.capture import SoftLayer, capture_attention
from softfree.analysis.spectrum import SpectralNorms, spectral_norms
from softfree.commands._common import NARROWEST, check_figure, new_figure, save_figure
from softfree.commands._figure_common import Photo, load_photo, load_subject, look
from softfree.training.devices import choose_device

LEAST = 1e-16
SIZES = (224, 320, 416, 512, 640)


def spectrum(
    photo: Photo = None,
    /,
    checkpoint: Path | None = None,
    model: str | None = None,
    img_size: tuple[int, ...] = (),
    output: Path = Path("spectrum.png"),
    device: str = "auto",
) -> int:
    """Draw the eigenvalues of A, and the spectral norm with and without normalisation against m (Fig. 6).

    Args:
        photo: a photo of yours; otherwise one is drawn.
        checkpoint: folder that `softfree train` wrote, such as OUT/best.
        model: name of a fresh model with random weights, see `softfree models`.
        img_size: two or more sides of the squares behind the spectral norms, for larger ones have more
            landmarks; the first is also behind the eigenvalues. Otherwise 224 320 416 512 640, and the
            training's for the eigenvalues.
        output: the file to write: .png, .svg or .pdf.
        device: 'cuda', 'cpu', or 'auto' for the GPU if there is one.
    """
    check_figure("--output", output)
    if img_size and (len(img_size) < 2 or min(img_size) < NARROWEST):
        given = " ".join(map(str, img_size))
        raise ValueError(f"--img-size must be two or more, each at least {NARROWEST}, got {given}")
    where = choose_device(device)
    picture = load_photo(photo)
    subject = load_subject(checkpoint, model, where)
    first = img_size[0] if img_size else None
    captured = capture_attention(subject.model, look(picture, subject, first).pixels)
    if not captured.soft_layers:
        raise ValueError(f"{subject.title} has no softmax-free layer, and so no matrix A")
    norms: dict[int, list[SpectralNorms]] = {}
    progress = track(
        sorted(set(img_size or SIZES)), "sizes", console=Console(stderr=True), transient=True
    )
    for side in progress:
        found = capture_attention(subject.model, look(picture, subject, side).pixels)
        last_blocks = [found.layer(stage) for stage in found.stages]
        layers = [layer for layer in last_blocks if isinstance(layer, SoftLayer)]
        # Where a class token is one landmark more, the layer still belongs to the same size.
        norms.setdefault(layers[0].m, []).extend(
            spectral_norms(layer.landmarks, layer.scale) for layer in layers
        )
    save_figure(draw(captured.soft_layers, norms, subject.title), output)
    return 0


def draw(
    layers: Sequence[SoftLayer], norms: Mapping[int, Sequence[SpectralNorms]], title: str
) -> Any:
    """Left: eigenvalues of A by stage. Right: spectral norms against m."""
    figure = new_figure(11, 4.6)
    figure.suptitle(title, fontsize=11)
    left, right = figure.subplots(1, 2)
    draw_eigenvalues(left, layers)
    draw_norms(right, norms)
    return figure


def draw_eigenvalues(axes: Any, layers: Sequence[SoftLayer]) -> None:
    """A thin line for each head, a thick one for the mean (geometric) of a stage."""
    for index, stage in enumerate(sorted({layer.stage for layer in layers})):
        members = [layer for layer in layers if layer.stage == stage]
        values = torch.cat([layer.eigenvalues for layer in members]).clamp(min=LEAST).cpu().numpy()
        number = np.arange(1, values.shape[1] + 1)
        axes.plot(number, values.T, color=f"C{index}", alpha=0.15, linewidth=0.6)
        mean = np.exp(np.log(values).mean(0))
        axes.plot(number, mean, f"C{index}-", linewidth=2, label=f"stage {stage}, m = {len(mean)}")
    axes.set(yscale="log", xlabel="number of the eigenvalue", ylabel="eigenvalue")
    axes.set_title("(a) Eigenvalues of A: each head, and their mean", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def draw_norms(axes: Any, norms: Mapping[int, Sequence[SpectralNorms]]) -> None:
    """A cross for each head of each layer, a line through the means."""
    counts = sorted(norms)
    for index, (field, label) in enumerate(
        (
            ("without", r"without normalisation, $\|A^\dagger\|_2$ (SOFT)"),
            ("normalized", r"with, $\|D^{-1/2} A^\dagger D^{-1/2}\|_2$ (SOFT++)"),
        )
    ):
        values = [torch.cat([getattr(found, field) for found in norms[m]]).cpu() for m in counts]
        for m, found in zip(counts, values, strict=True):
            axes.plot([m] * len(found), found, "+", color=f"C{index}", alpha=0.25)
        axes.plot(counts, [found.mean() for found in values], f"C{index}-o", label=label)
    axes.set(yscale="log", xlabel="landmarks m", ylabel="spectral norm")
    axes.set_title("(b) Spectral norm: + each head, o the mean", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
