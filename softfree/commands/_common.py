"""What the commands share: checks of their arguments, tables, figures, progress."""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from PIL import Image
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.control import Control
from rich.segment import ControlType
from rich.table import Table

from softfree.analysis import write_csv

NOTHING = "-"
NARROWEST = 32  # side of the smallest images that a pyramid takes
FIGURE_ENDINGS = (".png", ".svg", ".pdf")


def check_choices(option: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse values of ``option`` that are not ``known``, and none at all."""
    known, given = list(known), list(given)
    if not given:
        raise ValueError(f"{option} needs at least one of {', '.join(known)}")
    for value in given:
        if value not in known:
            raise ValueError(f"{option} must be one of {', '.join(known)}, got {value!r}")


def check_positive(option: str, value: float) -> None:
    """Refuse what is not above 0."""
    if not value > 0:
        raise ValueError(f"{option} must be above 0, got {value:g}")


def check_output(option: str, path: Path | None) -> None:
    """Refuse a file that can't be written: before the measuring, not after it."""
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{option} must name a file, {path} is a folder")
    if path.exists():
        if not os.access(path, os.W_OK):
            raise ValueError(f"{option}: can't write {path}; give a file of yours")
        return
    nearest = next(folder for folder in path.absolute().parents if folder.exists())
    try:
        # Tried, since permissions do not tell all: not even root can write in /proc.
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError as error:
        raise ValueError(
            f"{option}: can't write {path}, for {nearest} takes no files ({error.strerror})"
        ) from error


def check_figure(option: str, path: Path | None) -> None:
    """Refuse a file that no figure can be written to."""
    if path is not None and path.suffix.lower() not in FIGURE_ENDINGS:
        raise ValueError(f"{option} must end in {', '.join(FIGURE_ENDINGS)}, got {path}")
    check_output(option, path)


def make_table(titles: Iterable[str]) -> Table:
    """A table without side borders, narrow enough for a terminal of 80 columns."""
    table = Table(header_style="bold", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1))
    first, *others = titles
    table.add_column(first, overflow="fold", vertical="top")
    for title in others:
        table.add_column(title, justify="right", no_wrap=True)
    return table


def digits(value: float | None, factor: float = 1.0) -> str:
    """Three significant digits without an exponent; a dash for None.

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


def percent(share: float | None) -> str:
    """A share in percent; a dash for None.

    Example:
        >>> percent(0.416), percent(0.0047), percent(None)
        ('42%', '0.5%', '-')
    """
    if share is None:
        return NOTHING
    return f"{100 * share:.0f}%" if share >= 0.1 else f"{100 * share:.1f}%"


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Shows what is going on: ``with progress() as report: report("what")``; removed at the end.

    One line that is written over: no thread, as a spinner has, runs beside what is measured.
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


def heading(console: Console, what: str, measured_in: Mapping[str, object], threads: bool) -> None:
    """Two lines: what is measured, on what."""
    versions = [f"{name} {measured_in[name]}" for name in ("torch", "triton") if measured_in[name]]
    device = str(measured_in["device"])
    if threads:
        count = measured_in["threads"]
        device += f" ({count} thread{'' if count == 1 else 's'})"
    console.print(f"[bold]{what}[/]\n{device}, {', '.join(versions)}, {measured_in['date']}")


def save_rows(
    path: Path | None, rows: Sequence[Mapping[str, object]], measured_in: Mapping[str, object]
) -> None:
    """Write the rows to a CSV file, if one is named, and say so."""
    if path is not None:
        write_csv(path, rows, measured_in)
        print(f"figures written to {path}")


def new_figure(
    width: float, height: float, layout: Literal["constrained"] | None = "constrained"
) -> Any:
    """An empty matplotlib figure of this size in inches; ``layout=None`` leaves axes where they are put."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout=layout)
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, output: Path, kind: str = "figure") -> None:
    """Write the figure in the format that its ending names, and say so."""
    output.parent.mkdir(parents=True, exist_ok=True)
    # Of what zlib finds, runs of equal bytes are nearly all in such pictures, and found much faster.
    png = {"pil_kwargs": {"compress_type": Image.RLE}} if output.suffix.lower() == ".png" else {}
    figure.savefig(output, dpi=150, **png)
    print(f"{kind} written to {output}")
