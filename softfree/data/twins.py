"""Twins: which cells occur twice? A generated task that can't be solved without attention.

A sample has 64 cells in random order: 16 random values that occur twice and 32 that occur once. The label of
a cell says whether it has a twin, as half of the cells do. Neither the value nor the position of a cell tells
its label; a model must compare the cell with all others.

    values, labels = draw_twins(0, "train")              (64, 8) float32, (64,) int64
    picture, classes = draw_twin_picture(0, "train")     (64, 64, 3) and (64, 64) uint8: 8 x 8 cells
"""

import numpy as np

CELLS = 64
CHANNELS = 8
CLASSES = ("single", "twin")
SPLITS = ("train", "dev", "test")
# Samples of each split. They are generated on access, so many cost no more than few.
COUNTS = (100_000, 256, 1024)
# The index of the value in each cell before shuffling; the first 16 values occur twice.
_PAIRS = CELLS // 4
_VALUES = np.concatenate([np.arange(_PAIRS), np.arange(CELLS - _PAIRS)])


def draw_twins(
    index: int, split: str = "train", *, channels: int = CHANNELS
) -> tuple[np.ndarray, np.ndarray]:
    """Generate sample ``index`` of a split: normal values (64, channels) float32 and labels (64,) int64.

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
    """Generate picture ``index`` of a split, (64, 64, 3) uint8, and its class map (64, 64) uint8.

    The class of cells with a twin is 1. There are 8 x 8 cells of 2 x 2 patches in random colours. Each single
    colour occurs in many cells, so counting colours over the picture does not help.
    """
    values, labels = draw_twins(index, split, channels=2 * 2 * 3)
    patches = values.reshape(8, 8, 2, 2, 3).swapaxes(1, 2).reshape(16, 16, 3)
    colours = (127.5 + 48 * patches).clip(0, 255).astype(np.uint8)
    classes = labels.reshape(8, 8).astype(np.uint8)
    return _enlarge(colours, _CELL // 2), _enlarge(classes, _CELL)


def _enlarge(picture: np.ndarray, factor: int) -> np.ndarray:
    return picture.repeat(factor, 0).repeat(factor, 1)
