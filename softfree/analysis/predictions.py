"""Drawings of results: a photo with its likeliest classes, and the results of the quickstart."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from softfree.analysis.plots import new_figure, write_figure

RIGHT, WRONG, INK, FAINT = "#1a7f37", "#cf222e", "#24292f", "#8c959f"
LOSS, ACCURACY = "#8250df", "#0969da"
MAX_SIDE = 800  # of a photo in a drawing
LONGEST_LABEL = 28
ROWS, COLUMNS = 5, 6
DPI = 120
OUTLINE = 110  # grey that separates a digit from its surroundings


class Sample(NamedTuple):
    """A picture, what it shows and what the model says."""

    picture: Image.Image
    label: str
    predicted: str
    probability: float


class HeatMap(NamedTuple):
    """Where a patch looks: ``heat`` (H, W), from 0 to 1, over a picture, and (x, y) in [0, 1], the patch's centre.

    ``note`` is written below it.
    """

    title: str
    heat: np.ndarray
    note: str
    x: float
    y: float


def draw_classes(
    picture: Image.Image, labels: Sequence[str], probabilities: Sequence[float]
) -> Image.Image:
    """Draw a photo with a bar for each of its likeliest classes next to it."""
    figure = _figure(9, 4)
    photo, bars = figure.subplots(1, 2, width_ratios=(1, 1))
    small = picture.copy()
    small.thumbnail((MAX_SIDE, MAX_SIDE))
    photo.imshow(small)
    photo.axis("off")
    places = range(len(labels))
    bars.barh(places, probabilities, color=[ACCURACY] + [FAINT] * (len(labels) - 1), height=0.6)
    cut = LONGEST_LABEL - 1
    short = [label if len(label) <= LONGEST_LABEL else f"{label[:cut]}…" for label in labels]
    bars.set_yticks(places, short, parse_math=False)
    bars.invert_yaxis()
    bars.set_xlim(0, 1.15)
    bars.xaxis.set_visible(False)
    bars.spines[["top", "right", "bottom"]].set_visible(False)
    bars.tick_params(length=0)
    for place, probability in zip(places, probabilities, strict=True):
        bars.text(probability + 0.015, place, f"{probability:.1%}", va="center", color=INK)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=DPI)
    return Image.open(content).convert("RGB")


def draw_quickstart(
    path: Path,
    title: str,
    samples: Sequence[Sample],
    losses: Sequence[tuple[float, float]],
    accuracies: Sequence[tuple[float, float]],
    attended: Image.Image,
    heat_maps: Sequence[HeatMap],
) -> None:
    """Draw sample predictions, the training curves, and where the model looks.

    Args:
        samples: the first ROWS x COLUMNS of them are shown.
        losses: (epoch, training loss); accuracies: (epoch, validation accuracy in percent).
        attended: the picture behind ``heat_maps``.
    """
    figure = _figure(13, 7.2)
    figure.suptitle(title, fontsize=14, fontweight="bold", color=INK)
    left, right = figure.subfigures(1, 2, width_ratios=(1, 1.05), wspace=0.03)
    curves, attention = right.subfigures(2, 1, hspace=0.05)
    _draw_samples(left, samples)
    _draw_curves(curves, losses, accuracies)
    _draw_heat_maps(attention, attended, heat_maps)
    _save(figure, path)


def _draw_samples(part: Any, samples: Sequence[Sample]) -> None:
    part.suptitle("Validation digits and what the model says", fontsize=11, color=INK)
    cells = part.subplots(ROWS, COLUMNS).flat
    for cell in cells:
        cell.axis("off")
    for cell, sample in zip(part.axes, samples, strict=False):
        right = sample.predicted == sample.label
        colour = RIGHT if right else WRONG
        cell.axis("on")
        cell.imshow(sample.picture, cmap="gray")
        cell.set(xticks=[], yticks=[])
        for spine in cell.spines.values():
            spine.set(color=colour, linewidth=2.5)
        verdict = f"{sample.predicted}  {sample.probability:.0%}"
        cell.set_title(
            verdict if right else f"{verdict}\nis a {sample.label}", color=colour, fontsize=10
        )


def _draw_curves(
    part: Any, losses: Sequence[tuple[float, float]], accuracies: Sequence[tuple[float, float]]
) -> None:
    left, right = part.subplots(1, 2)
    left.plot(*zip(*losses, strict=True), color=LOSS)
    left.set_title("Training loss", fontsize=11, color=INK)
    left.set_ylim(bottom=0)
    right.plot(*zip(*accuracies, strict=True), color=ACCURACY, marker="o", markersize=4)
    right.set_title("Validation accuracy (%)", fontsize=11, color=INK)
    last = accuracies[-1]
    place = dict(xytext=(4, -18), textcoords="offset points", ha="right")
    right.annotate(f"{last[1]:.1f}", last, **place, color=ACCURACY, fontweight="bold")
    for axes in (left, right):
        axes.set_xlabel("epoch")
        axes.set_xlim(left=0)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.xaxis.get_major_locator().set_params(integer=True)


def _draw_heat_maps(part: Any, picture: Image.Image, heat_maps: Sequence[HeatMap]) -> None:
    part.suptitle(
        "Where the marked patch of one digit looks (bright: most)", fontsize=11, color=INK
    )
    plain, *others = part.subplots(1, 1 + len(heat_maps))
    width, height = picture.size
    plain.imshow(picture)
    plain.set_title("the digit", fontsize=10, color=INK)
    for axes, heat_map in zip(others, heat_maps, strict=True):
        extent = (-0.5, width - 0.5, height - 0.5, -0.5)
        axes.imshow(
            heat_map.heat, cmap="inferno", vmin=0, vmax=1, extent=extent, interpolation="nearest"
        )
        axes.set_xlabel(heat_map.note, fontsize=9, color=INK)
        axes.contour(np.asarray(picture.convert("L")), levels=[OUTLINE], colors="white", alpha=0.6)
        axes.set_title(heat_map.title, fontsize=10, color=INK)
    for axes, heat_map in zip((plain, *others), (heat_maps[0], *heat_maps), strict=True):
        point = (heat_map.x * width - 0.5, heat_map.y * height - 0.5)
        axes.plot(*point, "s", ms=9, mfc="none", mec="#3fb950", mew=2)
        axes.set(xticks=[], yticks=[])


def _figure(width: float, height: float) -> Any:
    figure = new_figure(width, height)
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08)
    return figure


def _save(figure: Any, path: Path) -> None:
    write_figure(figure, path, dpi=DPI)
