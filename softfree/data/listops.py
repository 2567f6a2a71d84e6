"""ListOps of the Long Range Arena, read or generated: nested operations on digits, to be evaluated.

    [MAX 4 [MED 2 9 1 ] 0 ]   ->   4

The distribution is that of LRA's own generator. A node above ``max_depth`` is an operator with probability
1/4, one of MIN, MAX, MED (rounded down) and SM (sum modulo 10), with 2 to ``max_args`` arguments; otherwise
it is a digit. Trees of more than ``min_length`` and fewer than ``max_length`` tokens are kept, each once.

LRA draws one tree at a time, and few of them are long enough to be kept. Here thousands grow together, one
numpy array per level, so that a hundred thousand samples take less than a minute.
"""

import io
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple
from zipfile import BadZipFile

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from softfree.data.files import replace_durably

logger = logging.getLogger(__name__)
PAD = 0
DIGITS = 1  # the digit d is token DIGITS + d
OPERATORS = {"MIN": 11, "MAX": 12, "MED": 13, "SM": 14}
END = 15

_OPERATOR_SHARE = 0.25
_TREES_AT_A_TIME = 8192
_FORMAT = 1

# LRA's files, and the first line of each.
FILES = {"train": "basic_train.tsv", "dev": "basic_val.tsv", "test": "basic_test.tsv"}
_HEADER = [b"Source", b"Target"]
_WORDS = {f"[{name}".encode(): token for name, token in OPERATORS.items()} | {b"]": END}
_WORDS |= {str(digit).encode(): DIGITS + digit for digit in range(10)}


@dataclass(frozen=True)
class ListOpsRules:
    """The settings of LRA's generator, with LRA's values as defaults."""

    max_depth: int = 10
    max_args: int = 10
    min_length: int = 500
    max_length: int = 2000

    def __post_init__(self) -> None:
        if self.max_depth < 2 or self.max_args < 2:
            raise ValueError(
                "max_depth and max_args must be at least 2, "
                f"got {self.max_depth} and {self.max_args}"
            )
        # The shortest operation has an operator, two digits and an end.
        if self.min_length < 1 or self.max_length < max(self.min_length + 2, 5):
            raise ValueError(
                "min_length must be at least 1 and max_length at least min_length + 2 and 5, "
                f"got {self.min_length} and {self.max_length}"
            )


LRA_RULES = ListOpsRules()


class Samples(NamedTuple):
    """Concatenated token sequences: sample i is ``tokens[offsets[i] : offsets[i + 1]]``."""

    tokens: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    labels: NDArray[np.uint8]

    def cut(self, first: int, last: int) -> "Samples":
        """Samples ``first`` to ``last - 1``, as views."""
        offsets = self.offsets[first : last + 1]
        return Samples(
            self.tokens[offsets[0] : offsets[-1]], offsets - offsets[0], self.labels[first:last]
        )


def to_text(tokens: NDArray[np.uint8]) -> str:
    """Format tokens as LRA does, without its round brackets.

    Example:
        >>> to_text(np.array([12, 5, 3, 15], np.uint8))
        '[MAX 4 2 ]'
    """
    names = {number: f"[{name}" for name, number in OPERATORS.items()} | {END: "]"}
    return " ".join(names.get(token, str(token - DIGITS)) for token in tokens.tolist())


def generate(count: int, seed: int = 0, rules: ListOpsRules = LRA_RULES) -> Samples:
    """Generate ``count`` different samples from a seed; the first ones don't depend on the count."""
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    rng = np.random.default_rng(seed)
    found: dict[bytes, int] = {}
    fruitless = 0
    while len(found) < count:
        before = len(found)
        batch = _generate_batch(rng, rules)
        for index, label in enumerate(batch.labels.tolist()):
            first, last = batch.offsets[index : index + 2]
            found.setdefault(batch.tokens[first:last].tobytes(), label)
        fruitless = 0 if len(found) > before else fruitless + 1
        if fruitless == 100:
            raise ValueError(f"only {before} of {count} different samples exist under {rules}")
    chosen = list(found)[:count]
    offsets = np.zeros(count + 1, np.int64)
    np.cumsum([len(sample) for sample in chosen], out=offsets[1:])
    labels = np.fromiter(found.values(), np.uint8, count)
    return Samples(np.frombuffer(b"".join(chosen), np.uint8), offsets, labels)


def load(
    folder: Path,
    sizes: tuple[int, int, int] = (96_000, 2_000, 2_000),
    seed: int = 0,
    rules: ListOpsRules = LRA_RULES,
) -> dict[str, Samples]:
    """Load train, dev and test samples from the cache in ``folder``; generate them if they are not there.

    The seed's samples are used for test first, then for dev, then for train. So test and dev do not depend on
    the number of training samples.
    """
    numbers = "-".join(map(str, (seed, sum(sizes), *asdict(rules).values())))
    path = Path(folder) / f"listops-v{_FORMAT}-{numbers}.npz"
    if not path.exists():
        _make(path, sum(sizes), seed, rules)
    try:
        with np.load(path, allow_pickle=False) as stored:
            samples = Samples(stored["tokens"], stored["offsets"], stored["labels"])
    except (ValueError, KeyError, EOFError, BadZipFile) as error:
        raise ValueError(
            f"{path} is damaged ({error}); delete it, and it will be generated again"
        ) from error
    train, dev, test = sizes
    return {
        "train": samples.cut(test + dev, test + dev + train),
        "dev": samples.cut(test, test + dev),
        "test": samples.cut(0, test),
    }


def find_files(folder: Path) -> dict[str, Path]:
    """Find LRA's own train, dev and test files in ``folder`` or its ``listops-1000``.

    Returns {} if there are none.
    """
    for root in (folder, folder / "listops-1000"):
        paths = {split: root / name for split, name in FILES.items()}
        missing = [path.name for path in paths.values() if not path.is_file()]
        if not missing:
            return paths
        if len(missing) < len(paths):
            raise FileNotFoundError(
                f"`data_dir` {root} has some of LRA's ListOps files, but not {', '.join(missing)}; "
                "samples are only generated if it has none of them"
            )
    return {}


def read_file(path: Path) -> Samples:
    """Read an LRA file: a header, then lines with an expression, a tab and its value.

    ( ( ( [MAX 4 ) 2 ) ] )      4           round brackets are dropped, as in LRA
    """
    rows: list[bytes] = []
    labels: list[int] = []
    with path.open("rb") as file:
        if file.readline().split() != _HEADER:
            raise ValueError(f"`data_dir`: {path} must start with the line Source, tab, Target")
        for number, line in enumerate(file, 2):
            source, _, target = line.rstrip(b"\r\n").partition(b"\t")
            try:
                row = bytes(map(_WORDS.__getitem__, source.translate(None, b"()").split()))
                label = _WORDS[target] - DIGITS
            except KeyError:
                row, label = b"", 0
            if not row or label > 9:
                raise ValueError(
                    f"`data_dir`: {path}, line {number} must be an expression of "
                    f"{', '.join(f'[{name}' for name in OPERATORS)}, digits and ], a tab and a digit, "
                    f"got {line[:60].decode(errors='replace').strip()!a}"
                )
            rows.append(row)
            labels.append(label)
    if not rows:
        raise ValueError(f"`data_dir`: {path} has no samples")
    offsets = np.cumsum([0, *map(len, rows)])
    return Samples(np.frombuffer(b"".join(rows), np.uint8), offsets, np.array(labels, np.uint8))


def _make(path: Path, count: int, seed: int, rules: ListOpsRules) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The processes of a distributed run get here at the same time: one generates samples, the others
        # wait.
        with FileLock(path.with_suffix(".lock")):
            if not path.exists():
                logger.info("generating the ListOps samples (only once)")
                buffer = io.BytesIO()
                np.savez(buffer, **generate(count, seed, rules)._asdict())
                replace_durably(path, buffer.getvalue())
    except PermissionError as error:
        raise ValueError(
            f"`data_dir`: can't write to {path.parent} to keep ListOps there"
        ) from error


class _Level(NamedTuple):
    """The nodes of one depth; children of a parent are adjacent, in the order of the parents."""

    tree: NDArray[np.int64]
    operator: NDArray[np.uint8]  # 0 for a digit
    digit: NDArray[np.uint8]
    arguments: NDArray[np.int64]  # only for operators


def _generate_batch(rng: np.random.Generator, rules: ListOpsRules) -> Samples:
    levels = _grow(rng, rules)
    if not levels:
        return Samples(np.empty(0, np.uint8), np.zeros(1, np.int64), np.empty(0, np.uint8))
    lengths, values = _evaluate(levels, rules.max_args)
    offsets = np.concatenate([[0], np.cumsum(lengths[0])])
    tokens = np.empty(offsets[-1], np.uint8)
    place = offsets[:-1]
    for level, length, below in zip(levels, lengths, [*lengths[1:], None], strict=True):
        is_operator = level.operator > 0
        tokens[place] = np.where(is_operator, level.operator, DIGITS + level.digit)
        tokens[(place + length - 1)[is_operator]] = END
        if below is not None:
            # A child comes after its parent's operator and its earlier siblings.
            before = np.cumsum(below) - below
            first = _starts(level.arguments)
            within = before - np.repeat(before[first], level.arguments)
            place = np.repeat(place[is_operator] + 1, level.arguments) + within
    return Samples(tokens, offsets, values)


def _grow(rng: np.random.Generator, rules: ListOpsRules) -> list[_Level]:
    """Grow trees level by level; drop those of a wrong length."""
    tree = np.arange(_TREES_AT_A_TIME)
    size = np.zeros(_TREES_AT_A_TIME, np.int64)
    levels: list[_Level] = []
    for depth in range(1, rules.max_depth + 1):
        count = len(tree)
        if depth == 1:
            # A single digit is never long enough, so the root is always an operator.
            is_operator = np.ones(count, bool)
        elif depth < rules.max_depth:
            is_operator = rng.random(count, np.float32) < _OPERATOR_SHARE
        else:
            is_operator = np.zeros(count, bool)
        operator = np.zeros(count, np.uint8)
        number = int(is_operator.sum())
        operator[is_operator] = rng.integers(
            min(OPERATORS.values()), max(OPERATORS.values()) + 1, number, np.uint8
        )
        digit = rng.integers(0, 10, count, np.uint8)
        arguments = rng.integers(2, rules.max_args + 1, number)
        size += np.bincount(tree, minlength=len(size))
        size += np.bincount(tree[is_operator], minlength=len(size))
        levels.append(_Level(tree, operator, digit, arguments))
        tree = np.repeat(tree[is_operator], arguments)
        if not len(tree):
            break
    kept = (size > rules.min_length) & (size < rules.max_length)
    remaining = []
    for level in levels:
        node = kept[level.tree]
        if not node.any():
            break
        parent = node[level.operator > 0]
        remaining.append(
            _Level(
                level.tree[node], level.operator[node], level.digit[node], level.arguments[parent]
            )
        )
    return remaining


def _evaluate(
    levels: list[_Level], max_args: int
) -> tuple[list[NDArray[np.int64]], NDArray[np.uint8]]:
    """Compute the number of tokens in every node's subtree, level by level, and the value of every tree."""
    lengths: list[NDArray[np.int64]] = []
    below = np.empty(0, np.uint8)
    for level in reversed(levels):
        length = np.ones(len(level.tree), np.int64)
        value = level.digit.copy()
        is_operator = level.operator > 0
        if is_operator.any():
            first = _starts(level.arguments)
            length[is_operator] = 2 + np.add.reduceat(lengths[-1], first)
            value[is_operator] = _apply(
                level.operator[is_operator], below, first, level.arguments, max_args
            )
        lengths.append(length)
        below = value
    return lengths[::-1], below


def _apply(
    operator: NDArray[np.uint8],
    values: NDArray[np.uint8],
    first: NDArray[np.int64],
    count: NDArray[np.int64],
    max_args: int,
) -> NDArray[np.uint8]:
    """Compute each operator's value from its arguments ``values[first : first + count]``."""
    total = np.add.reduceat(values.astype(np.int64), first) % 10
    # Sorted rows of arguments, padded with a number above all digits.
    column = np.arange(max_args)
    inside = column < count[:, None]
    rows = np.full(inside.shape, 10, np.uint8)
    rows[inside] = values
    rows.sort(axis=1)
    row = np.arange(len(count))
    middle = (rows[row, (count - 1) // 2] + rows[row, count // 2]) // 2
    result = np.select(
        [operator == OPERATORS[name] for name in ("MIN", "MAX", "MED")],
        [rows[:, 0], rows[row, count - 1], middle],
        total,
    )
    return result.astype(np.uint8)


def _starts(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The start of each group if groups of these sizes are concatenated."""
    return np.cumsum(counts) - counts
