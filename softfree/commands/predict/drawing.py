"""Pictures with what was seen in them: masks, a legend, a colour for each class."""

import colorsys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2.functional import resize

from softfree.data.coco import decode_mask

OPACITY = 0.55
LEAST_SIDE = 480  # of a drawing
LETTERS = 14  # height in pixels
# Of the classes from 1 on: none like another.
COLOURS = (
    "e6194b", "3cb44b", "ffe119", "4363d8", "f58231", "911eb4", "46f0f0", "f032e6", "bcf60c", "fabebe",
    "008080", "e6beff", "9a6324", "fffac8", "800000", "aaffc3", "808000", "ffd8b1", "000075", "ff7f9f",
)  # fmt: skip


def enlarged(picture: Image.Image) -> Image.Image:
    """A small picture at a size at which labels can be read."""
    factor = max(1, LEAST_SIDE // min(picture.size))
    return picture.resize((picture.width * factor, picture.height * factor))


def masks_at(codes: Sequence[dict[str, Any]], image: Tensor) -> Tensor:
    """Run-length codes as masks (n, H, W) bool at the size of ``image``."""
    masks = np.stack([decode_mask(code, *code["size"]) for code in codes])
    return resize(torch.from_numpy(masks), list(image.shape[1:]), InterpolationMode.NEAREST).bool()


def with_legend(
    picture: Image.Image, labels: Sequence[str], colours: Sequence[tuple[int, int, int]]
) -> Image.Image:
    """The picture with a list of colours to its right."""
    font = ImageFont.load_default(LETTERS)
    width = max(int(font.getlength(label)) for label in labels) + 3 * LETTERS
    rows = max(1, picture.height // (2 * LETTERS))
    page = Image.new("RGB", (picture.width + width, picture.height), "white")
    page.paste(picture)
    pen = ImageDraw.Draw(page)
    for row, (label, fill) in enumerate(list(zip(labels, colours, strict=True))[:rows]):
        left, top = picture.width + LETTERS // 2, 2 * LETTERS * row + LETTERS // 2
        pen.rectangle((left, top, left + LETTERS, top + LETTERS), fill=fill)
        pen.text((left + 3 * LETTERS // 2, top - 2), label, "black", font)
    return page


def colour(index: int) -> tuple[int, int, int]:
    """A colour for each class, told apart from those of the others; beyond so many, only from its neighbours'.

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


def ink_on(fill: tuple[int, int, int]) -> str:
    """Black or white, whichever can be read on a colour."""
    red, green, blue = fill
    return "black" if 0.3 * red + 0.59 * green + 0.11 * blue > 150 else "white"


def place_labels(
    boxes: Sequence[Sequence[float]], widths: Sequence[float], size: tuple[int, int]
) -> list[tuple[float, float]]:
    """Left and top of a label for each box (x1, y1, x2, y2), so that none hides another.

    Above its box, inside it at the top or the bottom, or below it: the first place within the picture that is
    free. Where all are taken, further down. Boxes that come first are served first.
    """
    height = LETTERS + 4
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
    """Rows of pictures of one height, each with its name on its left."""
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


def save(path: Path, picture: Image.Image) -> None:
    """Write a picture; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.save(path)
