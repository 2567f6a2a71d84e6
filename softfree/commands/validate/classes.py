"""What `softfree validate --per-class` shows: a table of the classes, and the confusion matrix."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from torch import Tensor

from softfree.analysis.plots import draw_confusion
from softfree.commands.common import NOTHING, make_table
from softfree.training.confusion import class_scores

BACKGROUND = "background"
MOST_PAIRS = 10  # pairs of confused classes to show if the whole matrix is too wide
LONGEST_NAME = 22  # of a class next to the matrix
CELL = 4  # columns of a cell: a space and up to 100


@dataclasses.dataclass(frozen=True)
class ClassScores:
    """Scores of each class.

    Args:
        names: the names of the classes.
        counted: what is counted, such as "pictures", and the count of each class.
        figures: by kind ("box", "mask"; "" if there is only one) and name, a percentage for each class, NaN
            or None if there is none.
        confusion: (n, n) counts, rows are the truth, columns the predictions; or (n + 1, n + 1) with a last
            row and column for the background. None: not shown.
    """

    names: Sequence[str]
    counted: tuple[str, Sequence[int]]
    figures: Mapping[str, Mapping[str, Sequence[float | None]]]
    confusion: np.ndarray | None = None

    @property
    def axis(self) -> list[str]:
        """Names of the rows and columns of ``confusion``."""
        assert self.confusion is not None
        return [*self.names, BACKGROUND][: len(self.confusion)]

    def rows(self, begin: Mapping[str, object]) -> list[dict[str, object]]:
        """A row of the file for each class and kind: its figures, and how often each class was predicted."""
        what, counts = self.counted
        rows: list[dict[str, object]] = []
        for number, (kind, figures) in enumerate(self.figures.items()):
            start = {**begin, "kind": kind} if kind else dict(begin)
            for index, name in enumerate(self.names):
                values = {title: _known(column[index]) for title, column in figures.items()}
                rows.append({**start, "class": name, what: counts[index], **values})
            if number == 0 and self.confusion is not None:
                # The background has no figures, only the detections that are found there.
                rows += [{**start, "class": name} for name in self.axis[len(self.names) :]]
                columns = [f"predicted {name}" for name in self.axis]
                if len(set(columns)) < len(columns):
                    columns = [f"{column} ({i})" for i, column in enumerate(columns, start=1)]
                for row, line in zip(rows, self.confusion.tolist(), strict=True):
                    row.update(zip(columns, line, strict=True))
        return rows

    def print(self, console: Console) -> None:
        """Print the table of the classes, one for each kind."""
        what, counts = self.counted
        for kind, figures in self.figures.items():
            table = make_table([kind or "class", what, *(f"{title} %" for title in figures)])
            for index, name in enumerate(self.names):
                cells = (_known(column[index]) for column in figures.values())
                shown = (NOTHING if value is None else f"{value:.1f}" for value in cells)
                table.add_row(escape(name), f"{counts[index]:,}", *shown)
            console.print(table)

    def print_confusion(self, console: Console) -> None:
        """Print the confusion matrix if it fits, otherwise the most frequent pairs."""
        if self.confusion is None:
            return
        confusion, shares = self.confusion, row_shares(self.confusion)
        names, heads = self.axis, self.axis
        if max(map(cell_len, names)) >= CELL:
            heads = [str(number) for number in range(1, len(names) + 1)]
            names = [f"{head} {name}" for head, name in zip(heads, names, strict=True)]
        beside = min(max(map(cell_len, names)), LONGEST_NAME)
        if beside + CELL * len(names) <= console.width:
            console.print("Confusion matrix: rows are the truth, in % of each row", style="bold")
            table = make_table(["", *map(escape, heads)])
            table.columns[0].width = beside
            for index, name in enumerate(names):
                cells = [
                    f"{share:.0f}" if count else "·"
                    for share, count in zip(shares[index], confusion[index], strict=True)
                ]
                cells[index] = f"[bold]{cells[index]}[/]"
                table.add_row(escape(name), *cells)
            console.print(table)
            return
        wrong = confusion.copy()
        np.fill_diagonal(wrong, 0)
        places = np.argsort(-wrong, axis=None, kind="stable")[:MOST_PAIRS]
        pairs = [divmod(int(place), len(wrong)) for place in places]
        pairs = [pair for pair in pairs if wrong[pair]]
        if not pairs:
            return
        console.print("Most frequent mistakes", style="bold")
        table = make_table(["truth", "predicted", "times", "% of the truth"])
        table.columns[1].justify = "left"
        table.columns[1].no_wrap = False
        for pair in pairs:
            truth, other = (escape(self.axis[index]) for index in pair)
            table.add_row(truth, other, f"{wrong[pair]:,}", f"{shares[pair]:.1f}")
        console.print(table)

    def draw(self, title: str) -> Any:
        """Draw a figure of both."""
        assert self.confusion is not None
        bars = {
            f"{kind} {name}".strip(): [_known(value) for value in values]
            for kind, figures in self.figures.items()
            for name, values in figures.items()
        }
        return draw_confusion(self.axis, row_shares(self.confusion), bars, title)


def classes_of(what: str, names: Sequence[str], confusion: Tensor | None) -> ClassScores | None:
    """Scores of a classifier from its confusion matrix (classes, classes) of ``what``; None without one."""
    if confusion is None:
        return None
    figures = class_scores(confusion)
    del figures["IoU"]
    counts = confusion.cpu().numpy()
    return ClassScores(names, (what, counts.sum(1).tolist()), {"": figures}, counts)


def row_shares(counts: np.ndarray) -> np.ndarray:
    """Each row in percent of its sum; 0 if the sum is 0."""
    return 100 * counts / counts.sum(1, keepdims=True).clip(min=1)


def _known(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else value
