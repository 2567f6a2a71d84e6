"""`softfree validate` for segmentation networks."""

import dataclasses

from softfree.commands.validate.base import PictureValidation, Scores, check_classes
from softfree.commands.validate.classes import ClassScores
from softfree.data.layouts import announce
from softfree.data.segmentation import EvalTransform, collate_pictures, load_split
from softfree.training.checkpoint import data_settings
from softfree.training.classification import Normalize
from softfree.training.confusion import class_scores
from softfree.training.distributed import Processes
from softfree.training.loading import evaluation
from softfree.training.segmentation import (
    Segmentation,
    SegmentationDataSettings,
    evaluate_segmenter,
)

HEAD_TITLES = {"upernet": "UPerNet", "linear": "a linear head"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValidateSegmentation(PictureValidation):
    """Mean intersection over union (mIoU) on the validation pictures, and the IoU of each class."""

    data_dir: str | None = None
    """folder in one of the known layouts; otherwise the data that the checkpoint was trained on"""
    batch_size: int = 1
    """pictures that a loading process delivers at a time"""
    window: int | None = None
    """side of the sliding windows; 0: the whole picture at once; otherwise as in the training"""
    short_side: int | None = None
    """short side that pictures are resized to; 0: not resized; otherwise as in the training"""

    def score(self, processes: Processes) -> Scores:
        model, metadata = Segmentation.load(self.checkpoint, processes.device)
        trained_on = data_settings(self.checkpoint, SegmentationDataSettings)
        data, names = load_split(
            self.data_dir or trained_on.data_dir,
            self.split,
            dataset=trained_on.dataset,
            ignore_label=trained_on.ignore_label,
            skip_bad=trained_on.skip_bad_annotations,
        )
        announce(data.layout, [len(data)], len(names))
        check_classes(self.checkpoint, metadata["class_names"], names)
        side = metadata["short_side"] if self.short_side is None else self.short_side
        side, views = self.views.loaded_at(side)
        data.transform = EvalTransform(side or None)
        reading = evaluation(data, collate_pictures, processes, **self.reading)
        with reading as (batches, unreadable):
            scores, counts = evaluate_segmenter(
                model,
                batches,
                Normalize(metadata["mean"], metadata["std"]),
                len(names),
                processes,
                window=metadata["window"] if self.window is None else self.window,
                views=views,
            )
        of_class = class_scores(counts)
        classes = ClassScores(
            names,
            ("pixels", counts.sum(1).tolist()),
            {"": {"IoU": of_class["IoU"], "accuracy": of_class["recall"]}},
            counts.numpy() if self.looks_at_classes else None,
        )
        head = HEAD_TITLES[metadata["arguments"].get("head", "upernet")]
        return Scores(
            f"{head} on {metadata['model']}, {self.subject}",
            [
                {
                    **self.row,
                    "class": "all (mean)",
                    "IoU": scores["mIoU"],
                    "accuracy": scores["accuracy"],
                }
            ],
            line=f"mIoU {scores['mIoU']:.2f} %, pixel accuracy {scores['accuracy']:.2f} %",
            unreadable=unreadable,
            classes=classes,
        )
