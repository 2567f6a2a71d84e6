"""The ``softfree`` command: lists the commands and starts one.

It is outside the package and imports nothing heavy, so that ``softfree --help`` answers at once: importing
anything inside ``softfree`` imports torch and timm, which takes seconds.
"""

import gc
import importlib
import io
import logging
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

# Commands and their summaries; the code of a command is ``main(argv)`` in softfree/commands/<command>.py,
# with ``_`` for ``-``.
COMMANDS = {
    "benchmark": "Measure attentions or whole models: time, memory, throughput.",
    "check-data": "Check data before training: classes, boxes, masks, missing and damaged files.",
    "compare": "Compare attentions on a task of the Long Range Arena, or on twins: accuracy, size, speed, memory.",
    "demo": "Run a picture through a backbone, then race the operator against softmax attention.",
    "explore": "Serve a page that shows where each patch of a photo attends to.",
    "export": "Write a model as ONNX, as a torch.export program or in timm's layout, checked against PyTorch.",
    "figure": "Draw the papers' figures for a model and one of your photos.",
    "inspect": "Examine the attention layers of a model: condition, convergence, errors.",
    "models": "List the backbones: parameters, multiply-adds, and the papers' figures for comparison.",
    "predict": "Predict what is in pictures, with a model that `softfree train` wrote.",
    "quickstart": "Train a small model on handwritten digits, score it, and draw what it has learned.",
    "train": "Train a model: from a laptop to a cluster, with checkpoints, logs and resume.",
    "validate": "Score a trained model: accuracy, average precision or mIoU, at any image size.",
}
# Flags of earlier versions, by command or by command and subcommand, and what to write instead.
RENAMED = {
    "benchmark attention": {"--dim": "--head-dim", "--plot": "--draw"},
    "benchmark detector": {"--plot": "--draw"},
    "benchmark memory": {"--heads": "--num-heads", "--plot": "--draw"},
    "benchmark model": {"--plot": "--draw"},
    "benchmark throughput": {"--plot": "--draw"},
    "compare": {"--attention-options": "--model-kwargs", "--plot": "--draw"},
    "demo": {"--image": "the photo itself: softfree demo PHOTO"},
    "figure convergence": {"--steps": "--iterations", "--output": "--draw"},
    "figure heatmap": {"--output": "--draw"},
    "figure resolution": {
        "--checkpoints": "--checkpoint, once for each",
        "--sizes": "--img-size",
        "--output": "--draw",
    },
    "figure spectrum": {"--sizes": "--img-size", "--output": "--draw"},
    "predict": {"--out": "--draw"},
    "train longrange": {"--attention-options": "--model-kwargs"},
    "validate classification": {"--results-file": "--csv"},
    "validate detection": {"--results-file": "--csv"},
    "validate segmentation": {"--results-file": "--csv"},
}
# Stored texts, which commands print without importing torch; `make texts` writes them.
TEXTS = Path(__file__).parent / "softfree" / "commands" / "texts"
COLUMNS = 80
FAILED = 1
USAGE_ERROR = 2
INTERRUPTED = 130
BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``softfree`` with ``argv`` (None: the process's arguments); return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Names of files and classes may have characters that the terminal's encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    name, *rest = arguments
    if name in ("-V", "--version"):
        print(f"softfree {_version()}")
        return 0
    if name not in COMMANDS:
        return fail(_unknown(name))
    if renamed := _renamed(arguments):
        return fail(renamed)
    if text := kept_text(arguments):
        print(text, end="")
        return 0
    # Log messages of the library go to stderr, without names and levels.
    logging.basicConfig(handlers=[_notices()])
    logging.getLogger("softfree").setLevel(logging.INFO)
    # The import takes seconds. If the user presses Ctrl-C then, modules may turn that into other errors.
    if argv is None and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _at_once)
    if argv is None:
        # Makes PyTorch ask Linux for huge pages, since training on a CPU spends much of its time on page
        # faults.
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    try:
        command = _load(name, own_process=argv is None)
        if argv is None:
            _interrupt_once()
        code = command.main(rest) or 0
        sys.stdout.flush()
        if argv is None and "RANK" in os.environ:
            leave(code)
        return code
    except KeyboardInterrupt:
        print("\nsoftfree: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader, such as `head`, is gone. Python would complain again when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except (ValueError, FileNotFoundError) as error:
        if os.environ.get("SOFTFREE_TRACEBACK"):
            raise
        return fail(str(error))
    except OSError as error:
        # Usually a disk that is full or not writable.
        if os.environ.get("SOFTFREE_TRACEBACK"):
            raise
        return fail(_of_system(error), FAILED)


def _of_system(error: OSError) -> str:
    try:
        sys.stdout.flush()
    except OSError:
        # The rest of stdout, which may be on that disk, can't be written at the end either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if error.strerror is None:
        return str(error)
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror


def _at_once(*_: object) -> NoReturn:
    os.write(2, b"\nsoftfree: interrupted\n")
    os._exit(INTERRUPTED)


def _interrupt_once() -> None:
    """Let the first Ctrl-C raise KeyboardInterrupt, so that the command can clean up.

    A second one exits at once.
    """

    pressed = False

    def interrupt(*_: object) -> NoReturn:
        nonlocal pressed
        if pressed:
            _at_once()
        pressed = True
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, interrupt)


def _notices() -> logging.Handler:
    class Formatter(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return with_flags(super().format(record))

    handler = logging.StreamHandler()
    handler.setFormatter(Formatter())
    return handler


def leave(code: int) -> NoReturn:
    """End a process that torchrun started, after everything is written, without interpreter shutdown.

    A gloo thread of PyTorch may still release a tensor. During interpreter shutdown that ends in a C++ abort,
    and torchrun then takes a successful run for a failed one.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _load(name: str, own_process: bool) -> ModuleType:
    """Import the module of a command.

    Objects that imports create stay until the end. In our own process the garbage collector is told to ignore
    them; searching them would take half a second now, and again at the end.
    """
    if own_process:
        gc.disable()
    module = importlib.import_module("softfree.commands." + name.replace("-", "_"))
    if own_process:
        gc.freeze()
        gc.enable()
    return module


def kept_text(arguments: Sequence[str]) -> str:
    """The stored output of a command for these arguments; "" if there is none and the command must run."""
    asked = [{"-h": "--help"}.get(argument, argument) for argument in arguments]
    # Only names of existing files are accepted, not parts of a path.
    files = {file.name: file for file in TEXTS.glob("*.txt")}
    file = files.get(text_name(asked))
    return "" if file is None or _columns() < COLUMNS else file.read_text(encoding="utf-8")


def text_name(arguments: Sequence[str]) -> str:
    """The name of the file with that text.

    Example:
        >>> text_name(["train", "detection", "--help"])
        'train_detection_help.txt'
    """
    return "_".join(arguments).replace("--", "") + ".txt"


def _help() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(
        _fill(f"  {name:<{width}}  {text}", width + 4) for name, text in COMMANDS.items()
    )
    return (
        "usage: softfree COMMAND [options]\n\n"
        "Softmax-free attention (SOFT, SOFT++) for PyTorch, and the backbones built on\nit.\n\n"
        f"commands:\n{commands}\n\n"
        "options:\n"
        "  -h, --help     this text; `softfree COMMAND --help` explains one command\n"
        "  -V, --version  the version\n\n"
        "SOFTFREE_TRACEBACK=1 in the environment shows where in the code an error arose."
    )


def _fill(text: str, indent: int = 0, columns: int = COLUMNS) -> str:
    """Wrap ``text`` into lines between words."""
    import textwrap

    return textwrap.fill(
        text,
        columns,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
        replace_whitespace=False,
    )


def _columns() -> int:
    import shutil

    return shutil.get_terminal_size((COLUMNS, 24)).columns


def _version() -> str:
    from importlib import metadata

    return metadata.version("softfree")


def _unknown(name: str) -> str:
    import difflib

    nearest = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
    kind = "option" if name.startswith("-") else "command"
    advice = f"did you mean '{nearest[0]}'?" if nearest else "try `softfree --help`"
    return f"there is no {kind} '{name}'; {advice}"


def _renamed(arguments: Sequence[str]) -> str:
    """A message on what replaces the first flag from an earlier version; "" if there is no such flag."""
    name, first = [*arguments, ""][:2]
    for command, new_names in RENAMED.items():
        # `validate` finds its subcommand itself if a flag comes first.
        if command not in (name, f"{name} {first}") and not (
            first.startswith("-") and command.startswith(f"{name} ")
        ):
            continue
        for argument in arguments[1:]:
            # The parser also accepts --img_size for --img-size.
            flag = argument.partition("=")[0].replace("_", "-")
            if flag in new_names:
                return f"{flag} of `softfree {command}` is now {new_names[flag]}"
    return ""


def fail(message: str, code: int = USAGE_ERROR) -> int:
    """Print an error message, and return the exit code."""
    text = f"softfree: error: {with_flags(message)}"
    if sys.stderr.isatty():
        # An error is wrapped in a terminal, but stays on one line in a file.
        text = "\n".join(_fill(line, columns=_columns()) for line in text.split("\n"))
    print(text, file=sys.stderr)
    return code


def with_flags(message: str) -> str:
    """Convert argument names in a message of the package to flags: `img_size` becomes --img-size."""
    return re.sub(r"`([a-z][a-z0-9_]*)`", lambda m: "--" + m[1].replace("_", "-"), message)


if __name__ == "__main__":
    sys.exit(main())
