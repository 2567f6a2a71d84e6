"""Pictures with boxes, labels and masks: COCO json files, other layouts, or the embedded shapes."""

import collections
import functools
import math
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN
from torch import Tensor
from torchvision import tv_tensors
from torchvision.ops import masks_to_boxes
from torchvision.transforms import v2

from softfree.data.coco import (
    Annotations,
    check_annotations,
    decode_mask,
    shape_annotations,
)
from softfree.data.images import (
    ImageDataset,
    Unreadable,
    UnreadableImageError,
    both_splits,
    check_embedded,
    open_image,
    part_readable,
    photometric,
    some,
)
from softfree.data.layouts import LAYOUTS, announce, read_layout
from softfree.data.shapes import SHAPES, SIDE, SPLITS, draw_shapes

# ImageNet's mean, which a detector normalizes to 0, like the padding of its batches.
MEAN_COLOUR = [round(255 * mean) for mean in IMAGENET_DEFAULT_MEAN]
Target = dict[str, Any]
Sample = tuple[Tensor, Target] | Unreadable


class UnknownLayoutError(FileNotFoundError):
    """A folder in an unknown layout."""


class Packed(NamedTuple):
    """Tensors of any shapes, concatenated into one.

    Each tensor is passed between processes, pinned and copied to the GPU separately. For dozens of small ones
    this overhead takes longer than copying their content.

    Example:
        >>> import torch
        >>> [x.shape for x in Packed.of([torch.ones(2, 3), torch.ones(4)]).unpack()]
        [torch.Size([2, 3]), torch.Size([4])]
    """

    values: Tensor
    shapes: list[tuple[int, ...]]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "Packed":
        flat = [x.flatten() for x in tensors]
        return cls(torch.cat(flat) if flat else torch.empty(0), [tuple(x.shape) for x in tensors])

    def unpack(self) -> list[Tensor]:
        """The tensors, as views."""
        parts = self.values.split([math.prod(shape) for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


class DetectionBatch(NamedTuple):
    """images (3, H, W) uint8 of different sizes, their targets, and the files that could not be read."""

    packed_images: Packed
    packed_targets: dict[str, Packed]
    image_ids: list[int]
    unreadable: list[Unreadable]

    @property
    def images(self) -> list[Tensor]:
        """The pictures, (3, H, W) uint8 each."""
        return self.packed_images.unpack()

    @property
    def unit_images(self) -> list[Tensor]:
        """The pictures as torchvision's detectors expect them: floats from 0 to 1."""
        return self.packed_images._replace(values=self.packed_images.values / 255).unpack()

    @property
    def targets(self) -> list[Target]:
        """The targets of the pictures: boxes, labels, masks, ... as far as they were read, and image_id."""
        fields = {name: packed.unpack() for name, packed in self.packed_targets.items()}
        return [
            {**{name: tensors[number] for name, tensors in fields.items()}, "image_id": image_id}
            for number, image_id in enumerate(self.image_ids)
        ]


class CocoDetection(ImageDataset):
    """Images of a COCO file. An item is (image, target), see :meth:`prepare`.

    Categories are labelled 1, 2, ... in the order of their ids, which may have gaps; 0 is the background.

    Args:
        annotations: content of the file.
        read: returns the picture of an entry in ``annotations["images"]``.
        masks: also decode masks.
        transform: applied to (image, target), which contain torchvision's tv_tensors.
        layout: the layout of the folder they come from, for messages.
    """

    def __init__(
        self,
        annotations: Annotations,
        read: Callable[[dict[str, Any]], Image.Image],
        *,
        masks: bool = False,
        transform: Callable[..., tuple[Tensor, Target]] | None = None,
        layout: str = "",
    ):
        super().__init__()
        self.layout = layout
        self.annotations = annotations
        self.open = read
        self.masks = masks
        self.transform = transform
        self.images = sorted(annotations["images"], key=lambda image: image["id"])
        categories = sorted(annotations["categories"], key=lambda category: category["id"])
        self.category_ids = [category["id"] for category in categories]
        self.class_names = tuple(str(category["name"]) for category in categories)
        self._label = {number: label for label, number in enumerate(self.category_ids, start=1)}
        self._objects: dict[int, list[dict[str, Any]]] = {image["id"]: [] for image in self.images}
        for annotation in annotations["annotations"]:
            # The box of a crowd covers many objects and is useless for training. The metric handles crowds
            # itself.
            if not annotation["iscrowd"]:
                self._objects[annotation["image_id"]].append(annotation)

    def __len__(self) -> int:
        return len(self.images)

    def aspect_ratio(self, index: int) -> float:
        """Width divided by height of a picture, from the annotations."""
        return self.images[index]["width"] / self.images[index]["height"]

    def labels(self, index: int) -> list[int]:
        """Labels of a picture's objects."""
        objects = self._objects[self.images[index]["id"]]
        return [self._label[annotation["category_id"]] for annotation in objects]

    def name(self, index: int) -> str:
        return self.images[index]["file_name"]

    def read(self, index: int) -> tuple[Image.Image, dict[str, Any]]:
        """The picture, and its entry in ``annotations["images"]``."""
        entry = self.images[index]
        picture = self.open(entry)
        width, height = picture.size
        if (width, height) != (entry["width"], entry["height"]):
            expected = f"{entry['width']} x {entry['height']} in the annotations"
            raise UnreadableImageError(f"{width} x {height} pixels, but {expected}")
        return picture, entry

    def prepare(self, picture: Image.Image, entry: dict[str, Any]) -> tuple[Tensor, Target]:
        """Return the image (3, H, W) uint8 and its target.

        The target has boxes (n, 4) as x1, y1, x2, y2; labels (n,); masks (n, H, W); image_id.
        """
        width, height = picture.size
        objects = self._objects[entry["id"]]
        boxes = torch.tensor([a["bbox"] for a in objects], dtype=torch.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        boxes = boxes.clamp(torch.zeros(4), torch.tensor([width, height] * 2, dtype=torch.float32))
        target: Target = dict(
            boxes=tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=(height, width)),
            labels=torch.tensor([self._label[a["category_id"]] for a in objects]).long(),
            image_id=entry["id"],
        )
        if self.masks:
            masks = torch.zeros(len(objects), height, width, dtype=torch.uint8)
            for mask, a in zip(masks, objects, strict=True):
                mask.copy_(torch.from_numpy(decode_mask(a["segmentation"], height, width)))
            target["masks"] = tv_tensors.Mask(masks)
        image = tv_tensors.Image(v2.functional.pil_to_tensor(picture))
        return (image, target) if self.transform is None else self.transform(image, target)


@dataclass(frozen=True)
class DetectionData:
    """The data of a detection run."""

    train: CocoDetection
    val: CocoDetection

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the labels 1, 2, ..."""
        return self.train.class_names


def load_detection(data_dir: str | None, **options: Any) -> DetectionData:
    """Load and check training and validation pictures; ``options`` are keywords of :func:`load_split`."""
    train, val = both_splits(lambda split: load_split(data_dir, split, **options))
    check_same_categories(data_dir, train, val)
    announce(train.layout, (len(train), len(val)), len(train.class_names))
    return DetectionData(train, val)


def check_same_categories(data_dir: str | None, train: CocoDetection, val: CocoDetection) -> None:
    """Raise if the splits have different categories; the message names those that differ."""
    in_train, in_val = (
        [f"{number} {name!r}" for number, name in zip(x.category_ids, x.class_names, strict=True)]
        for x in (train, val)
    )
    if in_train != in_val:
        only_train = some([category for category in in_train if category not in in_val])
        only_val = some([category for category in in_val if category not in in_train])
        raise ValueError(
            f"`data_dir` {data_dir}: the categories of train and val differ; only in train: "
            f"{only_train or 'none'}; only in val: {only_val or 'none'}"
        )


def load_split(
    data_dir: str | None,
    split: str,
    *,
    masks: bool | None = False,
    skip_bad: bool = False,
    shapes: tuple[int, int] = SHAPES,
    side: int = SIDE,
) -> CocoDetection:
    """Load a split, "train", "val" or "test"; check its annotations and that every file exists.

    Args:
        data_dir: a folder in one of the layouts of :mod:`softfree.data.layouts`; None: the embedded shapes.
        masks: also read masks; None: if any object has one.
        skip_bad: skip annotations that can't be used, instead of raising an error.
        shapes, side: the number of embedded pictures for training and validation, and their size.
    """
    if data_dir is None:
        check_embedded(split, "shapes")
        annotations = shape_annotations(shapes[SPLITS.index(split)], split=split, side=side)
        read = functools.partial(_draw_shapes, split, side)
        return CocoDetection(annotations, read, masks=masks is not False)
    root = Path(data_dir)
    if not root.is_dir():
        raise FileNotFoundError(f"`data_dir` {root} is not a folder")
    found = read_layout(root, split)
    if found is None:
        raise UnknownLayoutError(f"`data_dir` {root} has none of the supported layouts:\n{LAYOUTS}")
    layout, source, annotations, folder = found
    if masks is None:
        masks = any(annotation.get("segmentation") for annotation in annotations["annotations"])
    annotations = check_annotations(annotations, source, masks=masks, skip_bad=skip_bad)
    missing = [
        image["file_name"]
        for image in annotations["images"]
        if not os.path.isfile(folder / image["file_name"])
    ]
    if missing:
        raise FileNotFoundError(
            f"{len(missing):,} images of {source} are not in {folder}: {some(missing)}"
        )
    read = functools.partial(_read_file, folder)
    return CocoDetection(annotations, read, masks=masks, layout=layout)


def train_transform(
    short_sides: Sequence[int],
    max_size: int,
    *,
    scales: tuple[float, float] = (1.0, 1.0),
    crop: int = 0,
    color_jitter: float = 0.0,
) -> Callable[..., tuple[Tensor, Target]]:
    """Random flip, resize, colour changes and crop; objects that are cropped away completely are dropped.

    Args:
        short_sides, max_size: the picture is resized to one of the short sides, its long side within
            ``max_size``.
        scales: range of a random factor for both.
        crop: side of the square that is then cropped, with the centre of an object in it if there are any.
            Parts outside of the picture have the mean colour. 0: no crop.
        color_jitter: see :func:`softfree.data.images.photometric`.
    """
    sides, longest = list(short_sides), max_size
    if scales != (1.0, 1.0):
        low, high = scales
        sides = [*range(max(1, round(low * min(sides))), round(high * max(sides)) + 1)]
        longest = round(high * max_size)
    steps = [v2.RandomHorizontalFlip(), v2.RandomShortestSize(sides, longest)]
    steps += photometric(color_jitter)
    if crop:
        fill = {tv_tensors.Image: MEAN_COLOUR, tv_tensors.Mask: 0, "others": 0}
        steps += [ObjectCrop(crop, pad_if_needed=True, fill=fill), VisibleBoxes()]
    return v2.Compose([*steps, v2.SanitizeBoundingBoxes(), v2.ToPureTensor()])


class ObjectCrop(v2.RandomCrop):
    """A random crop with the centre of an object in it, if there are any: background alone teaches little."""

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        params = super().make_params(flat_inputs)
        boxes = next(part for part in flat_inputs if isinstance(part, tv_tensors.BoundingBoxes))
        if len(boxes):
            x1, y1, x2, y2 = boxes[int(torch.randint(len(boxes), ()))].tolist()
            height, width = boxes.canvas_size
            left, top, right, bottom = params["padding"]
            for name, middle, side, cut in (
                ("left", left + (x1 + x2) / 2, left + width + right, params["width"]),
                ("top", top + (y1 + y2) / 2, top + height + bottom, params["height"]),
            ):
                least = max(0, math.ceil(middle) - cut)
                most = min(side - cut, math.floor(middle))
                params[name] = int(torch.randint(least, max(least, most) + 1, ()))
        return params


class VisibleBoxes(torch.nn.Module):
    """After a crop, shrink boxes to what is left of the masks, if there are masks.

    Where nothing is left, boxes have no area.
    """

    def forward(self, image: Tensor, target: Target) -> tuple[Tensor, Target]:
        if "masks" not in target:
            return image, target
        masks, boxes = torch.as_tensor(target["masks"]) > 0, target["boxes"]
        left = torch.zeros(len(masks), 4)
        seen = masks.flatten(1).any(1)
        if seen.any():
            # From the first pixel's near edge to the last one's far edge.
            left[seen] = masks_to_boxes(masks[seen]) + torch.tensor([0.0, 0.0, 1.0, 1.0])
        return image, {**target, "boxes": tv_tensors.wrap(left.to(boxes.dtype), like=boxes)}


def repeat_factors(labels: Sequence[Collection[int]], share: float) -> list[float]:
    """How often each picture is shown, given the labels in it: once, or more often if it has a rare class.

    As for LVIS (Gupta et al. 2019), a class that is in a fraction f of the pictures has the factor
    max(1, sqrt(share / f)), and a picture has the factor of its rarest class.

    Example:
        >>> repeat_factors([{1}, {1}, {1, 2}, {1}], share=1.0)
        [1.0, 1.0, 2.0, 1.0]
    """
    counts = collections.Counter(label for found in labels for label in set(found))
    factor = {
        label: max(1.0, math.sqrt(share * len(labels) / count)) for label, count in counts.items()
    }
    return [max((factor[label] for label in found), default=1.0) for found in labels]


def repeat_indices(factors: Sequence[float], generator: torch.Generator) -> list[int]:
    """An epoch of n indices in random order for n pictures.

    A picture's frequency is proportional to its factor. The k-th repetition of picture i has the index
    i + k n, so that each repetition is augmented differently.
    """
    count = len(factors)
    exact = torch.tensor(factors, dtype=torch.float64)
    times = (exact + torch.rand(count, dtype=torch.float64, generator=generator)).floor().long()
    shown = [index + count * k for index, n in enumerate(times.tolist()) for k in range(n)]
    return [shown[place] for place in torch.randperm(len(shown), generator=generator)[:count]]


def aspect_ratio_order(
    ratios: Sequence[float], batch_size: int, generator: torch.Generator
) -> list[int]:
    """A random order in which each batch of ``batch_size`` has only wide pictures or only tall ones.

    The pictures of a batch are padded to the largest, so mixed batches waste half their work on padding.

    Example:
        >>> import torch
        >>> order = aspect_ratio_order([1.5, 0.7, 1.3, 0.6], 2, torch.Generator().manual_seed(0))
        >>> sorted(map(sorted, (order[:2], order[2:])))
        [[0, 2], [1, 3]]
    """
    order = torch.randperm(len(ratios), generator=generator).tolist()
    full, rest = [], []
    for wide in (True, False):
        group = [index for index in order if (ratios[index] >= 1) == wide]
        whole = len(group) - len(group) % batch_size
        full += [group[i : i + batch_size] for i in range(0, whole, batch_size)]
        rest += group[whole:]
    shuffled = torch.randperm(len(full), generator=generator).tolist()
    return [index for number in shuffled for index in full[number]] + rest


def collate_detection(samples: Iterable[Sample], *, refill: bool = False) -> DetectionBatch:
    """Turn items of a :class:`CocoDetection` into a batch; a ``collate_fn`` for DataLoader.

    Args:
        refill: repeat readable items in place of unreadable ones.
    """
    readable, unreadable = part_readable(samples, refill)
    targets = [target for _, target in readable]
    names = [name for name in targets[0] if name != "image_id"] if targets else []
    return DetectionBatch(
        Packed.of([image for image, _ in readable]),
        {name: Packed.of([target[name] for target in targets]) for name in names},
        [target["image_id"] for target in targets],
        unreadable,
    )


def _read_file(folder: Path, image: dict[str, Any]) -> Image.Image:
    return open_image(folder / image["file_name"])


def _draw_shapes(split: str, side: int, image: dict[str, Any]) -> Image.Image:
    return Image.fromarray(draw_shapes(image["id"], split=split, side=side).image)
