"""A photo, from a file or drawn; what a model sees of it, and where a pixel of the photo lies in that."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from softfree.data.images import UnreadableImageError, open_image

# Of the drawn photo, evening over a lake.
HORIZON = 0.58
SUN = (0.68, 0.36)  # across and down, as parts of the width and the height
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
        """A point of the photo, in its pixels, as parts of the square's width and height."""
        left, top, right, bottom = self.box
        if not (left <= x < right and top <= y < bottom):
            raise ValueError(
                f"the model sees x from {left} to {right - 1} and y from {top} to {bottom - 1} of the "
                f"photo (its central square), got {x:g},{y:g}"
            )
        return (x + 0.5 - left) / (right - left), (y + 0.5 - top) / (bottom - top)


def view(picture: Image.Image, side: int, metadata: dict[str, Any]) -> View:
    """The central square of an RGB photo at ``side`` pixels, normalised by metadata's mean and std."""
    width, height = picture.size
    edge = min(width, height)
    left, top = (width - edge) // 2, (height - edge) // 2
    box = (left, top, left + edge, top + edge)
    square = picture.resize((side, side), Image.Resampling.BICUBIC, box=box)
    mean, std = (torch.tensor(metadata[key])[:, None, None] for key in ("mean", "std"))
    pixels = torch.from_numpy(np.array(square, dtype=np.float32)).permute(2, 0, 1) / 255
    return View(square, (pixels - mean) / std, box)


def load_photo(photo: Path | None) -> Image.Image:
    """The photo in a file, or a drawn one for None."""
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
    # What lies below the horizon is the sky and the hills again, upside down.
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
