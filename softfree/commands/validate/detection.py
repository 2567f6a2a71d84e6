"""`softfree validate` for detectors."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from softfree.commands.common import check_output, make_table, write_json
from softfree.commands.validate.base import PictureValidation, Scores, check_classes
from softfree.commands.validate.classes import ClassScores
from softfree.data.detection import collate_detection, load_split
from softfree.data.layouts import announce
from softfree.models.checks import check_at_least
from softfree.training.checkpoint import data_settings
from softfree.training.coco_metrics import FIGURES
from softfree.training.detection import (
    Detection,
    DetectionDataSettings,
    collect_detections,
    for_evaluation,
    scaled_size,
    set_size,
)
from softfree.training.distributed import Processes
from softfree.training.loading import evaluation


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValidateDetection(PictureValidation):
    """COCO's average precision on the validation pictures: boxes, and masks for Mask R-CNN."""

    data_dir: str | None = None
    """folder in the layout of COCO, Roboflow, VOC or YOLO; otherwise the data that the checkpoint was trained
    on"""
    skip_bad_annotations: bool = False
    """skip annotations that can't be used instead of raising an error"""
    short_side: int | None = None
    """short side that pictures are resized to; otherwise as in the training"""
    max_size: int | None = None
    """maximum length of the longer side; otherwise as in the training, in proportion to --short-side"""
    batch_size: int = 8
    """pictures at a time"""
    min_score: float = 0.5
    """confusion matrix: drop detections with a lower score, as predict does"""
    results: Path | None = None
    """write the detections to this file, in the format of COCO's own tools (their loadRes)"""

    def _size(self, arguments: Mapping[str, Any]) -> tuple[int, int]:
        """The short side, and the maximum of the long side."""
        usual = arguments["min_size"], arguments["max_size"]
        short_side, max_size = scaled_size(*usual, self.short_side)
        max_size = max_size if self.max_size is None else self.max_size
        check_at_least(1, short_side=short_side, max_size=max_size)
        return short_side, max_size

    def score(self, processes: Processes) -> Scores:
        check_output("--results", self.results)
        if not 0 <= self.min_score <= 1:
            raise ValueError(f"--min-score must be from 0 to 1, got {self.min_score:g}")
        model, metadata = Detection.load(self.checkpoint, processes.device)
        masks = metadata["detector"] == "mask-rcnn"
        trained_on = data_settings(self.checkpoint, DetectionDataSettings)
        data = load_split(
            self.data_dir or trained_on.data_dir,
            self.split,
            masks=masks,
            skip_bad=self.skip_bad_annotations or trained_on.skip_bad_annotations,
        )
        announce(data.layout, [len(data)], len(data.class_names))
        check_classes(self.checkpoint, metadata["class_names"], data.class_names)
        size = self._size(metadata["arguments"])
        set_size(model, *size)
        pictures = for_evaluation(data, *size)
        reading = evaluation(pictures, collate_detection, processes, **self.reading)
        with reading as (batches, unreadable):
            metrics = collect_detections(model, batches, data, masks, self.views)
        scores = metrics.compute(processes)
        if processes.main and self.results is not None:
            write_json(self.results, metrics.entries())
        rows, table = [], make_table(["", *FIGURES])
        kinds = ("box", "mask") if masks else ("box",)
        for kind in kinds:
            figures = {name: scores.get(f"{kind}_{name}") for name in FIGURES}
            rows.append({**self.row, "kind": kind, **figures})
            table.add_row(kind, *("-" if x is None else f"{x:.1f}" for x in figures.values()))
        title = f"{metadata['detector']} on {metadata['model']}, {self.subject}"
        line = f"results written to {self.results}" if self.results else ""
        classes = None
        if self.looks_at_classes:
            classes = ClassScores(
                data.class_names,
                ("objects", metrics.objects()),
                {kind: metrics.of_classes(kind) for kind in kinds},
                metrics.confusion(self.min_score),
            )
        return Scores(title, rows, table, line, unreadable, classes)
