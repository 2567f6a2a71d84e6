"""From a photo to what a model sees, and back: where a pixel of the photo lies in the model's square."""

from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor


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
