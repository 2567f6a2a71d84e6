"""What the commands share: checks of their arguments, subcommands, tables, progress."""

import contextlib
import dataclasses
import json
import math
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.control import Control
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, track
from rich.segment import ControlType
from rich.table import Table

from softfree.analysis import describe_environment, write_csv
from softfree.analysis.plots import save_figure
from softfree.analysis.subject import Subject, load_subject
from softfree.commands.parser import HELP, columns, parse, print_subcommands
from softfree.data.files import replace_durably
from softfree.models.checks import SMALLEST_IMAGE, check_at_least
from softfree.training.checkpoint import read_metadata
from softfree.training.devices import choose_device
from softfree.training.settings import RunSettings

Item = TypeVar("Item")
NOTHING = "-"
# The default folder of runs, and the tasks whose models take pictures.
RUNS = RunSettings().output
PICTURE_TASKS = ("classification", "detection", "segmentation")
# For each title, a function from a row to the text of its cell.
Columns = Mapping[str, Callable[[Any], str]]
FIGURE_ENDINGS = (".png", ".svg", ".pdf")
PICTURE_ENDINGS = (".png", ".jpg", ".jpeg")
Photo = Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="[PHOTO]")]
# Each use of the option adds one value, so that a photo may follow it.
Repeated = tyro.conf.UseAppendAction
Result = TypeVar("Result")


def check_choices(option: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise if ``option`` has no values, or values that are not ``known``."""
    known, given = list(known), list(given)
    if not given:
        raise ValueError(f"{option} needs at least one of {', '.join(known)}")
    for value in given:
        if value not in known:
            raise ValueError(f"{option} must be one of {', '.join(known)}, got {value!r}")


def check_positive(option: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{option} must be above 0, got {value:g}")


def check_img_size(*sides: int | None) -> None:
    """Raise if images are too small for a pyramid; None, the model's own size, is accepted."""
    for side in sides:
        if side is not None:
            check_at_least(SMALLEST_IMAGE, img_size=side)


def check_output(option: str, path: Path | None) -> None:
    """Raise if a file can't be written, so that this is found before measuring and not after it."""
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{option} must name a file, but {path} is a folder")
    if path.exists():
        if not os.access(path, os.W_OK):
            raise ValueError(f"{option}: can't write {path}; use a file that you can write to")
        return
    nearest = next(folder for folder in path.absolute().parents if folder.exists())
    try:
        # Try it, since permissions are not enough: not even root can write in /proc.
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError as error:
        raise ValueError(
            f"{option}: can't write {path}, because no file can be created in {nearest} ({error.strerror})"
        ) from error


def check_figure(option: str, path: Path | None, endings: Sequence[str] = FIGURE_ENDINGS) -> None:
    """Raise if a figure can't be written to a file."""
    if path is not None and path.suffix.lower() not in endings:
        raise ValueError(f"{option} must end in {', '.join(endings)}, got {path}")
    check_output(option, path)


def make_table(titles: Iterable[str]) -> Table:
    """A table without side borders, narrow enough for a terminal of 80 columns."""
    table = Table(header_style="bold", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1))
    first, *others = titles
    # Words of the first title are not broken, even in a wide table.
    widest = max(map(len, first.split()), default=0)
    table.add_column(first, overflow="fold", vertical="top", min_width=widest)
    for title in others:
        table.add_column(title, justify="right", no_wrap=True)
    return table


def message_console(**options: Any) -> Console:
    """A console for messages: wrapped between words in a terminal, but one line each in a file."""
    console = Console(highlight=False, **options)
    console.soft_wrap = not console.is_terminal
    return console


def shell_lines(argv: Iterable[str]) -> str:
    """Format a command to be copied, in lines that fit a terminal.

    Example:
        >>> print(shell_lines(["softfree", "predict", "a photo.jpg", "--checkpoint", "output/" + 50 * "x"]))
        softfree predict 'a photo.jpg' --checkpoint \\
            output/xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx
    """
    first, *others = map(shlex.quote, argv)
    lines = [first]
    for word in others:
        if len(lines[-1]) + len(word) > columns() - 3:  # a space, and one more with the backslash
            lines.append(f"    {word}")
        else:
            lines[-1] += f" {word}"
    return " \\\n".join(lines)


def to_json(value: Any, **options: Any) -> str:
    """Convert a value to standard JSON: numbers that are not finite become null.

    Example:
        >>> to_json({"score": float("nan"), "boxes": [1.5]})
        '{"score": null, "boxes": [1.5]}'
    """
    return json.dumps(_finite(value), allow_nan=False, **options)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def digits(value: float | None, factor: float = 1.0) -> str:
    """Format a number with three significant digits and no exponent; a dash for None.

    Example:
        >>> digits(0.01234), digits(123.4), digits(23701.2), digits(None)
        ('0.0123', '123', '23,701', '-')
    """
    if value is None:
        return NOTHING
    value *= factor
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".")


def field(name: str, factor: float = 1.0) -> Callable[[Any], str]:
    """A function for a cell: :func:`digits` of the row's field of this name."""
    return lambda row: digits(getattr(row, name), factor)


def percent(share: float | None) -> str:
    """Format a share in percent; a dash for None.

    Example:
        >>> percent(0.416), percent(0.0047), percent(None)
        ('42%', '0.5%', '-')
    """
    if share is None:
        return NOTHING
    return f"{100 * share:.0f}%" if share >= 0.1 else f"{100 * share:.1f}%"


def with_bar(items: Iterable[Item], what: str, total: int | None = None) -> Iterable[Item]:
    """Yield the items with a progress bar, which is removed at the end.

    There is no bar if stderr is not a terminal.
    """
    console = Console(stderr=True, highlight=False)
    return track(
        items, what, total, console=console, transient=True, disable=not console.is_terminal
    )


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Show progress: ``with progress() as report: report("what")``; removed at the end.

    It is a single line that is overwritten. Unlike a spinner, it needs no thread that would disturb
    measurements.
    """
    console = Console(stderr=True, highlight=False)

    def report(text: str) -> None:
        if console.is_terminal:
            console.control(Control.move_to_column(0), Control((ControlType.ERASE_IN_LINE, 2)))
            console.print(text, end="", style="dim", no_wrap=True, overflow="ellipsis")

    try:
        yield report
    finally:
        report("")


@contextlib.contextmanager
def elapsing() -> Iterator[Callable[[str], None]]:
    """Like :func:`progress`, with the elapsed time; for long work without intermediate steps."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}", style="dim"), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as shown:
        task = shown.add_task("")
        yield lambda text: shown.update(task, description=text)


def heading(console: Console, what: str, measured_in: Mapping[str, object], threads: bool) -> None:
    """Print two lines: what is measured, and on which device."""
    versions = [f"{name} {measured_in[name]}" for name in ("torch", "triton") if measured_in[name]]
    device = str(measured_in["device"])
    if threads:
        count = measured_in["threads"]
        device += f" ({count} thread{'' if count == 1 else 's'})"
    console.print(f"[bold]{what}[/]\n{device}, {', '.join(versions)}, {measured_in['date']}")


@dataclasses.dataclass(frozen=True)
class Report:
    """The device to measure on, and files to write the figures to."""

    device: str = "auto"
    """'cuda', 'cpu', or 'auto' for the GPU if there is one"""
    csv: Path | None = None
    """write the figures to this file, with date, device and versions in every row"""
    draw: Path | None = None
    """draw the figures into this file (.png, .pdf or .svg)"""

    def check(self) -> torch.device:
        """Raise if a file can't be written, before measuring; return the device."""
        where = choose_device(self.device)
        check_output("--csv", self.csv)
        check_figure("--draw", self.draw)
        return where

    def publish(
        self,
        title: str,
        rows: Sequence[Any],
        columns: Columns,
        legend: str,
        draw: Callable[[str], Any],
        *,
        section: Callable[[Any], str] | None = None,
        records: Sequence[Mapping[str, object]] | None = None,
        extra: Mapping[str, object] = {},
    ) -> None:
        """Print measured rows with :func:`print_rows`, and how to read them; write CSV and plot if requested.

        Args:
            draw: makes the plot, given its title.
            records: the rows of the CSV; otherwise the attributes of ``rows``.
            extra: further columns with the same value in every row of the CSV.
        """
        console = Console(highlight=False)
        where = choose_device(self.device)
        measured_in = describe_environment(where)
        heading(console, title, measured_in, threads=where.type == "cpu")
        print_rows(console, rows, columns, section)
        console.print(legend, style="dim")
        fields = [vars(row) for row in rows] if records is None else records
        save_rows(self.csv, fields, {**extra, **measured_in})
        if self.draw is not None:
            words = f"{title}\n{measured_in['device']}, {measured_in['date']}"
            save_figure(draw(words), self.draw, "plot")


REPORT = Report()


def newest_run(tasks: Container[str] = PICTURE_TASKS) -> Path | None:
    """The best checkpoint of the newest run under output/ of one of these tasks, also printed.

    Returns None if there are no runs.
    """
    found = []
    for depth in ("best", "*/best", "*/*/best"):
        for folder in RUNS.glob(depth):
            # A run may be writing there, or it may not be a checkpoint.
            with contextlib.suppress(OSError, ValueError):
                if read_metadata(folder).get("task") in tasks:
                    found.append((folder.stat().st_mtime, folder))
    if not found:
        return None
    newest = max(found)[1]
    print(f"--checkpoint {newest}, the newest run under {RUNS}/", file=sys.stderr)
    return newest


@dataclasses.dataclass(frozen=True)
class OneSubject:
    """The model that a command examines, and where it runs."""

    checkpoint: Path | None = None
    """folder that `softfree train` wrote, such as OUT/best; if neither it nor --model is given, the newest
    run under output/, or a fresh model"""
    model: str | None = None
    """name of a fresh model with random weights, see `softfree models`"""
    device: str = "auto"
    """'cuda', 'cpu', or 'auto' for the GPU if there is one"""

    def load(self) -> Subject:
        device = choose_device(self.device)
        checkpoint = self.checkpoint
        if checkpoint is None and self.model is None:
            checkpoint = newest_run()
        return load_subject(checkpoint, self.model, device)


SUBJECT = OneSubject()


def print_rows(
    console: Console,
    rows: Sequence[Any],
    columns: Columns,
    section: Callable[[Any], str] | None = None,
) -> None:
    """Print a table of rows, with their notes below it.

    Args:
        columns: for each title, a function from a row to the text of its cell; the first names the row.
        section: a heading for consecutive rows that share it, shown above them.
    """
    name = next(iter(columns.values()))
    indent = "" if section is None else "  "
    widest = max((len(indent + name(row)) for row in rows), default=0)

    def table_of(width: int) -> Table:
        table = make_table(columns)
        previous = None
        for row in rows:
            if section is not None and section(row) != previous:
                previous = section(row)
                table.add_section()
                table.add_row(f"[bold]{previous}[/]")
            first, *others = (cell(row) for cell in columns.values())
            table.add_row(fold_name(first, width, indent), *others)
        return table

    table = table_of(widest)
    unbounded = console.options.update(width=console.width + widest)
    excess = console.measure(table, options=unbounded).maximum - console.width
    console.print(table_of(widest - excess) if excess > 0 else table)
    for row in rows:
        if note := getattr(row, "note", ""):
            words = name(row) if section is None else f"{section(row)} tokens, {name(row)}"
            style = "red" if getattr(row, "faulty", False) else "yellow"
            console.print(f"{words}: {escape(note)}", style=style)


def fold_name(name: str, width: int, indent: str = "") -> str:
    """Break a name into lines of at most ``width``, after its punctuation.

    Example:
        >>> print(fold_name("swin_tiny_patch4_window7_224", 20))
        swin_tiny_patch4_
        window7_224
    """
    lines = [indent]
    for part in re.findall(r"[^_+,:= ]*[_+,:= ]*", name):
        if len(lines[-1] + part) > width and lines[-1].strip():
            lines.append(indent)
        lines[-1] += part
    return "\n".join(lines)


def save_rows(
    path: Path | None, rows: Sequence[Mapping[str, object]], measured_in: Mapping[str, object]
) -> None:
    """Write the rows to a CSV file, if one is given, and print its name."""
    if path is not None:
        write_csv(path, rows, measured_in)
        print(f"figures written to {path}")


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file, completely or not at all; create its folder if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_durably(path, to_json(content).encode())


def command(
    function: Callable[..., int], description: str | None
) -> Callable[[Sequence[str]], int]:
    """``main(argv)`` of the command ``softfree NAME``, where NAME is the function's.

    Returns the exit code.
    """
    prog = f"softfree {function.__name__.replace('_', '-')}"
    return lambda argv: parse(function, argv, prog=prog, description=description)


def run_subcommand(
    command: str,
    subcommands: Mapping[str, Callable[..., Result]],
    argv: Sequence[str],
    *,
    question: str,
    description: str | None,
) -> Result:
    """Run the subcommand of ``softfree COMMAND`` that ``argv`` starts with; return what it returns.

    ``question`` starts the error message if there is no subcommand; ``description`` starts the help text.
    """
    name = argv[0] if argv else ""
    prog = f"softfree {command}"
    if name in HELP:
        print_subcommands(prog, subcommands, description or "")
        raise SystemExit(0)
    if name not in subcommands:
        given = f"got {name!r}" if argv else f"e.g. `{prog} {next(iter(subcommands))}`"
        raise ValueError(f"{question} One of {', '.join(subcommands)}; {given}")
    # Parsed separately, so that errors refer to the subcommand's own --help.
    return parse(subcommands[name], argv[1:], prog=f"{prog} {name}")
