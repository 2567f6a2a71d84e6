"""Pictures that stay on the device: decoded once, cropped, resized and mirrored there in whole batches.

    pictures = ResidentImages(dataset, device, workers=4)
    batch = pictures.random_crops(indices, 128, scale=(0.6, 1), ratio=(3 / 4, 4 / 3), hflip=0.5)
    batch = pictures.centre_crops(indices, 128, crop_pct=0.875)

For data of one picture size that fits a GPU's memory, such as CIFAR or Tiny-ImageNet. A training step then
waits for no loader.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from softfree.data.images import ImageDataset, Unreadable

INTERPOLATIONS = ("bilinear", "bicubic", "random")
TRIES = 10  # for a crop that fits the picture, as torchvision has it


class Indices(Dataset):
    """A data set that gives its indices, for pictures that are read elsewhere."""

    def __init__(self, length: int):
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class ResidentImages:
    """All pictures of a data set on one device: (N, 3, H, W) of 8 bits, and their labels (N,).

    Raises ValueError for pictures of different sizes, and for one that can't be read.
    """

    def __init__(self, dataset: ImageDataset, device: torch.device | str, workers: int = 0):
        kept, dataset.transform = dataset.transform, _to_array
        try:
            loader = DataLoader(dataset, batch_size=256, num_workers=workers, collate_fn=list)
            pictures, labels = self._read(dataset, loader, device)
        finally:
            dataset.transform = kept
        self.pictures, self.labels = pictures, labels

    def __len__(self) -> int:
        return len(self.pictures)

    def _read(
        self, dataset: ImageDataset, loader: DataLoader, device: torch.device | str
    ) -> tuple[Tensor, Tensor]:
        pictures, labels, count = torch.empty(0), [], 0
        for items in loader:
            for offset, item in enumerate(items):
                if isinstance(item, Unreadable):
                    raise ValueError(
                        f"--data-on-device: {item.path} can't be read: {item.reason}; remove it"
                    )
                if count == 0 and offset == 0:
                    pictures = torch.empty(
                        (len(dataset), *item[0].shape), dtype=torch.uint8, device=device
                    )
                if item[0].shape != pictures.shape[1:]:
                    sizes = [f"{s[2]} x {s[1]}" for s in (pictures.shape[1:], item[0].shape)]
                    raise ValueError(
                        f"--data-on-device needs pictures of one size: {dataset.name(0)} has "
                        f"{sizes[0]} pixels, {dataset.name(count + offset)} {sizes[1]}"
                    )
            pictures[count : count + len(items)] = torch.from_numpy(
                np.stack([item[0] for item in items])
            ).to(device)
            labels += [item[1] for item in items]
            count += len(items)
        return pictures, torch.tensor(labels, device=device)

    def random_crops(
        self,
        indices: Tensor,
        size: int,
        *,
        scale: Sequence[float],
        ratio: Sequence[float],
        hflip: float,
        interpolation: str = "bicubic",
    ) -> Tensor:
        """Random crops of the pictures, resized to (size, size) and mirrored: (b, 3, size, size), 0 to 255.

        Crops are drawn as torchvision's RandomResizedCrop draws them, from the device's generator, and
        resized with Pillow's filters: a resized row is a product of the picture's rows with a matrix.
        """
        pictures = self.pictures[indices]
        (top, left), (height, width) = random_boxes(
            len(indices), pictures.shape[2:], scale, ratio, pictures.device
        )
        cubic = torch.full_like(top, interpolation == "bicubic", dtype=torch.bool)
        if interpolation == "random":
            cubic = torch.rand(top.shape, device=top.device) < 0.5
        down = resize_matrices(top, height, pictures.shape[2], size, cubic)
        across = resize_matrices(left, width, pictures.shape[3], size, cubic)
        mirrored = torch.rand(top.shape, device=top.device) < hflip
        across = torch.where(mirrored[:, None, None], across.flip(1), across)
        return _resize(pictures, down, across)

    def centre_crops(
        self, indices: Tensor, size: int, *, crop_pct: float, interpolation: str = "bicubic"
    ) -> Tensor:
        """The middle of the pictures, ``crop_pct`` of the shorter side, as (b, 3, size, size), 0 to 255.

        As timm prepares pictures for a test: the shorter side is resized to ``size / crop_pct``, then cut.
        """
        pictures = self.pictures[indices]
        rows, columns = pictures.shape[2:]
        shorter = int(size / crop_pct)
        matrices = []
        for pixels in (rows, columns):
            resized = int(shorter * pixels / min(rows, columns))
            whole = torch.tensor([float(pixels)], device=pictures.device)
            cubic = torch.tensor([interpolation != "bilinear"], device=pictures.device)
            matrix = resize_matrices(torch.zeros_like(whole), whole, pixels, resized, cubic)
            first = round((resized - size) / 2)
            matrices.append(matrix[:, first : first + size])
        return _resize(pictures, *matrices)


def _resize(pictures: Tensor, down: Tensor, across: Tensor) -> Tensor:
    with torch.autocast(pictures.device.type, enabled=False):
        # Pillow, too, goes along the rows first and keeps 8 bits in between.
        wide = _to_levels(pictures.float() @ across.mT[:, None])
        return _to_levels(down[:, None] @ wide)


def _to_levels(pictures: Tensor) -> Tensor:
    return pictures.round_().clamp_(0, 255)


def _to_array(picture: Image.Image) -> Any:
    return np.ascontiguousarray(np.asarray(picture).transpose(2, 0, 1))


def random_boxes(
    count: int,
    picture: Sequence[int],
    scale: Sequence[float],
    ratio: Sequence[float],
    device: torch.device,
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(top, left), (height, width) of random crops of pictures (H, W), each (count,) of whole numbers.

    An area in ``scale`` of the picture's and a logarithm of width over height in ``ratio``, both uniform;
    of TRIES draws the first that fits, else the largest centred box of an allowed shape.
    """
    rows, columns = picture

    def uniform(least: float, most: float, *shape: int) -> Tensor:
        return least + (most - least) * torch.rand(shape, device=device)

    area = rows * columns * uniform(scale[0], scale[1], count, TRIES)
    shape = uniform(math.log(ratio[0]), math.log(ratio[1]), count, TRIES).exp()
    widths, heights = (area * shape).sqrt().round(), (area / shape).sqrt().round()
    fits = (widths >= 1) & (widths <= columns) & (heights >= 1) & (heights <= rows)
    first = fits.to(torch.uint8).argmax(1, keepdim=True)
    any_fits = fits.any(1)
    within = min(max(columns / rows, ratio[0]), ratio[1])
    whole = (min(rows, round(columns / within)), min(columns, round(rows * within)))
    height = torch.where(any_fits, heights.gather(1, first)[:, 0], whole[0])
    width = torch.where(any_fits, widths.gather(1, first)[:, 0], whole[1])
    top = (torch.rand(count, device=device) * (rows - height + 1)).floor()
    left = (torch.rand(count, device=device) * (columns - width + 1)).floor()
    top = torch.where(any_fits, top, (rows - whole[0]) // 2)
    left = torch.where(any_fits, left, (columns - whole[1]) // 2)
    return (top, left), (height, width)


def resize_matrices(first: Tensor, length: Tensor, pixels: int, size: int, cubic: Tensor) -> Tensor:
    """Matrices (b, size, pixels) that take ``length`` pixels from ``first`` on and resize them to ``size``.

    Pillow's filters: bicubic with a = -1/2 where ``cubic``, else bilinear, widened where the picture
    shrinks, cut at the box and with rows that sum to 1.
    """
    step = (length / size)[:, None, None]
    middle = first[:, None, None] + (torch.arange(size, device=first.device)[:, None] + 0.5) * step
    pixel = torch.arange(pixels, device=first.device)
    x = ((pixel + 0.5 - middle) / step.clamp(min=1)).abs()
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    weights = torch.where(x < 1, near, torch.where(x < 2, far, 0))
    weights = torch.where(cubic[:, None, None], weights, (1 - x).clamp(min=0))
    inside = (pixel >= first[:, None]) & (pixel < (first + length)[:, None])
    weights = weights * inside[:, None]
    return weights / weights.sum(2, keepdim=True)
