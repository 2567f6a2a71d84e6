"""Drawings of where a patch of a photo attends to, per head (Fig. 4 and 7 of the papers)."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from torch import Tensor

from softfree.analysis.capture import AttentionLayer
from softfree.analysis.judgement import Judgement, judge_maps, scale_maps
from softfree.analysis.plots import new_figure

COLOURS = "viridis"
OPACITY = 0.75  # of a map over the photo
DISPLAY = 336  # pixels of a picture: 56, 28, 14 and 7 tokens are whole squares of it
# In inches: a picture, the space around it, the height of the heading, the room for the colour bar.
CELL, GAP, MARGIN, HEADING = 2.0, 0.08, 0.1, 0.35
BAR_WIDTH, BAR_LENGTH = 1.1, 4.5


class Panel(NamedTuple):
    """The heat map of one head, (H, W), between 0 and 1, and a note on its weights."""

    title: str
    heat: np.ndarray
    note: str


class Group(NamedTuple):
    """The maps of one layer, the square of the photo that its model sees, and where the patch is in it."""

    title: str
    panels: Sequence[Panel]
    square: Image.Image
    place: tuple[float, float]


def layer_title(layer: AttentionLayer, model: str = "") -> str:
    """Attention, model and grid of a layer, in words."""
    assert layer.size is not None
    rows, columns = layer.size
    where = f"stage {layer.stage}, block {layer.block}, {rows} x {columns} tokens"
    return "\n".join(filter(None, (layer.kind, model, where)))


def heat_panels(layer: AttentionLayer, place: tuple[float, float], heads: int) -> list[Panel]:
    """The maps of the first heads for the patch at ``place``."""
    maps = layer.heat_map(layer.token_at(*place))[:heads].cpu()
    scaled = scale_maps(maps).numpy()
    return [
        Panel(f"head {number}", heat, note_of(row, judged))
        for number, (heat, row, judged) in enumerate(
            zip(scaled, maps, judge_maps(maps), strict=True), 1
        )
    ]


def note_of(heat: Tensor, judged: Judgement) -> str:
    """The range of a map's weights and their total, which colours do not show."""
    spread = f"{heat.min():.3g} to {heat.max():.3g}"
    if judged.word == "dead":
        return f"next to nothing: {spread}"
    return f"alike: {spread}" if judged.word == "flat" else f"{spread}, total {judged.total:.2g}"


def draw_heat_maps(groups: Sequence[Group], heading: str, *, across: bool) -> Any:
    """Draw the photo, then a group of maps for each layer, side by side (``across``) or below each other."""
    longest = max(len(group.panels) for group in groups)
    rows, columns = (longest, len(groups)) if across else (len(groups), longest)
    # All positions are known; a layout engine would draw the figure twice to find the same ones.
    side, above, between = (0.3, 0.6, 0.0) if across else (0.45, 0.3, 0.3)
    first = MARGIN + CELL + GAP + side  # left edge of the maps
    width = first + columns * (CELL + GAP) + BAR_WIDTH
    height = HEADING + above + rows * CELL + (rows - 1) * (between + GAP) + MARGIN
    figure = new_figure(width, height, layout=None)
    figure.suptitle(heading, y=1 - 0.5 * HEADING / height, va="center")

    def show(picture: Image.Image, of: Group, left: float, row: int, markersize: float) -> Any:
        bottom = height - HEADING - above - CELL - row * (CELL + between + GAP)
        box = (left / width, bottom / height, CELL / width, CELL / height)
        cell = figure.add_axes(box, xticks=[], yticks=[])
        cell.imshow(picture.resize((DISPLAY, DISPLAY)))
        # A red cross with a white edge shows on any picture.
        point = [part * DISPLAY for part in of.place]
        cell.plot(*point, "P", color="red", markeredgecolor="white", markersize=markersize)
        return cell

    show(groups[0].square, groups[0], MARGIN, 0, 13).set_title(
        "photo; + marks the patch", fontsize=9
    )
    for index, group in enumerate(groups):
        grey = group.square.resize((DISPLAY, DISPLAY)).convert("L").convert("RGB")
        for number, panel in enumerate(group.panels):
            row, column = (number, index) if across else (index, number)
            cell = show(paint(panel.heat, grey), group, first + column * (CELL + GAP), row, 8)
            corner = dict(transform=cell.transAxes, fontsize=7, color="white")
            shade = dict(facecolor="black", alpha=0.5, linewidth=0, pad=1.5)
            cell.text(0.03, 0.03, panel.note, **corner, bbox=shade)
            column_title, row_title = (
                (group.title, panel.title) if across else (panel.title, group.title)
            )
            if row == 0 or not across:
                cell.set_title(column_title, fontsize=8 if across else 9)
            if column == 0:
                cell.set_ylabel(row_title, fontsize=9 if across else 8)
    # The colour bar at the right edge shows the colours as they are over mid-grey.
    long = min(BAR_LENGTH, height - HEADING - 2 * MARGIN)
    left, bottom = width - BAR_WIDTH + 0.1, (height - HEADING - long) / 2
    axes = figure.add_axes((left / width, bottom / height, 0.25 / width, long / height), xticks=[])
    colours = paint(np.linspace(1, 0, 256)[:, None], Image.new("RGB", (1, 256), "grey"))
    axes.imshow(colours, aspect="auto", extent=(0, 1, 0, 1))
    axes.yaxis.tick_right()
    axes.yaxis.set_label_position("right")
    axes.set_ylabel("attention: 0, or the smallest if\nnegative, to each map's largest", fontsize=8)
    return figure


def paint(heat: np.ndarray, grey: Image.Image) -> Image.Image:
    """Paint a map over the grey photo.

    Each token is a flat square, so that maps don't look finer than they are.
    """
    from matplotlib import colormaps

    colours = Image.fromarray(colormaps[COLOURS](heat, bytes=True)[..., :3])
    return Image.blend(grey, colours.resize(grey.size, Image.Resampling.NEAREST), OPACITY)
