"""Pictures with class maps: ADE20K, Cityscapes, VOC, plain folders, masks of objects, or embedded data.

A class map gives every pixel its class, 0 .. n - 1, or the ignore label, which counts neither in the loss
nor in the metric. The embedded data are the shapes and the twins.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision import tv_tensors
from torchvision.datasets import Cityscapes
from torchvision.transforms import v2

from softfree.data import detection, twins
from softfree.data.coco import decode_mask
from softfree.data.images import (
    EXTENSIONS,
    TEST_NAMES,
    TRAIN_NAMES,
    VAL_NAMES,
    ImageDataset,
    Unreadable,
    UnreadableImageError,
    both_splits,
    check_embedded,
    find_split,
    image_files,
    open_image,
    opened,
    part_readable,
    photometric,
    some,
    upright_size,
)
from softfree.data.layouts import (
    ROBOFLOW_FILE,
    VOC_CLASSES,
    announce,
    find_voc,
    has_coco,
    voc_names,
    voc_pictures,
)
from softfree.data.shapes import CLASSES, SHAPES, SIDE, draw_shapes

CLASS_MAP_FORMATS = ("PNG",)
IGNORE = 255
# The largest ratio between the weights of two classes.
WEIGHT_RANGE = 20.0
ADE20K_CLASSES = 150
# The number of labels, 19 of which are classes. -1, a license plate, is 255 in 8 bits.
CITYSCAPES_IDS = 34
SPLITS = {"train": TRAIN_NAMES, "val": VAL_NAMES[:-1], "test": TEST_NAMES}
LAYOUTS = f"""\
  ADE20K      images/training, images/validation, annotations/training, annotations/validation
  Cityscapes  leftImg8bit/train, leftImg8bit/val, gtFine/train, gtFine/val
  VOC         JPEGImages, SegmentationClass, ImageSets/Segmentation/train.txt and val.txt
  folders     images/train, images/val, masks/train, masks/val, and classes.txt, one name per line
  COCO        annotations/instances_train2017.json, ..., with masks
  Roboflow    train/{ROBOFLOW_FILE}, valid/{ROBOFLOW_FILE}, with masks
  YOLO        data.yaml with names, train and val; labels/train, ... of polygons"""
Sample = tuple[Tensor, Tensor] | Unreadable
Embedded = Literal["shapes", "twins"]
TWIN_SPLITS = {"train": "train", "val": "dev", "test": "test"}


class SegmentationBatch(NamedTuple):
    """images (b, 3, H, W) uint8, class maps (b, H, W) int64, and the files that could not be read.

    In evaluation, where sizes differ, they are lists of images (3, H, W) and class maps (H, W).
    """

    images: Any
    class_maps: Any
    unreadable: list[Unreadable]


@dataclass
class SegmentationDataset(ImageDataset):
    """Pictures and class maps in files. An item is (image (3, H, W) uint8, class map (H, W) int64).

    Args:
        pairs: paths of pictures and class maps.
        ids, ignored: values in the files that stand for a class, and those that stand for none.
        classes: table from a value in the files, 0 .. 255, to its class; (256,) uint8.
        transform: applied to (image, class map), which are torchvision's tv_tensors.
        may_ignore: whether the user can choose the value that stands for no class.
        layout: the layout of the folder they come from, for messages.
    """

    pairs: Sequence[tuple[str, str]]
    ids: range
    classes: np.ndarray = field(default_factory=lambda: np.arange(256, dtype=np.uint8))
    ignored: tuple[int, ...] = (IGNORE,)
    transform: Callable[..., tuple[Tensor, Tensor]] | None = None
    may_ignore: bool = False
    layout: str = ""
    strict = False

    def __len__(self) -> int:
        return len(self.pairs)

    def read(self, index: int) -> tuple[Image.Image, np.ndarray]:
        """Read the picture and its class map (H, W) uint8."""
        picture, classes = open_image(self.pairs[index][0]), self.class_map(index)
        if picture.size != classes.shape[::-1]:
            raise UnreadableImageError(_sizes(picture.size, classes.shape[::-1]))
        return picture, classes

    def class_map(self, index: int) -> np.ndarray:
        """Read only the class map, (H, W) uint8."""
        return self.classes[read_class_ids(self.pairs[index][1])]

    def name(self, index: int) -> str:
        """The picture's file, for messages."""
        return self.pairs[index][0]

    def prepare(self, picture: Image.Image, classes: np.ndarray) -> tuple[Tensor, Tensor]:
        image = tv_tensors.Image(v2.functional.pil_to_tensor(picture))
        class_map = tv_tensors.Mask(torch.from_numpy(classes).long())
        return (image, class_map) if self.transform is None else self.transform(image, class_map)


class ShapeSegmentation(SegmentationDataset):
    """The embedded shapes; class 0 is the background."""

    def __init__(self, count: int, split: str, side: int = SIDE):
        super().__init__([("", "")] * count, range(len(CLASSES) + 1))
        self.split = split
        self.side = side

    def read(self, index: int) -> tuple[Image.Image, np.ndarray]:
        picture = draw_shapes(index, split=self.split, side=self.side)
        return Image.fromarray(picture.image), picture.class_map

    def class_map(self, index: int) -> np.ndarray:
        return self.read(index)[1]

    def name(self, index: int) -> str:
        return f"shapes {index}"


class ObjectSegmentation(SegmentationDataset):
    """Class maps drawn from the masks of objects; class 0 is everything outside of them.

    Where objects overlap, the smaller one is on top. Crowds are ignored, except for the objects in them.
    """

    def __init__(self, objects: detection.CocoDetection):
        names = [(image["file_name"], "") for image in objects.images]
        super().__init__(names, range(len(objects.class_names) + 1), layout=objects.layout)
        self.objects = objects
        labels = {number: label for label, number in enumerate(objects.category_ids, start=1)}
        self._drawn: dict[int, list[tuple[Any, int]]] = {i["id"]: [] for i in objects.images}
        for found in sorted(
            objects.annotations["annotations"], key=lambda a: (-a["iscrowd"], -a.get("area", 0))
        ):
            label = IGNORE if found["iscrowd"] else labels[found["category_id"]]
            self._drawn[found["image_id"]].append((found["segmentation"], label))

    def read(self, index: int) -> tuple[Image.Image, np.ndarray]:
        return self.objects.read(index)[0], self.class_map(index)

    def class_map(self, index: int) -> np.ndarray:
        entry = self.objects.images[index]
        height, width = entry["height"], entry["width"]
        classes = np.zeros((height, width), np.uint8)
        for segmentation, label in self._drawn[entry["id"]]:
            classes[decode_mask(segmentation, height, width).astype(bool)] = label
        return classes


class TwinSegmentation(SegmentationDataset):
    """Pictures of :mod:`softfree.data.twins`: 8 x 8 cells, half of which occur twice."""

    def __init__(self, split: str):
        self.split = TWIN_SPLITS[split]
        count = twins.COUNTS[twins.SPLITS.index(self.split)]
        super().__init__([("", "")] * count, range(len(twins.CLASSES)))

    def read(self, index: int) -> tuple[Image.Image, np.ndarray]:
        picture, classes = twins.draw_twin_picture(index, self.split)
        return Image.fromarray(picture), classes

    def class_map(self, index: int) -> np.ndarray:
        return self.read(index)[1]

    def name(self, index: int) -> str:
        return f"twins {index}"


@dataclass(frozen=True)
class SegmentationData:
    """The data of a segmentation run."""

    train: SegmentationDataset
    val: SegmentationDataset
    class_names: tuple[str, ...]


Split = tuple[SegmentationDataset, tuple[str, ...]]


def load_segmentation(data_dir: str | None, **options: Any) -> SegmentationData:
    """Load training and validation pictures with class maps.

    ``options`` are keywords of :func:`load_split`.
    """
    (train, names), (val, _) = both_splits(lambda split: load_split(data_dir, split, **options))
    if isinstance(train, ObjectSegmentation) and isinstance(val, ObjectSegmentation):
        detection.check_same_categories(data_dir, train.objects, val.objects)
    announce(train.layout, (len(train), len(val)), len(names))
    return SegmentationData(train, val, names)


def load_split(
    data_dir: str | None,
    split: str,
    *,
    dataset: Embedded = "shapes",
    ignore_label: int = IGNORE,
    skip_bad: bool = False,
    check: bool = True,
    shapes: tuple[int, int] = SHAPES,
    side: int = SIDE,
) -> Split:
    """Load the pictures and class maps of a split, "train", "val" or "test", and the names of the classes.

    Args:
        data_dir: a folder in one of the layouts of ``LAYOUTS``; None: an embedded data set.
        dataset: which embedded data set.
        ignore_label: value in the class maps of plain folders that stands for no class.
        skip_bad: skip masks of objects that can't be used, instead of raising an error.
        check: first check the sizes and class ids in every file.
        shapes, side: the number of embedded pictures for training and validation, and their size.
    """
    if data_dir is None and dataset == "twins":
        return TwinSegmentation(split), twins.CLASSES
    if data_dir is None:
        check_embedded(split, "shapes")
        count = shapes[tuple(SPLITS).index(split)]
        return ShapeSegmentation(count, split, side), ("ground", *CLASSES)
    root = Path(data_dir)
    if not root.is_dir():
        raise FileNotFoundError(f"`data_dir` {root} is not a folder")
    if not has_class_maps(root):
        return _objects(root, split, skip_bad)
    if (root / "leftImg8bit").is_dir():
        found, names = _cityscapes(root, split)
    elif (voc := find_voc(root, "SegmentationClass")) is not None:
        found, names = _voc(voc, split)
    elif (root / "annotations").is_dir() and not has_coco(root):
        found, names = _ade20k(root, split)
    else:
        found, names = _folders(root, split, ignore_label)
    if check:
        check_segmentation(found)
    return found, names


def has_class_maps(root: Path) -> bool:
    """Whether a folder has class maps as files; otherwise they are drawn from masks of objects, if any."""
    return (
        (root / "leftImg8bit").is_dir()
        or find_voc(root, "SegmentationClass") is not None
        or ((root / "images").is_dir() and (root / "annotations").is_dir() and not has_coco(root))
        or ((root / "images").is_dir() and (root / "masks").is_dir())
    )


def check_segmentation(dataset: SegmentationDataset) -> None:
    """Raise if a class map differs in size from its picture, or has a value unknown to the data set."""
    ids, bad = dataset.ids, []
    strange: dict[int, list[str]] = {}  # by value
    known = [*ids, *dataset.ignored]
    for image, class_map in dataset.pairs:
        try:
            values = read_class_ids(class_map)
        except UnreadableImageError as error:
            bad.append(str(error))
            continue
        try:
            size = upright_size(image)
        except UnreadableImageError as error:
            bad.append(f"{image}: {error}")
            continue
        if size != values.shape[::-1]:
            bad.append(f"{class_map}: {_sizes(size, values.shape[::-1])}")
            continue
        for value in np.setdiff1d(values, known).tolist():
            strange.setdefault(value, []).append(class_map)
    if not bad and not strange:
        return
    faults = [some(bad)] if bad else []
    if strange:
        found = []
        for value, paths in sorted(strange.items()):
            more = f" and {len(paths) - 1:,} more" if len(paths) > 1 else ""
            found.append(f"{paths[0]}{more}: class {value}")
        fault = (
            f"{some(found)}, but there are only {len(ids)} classes ({ids[0]} to {ids[-1]}) "
            f"and {' and '.join(map(str, dataset.ignored))} to ignore"
        )
        if dataset.may_ignore and len(strange) == 1:
            [value] = strange
            fault += f"; if {value} stands for no class, use `ignore_label` {value}"
        faults.append(fault)
    count = len(bad) + len(set().union(*strange.values()))
    raise ValueError(
        f"{count:,} of {len(dataset):,} pictures with their class maps can't be used: {'; '.join(faults)}"
    )


def read_class_ids(path: str | Path) -> np.ndarray:
    """Read the values of a class map as they are in the file, (H, W) uint8; palettes are not applied."""
    try:
        # Only these formats: Pillow detects formats by content, and starts other programs for some.
        with opened(path, CLASS_MAP_FORMATS) as picture:
            values = np.asarray(picture)
    except UnreadableImageError as error:
        raise UnreadableImageError(f"{path}: {error}") from error
    fine = values.ndim == 2 and (
        values.dtype in (np.uint8, np.bool)
        or (values.dtype.kind in "iu" and values.min() >= 0 and values.max() <= 255)
    )
    if not fine:
        raise UnreadableImageError(
            f"{path} is not a class map: expected one channel of values up to 255, "
            f"got shape {values.shape} of {values.dtype}"
        )
    return values.astype(np.uint8)


def balanced_weights(dataset: SegmentationDataset, classes: int) -> Tensor:
    """A weight for each class, (classes,), larger for those with few pixels; the mean over all pixels is 1.

    If s is a class's share of the pixels that have a class, its weight is proportional to 1 / sqrt(s), but at
    most WEIGHT_RANGE times the smallest weight. With 1 / s, a class of some hundred pixels would weigh as
    much as the background, and would be predicted everywhere.
    """
    counts = np.zeros(256, np.int64)
    for index in range(len(dataset)):
        try:
            counts += np.bincount(dataset.class_map(index).ravel(), minlength=256)
        except UnreadableImageError:
            continue  # skipped, as in training
    found = torch.from_numpy(counts[:classes]).double()
    share = found / found.sum().clamp(min=1)
    weights = share.max().clamp(min=1e-9).sqrt() / share.sqrt()
    weights = weights.clamp(max=WEIGHT_RANGE)
    return (weights / (share * weights).sum().clamp(min=1e-9)).float()


def train_transform(
    crop: int,
    *,
    short_side: int | None = None,
    scales: tuple[float, float] = (0.5, 2.0),
    color_jitter: float = 0.0,
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Random resize, flip, colour changes and crop.

    Args:
        crop: side of the square that is cropped; parts outside of the picture are ignored.
        short_side: the picture is resized to this short side times a random factor from ``scales``;
            None: it is not resized.
        color_jitter: see :func:`softfree.data.images.photometric`.
    """
    steps: list[torch.nn.Module] = []
    if short_side is not None:
        low, high = (max(1, round(scale * short_side)) for scale in scales)
        steps.append(v2.RandomShortestSize(range(low, high + 1)))
    crop_or_pad = v2.RandomCrop(
        crop, pad_if_needed=True, fill={tv_tensors.Mask: IGNORE, "others": 0}
    )
    # Padding comes last, so that its colour does not change.
    steps += [*photometric(color_jitter), v2.RandomHorizontalFlip(), crop_or_pad]
    return v2.Compose([*steps, v2.ToPureTensor()])


@dataclass(frozen=True)
class EvalTransform:
    """Resize only the picture to a short side; the metric is computed at the class map's own size."""

    short_side: int | None

    def __call__(self, image: Tensor, class_map: Tensor) -> tuple[Tensor, Tensor]:
        if self.short_side is not None:
            image = v2.functional.resize(image, [self.short_side])
        return v2.ToPureTensor()(image, class_map)


def collate_segmentation(samples: Iterable[Sample], *, refill: bool = False) -> SegmentationBatch:
    """Turn items of equal size into a batch; a ``collate_fn`` for DataLoader.

    Args:
        refill: repeat readable items in place of unreadable ones.
    """
    batch = collate_pictures(samples, refill)
    if not batch.images:
        return batch
    images, class_maps = torch.stack(batch.images), torch.stack(batch.class_maps)
    return SegmentationBatch(images, class_maps, batch.unreadable)


def collate_pictures(samples: Iterable[Sample], refill: bool = False) -> SegmentationBatch:
    """Turn items of different sizes into a batch of lists."""
    readable, unreadable = part_readable(samples, refill)
    return SegmentationBatch([x for x, _ in readable], [y for _, y in readable], unreadable)


def _ade20k(root: Path, split: str) -> Split:
    # 0 is "other", which the benchmark ignores; 1 .. 150 are the classes.
    classes = np.full(256, IGNORE, np.uint8)
    ids = range(1, ADE20K_CLASSES + 1)
    classes[ids] = np.arange(ADE20K_CLASSES)
    images, class_maps = (
        find_split(root / name, SPLITS[split]) for name in ("images", "annotations")
    )
    pairs = _pairs(images, class_maps)
    names = _ade20k_names(root / "objectInfo150.txt")
    return SegmentationDataset(pairs, ids, classes, ignored=(0, IGNORE), layout="ADE20K"), names


def _ade20k_names(path: Path) -> tuple[str, ...]:
    """Class names from the table that comes with the data set, or numbers if it is missing."""
    if not path.is_file():
        return tuple(f"class {i}" for i in range(1, ADE20K_CLASSES + 1))
    rows = _lines(path)[1 : ADE20K_CLASSES + 1]
    return tuple(row.split("\t")[-1].split(",")[0].strip() for row in rows)


def _cityscapes(root: Path, split: str) -> Split:
    labelled = [c for c in Cityscapes.classes if 0 <= c.train_id < IGNORE]
    names = tuple(c.name for c in sorted(labelled, key=lambda c: c.train_id))
    by_id = np.full(256, IGNORE, np.uint8)
    for label in labelled:
        by_id[label.id] = label.train_id
    ends = ("_gtFine_labelTrainIds.png", "_gtFine_labelIds.png")
    folder, class_maps = root / "leftImg8bit" / split, root / "gtFine" / split
    pairs = _pairs(folder, class_maps, "_leftImg8bit", ends)
    if pairs[0][1].endswith(ends[0]):
        return SegmentationDataset(pairs, range(len(names)), layout="Cityscapes"), names
    return SegmentationDataset(pairs, range(CITYSCAPES_IDS), by_id, layout="Cityscapes"), names


def _voc(root: Path, split: str) -> Split:
    listed, names = voc_names(root, split, "Segmentation")
    class_maps = [str(root / "SegmentationClass" / f"{name}.png") for name in names]
    pairs = list(zip(voc_pictures(root, listed, names), class_maps, strict=True))
    _check_there(class_maps)
    return SegmentationDataset(pairs, range(len(VOC_CLASSES)), layout="VOC"), VOC_CLASSES


def _objects(root: Path, split: str, skip_bad: bool) -> Split:
    """Load masks of objects in a layout of :mod:`softfree.data.layouts`."""
    try:
        objects = detection.load_split(str(root), split, masks=None, skip_bad=skip_bad)
    except detection.UnknownLayoutError:
        raise FileNotFoundError(
            f"`data_dir` {root} has none of the supported layouts:\n{LAYOUTS}"
        ) from None
    if not objects.masks:
        raise ValueError(
            f"`data_dir` {root} has boxes but no masks ({objects.layout} layout); segmentation needs masks"
        )
    if len(objects.class_names) >= IGNORE:
        raise ValueError(
            f"`data_dir` {root} has {len(objects.class_names)} classes, but class maps have at most {IGNORE - 1}"
        )
    return ObjectSegmentation(objects), ("background", *objects.class_names)


def _folders(root: Path, split: str, ignore_label: int) -> Split:
    if not 0 <= ignore_label <= 255:
        raise ValueError(f"`ignore_label` must be from 0 to 255, got {ignore_label}")
    names_file = root / "classes.txt"
    if not names_file.is_file():
        raise FileNotFoundError(
            f"{names_file} is missing; it must have one class name per line, class 0 first"
        )
    names = tuple(line.strip() for line in _lines(names_file) if line.strip())
    if not 0 < len(names) <= IGNORE:
        raise ValueError(f"{names_file} must name 1 to {IGNORE} classes, got {len(names)}")
    classes = np.arange(256, dtype=np.uint8)
    classes[ignore_label] = IGNORE
    images, class_maps = (find_split(root / name, SPLITS[split]) for name in ("images", "masks"))
    pairs = _pairs(images, class_maps)
    ignored = tuple(sorted({ignore_label, IGNORE}))
    dataset = SegmentationDataset(pairs, range(len(names)), classes, ignored, may_ignore=True)
    return dataset, names


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not readable as text: {error}") from error


def _pairs(
    images: Path, class_maps: Path, image_end: str = "", ends: Sequence[str] = (".png",)
) -> list[tuple[str, str]]:
    """Pair pictures with the class maps of the same name, except for their endings.

    Class maps end in the first of ``ends`` for which one exists.
    """
    found = [path for path in image_files(images) if Path(path).stem.endswith(image_end)]
    if not found:
        expected = ", ".join(image_end + extension for extension in EXTENSIONS)
        raise FileNotFoundError(f"{images} has no pictures ({expected})")
    stems = [
        str((class_maps / Path(path).relative_to(images)).with_suffix("")).removesuffix(image_end)
        for path in found
    ]
    end = next((end for end in ends if Path(stems[0] + end).is_file()), ends[-1])
    paths = [stem + end for stem in stems]
    _check_there(paths)
    alone = {path for path in image_files(class_maps) if path.endswith(end)}.difference(paths)
    if alone:
        raise FileNotFoundError(
            f"{len(alone):,} pictures are missing in {images}; there are class maps without them: "
            f"{some(sorted(alone))}"
        )
    return list(zip(found, paths, strict=True))


def _check_there(paths: Sequence[str]) -> None:
    missing = [path for path in paths if not Path(path).is_file()]
    if missing:
        raise FileNotFoundError(f"{len(missing):,} class maps are missing: {some(missing)}")


def _sizes(picture: tuple[int, ...], class_map: tuple[int, ...]) -> str:
    return f"the class map has {class_map[0]} x {class_map[1]} pixels, the picture {picture[0]} x {picture[1]}"
