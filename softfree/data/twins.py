"""Twins: which cells occur twice? A task made on the spot that nothing solves without attention.

A sample has 64 cells in random order: 16 random values that occur twice and 32 that occur once. The label of a cell is
whether it has a twin, which half of the cells do: a cell's value alone says nothing about it, and neither does its
place. Whoever labels it must compare it with all others.

    values, labels = draw_twins(0, "train")              (64, 8) float32, (64,) int64
    picture, classes = draw_twin_picture(0, "train")     (64, 64, 3) and (64, 64) uint8: 8 x 8 cells
"""

import numpy as np

CELLS = 64
CHANNELS = 8
CLASSES = ("single", "twin")
SPLITS = ("train", "dev", "test")
# Of each split. Samples are drawn when they are asked for, so many cost no more than few.
COUNTS = (100_000, 256, 1024)
# Which value is in which cell, before the cells are shuffled: the first 16 occur twice.
_PAIRS = CELLS // 4
_VALUES = np.concatenate([np.arange(_PAIRS), np.arange(CELLS - _PAIRS)])


def draw_twins(
    index: int, split: str = "train", *, channels: int = CHANNELS
) -> tuple[np.ndarray, np.ndarray]:
    """Sample number ``index`` of a split: values (64, channels) float32, normal, and labels (64,) int64.

    The same arguments give the same sample.

    Example:
        >>> values, labels = draw_twins(0)
        >>> equal = (values[:, None] == values).all(-1).sum(1) > 1
        >>> bool((equal == labels).all()), int(labels.sum())
        (True, 32)
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    random = np.random.default_rng([SPLITS.index(split), index])
    values = random.standard_normal((CELLS - _PAIRS, channels), np.float32)
    chosen = random.permutation(_VALUES)
    return values[chosen], (chosen < _PAIRS).astype(np.int64)


SIDE = 64  # pixels of a picture
_CELL = SIDE // 8  # of a cell, which has 2 x 2 patches of one colour each


def draw_twin_picture(index: int, split: str = "train") -> tuple[np.ndarray, np.ndarray]:
    """Picture number ``index`` of a split, (64, 64, 3) uint8, and its class map (64, 64) uint8: 1 for cells with a twin.

    It has 8 x 8 cells of 2 x 2 patches in random colours. A colour alone occurs in many cells, so that counting colours
    over the picture does not help.
    """
    values, labels = draw_twins(index, split, channels=2 * 2 * 3)
    patches = values.reshape(8, 8, 2, 2, 3).swapaxes(1, 2).reshape(16, 16, 3)
    colours = (127.5 + 48 * patches).clip(0, 255).astype(np.uint8)
    classes = labels.reshape(8, 8).astype(np.uint8)
    return _enlarge(colours, _CELL // 2), _enlarge(classes, _CELL)


def _enlarge(picture: np.ndarray, factor: int) -> np.ndarray:
    return picture.repeat(factor, 0).repeat(factor, 1)
