"""Twins: which cells occur twice? A task made on the spot that nothing solves without attention.

A sample has 64 cells in random order: 16 random values that occur twice and 32 that occur once. The label of a cell is
whether it has a twin, which half of the cells do: a cell's value alone says nothing about it, and neither does its
place. Whoever labels it must compare it with all others.

    values, labels = draw_twins(0, "train")      (64, 8) float32, (64,) int64
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
