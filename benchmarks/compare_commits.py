"""Does a change leave the training unchanged? Compares two commits: their losses bit for bit, and their speeds.

    python benchmarks/compare_commits.py main              the checked-out commit against main
    python benchmarks/compare_commits.py v0.1.0 HEAD       any two

Each commit is checked out into a temporary folder. Both then take turns to train the same small runs from the same seed:
digits with a pyramid, ListOps with an encoder; on the GPU if there is one. Every loss in the log and every weight at
the end must be the same, bit for bit. The speed of a run is the median of samples per second over its steps. The median
of the ratios over all turns decides: the new commit may be at most 5% slower.

The exit code is 0 if both hold, 1 if losses or weights differ, 3 if they are the same but slower.
"""

import argparse
import contextlib
import csv
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor

from softfree.commands.common import make_table

REPOSITORY = Path(__file__).parent.parent
DIFFERENT, SLOWER = 1, 3
# Flags that every version takes.
RUNS = {
    "digits": ["classification", "--img-size", "32", "--batch-size", "16", "--warmup-epochs", "0",
               "--model", "softpp_tiny", "--model-kwargs", "embed_dims=16,32,48,64",
               "num_heads=1,2,3,4", "depths=1,1,1,1"],
    "listops": ["longrange", "--task", "listops", "--batch-size", "4", "--dim", "32",
                "--listops-train", "64", "--listops-eval", "8"],
}  # fmt: skip


class Trained(NamedTuple):
    """The results of a run: the losses of its steps as logged, its weights, its speed."""

    losses: list[str]
    weights: dict[str, Tensor]
    samples_per_s: float


class Comparison(NamedTuple):
    """For one run: the first difference ("" for none), and how many times as long the new commit takes."""

    difference: str
    slowdown: float


def read_run(folder: Path) -> Trained:
    """Read a run from its folder. The first step, which sets everything up, does not count for the speed."""
    with (folder / "train.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    speeds = [float(row["samples_per_s"]) for row in rows[1:]]
    weights = load_file(folder / "last" / "model.safetensors")
    return Trained([row["loss"] for row in rows], weights, statistics.median(speeds))


def first_difference(base: Trained, new: Trained) -> str:
    """Describe where two runs diverge; "" if they are the same bit for bit."""
    for step, (one, other) in enumerate(zip(base.losses, new.losses, strict=False), 1):
        if one != other:
            return f"step {step}: loss {one}, now {other}"
    if len(base.losses) != len(new.losses):
        return f"{len(base.losses)} steps, now {len(new.losses)}"
    if names := base.weights.keys() ^ new.weights.keys():
        return f"weights of only one: {', '.join(sorted(names)[:3])}"
    for name, weight in base.weights.items():
        if not same_bits(weight, new.weights[name]):
            return f"losses are the same, the weight {name} is not"
    return ""


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same bit for bit: NaN equals itself, and 0 differs from -0."""
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(
            one.contiguous().reshape(-1).view(torch.uint8),
            other.contiguous().reshape(-1).view(torch.uint8),
        )
    )


def compare(turns: Sequence[tuple[Trained, Trained]]) -> Comparison:
    """Compare base and new over all turns. Runs of one commit must agree, too: else the machine is to blame."""
    base = turns[0][0]
    for one, other in turns[1:]:
        if words := first_difference(base, one):
            return Comparison(f"the base differs from itself, {words}", 1.0)
        if words := first_difference(turns[0][1], other):
            return Comparison(f"the new commit differs from itself, {words}", 1.0)
    slowdown = statistics.median(one.samples_per_s / other.samples_per_s for one, other in turns)
    return Comparison(first_difference(base, turns[0][1]), slowdown)


def verdict(found: Sequence[Comparison], limit: float) -> int:
    """The exit code."""
    if any(each.difference for each in found):
        return DIFFERENT
    return SLOWER if any(each.slowdown > 1 + limit for each in found) else 0


@contextlib.contextmanager
def checked_out(commit: str, folder: Path) -> Iterator[Path]:
    """The files of a commit in a temporary folder."""
    git = ["git", "-C", str(REPOSITORY), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(folder), commit], check=True)
    try:
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def train(checkout: Path, run: str, output: Path, steps: int, device: str) -> Trained:
    """Train with the code of a checkout."""
    command = [sys.executable, "-m", "softfree", "train", *RUNS[run], "--steps", str(steps)]
    command += ["--device", device, "--output", str(output)]
    command += ["--workers", "0", "--seed", "0", "--log-interval", "1", "--eval-every", "1000000"]
    if run == "listops":
        command += ["--data-dir", str(output.parent / "data")]  # created once
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    ended = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(f"{run} failed in {checkout.name}:\n{ended.stderr.strip()}")
    return read_run(output)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("base", help="commit to compare with")
    parser.add_argument("new", nargs="?", default="HEAD", help="commit to judge (default HEAD)")
    parser.add_argument("--runs", nargs="+", default=list(RUNS), choices=list(RUNS))
    parser.add_argument("--steps", type=int, default=30, help="steps per run (default 30)")
    parser.add_argument("--turns", type=int, default=3, help="turns per commit (default 3)")
    parser.add_argument(
        "--limit", type=float, default=0.05, help="how much slower is allowed (default 0.05)"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    console = Console(highlight=False)
    found: dict[str, Comparison] = {}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        base = stack.enter_context(checked_out(arguments.base, folder / "base"))
        new = stack.enter_context(checked_out(arguments.new, folder / "new"))
        for run in arguments.runs:
            turns = []
            for turn in range(arguments.turns):
                console.print(f"{run}, turn {turn + 1} of {arguments.turns}", style="dim")
                both = [
                    train(checkout, run, folder / f"{run}-{checkout.name}-{turn}", arguments.steps, arguments.device)
                    for checkout in (base, new)
                ]  # fmt: skip
                turns.append((both[0], both[1]))
            found[run] = compare(turns)
    table = make_table(["run", "losses and weights", "new takes"])
    for run, each in found.items():
        table.add_row(run, each.difference or "the same bits", f"{each.slowdown:.3f} x")
    console.print(table)
    return verdict(list(found.values()), arguments.limit)


if __name__ == "__main__":
    sys.exit(main())
