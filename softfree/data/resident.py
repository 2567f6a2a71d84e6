"""Pictures kept on the device: decoded once, then cropped, resized and mirrored there in whole batches.

    pictures = ResidentImages(dataset, device, workers=4)
    batch = pictures.centre_crops(indices, 128, crop_pct=0.875)
    crops = RandomCrops(pictures, 128, scale=(0.6, 1), ratio=(3 / 4, 4 / 3), hflip=0.5)
    batch = crops(crops.draw(indices))

This is for pictures of equal size that fit into a GPU's memory, such as CIFAR or Tiny-ImageNet. Training
steps then don't wait for a loader.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from softfree.data.images import ImageDataset, Unreadable
from softfree.ops.shared.precision import exactly

INTERPOLATIONS = ("bilinear", "bicubic", "random")
TRIES = 10  # for a crop that fits the picture, as in torchvision


class ResidentImages:
    """All pictures of a data set on one device, and their labels (N,).

    Pictures are (N, H, 3, W) uint8. In this order both matrix products of a resize are plain batched
    products.

    Raises ValueError if pictures have different sizes or can't be read.
    """

    def __init__(self, dataset: ImageDataset, device: torch.device | str, workers: int = 0):
        kept, dataset.transform = dataset.transform, _to_array
        pictures, labels = torch.empty(0), list[int]()
        try:
            # Its own generator, because by default a loader draws from the one that the caller has seeded.
            loader = DataLoader(
                dataset, 256, num_workers=workers, collate_fn=list, generator=torch.Generator()
            )
            for items in loader:
                arrays = []
                for item in items:
                    if isinstance(item, Unreadable):
                        raise ValueError(
                            f"`data_on_device`: {item.path} can't be read: {item.reason}; remove it"
                        )
                    if not labels:
                        size = (len(dataset), *item[0].shape)
                        pictures = torch.empty(size, dtype=torch.uint8, device=device)
                    if item[0].shape != pictures.shape[1:]:
                        sizes = [f"{s[2]} x {s[0]}" for s in (pictures.shape[1:], item[0].shape)]
                        raise ValueError(
                            f"`data_on_device` needs pictures of the same size: {dataset.name(0)} has "
                            f"{sizes[0]} pixels, {dataset.name(len(labels))} has {sizes[1]}"
                        )
                    arrays.append(item[0])
                    labels.append(item[1])
                batch = torch.from_numpy(np.stack(arrays))
                pictures[len(labels) - len(items) : len(labels)] = batch.to(device)
        finally:
            dataset.transform = kept
        self.pictures, self.labels = pictures, torch.tensor(labels, device=device)

    def __len__(self) -> int:
        return len(self.pictures)

    def centre_crops(
        self, indices: Tensor, size: int, *, crop_pct: float, interpolation: str = "bicubic"
    ) -> Tensor:
        """Centre crops with ``crop_pct`` of the shorter side, as (b, 3, size, size), 0 to 255.

        This is how timm prepares test pictures: the shorter side is resized to ``size / crop_pct``, then
        cropped.
        """
        pictures = self.pictures[indices]
        rows, columns = pictures.shape[1], pictures.shape[3]
        shorter = int(size / crop_pct)
        matrices = []
        for pixels in (rows, columns):
            resized = int(shorter * pixels / min(rows, columns))
            whole = torch.full((1,), float(pixels), device=pictures.device)
            matrix = resize_matrices(
                torch.zeros_like(whole), whole, pixels, resized, interpolation != "bilinear"
            )
            begin = round((resized - size) / 2)
            matrices.append(matrix[:, begin : begin + size])
        down, across = (matrix.expand(len(pictures), -1, -1) for matrix in matrices)
        return _resize(pictures.flatten(1, 2), down, across).contiguous()


class RandomCrops:
    """Random crops of resident pictures, resized to (size, size) and mirrored.

    Crops are drawn like those of torchvision's RandomResizedCrop, and resized with Pillow's filters. Resizing
    is a product of the picture with a matrix. Boxes have integer coordinates, so the matrices come from a
    table, and all boxes of an epoch are drawn at once. So the host has little to do in a step.
    """

    def __init__(
        self,
        resident: ResidentImages,
        size: int,
        *,
        scale: Sequence[float],
        ratio: Sequence[float],
        hflip: float,
        interpolation: str = "bicubic",
    ):
        self.pictures = resident.pictures.flatten(1, 2)
        self.scale, self.ratio, self.hflip = scale, ratio, hflip
        self.rows, self.columns = resident.pictures.shape[1], resident.pictures.shape[3]
        self.longest = max(self.rows, self.columns)
        self.kinds = [
            kind == "bicubic" for kind in INTERPOLATIONS[:2] if interpolation in (kind, "random")
        ]
        # A box of each length in the middle of twice the pixels: windows onto it are boxes at all positions.
        length = torch.arange(1.0, self.longest + 1, device=self.pictures.device)
        middle = torch.full_like(length, self.longest)
        table = torch.stack(
            [resize_matrices(middle, length, 2 * self.longest, size, kind) for kind in self.kinds]
        )
        table = torch.stack([table, table.flip(-2)], 1).flatten(0, 2)
        # (filters x mirrored x lengths, windows, size, pixels), a view of the table.
        self.matrices = table.unfold(-1, self.longest, 1).transpose(1, 2)

    def draw(self, indices: Tensor) -> Tensor:
        """Draw crops of the pictures ``indices`` (n,) with the device's generator: integers (5, n).

        They are the indices and, for both directions (down, across), the matrix in the table and its window.
        """
        count, device = len(indices), indices.device
        boxes = random_boxes(count, (self.rows, self.columns), self.scale, self.ratio, device)
        first, length = (numbers.long() for numbers in boxes)
        mirrored, kind = torch.rand(2, count, device=device)
        matrix = length - 1 + 2 * self.longest * (kind * len(self.kinds)).long()
        matrix[1] += self.longest * (mirrored < self.hflip)
        return torch.cat([indices[None], matrix, self.longest - first])

    def __call__(self, plan: Tensor) -> Tensor:
        """Make the crops of a slice (5, b) of what was drawn: (b, 3, size, size), 0 to 255.

        In memory they are (b, size, 3, size), as computed; the next operation can choose another layout.
        """
        down, across = self.matrices[plan[1:3], plan[3:5]].unbind()
        return _resize(
            self.pictures.index_select(0, plan[0]),
            down.narrow(2, 0, self.rows),
            across.narrow(2, 0, self.columns),
        )


def _resize(pictures: Tensor, down: Tensor, across: Tensor) -> Tensor:
    """Resize (b, H x 3, W) by (b, size, H) and (b, size, W) to (b, 3, size, size).

    It is stored as (b, size, 3, size).
    """
    # In TF32, which training allows, some pixels would be off by one level.
    with exactly(pictures.device):
        # Like Pillow, resize along the rows first and round to 8 bits in between.
        wide = _to_levels(torch.bmm(pictures.float(), across.mT))
        resized = _to_levels(torch.bmm(down, wide.view(len(wide), down.shape[2], -1)))
    size = across.shape[1]
    return resized.view(-1, size, 3, size).transpose(1, 2)


def _to_levels(pictures: Tensor) -> Tensor:
    return pictures.round_().clamp_(0, 255)


def _to_array(picture: Image.Image) -> Any:
    return np.ascontiguousarray(np.asarray(picture).transpose(0, 2, 1))


def random_boxes(
    count: int,
    picture: tuple[int, int],
    scale: Sequence[float],
    ratio: Sequence[float],
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Positions (top, left) and lengths (height, width) of random crops of pictures (H, W), both (2, count).

    The share of the area is uniform in ``scale``, and width / height is log-uniform in ``ratio``. The first of
    TRIES draws that fits is taken, else the largest centred box of an allowed shape. All numbers are integers.
    """
    rows, columns = picture
    within = min(max(columns / rows, ratio[0]), ratio[1])
    sides = _constant((rows, columns), device)[:, None]
    largest = _constant(
        (min(rows, round(columns / within)), min(columns, round(rows * within))), device
    )[:, None]

    def uniform(least: float, most: float) -> Tensor:
        return torch.empty(TRIES, count, device=device).uniform_(least, most)

    area = uniform(rows * columns * scale[0], rows * columns * scale[1])
    shape = uniform(math.log(ratio[0]), math.log(ratio[1])).exp_()
    lengths = torch.stack([area / shape, area * shape]).sqrt_().round_()
    fits = ((lengths >= 1) & (lengths <= sides[..., None])).all(0)
    chosen = fits.to(torch.uint8).argmax(0).expand(2, 1, count)
    any_fits = fits.any(0)
    length = torch.where(any_fits, lengths.gather(1, chosen)[:, 0], largest)
    share = torch.where(any_fits, torch.rand(2, count, device=device), 0.5)
    return (share * (sides + 1 - length)).floor_(), length


def resize_matrices(first: Tensor, length: Tensor, pixels: int, size: int, cubic: bool) -> Tensor:
    """Matrices (..., size, pixels) that resize ``length`` pixels, starting at ``first``, to ``size``.

    ``first`` and ``length`` are integers of shape (...). The filters are Pillow's: bicubic with a = -1/2 or
    bilinear, widened when shrinking, cut off at the box, and with rows that sum to 1.
    """
    first, length = first[..., None, None], length[..., None, None]
    step = length / size
    middle = torch.addcmul(first, torch.arange(0.5, size, device=first.device)[:, None], step)
    pixel = torch.arange(0.5, pixels, device=first.device)
    # 1 in the middle of the filter, 0 one pixel off, -1 two pixels off, where the cubic ends.
    near = 1 - ((pixel - middle) / step.clamp(min=1)).abs_()
    weights = linear = near.clamp(min=0)
    if cubic:
        # Twice Keys' cubic in one formula: its inner piece is the outer one plus a term that ends at 0.
        outer = near * (near + 1).clamp_(min=0).square_()
        weights = torch.addcmul(outer, 2 - 4 * linear, linear.square())
    weights = weights * ((pixel > first) & (pixel < first + length))
    return weights / weights.sum(-1, keepdim=True)


@functools.cache
def _constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Numbers on the device, copied only once, because the host may have to wait for a copy."""
    return torch.tensor(values, dtype=torch.float32, device=device)
