"""Score a trained model: accuracy, average precision or mIoU, at any image size.

`softfree validate --checkpoint OUT/best --data-dir D`, alone or under torchrun: each sample counts once. The
task is read from the checkpoint; `softfree validate TASK --help` lists a task's options.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from softfree.commands.common import run_subcommand
from softfree.commands.validate.base import Validation
from softfree.commands.validate.classification import ValidateClassification
from softfree.commands.validate.detection import ValidateDetection
from softfree.commands.validate.longrange import ValidateLongRange
from softfree.commands.validate.segmentation import ValidateSegmentation
from softfree.training.checkpoint import read_metadata

SUBCOMMANDS: dict[str, type[Validation]] = {
    "classification": ValidateClassification,
    "detection": ValidateDetection,
    "longrange": ValidateLongRange,
    "segmentation": ValidateSegmentation,
}


def main(argv: Sequence[str]) -> int:
    """Run ``softfree validate`` with these arguments; return the exit code."""
    validation: Validation = run_subcommand(
        "validate", SUBCOMMANDS, with_task(argv), question="validate what?", description=__doc__
    )
    return validation.run()


def with_task(argv: Sequence[str]) -> list[str]:
    """The arguments, preceded by the task of --checkpoint if they don't name one."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--checkpoint", type=Path)
    checkpoint = parser.parse_known_args(list(argv))[0].checkpoint
    if checkpoint is None or argv[0] in SUBCOMMANDS:
        return list(argv)
    # A weights file does not name its task; only classifiers can be validated from one.
    task = "classification" if checkpoint.is_file() else read_metadata(checkpoint).get("task")
    return [str(task), *argv]
