"""Pictures for training and inference: data sets of them, and decoding that survives bad files.

    loader = DataLoader(data.train, collate_fn=collate_images, ...)

A data set here is map-style. Its item is (picture, label), or :class:`Unreadable` for a file that can't be
decoded, so that one bad file in a million does not end a run.
"""

import hashlib
import logging
import os
import random
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import v2

EXTENSIONS = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
# Pillow knows more, told by a file's content and not by its name; for some it starts other programs.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
TRAIN_NAMES = ("train", "training")
VAL_NAMES = ("val", "validation", "valid", "test")
TEST_NAMES = ("test", "testing")
# A header may promise a picture that does not fit into memory. The largest in ImageNet has 61 million.
MAX_PIXELS = 100_000_000
# Resized to a short side, a picture of one row of pixels would get this many times larger, squared.
MAX_RATIO = 100
MAX_NAMED = 5
logger = logging.getLogger(__name__)
T = TypeVar("T")


class MapData(Protocol):
    """A map-style data set."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...


class UnreadableImageError(ValueError):
    """A picture that can't be decoded; its text is the reason, without the path."""


@dataclass(frozen=True)
class Unreadable:
    """Stands in a batch for a picture that could not be decoded."""

    path: str
    reason: str


class Batch(NamedTuple):
    """images (b, 3, H, W), labels (b,) int64, and the files that could not be read."""

    images: Tensor
    labels: Tensor
    unreadable: list[Unreadable]


class ImageDataset(Dataset):
    """Labelled pictures. A subclass has ``__len__``, ``read`` and ``name``.

    Attributes:
        transform: from a PIL picture to what an item holds; None: the picture itself.
        strict: raise for a picture that can't be decoded, instead of an :class:`Unreadable` item.
    """

    def __init__(self, strict: bool = False):
        self.transform: Callable[..., Any] | None = None
        self.strict = strict

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, index: int) -> tuple[Image.Image, Any]:
        """The RGB picture and its label; raises :class:`UnreadableImageError`."""

    @abstractmethod
    def name(self, index: int) -> str:
        """The file behind an item, for messages."""

    def prepare(self, picture: Image.Image, label: Any) -> tuple[Any, Any]:
        """An item of what was read."""
        return (picture if self.transform is None else self.transform(picture)), label

    def __getitem__(self, index: int) -> Any:
        try:
            picture, label = self.read(index)
        except UnreadableImageError as error:
            if self.strict:
                raise ValueError(f"{self.name(index)} can't be read: {error}") from error
            return Unreadable(self.name(index), str(error))
        return self.prepare(picture, label)


class ImageFiles(ImageDataset):
    """Files of pictures and their labels."""

    def __init__(self, paths: Sequence[str], labels: Sequence[int], strict: bool = False):
        super().__init__(strict)
        self.paths = paths
        self.labels = labels

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, index: int) -> tuple[Image.Image, int]:
        return open_image(self.paths[index]), self.labels[index]

    def name(self, index: int) -> str:
        return self.paths[index]


@dataclass(frozen=True)
class ImageData:
    """What a classification run reads.

    ``mirrors`` says whether a mirrored picture keeps its class (not so for digits): training may flip it.
    """

    train: ImageDataset
    val: ImageDataset
    class_names: tuple[str, ...]
    mirrors: bool = True


def both_splits(load: Callable[[str], T]) -> tuple[T, T]:
    """``load("train")`` and ``load("val")``; the faults of both in one error."""
    found, faults = [], []
    for split in ("train", "val"):
        try:
            found.append(load(split))
        except (ValueError, FileNotFoundError) as error:
            faults.append(error)
    if faults:
        kind = FileNotFoundError if isinstance(faults[0], FileNotFoundError) else ValueError
        # What is no matter of one split, such as a missing folder, is said once.
        raise kind("\n".join(dict.fromkeys(map(str, faults)))) from faults[0]
    return found[0], found[1]


def some(names: Sequence[str]) -> str:
    """The first few of ``names``, and how many more there are."""
    text = ", ".join(map(printable, names[:MAX_NAMED]))
    more = len(names) - MAX_NAMED
    return f"{text} and {more:,} more" if more > 0 else text


def find_split(root: Path, names: Sequence[str], what: str = "") -> Path:
    """The folder of ``root`` with the first of ``names``, or an error that says what is there instead."""
    for name in names:
        if (root / name).is_dir():
            return root / name
    expected = f"{names[0]}/ (or {', '.join(f'{name}/' for name in names[1:])}){what}"
    raise FileNotFoundError(f"`data_dir` {root} has no folder {expected}; found {listing(root)}")


def check_embedded(split: str, data: str) -> None:
    """Refuse a split that the embedded ``data`` do not have."""
    if split not in ("train", "val"):
        raise ValueError(
            f"`split` {split}: the embedded {data} have train and val alone; `data_dir` names other data"
        )


def listing(folder: Path) -> str:
    """What a folder holds."""
    return some(sorted(p.name + "/" * p.is_dir() for p in folder.iterdir())) or "nothing"


def image_files(folder: Path) -> list[str]:
    """Paths of the pictures in a folder and its subfolders, by their extension, sorted."""
    return sorted(walk_images(folder))


def walk_images(folder: str | Path, seen: set[tuple[int, int]] | None = None) -> Iterator[str]:
    """The same one by one: files alone, what else has such a name is logged; links are followed, no folder twice."""
    seen = set() if seen is None else seen
    try:
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in seen:
            return
        seen.add((status.st_dev, status.st_ino))
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        logger.warning("skipped %s: %s", printable(str(folder)), error.strerror)
        return
    for entry in entries:
        is_picture = entry.name.lower().endswith(EXTENSIONS) and not entry.name.startswith(".")
        # Of an entry alone these raise for links that lead to themselves.
        if os.path.isdir(entry) if entry.is_symlink() else entry.is_dir():
            yield from walk_images(entry.path, seen)
        elif is_picture and (os.path.isfile(entry) if entry.is_symlink() else entry.is_file()):
            yield entry.path
        elif is_picture:
            logger.warning("skipped %s: it is no file", printable(entry.path))


def printable(text: str) -> str:
    """A text for a terminal: bytes of a file's name that are no UTF-8, and control characters, are escaped.

    Example:
        >>> print(printable("caf\\udce9\\x1b.png"))
        caf\\xe9\\x1b.png
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in as_utf8(text))


def as_utf8(text: str) -> str:
    """A file's name that a UTF-8 file can hold: bytes of it that are none are escaped."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def open_image(source: str | Path | IO[bytes], max_ratio: float = MAX_RATIO) -> Image.Image:
    """The picture in a file as RGB, turned upright, its first frame if it moves.

    Transparent parts become white. 16-bit grey is scaled to 8 bits. Raises :class:`UnreadableImageError`
    with the reason: no picture, damaged, more than MAX_PIXELS pixels, or one side more than ``max_ratio`` times the
    other; the sizes are told from the header before any pixels are decoded.
    """
    with opened(source, FORMATS, max_ratio) as picture:
        return to_rgb(picture)


def upright_size(source: str | Path) -> tuple[int, int]:
    """Width and height that :func:`open_image` would give, from the header alone; raises as it does."""
    with opened(source, FORMATS) as picture:
        width, height = picture.size
        # Quarter turns are told by the EXIF orientation, which may be anything.
        return (height, width) if picture.getexif().get(0x0112) in range(5, 9) else (width, height)


@contextmanager
def opened(
    source: str | Path | IO[bytes], formats: Sequence[str], max_ratio: float = MAX_RATIO
) -> Iterator[Image.Image]:
    """A picture that Pillow has opened, and may be decoded inside; whatever it raises there has one class."""
    try:
        with warnings.catch_warnings():
            # Pillow warns of odd metadata and of sizes below our own limit: nothing a user could act on.
            warnings.simplefilter("ignore")
            with Image.open(source, formats=tuple(formats)) as picture:
                width, height = picture.size
                if width * height > MAX_PIXELS:
                    raise UnreadableImageError(
                        f"more than the limit of {MAX_PIXELS:,} pixels: {width:,} x {height:,}"
                    )
                if max(width, height) > max_ratio * min(width, height):
                    raise UnreadableImageError(
                        f"{width:,} x {height:,} pixels: one side is more than {max_ratio} times the other"
                    )
                yield picture
    except UnreadableImageError:
        raise
    except Exception as error:  # a damaged file makes decoders raise errors of nearly any type
        raise UnreadableImageError(_reason(source, formats, error)) from error


def _reason(source: object, formats: Sequence[str], error: Exception) -> str:
    if isinstance(source, (str, Path)) and os.path.isfile(source) and not os.path.getsize(source):
        return "the file is empty"
    if isinstance(error, Image.DecompressionBombError):
        return f"more than the limit of {MAX_PIXELS:,} pixels"
    if isinstance(error, Image.UnidentifiedImageError):
        one = (
            f"none of the formats {', '.join(formats)}" if len(formats) > 1 else f"no {formats[0]}"
        )
        return f"not a picture, or {one}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


def to_rgb(picture: Image.Image) -> Image.Image:
    """An opened picture of any mode as RGB, upright; see :func:`open_image`."""
    picture.load()
    # In place where it can be: each copy of a large picture takes hundreds of megabytes.
    ImageOps.exif_transpose(picture, in_place=True)
    if picture.mode == "F":
        raise UnreadableImageError("floating-point pixels have no fixed range; save 8 or 16 bits")
    if picture.mode.startswith("I"):
        grey = np.asarray(picture).clip(0, 65535) // 257
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
    if picture.has_transparency_data:
        white = Image.new("RGBA", picture.size, "white")
        white.alpha_composite(picture if picture.mode == "RGBA" else picture.convert("RGBA"))
        return white.convert("RGB")
    return picture.convert("RGB")


def photometric(color_jitter: float) -> list[torch.nn.Module]:
    """The step of a transform that changes brightness, contrast and saturation at random; none for 0.

    Each is multiplied by a number from 1 - ``color_jitter`` to 1 + ``color_jitter``.
    """
    return [v2.ColorJitter(color_jitter, color_jitter, color_jitter)] if color_jitter else []


def part_readable(
    samples: Iterable[Any], refill: bool = False
) -> tuple[list[Any], list[Unreadable]]:
    """Items that could be read and those that could not; ``refill`` repeats some in place of the latter."""
    samples = list(samples)
    unreadable = [item for item in samples if isinstance(item, Unreadable)]
    readable = [item for item in samples if not isinstance(item, Unreadable)]
    if refill and readable:
        readable += [readable[i % len(readable)] for i in range(len(unreadable))]
    return readable, unreadable


def collate_images(
    samples: Iterable[tuple[Tensor, int] | Unreadable], *, refill: bool = False
) -> Batch:
    """Items of an :class:`ImageDataset` as a batch; give it to DataLoader as ``collate_fn``.

    Args:
        refill: repeat readable items in place of unreadable ones, so that every training batch has the
            same size. A batch without any readable item has 0 images either way.
    """
    readable, unreadable = part_readable(samples, refill)
    if not readable:
        return Batch(torch.empty(0, 3, 0, 0), torch.empty(0, dtype=torch.int64), unreadable)
    images, labels = zip(*readable, strict=True)
    return Batch(torch.stack(images), torch.tensor(labels), unreadable)


def collate_training(collate: Callable[..., Any], samples: Sequence[Any], dataset: Any) -> Any:
    """A training batch of full size, by a ``collate`` that has ``refill``.

    A batch may have unreadable items alone: the first picture of ``dataset`` that can be read steps in.
    So every process has a batch for every step.
    """
    batch = collate(samples, refill=True)
    if len(batch.unreadable) < len(samples):
        return batch
    items = (dataset[index] for index in range(len(dataset)))
    readable = next((item for item in items if not isinstance(item, Unreadable)), None)
    if readable is None:
        first = batch.unreadable[0]
        raise ValueError(
            f"none of the training pictures can be read, e.g. {first.path}: {first.reason}"
        )
    return collate([readable] * len(samples))._replace(unreadable=batch.unreadable)


def seed_generators(*key: int) -> int:
    """Seed Python's, numpy's and torch's CPU generators from the numbers of ``key``; return the seed.

    Cheap enough to be done for every picture.
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    seed = int.from_bytes(digest, "little")
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    # Not torch.manual_seed, which sees to the GPUs, too: where there is none, that takes a millisecond.
    torch.default_generator.manual_seed(seed)
    return seed


@contextmanager
def seeded(*key: int) -> Iterator[None]:
    """:func:`seed_generators` for a while: puts the generators back at the end.

    Around the reading of an item, with (seed, epoch, index) as key, it makes random transforms the same with
    any number of workers and after a resume. Putting back takes much longer than seeding.

    Example:
        >>> import random
        >>> from softfree.data import seeded
        >>> def draw(*key):
        ...     with seeded(*key):
        ...         return random.random()
        >>> draw(0, 1, 2) == draw(0, 1, 2), draw(0, 1, 2) == draw(0, 1, 3)
        (True, False)
    """
    python, numpy, generator = random.getstate(), np.random.get_state(), torch.default_generator
    kept = generator.get_state()
    seed_generators(*key)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        generator.set_state(kept)
