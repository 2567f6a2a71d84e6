"""Check data before training: boxes, masks, class maps, categories, missing files."""

from collections.abc import Sequence
from typing import Annotated, Literal

import tyro


def main(argv: Sequence[str]) -> int:
    """Run ``softfree check-data`` with these arguments; return the exit code."""
    return tyro.cli(check_data, args=argv, prog="softfree check-data", description=__doc__)


def check_data(
    task: Annotated[
        tyro.conf.Positional[Literal["detection", "segmentation"]], tyro.conf.arg(metavar="TASK")
    ],
    /,
    data_dir: str | None = None,
    masks: bool = True,
    skip_bad_annotations: bool = False,
    ignore_label: int = 255,
) -> int:
    """Run the checks that training begins with, and say what was found.

    Args:
        task: detection (COCO json) or segmentation (class maps).
        data_dir: folder to check; otherwise the embedded shapes.
        masks: detection: also check masks, which Mask R-CNN needs.
        skip_bad_annotations: detection: leave out annotations that can't be used.
        ignore_label: segmentation: value in masks/ that stands for no class.
    """
    if task == "detection":
        from softfree.data.detection import load_detection

        data = load_detection(data_dir, masks=masks, skip_bad=skip_bad_annotations)
        for split, part in (("train", data.train), ("val", data.val)):
            objects = len(part.annotations["annotations"])
            print(f"{split}: {len(part):,} pictures, {objects:,} objects")
        names = data.class_names
    else:
        from softfree.data.segmentation import load_segmentation

        maps = load_segmentation(data_dir, ignore_label=ignore_label)
        for split, pictures in (("train", maps.train), ("val", maps.val)):
            print(f"{split}: {len(pictures):,} pictures with class maps")
        names = maps.class_names
    print(f"{len(names)} classes: {', '.join(names)}\nno faults found")
    return 0
