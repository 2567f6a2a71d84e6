"""Pictures with what was seen in them: masks, a legend, a colour for each class."""

import colorsys
from collections.abc import Sequence
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
    """A colour for each class; neighbours in the list look different. Class 0 is grey."""
    if index == 0:
        return (110, 110, 110)
    hue = (0.61 * index) % 1
    red, green, blue = colorsys.hsv_to_rgb(hue, 0.85, 0.6 + 0.4 * (index % 2))
    return round(255 * red), round(255 * green), round(255 * blue)


def save(path: Path, picture: Image.Image) -> None:
    """Write a picture; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.save(path)
