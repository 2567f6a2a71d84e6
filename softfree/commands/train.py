"""Train a model: from a laptop to a cluster, with checkpoints, logs and resume.

`softfree train classification --data-dir D --output OUT`, alone or under torchrun.

Exit codes: 0 done; 1 failed on the way; 2 wrong arguments or unreadable files; 75 asked to stop (SIGTERM or
Ctrl-C): the run is saved and goes on with --resume auto.
"""

import argparse
import errno
import itertools
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console

from softfree.training.checkpoint import CheckpointWriteError
from softfree.training.engine import Outcome, Task
from softfree.training.guard import NonFiniteError
from softfree.training.settings import Given, override, read_settings
from softfree.training.tasks import TASKS
from softfree_cli import with_flags

SUMMARIES = {
    "classification": (
        "Train an image classifier.\n\n--recipe NAME sets defaults: digits, imagenet, short, finetune "
        "(without: digits for the embedded digits, else imagenet)."
    ),
    "detection": (
        "Train a detector of objects: RetinaNet (boxes) or Mask R-CNN (boxes and masks).\n\n"
        "--recipe NAME sets defaults: 1x, 3x, shapes (without: shapes for the embedded shapes, else 1x)."
    ),
    "longrange": (
        "Train the sequence encoder on a task of the Long Range Arena.\n\n--task sets the defaults below to "
        "the papers' for it. At the end the step that was best on dev is tested."
    ),
    "segmentation": (
        "Train UPerNet: a class for every pixel.\n\n--recipe NAME sets defaults: ade20k, cityscapes, shapes "
        "(without: shapes for the embedded shapes, else ade20k)."
    ),
}
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
    task = TASKS[argv[0]]
    settings = resolve(
        argv[1:],
        task,
        prog=f"softfree train {task.name}",
        description=(
            f"{SUMMARIES[task.name]} --config FILE takes a settings.json of an earlier run instead. Flags win "
            "over both. Under torchrun, --batch-size is that of one process."
        ),
    )
    try:
        return report(task.run(settings), settings.run.output)
    except (CheckpointWriteError, NonFiniteError) as error:
        return _fail(str(error))
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return _fail("no space left on the disk of --output; make room, then --resume auto")


def resolve(
    argv: Sequence[str],
    task: type[Task],
    recipes: Mapping[str, Any] | None = None,
    prog: str = "",
    description: str = "",
) -> Any:
    """Settings of a task: a recipe or the file of --config, then the flags, which win.

    ``recipes`` stand in for the task's own, of a dataclass that has the same parts and more.
    """
    recipes = task.recipes if recipes is None else recipes
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--recipe", default="")
    first.add_argument("--config", type=Path)
    chosen, rest = first.parse_known_args([with_hyphens(argument) for argument in argv])
    if chosen.recipe and chosen.recipe not in recipes:
        raise ValueError(f"--recipe must be one of {', '.join(recipes)}, got {chosen.recipe!r}")
    if chosen.recipe and chosen.config:
        raise ValueError("--recipe and --config can't be used together: the file has its recipe")
    given = given_in(rest)
    kind = type(next(iter(recipes.values())))
    if chosen.config is None:
        default = recipes[chosen.recipe or task.usual_recipe(given)]
    elif chosen.config.is_file():
        default = read_settings(kind, chosen.config)
    else:
        raise FileNotFoundError(f"--config {chosen.config} does not exist")
    settings = tyro.cli(
        kind,
        args=rest,
        default=default,
        prog=prog,
        description=description,
        config=(tyro.conf.OmitArgPrefixes,),
    )
    if chosen.config is not None:
        return settings
    if "batch_size" not in given:
        batch_size = share_out(default.optim.batch_size)
        settings = override(settings, {"optim": dict(batch_size=batch_size)})
    return task.adapt(settings, given)


def with_hyphens(argument: str) -> str:
    """A flag in the one spelling that the parsers share."""
    flag, equals, value = argument.partition("=")
    return flag.replace("_", "-") + equals + value if flag.startswith("--") else argument


def given_in(argv: Sequence[str]) -> Given:
    """The arguments that flags name, each with what follows its flag: its first value, or nothing."""
    given = {}
    for argument, following in itertools.pairwise([*argv, ""]):
        if argument.startswith("--"):
            flag, equals, value = argument.partition("=")
            given[flag[2:].replace("-", "_")] = value if equals else following
    return given


def share_out(batch: int) -> int:
    """A recipe's batch shared out among the processes that torchrun started."""
    processes = int(os.environ.get("WORLD_SIZE", 1))
    if batch % processes:
        raise ValueError(
            f"the recipe's batch of {batch} can't be shared out among {processes} processes; "
            "give --batch-size, the batch of one process"
        )
    return batch // processes


def report(outcome: Outcome, output: Path) -> int:
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
    print(f"softfree: error: {with_flags(message)}", file=sys.stderr)
    return FAILED
