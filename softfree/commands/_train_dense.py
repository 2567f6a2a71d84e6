"""`softfree train detection` and `softfree train segmentation`."""

from collections.abc import Sequence

from softfree.training.settings import parse_settings

ABOUT = (
    "{what}\n\n--recipe NAME sets defaults: {recipes} (without: shapes for the embedded shapes, else "
    "{usual}). --config FILE takes a settings.json of an earlier run instead. Flags win over both. Under "
    "torchrun, --batch-size is that of one process."
)


def detection(argv: Sequence[str]) -> int:
    """Parse the settings, train, say how it went."""
    from softfree.commands.train import report
    from softfree.training.detection import RECIPES, DetectionSettings, recipe, train_detection

    settings = parse_settings(
        DetectionSettings,
        argv,
        recipe,
        RECIPES,
        prog="softfree train detection",
        description=ABOUT.format(
            what="Train a detector of objects: RetinaNet (boxes) or Mask R-CNN (boxes and masks).",
            recipes=", ".join(RECIPES),
            usual="1x",
        ),
    )
    return report(train_detection(settings), str(settings.run.output))


def segmentation(argv: Sequence[str]) -> int:
    """Parse the settings, train, say how it went."""
    from softfree.commands.train import report
    from softfree.training.segmentation import (
        RECIPES,
        SegmentationSettings,
        recipe,
        train_segmentation,
    )

    settings = parse_settings(
        SegmentationSettings,
        argv,
        recipe,
        RECIPES,
        prog="softfree train segmentation",
        description=ABOUT.format(
            what="Train UPerNet: a class for every pixel.",
            recipes=", ".join(RECIPES),
            usual="ade20k",
        ),
    )
    return report(train_segmentation(settings), str(settings.run.output))
