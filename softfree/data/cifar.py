"""CIFAR-10's own files: cifar-10-batches-py (pickles) and cifar-10-batches-bin.

Pickles can run code, but not here. Only the names that an array of numbers needs are accepted, and they are
replaced by classes that just keep their arguments. NumPy only ever sees bytes.
"""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

SIDE = 32
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
VALUES = 3 * SIDE * SIDE
BATCHES = {"train": "data_batch_*", "test": "test_batch*"}
# A batch of 10,000 pictures has 30 MB.
MAX_BYTES = 512 * 2**20


def find_batches(root: Path) -> Path | None:
    """Find the folder of CIFAR-10's files: ``root`` or a folder in it."""
    folders = (root, root / "cifar-10-batches-py", root / "cifar-10-batches-bin")
    return next((folder for folder in folders if any(folder.glob(BATCHES["train"]))), None)


def read_batches(folder: Path, split: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Read pictures (n, 32, 32, 3) and labels (n,) of "train" or "test", in the order of the files."""
    paths = sorted(path for path in folder.glob(BATCHES[split]) if path.is_file())
    if not paths:
        raise FileNotFoundError(f"`data_dir`: {folder} has no {BATCHES[split]}")
    pictures, labels = zip(*map(_read_batch, paths), strict=True)
    channels_first = np.concatenate(pictures).reshape(-1, 3, SIDE, SIDE)
    return channels_first.transpose(0, 2, 3, 1), np.concatenate(labels)


def _read_batch(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"it is larger than the limit of {MAX_BYTES // 2**20} MiB")
        read = _read_binary if path.suffix == ".bin" else _read_pickle
        pictures, labels = read(path)
        if len(pictures) != len(labels) or not len(labels):
            raise ValueError(f"it has {len(pictures):,} pictures and {len(labels):,} labels")
        # Converted to 8 bits, a label out of range could turn into a valid one.
        beyond = np.setdiff1d(labels, range(len(CLASSES)))
        if len(beyond):
            raise ValueError(f"labels must be 0 to {len(CLASSES) - 1}, got {beyond[0]}")
    except Exception as error:  # damaged pickles raise errors of nearly any type
        reason = (
            "it is truncated" if isinstance(error, EOFError) else f"it is damaged ({error!r:.60})"
        )
        if type(error) is ValueError:
            reason = str(error)
        raise ValueError(f"`data_dir`: {path} is not a CIFAR-10 batch: {reason}") from error
    return pictures, labels.astype(np.uint8)


def _read_binary(path: Path) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    """Read records of one byte for the label and 3,072 for the picture."""
    content = np.fromfile(path, np.uint8)
    if len(content) % (1 + VALUES):
        raise ValueError(f"its {len(content):,} bytes are not a multiple of {1 + VALUES:,}")
    rows = content.reshape(-1, 1 + VALUES)
    return rows[:, 1:], rows[:, 0]


class _Kept:
    """Stands in for numpy's array and dtype; just keeps the arguments found in a pickle."""

    def __init__(self, *arguments: Any):
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _latin(text: str, encoding: str) -> bytes:
    """Restore bytes, which Python 3 stores as text in pickles that Python 2 can read."""
    return text.encode("latin-1")


KNOWN = {
    ("numpy.core.multiarray", "_reconstruct"): _Kept,
    ("numpy._core.multiarray", "_reconstruct"): _Kept,
    ("numpy", "ndarray"): _Kept,
    ("numpy", "dtype"): _Kept,
    ("_codecs", "encode"): _latin,
}


# The Python version, because the C version allocates memory for as many values as a file claims to have.
class _Unpickler(pickle._Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in KNOWN:
            raise ValueError(f"it refers to {module}.{name}, which is not allowed"[:100])
        return KNOWN[module, name]


def _read_pickle(path: Path) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    with path.open("rb") as file:
        content = _Unpickler(file, encoding="bytes").load()
    if not isinstance(content, dict):
        raise ValueError("it is not a mapping")
    fields = {key.decode() if isinstance(key, bytes) else key: content[key] for key in content}
    array, labels = fields.get("data"), fields.get("labels")
    if not isinstance(array, _Kept) or not isinstance(labels, list):
        raise ValueError("it has no 'data' and 'labels'")
    _, shape, kind, by_columns, content = array.state
    if kind.arguments[0] not in ("u1", b"u1") or len(shape) != 2 or shape[1] != VALUES:
        raise ValueError(f"its pictures must be 8 bits and {VALUES:,} values each")
    pictures = np.frombuffer(content, np.uint8).reshape(shape, order="F" if by_columns else "C")
    if not all(type(label) is int for label in labels):
        raise ValueError("its labels must be whole numbers")
    return pictures, np.array(labels)
