"""Logs of a run: a progress bar, lines, CSV files, and optionally TensorBoard and Weights & Biases."""

import contextlib
import csv
import io
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from softfree.data.files import replace_durably
from softfree.data.images import Unreadable, printable

TRAIN_CSV, EVAL_CSV, TEST_RESULT = "train.csv", "eval.csv", "test.json"
PREVIEW, PREDICTIONS = "preview.png", "predictions.png"
# The loop itself draws the bar, so that no other thread runs during training.
REDRAW_SECONDS = 0.5


class RunLog:
    """Logs of the main process; in the others every call does nothing.

    ``train.csv`` has a row for every log interval, ``eval.csv`` one for every evaluation. A run that
    continues from step ``start`` drops later rows, because it will write them again.
    """

    def __init__(self, output: Path, start: int, total: int, active: bool):
        self.output, self.total = output, total
        self.active = active
        self.console = Console(highlight=False, quiet=not active)
        # Lines in a file are not wrapped, because programs may read them.
        self.console.soft_wrap = not self.console.is_terminal
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=25),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
            TextColumn("{task.fields[numbers]}"),
            console=self.console,
            auto_refresh=False,
            transient=True,
            disable=not (active and self.console.is_terminal),
        )
        self.bar = self.progress.add_task(
            "training", total=total, completed=start, numbers="", left=""
        )
        self.drawn = 0.0
        self.ends_at: float | None = None
        self.tensorboard: Any = None
        self.wandb: Any = None
        if active:
            for name in (TRAIN_CSV, EVAL_CSV):
                _drop_rows_after(output / name, start)

    def __enter__(self) -> "RunLog":
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()
        if self.tensorboard is not None:
            self.tensorboard.close()
        if self.wandb is not None:
            self.wandb.finish()

    def open_tensorboard(self) -> None:
        """Also write TensorBoard's files."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(
                "`log_tensorboard` needs a package: pip install tensorboard"
            ) from error
        if self.active:
            self.tensorboard = SummaryWriter(self.output / "tensorboard")

    def open_wandb(self, settings_json: str) -> None:
        """Also log to Weights & Biases."""
        try:
            import wandb  # type: ignore[import-not-found, unused-ignore]
        except ImportError as error:
            raise ValueError("`log_wandb` needs a package: pip install wandb") from error
        if self.active:
            config = json.loads(settings_json)
            self.wandb = wandb.init(project="softfree", dir=self.output, config=config)

    # What happens in a run

    def steps_done(
        self, step: int, numbers: Mapping[str, float], skipped: int, seconds_left: float
    ) -> None:
        """Log the numbers of the last steps, how many were ``skipped``, and the estimated time left."""
        self.record(TRAIN_CSV, step, numbers)
        # A line of 80 columns has no room for the parts of a loss.
        loss, rate = f"loss {numbers['loss']:.4g}", f"{numbers['samples_per_s']:,.0f}"
        self.ends_at = time.monotonic() + seconds_left
        self.tick(step, f"{loss}  {rate}/s")
        if not self.console.is_terminal:
            peak = numbers["peak_gib"]
            memory = "" if math.isnan(peak) else f"  {peak:.2f} GiB"
            self.say(
                f"step {step:,}/{self.total:,}  {loss}  lr {numbers['lr']:.2e}  {rate}/s{memory}  "
                f"{clock(seconds_left)} left"
            )
        if skipped:
            self.say(
                f"step {step:,}: skipped {skipped} of the last steps because gradients were not finite",
                "yellow",
            )

    def evaluated(
        self, step: int, numbers: Mapping[str, float], *, shown: Sequence[str], best: float | None
    ) -> None:
        """Log the scores of an evaluation.

        ``best`` is a better earlier score, None if this one is the best.
        """
        self.record(EVAL_CSV, step, numbers)
        text = "  ".join(
            # Counts are whole: 50,000, not 5e+04.
            f"{name} {numbers[name]:{',' if isinstance(numbers[name], int) else '.4g'}}"
            for name in shown
            if name in numbers
        )
        mark = "(best so far)" if best is None else f"(best: {best:.4g})"
        self.say(f"epoch {numbers['epoch']:.4g}: {text}  {mark}")

    def unreadable(self, file: Unreadable) -> None:
        """Report an unreadable file, in whichever process it was found."""
        text = f"skipped {printable(file.path)}: {file.reason}"
        if self.active:
            self.say(text, "yellow")
        else:
            # The main process does not know about it.
            print(text, file=sys.stderr)

    # How it is said and written

    def say(self, text: str, style: str = "") -> None:
        """Print a line for the user."""
        self.console.print(text, style=style, markup=False)

    def tick(self, step: int, numbers: str = "") -> None:
        """Move the bar, at most a few times a second."""
        if self.progress.disable or (
            not numbers and time.monotonic() - self.drawn < REDRAW_SECONDS
        ):
            return
        # The time left is unknown until the first numbers.
        left = "" if self.ends_at is None else clock(self.ends_at - time.monotonic())
        self.progress.update(self.bar, completed=step, left=left)
        if numbers:
            self.progress.update(self.bar, numbers=numbers)
        self.progress.refresh()
        self.drawn = time.monotonic()

    def record(self, file: str, step: int, numbers: Mapping[str, float]) -> None:
        """Write a row of a CSV file, and the same numbers to TensorBoard and Weights & Biases."""
        if not self.active:
            return
        row = {"step": step, **{name: _short(value) for name, value in numbers.items()}}
        path = self.output / file
        fresh = not path.exists() or not path.stat().st_size
        with path.open("a", newline="") as stream:
            writer = csv.DictWriter(stream, list(row))
            if fresh:
                writer.writeheader()
            writer.writerow(row)
        part = file.removesuffix(".csv")
        if self.tensorboard is not None:
            for name, value in numbers.items():
                self.tensorboard.add_scalar(f"{part}/{name}", value, step)
        if self.wandb is not None:
            self.wandb.log({f"{part}/{name}": value for name, value in numbers.items()}, step=step)

    def picture(self, file: str, step: int, page: Image.Image) -> None:
        """Write a picture, replacing the last one of that name; TensorBoard and Weights & Biases keep all."""
        if not self.active:
            return
        content = io.BytesIO()
        # Hardly larger than with the default level, and takes a third of the time.
        page.save(content, "PNG", compress_level=1)
        replace_durably(self.output / file, content.getvalue())
        name = file.removesuffix(".png")
        if self.tensorboard is not None:
            self.tensorboard.add_image(name, np.asarray(page), step, dataformats="HWC")
        if self.wandb is not None:
            import wandb  # type: ignore[import-not-found, unused-ignore]

            self.wandb.log({name: wandb.Image(page)}, step=step)


class Timer:
    """Measures samples per second, not counting time for evaluation and saving."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.samples = 0
        self.began = time.perf_counter()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        if self.device.type == "cuda":
            # Steps that are still running are not part of the pause.
            torch.cuda.synchronize(self.device)
        paused_at = time.perf_counter()
        yield
        self.began += time.perf_counter() - paused_at

    def read(self) -> float:
        """The rate since the last reading."""
        now = time.perf_counter()
        rate = self.samples / (now - self.began)
        self.samples, self.began = 0, now
        return rate


class TimeLeft:
    """Estimates the seconds until the end of a run from the times of its last steps and evaluations.

    Example:
        >>> left = TimeLeft()
        >>> left.note_step(2.0)
        >>> left.note_evaluation(60.0)
        >>> left(steps=100, evaluations=1)
        260.0
    """

    NEWEST = 0.3  # share of the newest time in the mean

    def __init__(self) -> None:
        self.step = self.evaluation = 0.0

    def note_step(self, seconds: float) -> None:
        """Record how long one of the last steps took."""
        self.step = self._mean(self.step, seconds)

    def note_evaluation(self, seconds: float) -> None:
        """Record how long an evaluation took; until the first, evaluations count as taking no time."""
        self.evaluation = self._mean(self.evaluation, seconds)

    def __call__(self, steps: int, evaluations: int) -> float:
        return steps * self.step + evaluations * self.evaluation

    def _mean(self, before: float, newest: float) -> float:
        return before + self.NEWEST * (newest - before) if before else newest


def clock(seconds: float) -> str:
    """Format a time as hours, minutes and seconds.

    Example:
        >>> clock(59), clock(3725), clock(200_000)
        ('0:59', '1:02:05', '55:33:20')
    """
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory so far: of tensors on a GPU, of the process on a CPU; NaN if it can't be measured."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    if sys.platform == "win32":
        return math.nan
    import resource

    # Bytes on macOS, KiB elsewhere.
    unit = 2**30 if sys.platform == "darwin" else 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def _short(value: float) -> float | str:
    return f"{value:.8g}" if isinstance(value, float) else value


def _drop_rows_after(path: Path, step: int) -> None:
    """Drop the rows after a step, and a truncated last line."""
    if not path.exists():
        return
    header, *lines = path.read_bytes().splitlines(keepends=True) or [b""]
    whole = [(line.partition(b",")[0], line) for line in lines if line.endswith(b"\n")]
    kept = [line for number, line in whole if number.isdigit() and int(number) <= step]
    if kept:
        replace_durably(path, header + b"".join(kept))
    else:
        path.unlink()
