"""Pictures with a class each: folders, the data sets that timm names, or the embedded digits.

load_images(data_dir) -> ImageData(train, val, class_names)
"""

from collections.abc import Sequence
from pathlib import Path

from softfree.data.digits import CLASS_NAMES, Digits
from softfree.data.images import (
    EXTENSIONS,
    TRAIN_NAMES,
    VAL_NAMES,
    ImageData,
    ImageFiles,
    find_split,
    image_files,
    listing,
    some,
)
from softfree.data.named import load_named


def load_images(data_dir: str | None, *, dataset: str = "", strict: bool = False) -> ImageData:
    """Training and validation pictures.

    Args:
        data_dir: a folder with train/ and val/ (or validation/, valid/, test/), each with one folder a
            class; None: the embedded digits.
        dataset: a data set as timm names it, in ``data_dir``: "torch/cifar10", "hfds/NAME", or "wds/NAME"
            for tar shards. Empty: the folders above.
        strict: raise at the first picture that can't be decoded, instead of an :class:`Unreadable` item.

    Example:
        >>> from softfree.data import load_images
        >>> data = load_images(None)
        >>> len(data.train), len(data.val), data.class_names[3]
        (1437, 360, '3')
    """
    if dataset:
        return load_named(data_dir, dataset, strict)
    if data_dir is None:
        return ImageData(Digits("train"), Digits("val"), CLASS_NAMES, mirrors=False)
    root = Path(data_dir)
    if not root.is_dir():
        kind = "is a file" if root.exists() else "does not exist"
        raise FileNotFoundError(
            f"`data_dir` {data_dir} {kind}; expected a folder with train/ and val/, each with one "
            "folder per class (without `data_dir`, the embedded digits are used)"
        )
    train_root = find_split(root, TRAIN_NAMES, " with one folder per class")
    val_root = find_split(root, VAL_NAMES, " with one folder per class")
    class_names, in_val = _class_folders(train_root), _class_folders(val_root)
    if class_names != in_val:
        only_train, only_val = (
            set(class_names).difference(in_val),
            set(in_val).difference(class_names),
        )
        differences = [
            f"only in {part}: {some(sorted(only))}"
            for part, only in ((train_root, only_train), (val_root, only_val))
            if only
        ]
        raise ValueError(
            f"{train_root} has {len(class_names):,} class folders and {val_root} has {len(in_val):,}; "
            f"they must have the same names. {'; '.join(differences)}"
        )
    train, val = (_read_class_folders(part, class_names, strict) for part in (train_root, val_root))
    return ImageData(train, val, tuple(class_names))


def _class_folders(root: Path) -> list[str]:
    names = sorted(p.name for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
    if not names:
        raise ValueError(
            f"{root} has no class folders, expected one folder of pictures per class; "
            f"found {listing(root)}"
        )
    return names


def _read_class_folders(root: Path, class_names: Sequence[str], strict: bool) -> ImageFiles:
    paths: list[str] = []
    labels: list[int] = []
    empty = []
    for label, name in enumerate(class_names):
        found = image_files(root / name)
        if not found:
            empty.append(f"{name}/")
        paths += found
        labels += [label] * len(found)
    if empty:
        raise ValueError(
            f"{root} has class folders without a picture: {some(empty)}; put pictures there "
            f"({', '.join(EXTENSIONS)}) or remove the folders from both train/ and val/"
        )
    return ImageFiles(paths, labels, strict)
