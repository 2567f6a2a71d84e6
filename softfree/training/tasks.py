"""The tasks that the engine trains, by name.

load_for_inference("OUTPUT/best")    -> model, metadata
"""

from pathlib import Path
from typing import Any

from torch import nn

from softfree.training.checkpoint import read_metadata
from softfree.training.classification import Classification
from softfree.training.detection import Detection
from softfree.training.engine import Task
from softfree.training.longrange import LongRange
from softfree.training.segmentation import Segmentation

TASKS: dict[str, type[Task]] = {
    task.name: task for task in (Classification, Detection, LongRange, Segmentation)
}


def load_for_inference(path: str | Path) -> tuple[nn.Module, dict[str, Any]]:
    """Load the model of a checkpoint folder of any task, on the CPU and ready to use, and its metadata."""
    task = read_metadata(Path(path)).get("task", "")
    if task not in TASKS:
        raise ValueError(
            f"{path} is a checkpoint of the task {task!r}, which this version does not know"
        )
    return TASKS[task].load(path)
