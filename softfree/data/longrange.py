"""The tasks of the Long Range Arena: how each is read from disk, and how its sequences are batched.

    data = load_longrange("text", Path("aclImdb"))
    loader = DataLoader(data.train, 32, collate_fn=PadSequences(data.task.length))

    listops    LRA's tsv files, or generated and cached, see :mod:`softfree.data.listops`
    text       IMDb's folders or json lines, one token per byte
    retrieval  LRA's tsv of document pairs, one token per byte
    image      CIFAR-10's own batches, class folders or packed grids, grey, one token per pixel
    pathfinder LRA's folders of pictures, one token per pixel
    twins      generated, a label for every token, see :mod:`softfree.data.twins`; not part of the arena

Token 0 is padding; bytes and pixels are tokens 1 to 256.
"""

import array
import bz2
import gzip
import json
import logging
import lzma
import math
import os
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, Subset

from softfree.data import listops, twins
from softfree.data.cifar import CLASSES as CIFAR10
from softfree.data.cifar import SIDE, find_batches, read_batches
from softfree.data.classification import lacks_validation, load_images
from softfree.data.images import ImageFiles, MapData, UnreadableImageError, open_image
from softfree.data.listops import PAD, Samples
from softfree.models.checks import check_at_least
from softfree.ops.shared.compiled_c import cache_folder

logger = logging.getLogger(__name__)
SPLIT_SEED = 0
UNLABELLED = -100  # the label that cross-entropy ignores


@dataclass(frozen=True)
class LongRangeTask:
    """A task: maximum length, tokens, classes, and the kind of its samples.

    Attributes:
        pair: a sample is a pair of sequences.
        channels: a token is this many numbers; 0: a token is one of ``vocab_size``.
        per_token: every token has a label, instead of the sequence.
    """

    name: str
    length: int
    vocab_size: int
    num_classes: int
    needs: str
    pair: bool = False
    channels: int = 0
    per_token: bool = False


TASKS = {
    task.name: task
    for task in (
        LongRangeTask("listops", 2000, 32, 10, "LRA's tsv files, or nothing: samples are generated"),
        LongRangeTask(
            "text", 4000, 512, 2,
            "IMDb's train/ and test/, each with pos/ and neg/ of .txt files, or train.jsonl and test.jsonl "
            '(also .gz, .bz2, .xz) of lines {"text": ..., "label": 0 or 1}',
        ),
        LongRangeTask(
            "retrieval", 4000, 512, 2,
            "LRA's NAME.train.tsv, NAME.eval.tsv and NAME.test.tsv of lines "
            "label, id1, id2, text1, text2",
            pair=True,
        ),
        LongRangeTask(
            "image", SIDE * SIDE, 512, 10,
            "CIFAR-10: cifar-10-batches-py or cifar-10-batches-bin, train/ and test/ (or val/) with a folder of "
            "pictures per class, or labels.npz with grids of 32 x 32 tiles train_1.png, ..., test.png (or .jpg)",
        ),
        LongRangeTask(
            "pathfinder", SIDE * SIDE, 512, 2,
            "LRA's pathfinder32/, or one of its folders curv_... with imgs/ and metadata/",
        ),
        LongRangeTask(
            "twins", twins.CELLS, 0, len(twins.CLASSES), "nothing",
            channels=twins.CHANNELS, per_token=True,
        ),
    )
}  # fmt: skip


def find_task(name: str) -> LongRangeTask:
    """Find a task by its name."""
    if name not in TASKS:
        raise ValueError(f"`task` must be one of {', '.join(TASKS)}, got {name!r}")
    return TASKS[name]


@dataclass(frozen=True)
class LongRangeData:
    """The data of a run on one task.

    An item is (tokens, label). Tokens are int64 (n,), or a list of two of these for pairs. If tokens have
    channels, they are float32 (n, channels). If each token has a label, labels are int64 (n,).
    """

    task: LongRangeTask
    class_names: tuple[str, ...]
    train: MapData
    dev: MapData
    test: MapData


class SequenceBatch(NamedTuple):
    """tokens (b, n) int64, mask (b, n) bool, True for real tokens, labels (b,); pairs: (b, 2, n).

    Tokens with channels are (b, n, channels) float32. Labels of each token are (b, n), with UNLABELLED for
    padding. The mask is None if all tokens are real, because attention is faster without one.
    """

    tokens: Tensor
    mask: Tensor | None
    labels: Tensor


def load_longrange(
    name: str,
    data_dir: Path | None = None,
    *,
    seed: int = 0,
    listops_sizes: tuple[int, int, int] = (96_000, 2_000, 2_000),
) -> LongRangeData:
    """Load train, dev and test samples of a task.

    Args:
        name: listops, text, retrieval, image, pathfinder or twins.
        data_dir: the folder with its files. For listops without LRA's files: the cache folder; None: the
            user's cache folder.
        seed: seed for generating ListOps. Where dev is split off from training data, the split is always the
            same.
        listops_sizes: the numbers of train, dev and test samples if ListOps is generated.
    """
    task = find_task(name)
    if name == "listops":
        files = listops.find_files(Path(data_dir)) if data_dir else {}
        if files:
            found = {split: listops.read_file(path) for split, path in files.items()}
            if os.environ.get("RANK", "0") == "0":
                sizes = " / ".join(f"{len(split.labels):,}" for split in found.values())
                logger.info("listops: LRA's own samples in %s, %s", files["train"].parent, sizes)
        else:
            found = listops.load(data_dir or cache_folder(), listops_sizes, seed)
        splits = (PackedSequences(found[name], 0, task.length) for name in ("train", "dev", "test"))
        return LongRangeData(task, tuple(map(str, range(10))), *splits)
    if name == "twins":
        parts = (TwinSequences(*part) for part in zip(twins.SPLITS, twins.COUNTS, strict=True))
        return LongRangeData(task, twins.CLASSES, *parts)
    if data_dir is None:
        raise ValueError(f"`task` {name} needs `data_dir` with {task.needs}")
    root = Path(data_dir)
    if not root.is_dir():
        raise FileNotFoundError(
            f"`data_dir` {root} is not a folder; `task` {name} needs one with {task.needs}"
        )
    reader = {
        "text": _load_text,
        "retrieval": _load_retrieval,
        "image": _load_image,
        "pathfinder": _load_pathfinder,
    }
    return reader[name](task, root)


def some_samples(data: MapData, count: int) -> MapData:
    """``count`` random samples in their original order, always the same ones; 0, or too many: all samples."""
    check_at_least(0, eval_samples=count)
    if not 0 < count < len(data):
        return data
    chosen = np.random.default_rng(SPLIT_SEED).permutation(len(data))[:count]
    return Subset(data, np.sort(chosen).tolist())  # type: ignore[arg-type]


@dataclass(frozen=True)
class PadSequences:
    """A ``collate_fn`` that truncates sequences to ``length`` and pads them to the longest of the batch.

    Padded lengths are multiples of ``multiple`` (except ``length`` itself), so there are few different
    shapes.
    """

    length: int
    multiple: int = 64

    def __call__(self, samples: Sequence[tuple[Any, Any]]) -> SequenceBatch:
        inputs, labels = zip(*samples, strict=True)
        pair = isinstance(inputs[0], list)
        rows: list[Tensor] = [row for pair_ in inputs for row in pair_] if pair else list(inputs)
        longest = max(len(row) for row in rows)
        width = min(-(-longest // self.multiple) * self.multiple, self.length)
        tokens = _pad(rows, width, PAD)
        if pair:
            tokens = tokens.unflatten(0, (-1, 2))
        if tokens.is_floating_point():
            mask = torch.arange(width) < torch.tensor([[len(row)] for row in rows])
        else:
            mask = tokens != PAD
        per_token = isinstance(labels[0], Tensor)
        known = _pad(labels, width, UNLABELLED) if per_token else torch.tensor(labels)
        return SequenceBatch(tokens, None if mask.all() else mask, known)


def _pad(rows: Sequence[Tensor], width: int, value: int) -> Tensor:
    """Truncate or pad rows (n, ...) to ``width``, and stack them."""
    padded = rows[0].new_full((len(rows), width, *rows[0].shape[1:]), value)
    for into, row in zip(padded, rows, strict=True):
        into[: len(row)] = row[:width]
    return padded


@dataclass(frozen=True)
class PackedSequences(Dataset):
    """Sequences in memory, one byte per token; ``shift`` is added to each."""

    samples: Samples
    shift: int
    length: int

    def __len__(self) -> int:
        return len(self.samples.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        label = int(self.samples.labels[index])
        first, last = self.samples.offsets[index : index + 2]
        tokens = self.samples.tokens[first : min(last, first + self.length)]
        return to_tokens(tokens, self.shift), label


@dataclass(frozen=True)
class TwinSequences(Dataset):
    """Samples of a split of :mod:`softfree.data.twins`, generated on access."""

    split: str
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        values, labels = twins.draw_twins(index, self.split)
        return torch.from_numpy(values), torch.from_numpy(labels)


def to_tokens(values: NDArray[np.uint8], shift: int = 1) -> Tensor:
    """Convert bytes or pixels to tokens; they are shifted by one, because token 0 is padding."""
    return torch.from_numpy(values.astype(np.int64)) + shift


def encode_text(text: bytes, length: int) -> NDArray[np.uint8]:
    """The first ``length`` bytes; an empty text counts as a line break, since attention needs a token."""
    return np.frombuffer(text[:length] or b"\n", np.uint8)


# Text


def _load_text(task: LongRangeTask, root: Path) -> LongRangeData:
    if (root / "aclImdb").is_dir():
        root = root / "aclImdb"
    folders = all((root / split / "pos").is_dir() for split in ("train", "test"))
    read = _read_imdb if folders else _read_json_lines
    train, test = read(task, root, "train"), read(task, root, "test")
    # LRA selects the best step on the test reviews, because it has no dev split. A dev.jsonl is used if
    # present.
    has_dev = not folders and _find_json_lines(root, "dev") is not None
    dev = _read_json_lines(task, root, "dev") if has_dev else test
    return LongRangeData(task, ("negative", "positive"), train, dev, test)


def _read_imdb(task: LongRangeTask, root: Path, split: str) -> PackedSequences:
    rows, labels = [], []
    for label, name in enumerate(("neg", "pos")):
        paths = sorted((root / split / name).glob("*.txt"))
        if not paths:
            raise FileNotFoundError(f"`data_dir`: {root / split / name} has no .txt files")
        for path in paths:
            with path.open("rb") as file:
                rows.append(encode_text(file.read(task.length), task.length))
                labels.append(label)
    return _pack(task, rows, labels)


def _find_json_lines(root: Path, split: str) -> Path | None:
    names = [f"{split}.jsonl{ending}" for ending in ("", ".gz", ".bz2", ".xz")]
    return next((root / name for name in names if (root / name).is_file()), None)


def _read_json_lines(task: LongRangeTask, root: Path, split: str) -> PackedSequences:
    path = _find_json_lines(root, split)
    if path is None:
        raise FileNotFoundError(
            f"`data_dir` {root} has no {split}.jsonl; `task` text needs {task.needs}"
        )
    rows, labels = [], []
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            text, label = row["text"].encode(), int(row["label"])
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(
                f'`data_dir`: {path}, line {number} must be {{"text": "...", "label": 0 or 1}}, '
                f"got {line[:60].decode(errors='replace').strip()}"
            ) from error
        _check_label(label, task, f"{path}, line {number}")
        rows.append(encode_text(text, task.length))
        labels.append(label)
    if not rows:
        raise ValueError(f"`data_dir`: {path} has no sample for `task` {task.name}")
    return _pack(task, rows, labels)


def _lines(path: Path) -> Iterator[bytes]:
    opener: Any = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}.get(path.suffix, open)
    try:
        with opener(path, "rb") as file:
            yield from file
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise ValueError(f"`data_dir`: {path} can't be read: {error}") from error


def _pack(task: LongRangeTask, rows: Any, labels: Any) -> PackedSequences:
    """Concatenate sequences of bytes."""
    offsets = np.cumsum([0, *map(len, rows)])
    samples = Samples(np.concatenate(rows), offsets, np.array(labels, np.uint8))
    return PackedSequences(samples, 1, task.length)


def _check_label(label: float, task: LongRangeTask, where: str) -> None:
    if label not in range(task.num_classes):
        raise ValueError(
            f"`data_dir`: {where}: the label of `task` {task.name} must be 0 to "
            f"{task.num_classes - 1}, got {label}"
        )


# Retrieval


class DocumentPairs(Dataset):
    """LRA's tsv: label, id1, id2, text1, text2, separated by tabs, without quotes or header.

    The file has gigabytes, so it stays on disk. Only the start of each line and the end of the last are kept.
    """

    def __init__(self, task: LongRangeTask, path: Path):
        self.task = task
        self.path = path
        starts = array.array("q", [0])
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                # Checked now, so that a bad line does not stop a run later.
                _parse_pair(line, task, f"{path}, line {number}")
                starts.append(starts[-1] + len(line))
        self.starts = np.array(starts)
        if not len(self):
            raise ValueError(f"`data_dir`: {path} is empty")

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> tuple[list[Tensor], int]:
        first, last = self.starts[index : index + 2]
        with self.path.open("rb") as file:
            file.seek(first)
            line = file.read(last - first)
        texts, label = _parse_pair(line, self.task, f"{self.path}, line {index + 1}")
        return [to_tokens(encode_text(text, self.task.length)) for text in texts], label


def _parse_pair(line: bytes, task: LongRangeTask, where: str) -> tuple[list[bytes], int]:
    """Both texts of a line, and its label."""
    fields = line.rstrip(b"\r\n").split(b"\t")
    try:
        written, _, _, *texts = fields
        label = float(written)
    except ValueError as error:
        raise ValueError(
            f"`data_dir`: {where} must be label, id1, id2, text1, text2, separated by tabs"
        ) from error
    if len(texts) != 2:
        raise ValueError(f"`data_dir`: {where} has {len(fields)} fields, expected 5")
    _check_label(label, task, where)
    return texts, int(label)


def _load_retrieval(task: LongRangeTask, root: Path) -> LongRangeData:
    found = []
    for split in ("train", "eval", "test"):
        paths = sorted(root.glob(f"*{split}.tsv"))
        if len(paths) != 1:
            raise FileNotFoundError(
                f"`data_dir` {root} must have one file *{split}.tsv, found {len(paths)}; "
                f"`task` retrieval needs {task.needs}"
            )
        found.append(DocumentPairs(task, paths[0]))
    return LongRangeData(task, ("unrelated", "related"), *found)


# Pictures


def _load_image(task: LongRangeTask, root: Path) -> LongRangeData:
    if batches := find_batches(root):
        found = _read_cifar(batches)
    elif (root / "labels.npz").is_file():
        found = _read_grids(root)
    else:
        found = _read_class_folders(root)
    (pixels, labels), test, names = found
    if len(names) != task.num_classes:
        raise ValueError(
            f"`data_dir` {root} has {len(names)} classes, but `task` image has {task.num_classes}"
        )
    # A random tenth is dev, as in LRA; not the last tenth, since pictures may be sorted by class.
    train_part, dev_part = _shuffled_parts(len(pixels), (0.9, 0.1))
    train, dev = (_pack(task, pixels[part], labels[part]) for part in (train_part, dev_part))
    return LongRangeData(task, names, train, dev, _pack(task, *test))


Pictures = tuple[NDArray[np.uint8], NDArray[np.uint8]]


def _read_cifar(folder: Path) -> tuple[Pictures, Pictures, tuple[str, ...]]:
    """Read CIFAR-10's own files and convert them to grey, like other pictures."""
    parts = []
    for split in ("train", "test"):
        pictures, labels = read_batches(folder, split)
        # Stacked vertically, they are converted as one picture.
        grey = Image.fromarray(pictures.reshape(-1, SIDE, 3)).convert("L")
        parts.append((np.asarray(grey).reshape(-1, SIDE * SIDE), labels))
    return parts[0], parts[1], CIFAR10


def _read_grids(root: Path) -> tuple[Pictures, Pictures, tuple[str, ...]]:
    """Read pictures that are tiles of large pictures, row by row.

    The file labels.npz has their classes in this order.
    """
    labels = _read_labels(root / "labels.npz")
    parts = []
    for split in ("train", "test"):
        paths = sorted(
            path
            for path in root.iterdir()
            if path.stem.partition("_")[0] == split and path.suffix in (".png", ".jpg")
        )
        tiles = [_tiles(path) for path in paths]
        pixels = np.concatenate(tiles) if tiles else np.empty((0, SIDE * SIDE), np.uint8)
        if len(pixels) != len(labels[split]):
            raise ValueError(
                f"`data_dir`: {root / 'labels.npz'} has {len(labels[split])} labels for {split}, but its "
                f"{len(paths)} grids {split}*.png or .jpg have {len(pixels)} tiles of {SIDE} x {SIDE}"
            )
        parts.append((pixels, labels[split]))
    return parts[0], parts[1], CIFAR10


def _read_labels(path: Path) -> dict[str, NDArray[np.uint8]]:
    try:
        with np.load(path, allow_pickle=False) as stored:
            found = {split: stored[split] for split in ("train", "test")}
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"`data_dir`: {path} must be an npz file with arrays 'train' and 'test': {error}"
        ) from error
    for split, labels in found.items():
        # Converted to 8 bits, a label out of range could turn into a valid one.
        beyond = np.setdiff1d(labels, range(len(CIFAR10)))
        if len(beyond):
            raise ValueError(
                f"`data_dir`: {path}, {split}: labels must be 0 to {len(CIFAR10) - 1}, got {beyond[0]}"
            )
    return {split: labels.astype(np.uint8) for split, labels in found.items()}


def _tiles(path: Path) -> NDArray[np.uint8]:
    grid = np.asarray(_open(path, max_ratio=math.inf).convert("L"))
    rows, columns = grid.shape[0] // SIDE, grid.shape[1] // SIDE
    tiles = grid[: rows * SIDE, : columns * SIDE].reshape(rows, SIDE, columns, SIDE)
    return tiles.transpose(0, 2, 1, 3).reshape(-1, SIDE * SIDE)


def _read_class_folders(root: Path) -> tuple[Pictures, Pictures, tuple[str, ...]]:
    if lacks_validation(root):
        raise FileNotFoundError(
            f"`data_dir` {root} has no folder of test pictures; expected train/ and test/, each with one "
            "folder per class"
        )
    data = load_images(str(root), strict=True)
    parts = []
    for split in (data.train, data.val):
        assert isinstance(split, ImageFiles)
        # Sorted by file name, so that the split into train and dev is the same as for the packed grids.
        order = np.argsort([Path(path).name for path in split.paths], kind="stable").tolist()
        pixels = np.stack([_grey(split.paths[index]) for index in order])
        parts.append((pixels, np.array([split.labels[index] for index in order], np.uint8)))
    return parts[0], parts[1], data.class_names


def _open(path: str | Path, **limits: float) -> Image.Image:
    try:
        return open_image(path, **limits)
    except UnreadableImageError as error:
        raise ValueError(f"`data_dir`: {path} can't be read: {error}") from error


def _grey(path: str) -> NDArray[np.uint8]:
    """Read a picture as grey values (1024,), row by row."""
    picture = _open(path)
    if picture.size != (SIDE, SIDE):
        width, height = picture.size
        raise ValueError(
            f"`data_dir`: pictures must have {SIDE} x {SIDE} pixels, but {path} has {width} x {height}"
        )
    return np.asarray(picture.convert("L")).reshape(-1)


@dataclass(frozen=True)
class PathfinderPictures(Dataset):
    """Pictures with two dots: does a dashed path join them?"""

    paths: Sequence[str]
    labels: Sequence[int]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return to_tokens(_grey(self.paths[index])), self.labels[index]


def _load_pathfinder(task: LongRangeTask, root: Path) -> LongRangeData:
    """Load Pathfinder.

    LRA's metadata/N.npy are text, a line per picture: folder, file, number, label and more.
    """
    hardest = "curv_contour_length_14"
    candidates = [root, root / hardest, root / "pathfinder32" / hardest]
    folder = next((path for path in candidates if (path / "metadata").is_dir()), None)
    if folder is None:
        raise FileNotFoundError(f"`data_dir` {root} must be {task.needs}")
    paths, labels = [], []
    for listing in sorted((folder / "metadata").glob("*.npy")):
        for number, line in enumerate(listing.read_text(errors="replace").splitlines(), 1):
            words = line.split()
            if len(words) < 4 or not words[3].isdecimal():
                raise ValueError(
                    f"`data_dir`: {listing}, line {number} must be folder, file, number, label, got {line!r}"
                )
            _check_label(int(words[3]), task, f"{listing}, line {number}")
            picture = folder / words[0] / words[1]
            try:
                size = picture.stat().st_size
            except FileNotFoundError as error:
                raise FileNotFoundError(
                    f"`data_dir`: {picture} is missing, but listed in {listing}, line {number}"
                ) from error
            # The released set has empty files, which other implementations skip, too.
            if size:
                paths.append(str(picture))
                labels.append(int(words[3]))
    splits = (
        PathfinderPictures([paths[i] for i in part], [labels[i] for i in part])
        for part in _shuffled_parts(len(paths), (0.8, 0.1, 0.1))
    )
    return LongRangeData(task, ("apart", "joined"), *splits)


def _shuffled_parts(count: int, shares: Sequence[float]) -> list[NDArray[np.int64]]:
    """Positions in random but fixed order, split into parts with these shares."""
    order = np.random.default_rng(SPLIT_SEED).permutation(count)
    bounds = np.round(np.cumsum(shares)[:-1] * count).astype(int)
    parts = np.split(order, bounds)
    if not all(len(part) for part in parts):
        raise ValueError(f"`data_dir` has {count} samples, too few for {len(parts)} splits")
    return parts
