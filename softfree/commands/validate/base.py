"""What all tasks of `softfree validate` share: options, processes, the table and its file."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from softfree.analysis import describe_environment
from softfree.analysis.plots import save_figure
from softfree.commands.common import (
    check_figure,
    check_output,
    check_positive,
    message_console,
    save_rows,
)
from softfree.commands.validate.classes import ClassScores
from softfree.data.images import Unreadable
from softfree.models.checks import check_at_least
from softfree.models.views import Views
from softfree.training.devices import AmpDtype
from softfree.training.distributed import Processes, gather, join_processes
from softfree.training.settings import WORKERS


@dataclasses.dataclass
class Scores:
    """The results: rows for the file; a title, a table and a line below it for the terminal."""

    title: str
    rows: Sequence[Mapping[str, object]]
    table: Table | None = None
    line: str = ""
    unreadable: Sequence[Unreadable] = ()
    classes: ClassScores | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Validation(ABC):
    """Options of every task; a subclass adds its own and computes the scores."""

    checkpoint: Path
    """a checkpoint folder, such as OUT/best"""
    data_dir: str | None = None
    """the data; otherwise the data that the checkpoint was trained on"""
    split: Literal["train", "val", "test"] = "val"
    """which split of the data: train, val or test"""
    batch_size: int = 128
    """samples at a time"""
    workers: int = WORKERS
    """processes that load samples"""
    amp_dtype: AmpDtype = "auto"
    """autocast dtype; 'auto': bfloat16 on a GPU, none on a CPU"""
    device: str = "auto"
    """'cuda', 'cpu', or 'auto' for the GPU if there is one"""
    per_class: bool = False
    """also show the scores of each class, and the confusion matrix"""
    csv: Path | None = None
    """write the table to this CSV file, with date, device and versions"""
    draw: Path | None = None
    """draw the scores of each class and the confusion matrix into this file (.png, .pdf or .svg)"""

    @property
    def reading(self) -> dict[str, Any]:
        """Keyword arguments for :func:`~softfree.training.loading.evaluation`."""
        return dict(batch_size=self.batch_size, workers=self.workers, amp_dtype=self.amp_dtype)

    @property
    def looks_at_classes(self) -> bool:
        """Whether the scores of classes are to be shown or drawn."""
        return self.per_class or self.draw is not None

    def new_confusion(self, classes: int, processes: Processes) -> Tensor | None:
        """Zeros (classes, classes) for a confusion matrix, if one is needed; otherwise None."""
        if not self.looks_at_classes:
            return None
        return torch.zeros(classes, classes, dtype=torch.int64, device=processes.device)

    @property
    def subject(self) -> str:
        """What is scored, for titles: the checkpoint, and the split if it is not the default."""
        return str(self.checkpoint) + ("" if self.split == "val" else f", {self.split}")

    @property
    def row(self) -> dict[str, Any]:
        """The first columns of every row of the file."""
        return {"checkpoint": str(self.checkpoint), "split": self.split}

    @abstractmethod
    def score(self, processes: Processes) -> Scores:
        """Compute the scores over the samples of all processes, with this process's unreadable files."""

    def run(self) -> int:
        """Score, print and write; return the exit code."""
        check_output("--csv", self.csv)
        check_figure("--draw", self.draw)
        check_positive("--batch-size", self.batch_size)
        check_at_least(0, workers=self.workers)
        with join_processes(self.device) as processes:
            scores = self.score(processes)
            skipped = gather(list(scores.unreadable), processes)
            if processes.main:
                for file in dict.fromkeys(skipped):
                    print(f"skipped {file.path}: {file.reason}")
                console, messages = Console(highlight=False), message_console(markup=False)
                if scores.title:
                    messages.print(scores.title, style="bold")
                if scores.table is not None:
                    console.print(scores.table)
                if scores.classes is not None and (self.per_class or scores.table is None):
                    scores.classes.print(console)
                if scores.classes is not None and self.per_class:
                    scores.classes.print_confusion(console)
                if scores.line:
                    messages.print(scores.line)
                rows = list(scores.rows)
                if scores.classes is not None:
                    rows = [{**self.row, "class": "all", **row} for row in rows]
                    rows += scores.classes.rows(self.row)
                save_rows(self.csv, rows, describe_environment(processes.device))
                if self.draw is not None and scores.classes is not None:
                    model = scores.title.partition(", ")[0] or self.checkpoint.resolve().parent.name
                    heading = f"{model}: which classes are mistaken for which ({self.split})"
                    save_figure(scores.classes.draw(heading), self.draw, "plot")
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PictureValidation(Validation):
    """Options of every task on pictures."""

    tta: bool = False
    """test-time augmentation: also run each picture mirrored, and merge the results"""
    tta_scales: tuple[float, ...] = ()
    """test-time augmentation: run each picture at several multiples of its size, e.g. 0.75 1 1.25"""

    @property
    def views(self) -> Views:
        """How pictures are shown to the model."""
        return Views.of(self.tta, self.tta_scales)

    @property
    def subject(self) -> str:
        scales = " ".join(f"{scale:g}" for scale in self.views.scales)
        shown = [f"at {scales}"] * (scales != "1") + ["mirrored"] * self.tta
        return ", ".join([super().subject, *shown])

    @property
    def row(self) -> dict[str, Any]:
        views = self.views
        return {**super().row, "tta": self.tta, "tta_scales": " ".join(map(str, views.scales))}


def check_classes(checkpoint: Path, known: Sequence[str], given: Sequence[str]) -> None:
    """Raise if the classes of the data differ from those of the checkpoint."""
    if list(known) != list(given):
        raise ValueError(
            f"--checkpoint {checkpoint} has {len(known)} classes ({', '.join(known[:3])}, ...), but "
            f"--data-dir has {len(given)} ({', '.join(given[:3])}, ...); they must be the same"
        )
