"""The tasks that the engine trains, by name."""

from softfree.training.classification import Classification
from softfree.training.detection import Detection
from softfree.training.engine import Task
from softfree.training.longrange import LongRange
from softfree.training.segmentation import Segmentation

TASKS: dict[str, type[Task]] = {
    task.name: task for task in (Classification, Detection, LongRange, Segmentation)
}
