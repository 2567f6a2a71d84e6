"""Drawing boxes, masks, class maps and legends on pictures, each class in its colour; sheets of pictures."""

import colorsys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2.functional import pil_to_tensor, resize, to_pil_image
from torchvision.utils import draw_segmentation_masks

from softfree.data.coco import decode_mask

OPACITY = 0.55
LEAST_SIDE = 480  # of a drawing
LETTERS = 14  # height in pixels
TILE, TILE_LETTERS, COLUMNS = 320, 12, 4  # of a sheet
Colour = tuple[int, int, int]
RIGHT, WRONG = (20, 110, 40), (190, 20, 30)  # captions
# Colours of the classes from 1 on, all clearly different.
COLOURS = (
    "e6194b", "3cb44b", "ffe119", "4363d8", "f58231", "911eb4", "46f0f0", "f032e6", "bcf60c", "fabebe",
    "008080", "e6beff", "9a6324", "fffac8", "800000", "aaffc3", "808000", "ffd8b1", "000075", "ff7f9f",
)  # fmt: skip


def enlarged(picture: Image.Image) -> Image.Image:
    """Enlarge a small picture so that labels can be read."""
    factor = max(1, LEAST_SIDE // min(picture.size))
    return picture.resize((picture.width * factor, picture.height * factor))


def masks_at(codes: Sequence[dict[str, Any]], image: Tensor) -> Tensor:
    """Decode run-length codes to masks (n, H, W) bool at the size of ``image``."""
    masks = np.stack([decode_mask(code, *code["size"]) for code in codes])
    return resize(torch.from_numpy(masks), list(image.shape[1:]), InterpolationMode.NEAREST).bool()


def with_legend(
    picture: Image.Image,
    labels: Sequence[str],
    colours: Sequence[Colour],
    others: Sequence[str] = (),
) -> Image.Image:
    """Add a legend of colours to the right of a picture, also wide enough for the labels ``others``."""
    font = ImageFont.load_default(LETTERS)
    width = max(int(font.getlength(label)) for label in (*labels, *others)) + 3 * LETTERS
    rows = max(1, picture.height // (2 * LETTERS))
    page = Image.new("RGB", (picture.width + width, picture.height), "white")
    page.paste(picture)
    pen = ImageDraw.Draw(page)
    for row, (label, fill) in enumerate(list(zip(labels, colours, strict=True))[:rows]):
        left, top = picture.width + LETTERS // 2, 2 * LETTERS * row + LETTERS // 2
        pen.rectangle((left, top, left + LETTERS, top + LETTERS), fill=fill)
        pen.text((left + 3 * LETTERS // 2, top - 2), label, "black", font)
    return page


def colour(index: int) -> Colour:
    """The colour of a class, different from all others; beyond a certain number, only from its neighbours.

    Class 0 is grey.
    """
    if index == 0:
        return (110, 110, 110)
    if index <= len(COLOURS):
        red, green, blue = bytes.fromhex(COLOURS[index - 1])
        return red, green, blue
    hue = (0.61 * index) % 1
    parts = colorsys.hsv_to_rgb(hue, 0.85, 0.6 + 0.4 * (index % 2))
    return round(255 * parts[0]), round(255 * parts[1]), round(255 * parts[2])


def ink_on(fill: Colour) -> str:
    """Black or white, whichever is readable on a colour."""
    red, green, blue = fill
    return "black" if 0.3 * red + 0.59 * green + 0.11 * blue > 150 else "white"


def draw_objects(
    picture: Image.Image,
    boxes: Sequence[Sequence[float]],
    labels: Sequence[str],
    colours: Sequence[Colour],
    masks: Tensor | None = None,
    letters: int = LETTERS,
) -> Image.Image:
    """Draw boxes (x1, y1, x2, y2) in pixels, their labels, and masks (n, H, W) bool on a picture.

    Earlier objects are drawn on top of later ones.
    """
    if masks is not None and len(masks):
        # torchvision blackens pixels that are in several masks, so each is left only to the first.
        masks = masks & (masks.int().cumsum(0) == 1)
        drawn = draw_segmentation_masks(pil_to_tensor(picture), masks, OPACITY, [*colours])
        page = to_pil_image(drawn)
    else:
        page = picture.copy()
    pen, font = ImageDraw.Draw(page), ImageFont.load_default(letters)
    # Labels are drawn on top of all boxes.
    for box, fill in reversed(list(zip(boxes, colours, strict=True))):
        pen.rectangle([*box], outline=fill, width=3 if letters >= LETTERS else 2)
    widths = [font.getlength(label) + 6 for label in labels]
    places = place_labels(boxes, widths, page.size, letters)
    for label, (left, top), width, fill in zip(labels, places, widths, colours, strict=True):
        pen.rectangle((left, top, left + width, top + letters + 4), fill=fill)
        pen.text((left + 3, top), label, ink_on(fill), font)
    return page


def place_labels(
    boxes: Sequence[Sequence[float]],
    widths: Sequence[float],
    size: tuple[int, int],
    letters: int = LETTERS,
) -> list[tuple[float, float]]:
    """Left and top of a label for each box (x1, y1, x2, y2), so that labels don't hide each other.

    A label is placed above its box, inside it at the top or the bottom, or below it: at the first free place
    inside the picture. If none is free, it moves further down. Earlier boxes are placed first.
    """
    height = letters + 4
    taken: list[tuple[float, float, float]] = []

    def free(left: float, top: float, width: float) -> bool:
        return all(
            left + width <= other or other + wide <= left or abs(top - high) >= height
            for other, high, wide in taken
        )

    places = []
    for (x1, y1, _, y2), width in zip(boxes, widths, strict=True):
        left = max(0.0, min(x1, size[0] - width))
        lowest = max(0.0, size[1] - height)
        wanted = [y1 - height, y1, y2 - height, y2]
        wanted += [y1 + step * height for step in range(1, int(size[1] // height))]
        tops = [max(0.0, min(top, lowest)) for top in wanted]
        top = next((top for top in tops if free(left, top, width)), tops[0])
        taken.append((left, top, width))
        places.append((left, top))
    return places


def rows_of_pictures(rows: Mapping[str, Sequence[Image.Image]], height: int = 320) -> Image.Image:
    """Rows of pictures of equal height, with the name of each row on its left."""
    font, gap = ImageFont.load_default(2 * LETTERS), LETTERS // 2
    scaled = {
        name: [p.resize((max(1, round(p.width * height / p.height)), height)) for p in pictures]
        for name, pictures in rows.items()
    }
    names = int(max(font.getlength(name) for name in rows)) + 2 * gap
    width = names + max(sum(p.width + gap for p in pictures) for pictures in scaled.values())
    page = Image.new("RGB", (width, len(rows) * (height + gap)), "white")
    pen = ImageDraw.Draw(page)
    for row, (name, pictures) in enumerate(scaled.items()):
        top, left = row * (height + gap), names
        pen.text((gap, top + height // 2 - LETTERS), name, "black", font)
        for picture in pictures:
            page.paste(picture, (left, top))
            left += picture.width + gap
    return page


class Tile(NamedTuple):
    """A picture on a sheet, its caption, and the colours it uses, by name."""

    picture: Image.Image
    caption: str = ""
    ink: Colour = (0, 0, 0)
    legend: Mapping[str, Colour] = {}


def to_tile(image: Tensor, caption: str = "", ink: Colour = (0, 0, 0)) -> Tile:
    """Make a tile of a picture (3, H, W) uint8."""
    return Tile(_at_tile_size(image), caption, ink)


def objects_tile(
    image: Tensor, target: Mapping[str, Any], class_names: Sequence[str], caption: str = ""
) -> Tile:
    """Make a tile of a picture (3, H, W) uint8 with the objects of a target, or detections with their scores.

    ``class_names`` are the names of the labels from 1 on.
    """
    picture = _at_tile_size(image)
    scale = picture.width / image.shape[2]
    numbers = target["labels"].tolist()
    names = [class_names[number - 1] for number in numbers]
    labels = names
    if "scores" in target:
        scores = target["scores"].tolist()
        labels = [f"{name} {score:.0%}" for name, score in zip(names, scores, strict=True)]
    colours = [colour(number) for number in numbers]
    masks = None
    if "masks" in target:
        size = [picture.height, picture.width]
        masks = torch.as_tensor(target["masks"]).to("cpu", torch.uint8)
        masks = resize(masks, size, InterpolationMode.NEAREST).bool()
    boxes = (scale * torch.as_tensor(target["boxes"]).float()).tolist()
    drawn = draw_objects(picture, boxes, labels, colours, masks, TILE_LETTERS)
    return Tile(drawn, caption)


def class_map_tile(
    image: Tensor, class_map: Tensor, class_names: Sequence[str], caption: str = ""
) -> Tile:
    """Make a tile of a picture (3, H, W) uint8 with pixels in the colour of their class, or dark without one.

    ``class_map`` (H', W') may have another size.
    """
    picture = _at_tile_size(image)
    size = [picture.height, picture.width]
    classes = resize(class_map[None].to("cpu", torch.uint8), size, InterpolationMode.NEAREST)[
        0
    ].numpy()
    seen = [number for number in np.unique(classes).tolist() if number < len(class_names)]
    palette = np.zeros((256, 3), np.float32)
    for number in seen:
        palette[number] = colour(number)
    painted = (1 - OPACITY) * np.asarray(picture) + OPACITY * palette[classes]
    drawn = Image.fromarray(painted.round().astype(np.uint8))
    return Tile(drawn, caption, legend={class_names[number]: colour(number) for number in seen})


def in_turn(truths: Sequence[Tile], guesses: Sequence[Tile]) -> list[Tile]:
    """Arrange tiles for a sheet in which each row of truths is followed by its row of guesses."""
    rows: list[Tile] = []
    for first in range(0, len(truths), COLUMNS):
        part = slice(first, first + COLUMNS)
        blank = [Tile(Image.new("RGB", (1, 1), "white"))] * (COLUMNS - len(truths[part]))
        rows += [*truths[part], *blank, *guesses[part], *blank]
    return rows


def sheet(tiles: Sequence[Tile], title: str) -> Image.Image:
    """A page of tiles in rows of COLUMNS, each with its caption, with a title above and a legend below."""
    font, gap = ImageFont.load_default(LETTERS), LETTERS // 2
    line = LETTERS + gap
    captioned = line if any(tile.caption for tile in tiles) else 0
    columns = min(COLUMNS, max(1, len(tiles)))
    width = max(columns * (TILE + gap) + gap, int(font.getlength(title)) + 2 * gap)
    rows = [tiles[first : first + columns] for first in range(0, len(tiles), columns)]
    heights = [max(tile.picture.height for tile in row) + captioned + gap for row in rows]
    legend = {name: fill for tile in tiles for name, fill in tile.legend.items()}
    places, below = _flow(legend, font, width)
    top = line + gap
    page = Image.new("RGB", (width, top + sum(heights) + below), "white")
    pen = ImageDraw.Draw(page)
    pen.text((gap, gap), title, "black", font)
    for row, height in zip(rows, heights, strict=True):
        for column, tile in enumerate(row):
            left = gap + column * (TILE + gap)
            page.paste(tile.picture, (left, top))
            caption = _shortened(tile.caption, font)
            pen.text((left, top + tile.picture.height + 2), caption, tile.ink, font)
        top += height
    for (name, fill), (left, down) in zip(legend.items(), places, strict=True):
        pen.rectangle((left, top + down, left + LETTERS, top + down + LETTERS), fill=fill)
        pen.text((left + LETTERS + gap, top + down - 2), name, "black", font)
    return page


def _at_tile_size(image: Tensor) -> Image.Image:
    """Resize a picture (3, H, W) uint8 so that its longer side fits a tile; small ones show square pixels."""
    picture = to_pil_image(image.cpu())
    scale = TILE / max(picture.size)
    size = max(1, round(scale * picture.width)), max(1, round(scale * picture.height))
    how = Image.Resampling.NEAREST if scale > 2 else Image.Resampling.BICUBIC
    return picture.resize(size, how)


def _flow(names: Iterable[str], font: Any, width: int) -> tuple[list[tuple[int, int]], int]:
    """Positions of a legend's entries, wrapped into lines, and the total height."""
    gap, line, places = LETTERS // 2, 3 * LETTERS // 2, []
    left = top = 0
    for name in names:
        wide = int(font.getlength(name)) + 2 * LETTERS + gap
        if left and left + wide > width:
            left, top = 0, top + line
        places.append((gap + left, top))
        left += wide
    return places, top + line if places else 0


def _shortened(text: str, font: Any) -> str:
    """Shorten a caption so that it fits below its tile."""
    if font.getlength(text) <= TILE:
        return text
    return next(
        (cut for n in range(len(text), 0, -1) if font.getlength(cut := f"{text[:n]}…") <= TILE), ""
    )


def save(path: Path, picture: Image.Image) -> None:
    """Write a picture; create its folder if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.save(path)
