"""Pictures for training and inference: data sets, and decoding that survives bad files.

    loader = DataLoader(data.train, collate_fn=collate_images, ...)

Data sets here are map-style. An item is (picture, label), or :class:`Unreadable` for a file that can't be
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
# Pillow supports more formats, which it detects by content, not by name. For some it starts other programs.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
TRAIN_NAMES = ("train", "training")
VAL_NAMES = ("val", "validation", "valid", "test")
TEST_NAMES = ("test", "testing")
# A header may announce a picture that does not fit into memory. The largest in ImageNet has 61 million
# pixels.
MAX_PIXELS = 100_000_000
# Limits the aspect ratio: resizing a single row of pixels to a short side would make a huge picture.
MAX_RATIO = 100
MAX_NAMED = 5
logger = logging.getLogger(__name__)
T = TypeVar("T")


class MapData(Protocol):
    """A map-style data set."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...


class UnreadableImageError(ValueError):
    """A picture can't be decoded; the text is the reason, without the path."""


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
    """Labelled pictures. A subclass defines ``__len__``, ``read`` and ``name``.

    Attributes:
        transform: applied to the PIL picture of an item; None: the picture stays as it is.
        strict: raise for a picture that can't be decoded, instead of returning an :class:`Unreadable` item.
    """

    def __init__(self, strict: bool = False):
        self.transform: Callable[..., Any] | None = None
        self.strict = strict

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, index: int) -> tuple[Image.Image, Any]:
        """Read the RGB picture and its label; raises :class:`UnreadableImageError`."""

    @abstractmethod
    def name(self, index: int) -> str:
        """The file behind an item, for messages."""

    def prepare(self, picture: Image.Image, label: Any) -> tuple[Any, Any]:
        """Turn what was read into an item."""
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
    """Picture files and their labels."""

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
    """The data of a classification run.

    ``mirrors`` says whether a mirrored picture keeps its class, so that training may flip it (not so for
    digits).
    """

    train: ImageDataset
    val: ImageDataset
    class_names: tuple[str, ...]
    mirrors: bool = True


def both_splits(load: Callable[[str], T]) -> tuple[T, T]:
    """``load("train")`` and ``load("val")``; faults of either become one FileNotFoundError or ValueError."""
    found, faults = [], []
    for split in ("train", "val"):
        try:
            found.append(load(split))
        except (ValueError, FileNotFoundError) as error:
            faults.append(error)
    if faults:
        kind = FileNotFoundError if isinstance(faults[0], FileNotFoundError) else ValueError
        # A fault of both splits, such as a missing folder, is reported only once.
        raise kind("\n".join(dict.fromkeys(map(str, faults)))) from faults[0]
    return found[0], found[1]


def some(names: Sequence[str]) -> str:
    """The first few of ``names``, and how many more there are."""
    text = ", ".join(map(printable, names[:MAX_NAMED]))
    more = len(names) - MAX_NAMED
    return f"{text} and {more:,} more" if more > 0 else text


def find_split(root: Path, names: Sequence[str], what: str = "") -> Path:
    """Find the first of ``names`` in ``root``, or raise an error that says what is there instead."""
    for name in names:
        if (root / name).is_dir():
            return root / name
    expected = f"{names[0]}/ (or {', '.join(f'{name}/' for name in names[1:])}){what}"
    raise FileNotFoundError(f"`data_dir` {root} has no folder {expected}; found {listing(root)}")


def check_embedded(split: str, data: str) -> None:
    """Raise if the embedded ``data`` does not have a split."""
    if split not in ("train", "val"):
        raise ValueError(
            f"`split` {split}: the embedded {data} have only train and val; use `data_dir` for other data"
        )


def listing(folder: Path) -> str:
    """List what a folder contains, for messages."""
    return some(sorted(p.name + "/" * p.is_dir() for p in folder.iterdir())) or "nothing"


def image_files(folder: Path) -> list[str]:
    """Sorted paths of the pictures in a folder and its subfolders, recognized by their extensions."""
    return sorted(walk_images(folder))


def walk_images(folder: str | Path, seen: set[tuple[int, int]] | None = None) -> Iterator[str]:
    """Yield the same paths one by one. Links are followed, but no folder is visited twice.

    Anything else with the name of a picture that is not a file is skipped and logged.
    """
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
        # The methods of an entry raise for links that lead to themselves.
        if os.path.isdir(entry) if entry.is_symlink() else entry.is_dir():
            yield from walk_images(entry.path, seen)
        elif is_picture and (os.path.isfile(entry) if entry.is_symlink() else entry.is_file()):
            yield entry.path
        elif is_picture:
            logger.warning("skipped %s: it is not a file", printable(entry.path))


def printable(text: str) -> str:
    """Make a text safe for a terminal: escape control characters and bytes of file names that are not UTF-8.

    Example:
        >>> print(printable("caf\\udce9\\x1b.png"))
        caf\\xe9\\x1b.png
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in as_utf8(text))


def as_utf8(text: str) -> str:
    """Escape the bytes of a file name that are not UTF-8, so that a UTF-8 file can hold it."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def open_image(source: str | Path | IO[bytes], max_ratio: float = MAX_RATIO) -> Image.Image:
    """Open a picture as RGB, turned upright; the first frame of an animation.

    Transparent parts become white. 16-bit grey is scaled to 8 bits. Raises :class:`UnreadableImageError` with
    the reason if the file is not a picture, is damaged, has more than MAX_PIXELS pixels, or if one side is
    more than ``max_ratio`` times the other. Sizes are read from the header before any pixels are decoded.
    """
    with opened(source, FORMATS, max_ratio) as picture:
        return to_rgb(picture)


def upright_size(source: str | Path) -> tuple[int, int]:
    """Width and height as :func:`open_image` returns them, but only from the header.

    Raises the same errors.
    """
    with opened(source, FORMATS) as picture:
        width, height = picture.size
        # The EXIF orientation, which may have any value, tells about quarter turns.
        return (height, width) if picture.getexif().get(0x0112) in range(5, 9) else (width, height)


@contextmanager
def opened(
    source: str | Path | IO[bytes], formats: Sequence[str], max_ratio: float = MAX_RATIO
) -> Iterator[Image.Image]:
    """Context with a picture opened by Pillow; errors inside become :class:`UnreadableImageError`."""
    try:
        with warnings.catch_warnings():
            # Pillow warns about odd metadata and sizes below our own limit, which a user can't do anything
            # about.
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
    except Exception as error:  # decoders raise errors of nearly any type for damaged files
        raise UnreadableImageError(_reason(source, formats, error)) from error


def _reason(source: object, formats: Sequence[str], error: Exception) -> str:
    if isinstance(source, (str, Path)) and os.path.isfile(source) and not os.path.getsize(source):
        return "the file is empty"
    if isinstance(error, Image.DecompressionBombError):
        return f"more than the limit of {MAX_PIXELS:,} pixels"
    if isinstance(error, Image.UnidentifiedImageError):
        one = (
            f"in none of the formats {', '.join(formats)}"
            if len(formats) > 1
            else f"not in the format {formats[0]}"
        )
        return f"not a picture, or {one}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


def to_rgb(picture: Image.Image) -> Image.Image:
    """Convert an opened picture of any mode to RGB, upright; see :func:`open_image`."""
    picture.load()
    # In place where possible: each copy of a large picture takes hundreds of megabytes.
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
    """Transforms that randomly change brightness, contrast and saturation; an empty list for 0.

    Each is multiplied by a factor from 1 - ``color_jitter`` to 1 + ``color_jitter``.
    """
    return [v2.ColorJitter(color_jitter, color_jitter, color_jitter)] if color_jitter else []


def part_readable(
    samples: Iterable[Any], refill: bool = False
) -> tuple[list[Any], list[Unreadable]]:
    """Separate readable and unreadable items; ``refill`` repeats readable ones in place of the others."""
    samples = list(samples)
    unreadable = [item for item in samples if isinstance(item, Unreadable)]
    readable = [item for item in samples if not isinstance(item, Unreadable)]
    if refill and readable:
        readable += [readable[i % len(readable)] for i in range(len(unreadable))]
    return readable, unreadable


def collate_images(
    samples: Iterable[tuple[Tensor, int] | Unreadable], *, refill: bool = False
) -> Batch:
    """Turn items of an :class:`ImageDataset` into a batch; a ``collate_fn`` for DataLoader.

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
    """Make a training batch of full size with a ``collate`` that has ``refill``.

    If all items of a batch are unreadable, the first readable picture of ``dataset`` takes their place. So
    every process has a batch for every step.
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
    """Seed the CPU generators of Python, NumPy and torch from the numbers ``key``; return the seed.

    This is cheap enough to be done for every picture.
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    seed = int.from_bytes(digest, "little")
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    # Not torch.manual_seed, which also handles GPUs: without any, that takes a millisecond.
    torch.default_generator.manual_seed(seed)
    return seed


@contextmanager
def seeded(*key: int) -> Iterator[None]:
    """Context that calls :func:`seed_generators` and restores the generators at the end.

    Used around the reading of an item, with (seed, epoch, index) as key, it makes random transforms the same
    with any number of workers and after a resume. Restoring takes much longer than seeding.

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
