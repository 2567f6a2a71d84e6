"""A photo, from a file or drawn, and the part of it that a model sees."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from timm.data import create_transform
from torch import Tensor

from softfree.data.images import UnreadableImageError, open_image

# The drawn photo shows evening over a lake.
HORIZON = 0.58
SUN = (0.68, 0.36)  # across and down, as fractions of the width and the height
SKY = np.array([[38, 54, 110], [236, 138, 92], [255, 214, 140]], dtype=np.float64)
HILLS = [((0.40, 0.13), (112, 86, 124)), ((0.47, 0.08), (72, 60, 98)), ((0.53, 0.05), (36, 38, 66))]


class View(NamedTuple):
    """The square of a photo that a model sees.

    Attributes:
        picture: the square, at the model's size.
        pixels: the same normalised, (3, side, side).
        box: left, top, right and bottom of the square in the photo.
    """

    picture: Image.Image
    pixels: Tensor
    box: tuple[int, int, int, int]

    def locate(self, x: float, y: float) -> tuple[float, float]:
        """Convert a point of the photo, in pixels, to fractions of the square's width and height."""
        left, top, right, bottom = self.box
        if not (left <= x < right and top <= y < bottom):
            raise ValueError(
                f"the model sees x from {left} to {right - 1} and y from {top} to {bottom - 1} of the "
                f"photo (the middle), got {x:g},{y:g}"
            )
        return (x + 0.5 - left) / (right - left), (y + 0.5 - top) / (bottom - top)


def view(picture: Image.Image, side: int, metadata: Mapping[str, Any]) -> View:
    """Prepare an RGB photo as for testing: resized, centre-cropped to ``side`` pixels, normalised.

    Args:
        metadata: mean and std; crop_pct, the share of the shorter side that the model sees (default: all of
            it); interpolation (default: bicubic).
    """
    crop_pct = metadata.get("crop_pct", 1.0)
    interpolation = metadata.get("interpolation", "bicubic")
    transform = create_transform(
        side, is_training=False, crop_pct=crop_pct, interpolation=interpolation, normalize=False
    )
    square: Tensor = transform(picture)
    mean, std = (torch.tensor(metadata[key])[:, None, None] for key in ("mean", "std"))
    seen = Image.fromarray(square.permute(1, 2, 0).numpy())
    return View(seen, (square / 255 - mean) / std, seen_box(picture.size, crop_pct))


def seen_box(size: tuple[int, int], crop_pct: float) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of the central square with ``crop_pct`` of the shorter side.

    Example:
        >>> seen_box((300, 100), 0.9)
        (105, 5, 195, 95)
    """
    edge = round(min(size) * crop_pct)
    left, top = ((length - edge) // 2 for length in size)
    return left, top, left + edge, top + edge


def load_photo(photo: Path | None) -> Image.Image:
    """Load the photo in a file; None: a drawn photo."""
    if photo is None:
        return landscape()
    if not photo.is_file():
        raise FileNotFoundError(f"no photo at {photo}")
    try:
        return open_image(photo)
    except UnreadableImageError as error:
        raise ValueError(f"{photo} can't be read as a photo: {error}") from error


def landscape(width: int = 640, height: int = 480) -> Image.Image:
    """An RGB picture of this size, the same at every call."""
    x = np.linspace(0, 1, width)[None, :]
    y = np.linspace(0, 1, height)[:, None]
    # Below the horizon, the sky and the hills are repeated upside down.
    above = np.where(y < HORIZON, y, 2 * HORIZON - y)
    ripples = 0.006 * np.sin(240 * y**2 + 9 * np.sin(5 * x)) * (y > HORIZON)
    across = np.broadcast_to(x, (height, width)) + ripples
    stops = np.array([0, 0.75, 1]) * HORIZON
    sky = np.stack([np.interp(above, stops, SKY[:, channel]) for channel in range(3)], -1)
    picture = np.broadcast_to(sky, (height, width, 3)).copy()
    distance = np.hypot((across - SUN[0]) * width / height, above - SUN[1])
    glow = np.exp(-((distance / 0.18) ** 2))[..., None]
    picture += glow * (np.array([255, 226, 170]) - picture) * 0.7
    picture[distance < 0.05] = (255, 246, 214)
    for (base, size), colour in HILLS:
        waves = np.sin(7 * across + 11 * base) + 0.5 * np.sin(19 * across + 5 * base)
        ridge = base + size * (1 - waves / 1.5) / 2
        picture[above > ridge] = colour
    water = (y > HORIZON) & np.ones_like(x, dtype=bool)
    picture[water] = picture[water] * 0.78 + np.array([6, 14, 26])
    grain = np.random.default_rng(0).normal(0, 3, picture.shape)
    return Image.fromarray((picture + grain).clip(0, 255).astype(np.uint8))
