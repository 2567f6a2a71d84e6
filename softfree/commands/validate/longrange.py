"""`softfree validate` for the tasks of the Long Range Arena."""

import dataclasses
from typing import Literal

from softfree.commands.validate.base import Scores, Validation
from softfree.commands.validate.classes import classes_of
from softfree.data.longrange import some_samples
from softfree.training.checkpoint import SETTINGS, check_task, locate, read_metadata
from softfree.training.distributed import Processes
from softfree.training.longrange import (
    LongRange,
    LongRangeSettings,
    load_data,
    score_checkpoint,
)
from softfree.training.settings import read_settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValidateLongRange(Validation):
    """Accuracy and loss on a task of the Long Range Arena, or on twins."""

    data_dir: str | None = None
    """folder with the task's files; otherwise the data that the checkpoint was trained on"""
    split: Literal["train", "dev", "val", "test"] = "test"  # type: ignore[assignment]
    """train, dev (or val, which is the same) or test"""
    eval_samples: int = 0
    """score only this many random samples, always the same ones; 0: all"""
    batch_size: int = 32
    """samples at a time"""
    workers: int = 2
    """processes that load samples"""

    def score(self, processes: Processes) -> Scores:
        folder = locate(self.checkpoint)
        check_task(self.checkpoint, read_metadata(folder), LongRange.name)
        settings = read_settings(LongRangeSettings, folder / SETTINGS).data
        if self.data_dir is not None:
            settings = dataclasses.replace(settings, data_dir=self.data_dir)
        split = "dev" if self.split == "val" else self.split
        data = load_data(settings)
        samples = some_samples(getattr(data, split), self.eval_samples)
        confusion = self.new_confusion(len(data.class_names), processes)
        scores = score_checkpoint(folder, samples, processes, confusion, **self.reading)
        what = "tokens" if data.task.per_token else "samples"
        classes = classes_of(what, data.class_names, confusion)
        line = (
            f"{settings.task} {self.split}: accuracy {scores['accuracy']:.2f}%, "
            f"loss {scores['loss']:.4f}, {scores['samples']:,} samples"
        )
        return Scores(
            "", [{**self.row, "task": settings.task, **scores}], line=line, classes=classes
        )
