"""Train a model: from a laptop to a cluster, with checkpoints, logs and resume.

`softfree train classification --data-dir D --output OUT`, alone or under torchrun.

Exit codes: 0 done; 1 failed on the way; 2 wrong arguments or unreadable files; 75 asked to stop (SIGTERM or
Ctrl-C): the run is saved and goes on with --resume auto.
"""

import errno
import os
import sys
from collections.abc import Callable, Sequence

from rich.console import Console

from softfree.commands._train_dense import detection, segmentation
from softfree.training.checkpoint import CheckpointWriteError
from softfree.training.engine import Outcome
from softfree.training.guard import NonFiniteError

FAILED = 1
STOPPED = 75  # EX_TEMPFAIL of sysexits.h: try again


def main(argv: Sequence[str]) -> int:
    """Run ``softfree train`` with these arguments; return the exit code."""
    if argv and argv[0] in ("-h", "--help"):
        print(f"usage: softfree train {{{','.join(TASKS)}}} [options]\n\n{__doc__}")
        return 0
    if not argv or argv[0] not in TASKS:
        given = f"got {argv[0]!r}" if argv else "e.g. `softfree train classification`"
        raise ValueError(f"train what? One of {', '.join(TASKS)}; {given}")
    try:
        return TASKS[argv[0]](argv[1:])
    except (CheckpointWriteError, NonFiniteError) as error:
        return _fail(str(error))
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return _fail("no space left on the disk of --output; make room, then --resume auto")


def classification(argv: Sequence[str]) -> int:
    """Parse the settings, train, say how it went."""
    from softfree.training.classification import (
        RECIPES,
        ClassificationSettings,
        recipe,
        train_classification,
    )
    from softfree.training.settings import parse_settings

    settings = parse_settings(
        ClassificationSettings,
        argv,
        recipe,
        RECIPES,
        prog="softfree train classification",
        description=(
            "Train an image classifier.\n\n"
            f"--recipe NAME sets defaults: {', '.join(RECIPES)} (without: digits for the embedded "
            "digits, else imagenet). --config FILE takes a settings.json of an earlier run instead. "
            "Flags win over both. Under torchrun, --batch-size is that of one process."
        ),
    )
    return report(train_classification(settings), str(settings.run.output))


def longrange(argv: Sequence[str]) -> int:
    """Train and test on a task of the Long Range Arena."""
    from softfree.training.longrange import parse_longrange, train_longrange

    settings = parse_longrange(argv)
    return report(train_longrange(settings), str(settings.run.output))


TASKS: dict[str, Callable[[Sequence[str]], int]] = {
    "classification": classification,
    "detection": detection,
    "longrange": longrange,
    "segmentation": segmentation,
}


def report(outcome: Outcome, output: str) -> int:
    """The last line of a run, by the main process, and its exit code."""
    main_process = os.environ.get("RANK", "0") == "0"
    console = Console(highlight=False, markup=False, soft_wrap=True, quiet=not main_process)
    position = outcome.position
    if outcome.stopped:
        console.print(
            f"stopped at step {position.step:,} as asked and saved in {output}/last; go on with "
            "--resume auto"
        )
        return STOPPED
    if position.best is not None:
        console.print(
            f"done: best {position.best:.4g} at step {position.best_step:,}, in {output}/best"
        )
    return 0


def _fail(message: str) -> int:
    print(f"softfree: error: {message}", file=sys.stderr)
    return FAILED
