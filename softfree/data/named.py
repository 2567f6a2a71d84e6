"""Data sets in timm's notation: torchvision's ("torch/"), Hugging Face's ("hfds/") and tar shards ("wds/").

Shards are read here and not by timm, which reads them as a stream. A stream can't be continued in the middle,
nor divided among processes so that each picture counts once.
"""

import io
import json
import tarfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from timm.data import create_dataset

from softfree.data.images import (
    EXTENSIONS,
    TRAIN_NAMES,
    VAL_NAMES,
    ImageData,
    ImageDataset,
    UnreadableImageError,
    open_image,
    some,
    to_rgb,
)

PREFIXES = ("torch/", "hfds/", "wds/")
NOT_MIRRORED = ("torch/mnist", "torch/qmnist", "torch/kmnist")


def load_named(
    data_dir: str | None, dataset: str, strict: bool, held_out: Sequence[str] = VAL_NAMES
) -> ImageData:
    """:func:`softfree.data.load_images` for a ``dataset`` with one of PREFIXES.

    ``held_out`` are possible names of the validation split; the first that exists is used.
    """
    if not dataset.startswith(PREFIXES):
        raise ValueError(
            f"`dataset` must start with {', '.join(PREFIXES)}, got {dataset!r}; "
            "for folders of pictures, use only `data_dir`"
        )
    if dataset.startswith("hfds/"):
        return _load_hfds(data_dir, dataset, strict, held_out)
    if data_dir is None:
        raise ValueError(f"`dataset` {dataset} needs `data_dir`, the folder where it is stored")
    if not Path(data_dir).is_dir():
        raise FileNotFoundError(
            f"`data_dir` {data_dir} is not a folder; `dataset` {dataset} must be stored there"
        )
    if dataset.startswith("wds/"):
        return _load_shards(Path(data_dir), dataset.removeprefix("wds/"), strict, held_out)
    return _load_torchvision(data_dir, dataset, strict, held_out)


class _Named(ImageDataset):
    """A data set of torchvision, or of the Hugging Face hub through timm's reader.

    The reader returns open files.
    """

    def __init__(self, source: Any, name: str, strict: bool):
        super().__init__(strict)
        self.source = source
        self.source_name = name

    def __len__(self) -> int:
        return len(self.source)

    def read(self, index: int) -> tuple[Image.Image, int]:
        try:
            picture, label = self.source[index]
            with picture:
                read = to_rgb if isinstance(picture, Image.Image) else open_image
                return read(picture), int(label)
        except UnreadableImageError:
            raise
        except Exception as error:  # decoders raise errors of nearly any type for damaged files
            raise UnreadableImageError(str(error) or type(error).__name__) from error

    def name(self, index: int) -> str:
        files = getattr(self.source, "samples", None)
        return str(files[index][0]) if files else f"{self.source_name}, item {index}"


def _load_torchvision(
    data_dir: str, dataset: str, strict: bool, held_out: Sequence[str]
) -> ImageData:
    parts = []
    for split in ("train", held_out[0]):
        try:
            parts.append(create_dataset(dataset, root=data_dir, split=split))
        except (AssertionError, RuntimeError, FileNotFoundError) as error:
            raise ValueError(
                f"`dataset` {dataset} can't be read from `data_dir` {data_dir}: {error} "
                "(softfree downloads nothing; fetch it with torchvision.datasets first)"
            ) from error
    names = getattr(parts[0], "classes", None) or getattr(parts[0], "all_categories", None)
    if not names:
        raise ValueError(f"`dataset` {dataset} does not list its classes")
    train, val = (_Named(part, dataset, strict) for part in parts)
    class_names = tuple(name if isinstance(name, str) else str(name[0]) for name in names)
    return ImageData(train, val, class_names, mirrors=dataset not in NOT_MIRRORED)


def _load_hfds(
    data_dir: str | None, dataset: str, strict: bool, held_out: Sequence[str]
) -> ImageData:
    try:
        import datasets  # type: ignore[import-not-found, unused-ignore]  # noqa: F401
    except ImportError as error:
        raise ValueError(f"`dataset` {dataset} needs a package: pip install datasets") from error
    train = create_dataset(dataset, root=data_dir, split="train").reader
    problems = []
    for split in held_out:
        try:
            val = create_dataset(dataset, root=data_dir, split=split).reader
            break
        except ValueError as error:
            problems.append(str(error))
    else:
        raise ValueError(f"`dataset` {dataset} has no split to validate on: {problems[0]}")
    if not train.class_to_idx:
        raise ValueError(f"`dataset` {dataset} has no column 'label' with class names")
    class_names = tuple(sorted(train.class_to_idx, key=train.class_to_idx.__getitem__))
    return ImageData(_Named(train, dataset, strict), _Named(val, dataset, strict), class_names)


class _Shards(ImageDataset):
    """Pictures in tar files, each with its label: KEY.jpg and KEY.cls, or KEY.json with "label"."""

    def __init__(self, shards: list[Path], strict: bool):
        super().__init__(strict)
        self.shards = shards
        # For each picture: its shard, its name there, the offset of its bytes and their number.
        self.places: list[tuple[int, str, int, int]] = []
        self.labels: list[int] = []
        for number, shard in enumerate(shards):
            self._index(number, shard)

    def _index(self, number: int, shard: Path) -> None:
        samples: dict[str, dict[str, tarfile.TarInfo]] = defaultdict(dict)
        try:
            with tarfile.open(shard, "r:") as archive:
                for member in archive:
                    key, _, extension = member.name.rpartition(".")
                    samples[key]["." + extension.lower()] = member
                for parts in samples.values():
                    picture = next((parts[e] for e in EXTENSIONS if e in parts), None)
                    if picture is not None:
                        self.labels.append(_shard_label(archive, parts))
                        self.places.append(
                            (number, picture.name, picture.offset_data, picture.size)
                        )
        except (tarfile.TarError, ValueError, KeyError, EOFError) as error:
            raise ValueError(f"{shard} can't be read as a shard of pictures: {error}") from error

    def __len__(self) -> int:
        return len(self.places)

    def read(self, index: int) -> tuple[Image.Image, int]:
        number, _, offset, size = self.places[index]
        with self.shards[number].open("rb") as file:
            file.seek(offset)
            return open_image(io.BytesIO(file.read(size))), self.labels[index]

    def name(self, index: int) -> str:
        number, name, _, _ = self.places[index]
        return f"{self.shards[number]}:{name}"


def _shard_label(archive: tarfile.TarFile, parts: dict[str, tarfile.TarInfo]) -> int:
    def content(extension: str) -> bytes:
        file = archive.extractfile(parts[extension])
        return b"" if file is None else file.read()

    if ".cls" in parts:
        return int(content(".cls"))
    if ".json" in parts:
        return int(json.loads(content(".json"))["label"])
    names = ", ".join(member.name for member in parts.values())
    raise ValueError(f"{names} has no label, expected .cls, or .json with 'label'")


def _load_shards(root: Path, name: str, strict: bool, held_out: Sequence[str]) -> ImageData:
    train, val = (
        _Shards(_find_shards(root, name, names), strict) for names in (TRAIN_NAMES, held_out)
    )
    count = max(train.labels, default=-1) + 1
    classes = root / "classnames.txt"
    class_names = (
        tuple(classes.read_text().splitlines())
        if classes.is_file()
        else tuple(str(label) for label in range(count))
    )
    if not count or max(val.labels, default=count) >= len(class_names) or count > len(class_names):
        raise ValueError(
            f"labels of the shards in {root} must lie in 0 ... {len(class_names) - 1}"
            f"{f', the lines of {classes}' if classes.is_file() else ', those of the training shards'}; "
            f"found up to {count - 1} for training and {max(val.labels, default=-1)} for validation"
        )
    return ImageData(train, val, class_names)


def _find_shards(root: Path, name: str, splits: Sequence[str]) -> list[Path]:
    archives = sorted(p for p in root.rglob("*.tar") if str(p.relative_to(root)).startswith(name))
    for split in splits:
        chosen = [p for p in archives if split in p.relative_to(root).as_posix().lower()]
        if chosen:
            return chosen
    raise FileNotFoundError(
        f"`data_dir` {root} has no {name}*{splits[0]}*.tar for `dataset` wds/{name}; "
        f"found {some([p.name for p in archives]) or 'no .tar file'}"
    )
