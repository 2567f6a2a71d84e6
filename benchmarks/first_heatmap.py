"""Seconds from the start of a process to the first heat map, on a CPU with default settings.

    python benchmarks/first_heatmap.py                   five runs of each, prints a table (about a minute)
    python benchmarks/first_heatmap.py --runs 9 --csv results/first_heatmap.csv

Each run is a fresh process. `softfree figure heatmap` is timed until it reports that the figure is written,
`softfree explore` until it has answered the first request for maps, both at 224 x 224 pixels. The first run
of each, which loads the files into the system's cache, does not count. Close other programs: two thirds of
the time are spent importing PyTorch and timm.
"""

import argparse
import contextlib
import datetime
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from softfree.analysis import describe_environment, write_csv
from softfree.analysis.environment import cpu_name

BAR = 3.0
FIRST_MAPS = "api/maps?model=0&photo=sample-1&size=224&stage=1&x=0.5&y=0.5"


def figure_heatmap() -> float:
    """Seconds until `softfree figure heatmap` has written its figure."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "heatmap.png"
        start = time.perf_counter()
        with starting("figure", "heatmap", "--draw", str(output)) as lines:
            wait_for("figure written to", lines)
            seconds = time.perf_counter() - start
            if not output.stat().st_size:
                raise RuntimeError("softfree figure heatmap wrote an empty file")
    return seconds


def explore() -> float:
    """Seconds until `softfree explore` has answered with heat maps."""
    start = time.perf_counter()
    with starting("explore", "--port", "0") as lines:
        address = re.search(r"http://\S+/", wait_for("http://", lines))
        assert address
        with urllib.request.urlopen(address[0] + FIRST_MAPS) as answer:
            answer.read()
        return time.perf_counter() - start


@contextlib.contextmanager
def starting(*arguments: str) -> Iterator[IO[str]]:
    """The lines that a softfree command prints, in its own process, which ends with the block."""
    command = [sys.executable, "-u", "-m", "softfree_cli", *arguments, "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            yield process.stdout
        finally:
            process.terminate()


def wait_for(text: str, lines: IO[str]) -> str:
    """The first line that contains ``text``."""
    for line in lines:
        if text in line:
            return line
    raise RuntimeError(f"the command ended before it said {text!r}")


COMMANDS: dict[str, Callable[[], float]] = {
    "softfree figure heatmap": figure_heatmap,
    "softfree explore": explore,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--csv", type=Path, help="also write the figures to this file")
    parser.add_argument("--runs", type=int, default=5, help="runs of each command (default 5)")
    arguments = parser.parse_args()
    console = Console(highlight=False)
    console.print(
        f"{cpu_name()}, {os.cpu_count()} cores, {datetime.date.today()}, "
        f"load before the run {os.getloadavg()[0]:.1f}"
    )
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for number in range(arguments.runs + 1):
        # In turn, so that other work on the machine affects both.
        for name, run in COMMANDS.items():
            seconds = run()
            if number > 0:
                times[name].append(seconds)
    table = Table(header_style="bold", box=SIMPLE, pad_edge=False)
    table.add_column("seconds to the first heat map")
    for title in ("median", "least", "greatest", "bar", ""):
        table.add_column(title, justify="right")
    rows = []
    for name, seconds_each in times.items():
        median = statistics.median(seconds_each)
        least, greatest = min(seconds_each), max(seconds_each)
        table.add_row(
            name,
            *(f"{seconds:.2f}" for seconds in (median, least, greatest)),
            f"<= {BAR:g}",
            "[green]holds[/]" if median <= BAR else "[red]missed[/]",
        )
        rows.append({"command": name, "median_s": median, "least_s": least,
                     "greatest_s": greatest, "runs": arguments.runs, "bar_s": BAR})  # fmt: skip
    console.print(table)
    console.print(
        f"Load after the run {os.getloadavg()[0]:.1f}; well above 1, something else ran.",
        style="dim",
    )
    if arguments.csv:
        write_csv(arguments.csv, rows, describe_environment())
        console.print(f"written to {arguments.csv}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
