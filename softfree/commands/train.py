"""Train a model: from a laptop to a cluster, with checkpoints, logs and resume.

`softfree train classification --data-dir D --output OUT`, alone or under torchrun.

Exit codes: 0 done; 1 failed during the run; 2 wrong arguments or unreadable files; 75 asked to stop (SIGTERM
or Ctrl-C): the run is saved, and --resume auto continues it.
"""

import errno
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape

from softfree.analysis.capture import KNOWN
from softfree.analysis.judgement import warnings_of
from softfree.analysis.subject import load_subject
from softfree.commands.common import PICTURE_TASKS, message_console
from softfree.commands.inspect import look
from softfree.commands.parser import HELP, columns, print_subcommands
from softfree.commands.settings import resolve
from softfree.training.checkpoint import CheckpointWriteError
from softfree.training.engine import Outcome
from softfree.training.guard import NonFiniteError
from softfree.training.tasks import TASKS as SUBCOMMANDS
from softfree_cli import FAILED, fail

SUMMARIES = {
    "classification": "Train an image classifier.",
    "detection": "Train an object detector: RetinaNet (boxes) or Mask R-CNN (boxes and masks).",
    "longrange": (
        "Train the sequence encoder on a task of the Long Range Arena, or on twins.\n\n--task sets the defaults "
        "below to those of the papers. At the end the step that was best on dev is tested."
    ),
    "segmentation": "Train UPerNet, or a linear head: a class for every pixel.",
}
PHOTO = "photo.jpg"
STOPPED = 75  # EX_TEMPFAIL of sysexits.h: try again


def main(argv: Sequence[str], advice: bool = True) -> int:
    """Run ``softfree train`` with these arguments; return the exit code.

    With ``advice``, print what to type next at the end.
    """
    if argv and argv[0] in HELP:
        print_subcommands("softfree train", SUMMARIES, __doc__ or "")
        return 0
    if not argv or argv[0] not in SUBCOMMANDS:
        given = f"got {argv[0]!r}" if argv else "e.g. `softfree train classification`"
        raise ValueError(f"train what? One of {', '.join(SUBCOMMANDS)}; {given}")
    task = SUBCOMMANDS[argv[0]]
    settings = resolve(
        argv[1:],
        task,
        prog=f"softfree train {task.name}",
        description=(
            f"{SUMMARIES[task.name]}\n\nFlags override the recipe. Under torchrun, --batch-size is the batch size of "
            "one process."
        ),
    )
    try:
        code = report(task.run(settings), settings.run.output)
    except (CheckpointWriteError, NonFiniteError) as error:
        return fail(str(error), FAILED)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        return fail(
            "no space left on the disk of --output; make room, then continue with --resume auto",
            FAILED,
        )

    if not code and os.environ.get("RANK", "0") == "0":
        warn_of_attention(settings.run.output / "best")
        if advice:
            print(next_steps(task.name, settings.run.output / "best"))
    return code


def warn_of_attention(checkpoint: Path) -> None:
    """Warn about layers of a trained model that attend to nothing, or to everything equally."""
    if not checkpoint.exists():
        return
    subject = load_subject(checkpoint, None)
    if not any(isinstance(module, KNOWN) for module in subject.model.modules()):
        return
    console = message_console()
    try:
        captured, seen = look(subject)
    except ValueError as error:  # the training is done all the same
        console.print(f"[yellow]warning[/] {escape(str(error))}")
        return
    layers = captured.layers
    found = warnings_of(layers)
    for name, text in found.items():
        console.print(f"[yellow]warning[/] {name} {text}")
    if found:
        console.print(f"{len(found)} of {len(layers)} attention layers do little, seen on {seen}")


def next_steps(task: str, checkpoint: Path) -> str:
    """Commands to type after training."""
    commands: tuple[tuple[str, str], ...] = (
        (f"predict {PHOTO}", "what it sees"),
        (f"inspect {PHOTO}", "whether it attends"),
        (f"explore {PHOTO}", "where it attends, on a page"),
    )
    if task not in PICTURE_TASKS:
        commands = (("validate", "its scores"), ("inspect", "whether it attends"))
    named = shlex.quote(str(checkpoint))
    lines = [(f"  softfree {command} --checkpoint {named}", what) for command, what in commands]
    width = max(len(line) for line, _ in lines)
    rows = [f"{line:<{width}}  {what}" for line, what in lines]
    if max(map(len, rows)) > columns():
        rows = [f"{what}:\n{line}" for line, what in lines]
    return "\n".join(["Next:", *rows])


def report(outcome: Outcome, output: Path) -> int:
    """Print the last line of a run in the main process; return the exit code."""
    main_process = os.environ.get("RANK", "0") == "0"
    console = message_console(markup=False, quiet=not main_process)
    position = outcome.position
    if outcome.stopped:
        console.print(
            f"stopped at step {position.step:,} as requested and saved in {output}/last; continue with "
            "--resume auto"
        )
        return STOPPED
    if outcome.note:
        console.print(outcome.note)
    if position.best is not None:
        console.print(
            f"done: best {position.best:.4g} at step {position.best_step:,}, in {output}/best"
        )
    return 0
