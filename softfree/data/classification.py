"""Pictures with one class each: folders, timm's named data sets, or the embedded digits.

load_images(data_dir) -> ImageData(train, val, class_names)
"""

import hashlib
import itertools
from collections.abc import Sequence
from pathlib import Path

from softfree.data.digits import CLASS_NAMES, Digits
from softfree.data.images import (
    EXTENSIONS,
    TEST_NAMES,
    TRAIN_NAMES,
    VAL_NAMES,
    ImageData,
    ImageFiles,
    check_embedded,
    find_split,
    image_files,
    listing,
    some,
    walk_images,
)
from softfree.data.named import load_named


def load_images(
    data_dir: str | None,
    *,
    dataset: str = "",
    strict: bool = False,
    val_split: float = 0.0,
    split_seed: int = 0,
    split: str = "val",
) -> ImageData:
    """Load training and validation pictures.

    Args:
        data_dir: a folder with train/ and val/ (or validation/, valid/, test/), each with one folder per
            class; None: the embedded digits.
        dataset: name of a data set in timm's notation, stored in ``data_dir``: "torch/cifar10", "hfds/NAME",
            or "wds/NAME" for tar shards. Empty: the folders above.
        strict: raise at the first picture that can't be decoded, instead of returning an :class:`Unreadable`
            item.
        val_split: for a folder without val/ (with train/ or just the class folders): the share of each
            class's pictures to validate on. ``split_seed`` and the file names decide which.
        split: "test" to validate on the pictures in test/ and on nothing else.

    Example:
        >>> from softfree.data import load_images
        >>> data = load_images(None)
        >>> len(data.train), len(data.val), data.class_names[3]
        (1437, 360, '3')
    """
    if not 0 <= val_split < 1:
        raise ValueError(f"`val_split` must be a share from 0 to 1, such as 0.2, got {val_split:g}")
    if val_split and (dataset or data_dir is None):
        raise ValueError(
            f"`val_split` {val_split:g} is for folders of pictures; "
            f"{dataset or 'the set of embedded digits'} already has validation pictures"
        )
    held_out = TEST_NAMES if split == "test" else VAL_NAMES
    if dataset:
        return load_named(data_dir, dataset, strict, held_out)
    if data_dir is None:
        check_embedded(split, "digits")
        return ImageData(Digits("train"), Digits("val"), CLASS_NAMES, mirrors=False)
    root = Path(data_dir)
    if not root.is_dir():
        kind = "is a file" if root.exists() else "does not exist"
        raise FileNotFoundError(
            f"`data_dir` {data_dir} {kind}; expected a folder with train/ and val/, each with one "
            "folder per class (without `data_dir`, the embedded digits are used)"
        )
    if val_split:
        return _split(root, strict, val_split, split_seed)
    layout = " with one folder per class"
    if split == "val" and lacks_validation(root):
        layout += " (to validate on a fifth of each class, train with `val_split` 0.2)"
    train_root = find_split(root, TRAIN_NAMES, layout)
    val_root = find_split(root, held_out, layout)
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


def lacks_validation(root: Path) -> bool:
    """Whether a folder has only training pictures: train/ without val/, or just the class folders."""
    return root.is_dir() and not any((root / name).is_dir() for name in VAL_NAMES)


def has_fewer(data_dir: str | None, count: int) -> bool:
    """Whether a folder has fewer training pictures than ``count``; looks at no more files than necessary."""
    if data_dir is None or not Path(data_dir).is_dir():
        return False
    files = walk_images(_training_folder(Path(data_dir)))
    return len(list(itertools.islice(files, count))) < count


def _training_folder(root: Path) -> Path:
    return next((root / name for name in TRAIN_NAMES if (root / name).is_dir()), root)


def _split(root: Path, strict: bool, share: float, seed: int) -> ImageData:
    """Split a folder without val/: ``share`` of each class, at least one picture, is for validation.

    Pictures are ranked by a hash of their names, so that adding or removing pictures later moves only a few
    others to the other part.
    """
    if not lacks_validation(root):
        own = find_split(root, VAL_NAMES)
        raise ValueError(
            f"`val_split` {share:g}: {own} already has validation pictures; use one of the two"
        )
    source = _training_folder(root)
    class_names = _class_folders(source)
    files = _read_class_folders(source, class_names, strict)
    classes: list[list[str]] = [[] for _ in class_names]
    for path, label in zip(files.paths, files.labels, strict=True):
        classes[label].append(path)
    if single := [f"{name}/" for name, of in zip(class_names, classes, strict=True) if len(of) < 2]:
        raise ValueError(
            "`val_split` needs at least two pictures per class, one of them to validate on; "
            f"{source} has only one in {some(single)}"
        )

    def rank(path: str) -> bytes:
        name = Path(path).relative_to(source).as_posix()
        return hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()

    chosen: set[str] = set()
    for paths in classes:
        count = min(max(1, round(share * len(paths))), len(paths) - 1)
        chosen.update(sorted(paths, key=rank)[:count])

    def part(validates: bool) -> ImageFiles:
        places = [i for i, path in enumerate(files.paths) if (path in chosen) == validates]
        paths = [files.paths[i] for i in places]
        return ImageFiles(paths, [files.labels[i] for i in places], strict)

    return ImageData(part(validates=False), part(validates=True), tuple(class_names))


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
