"""The operator on a CPU against torch's softmax attention: each figure next to the limit it must meet.

    python benchmarks/cpu_operator.py                    two threads, prints a table (about two minutes)
    python benchmarks/cpu_operator.py --csv results/cpu_operator.csv
    python benchmarks/cpu_operator.py --backend torch    plain PyTorch, as without a C compiler
    python benchmarks/cpu_operator.py --inverse newton   the papers' iteration

2 heads of 32 channels, 49 landmarks, float32. Both sides of every ratio are measured in turn in the same
run, so that other work on the machine affects both. Before anything is timed, the operator is compared
with the float64 reference. Close other programs: threads that wait for each other on busy cores make
small calls slower by a factor of a hundred.
"""

import argparse
import datetime
import functools
import os
import sys
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torch import Tensor

import softfree
from softfree.analysis import describe_environment, peak_extra_memory, time_in_turn, write_csv
from softfree.analysis.environment import cpu_name

HEADS, HEAD_DIM, LANDMARKS = 2, 32, 49
TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-4
FORWARD_BARS = {784: 3.0, 3136: 15.0, 16384: 100.0}
BACKWARD_TOKENS, BACKWARD_BAR = 3136, 20.0
MEMORY_TOKENS, MEMORY_BAR = 65536, 64.0
GROWTH_TOKENS, GROWTH_BAR = (16384, 262144), 1.15
KINDS = ("tokens", "means")


class Figure(NamedTuple):
    """One measured figure: larger is better (``at_least``), or smaller."""

    what: str
    landmarks: str
    tokens: str
    soft_ms: float | None
    softmax_ms: float | None
    value: float
    unit: str
    bar: float
    at_least: bool

    @property
    def holds(self) -> bool:
        return self.value >= self.bar if self.at_least else self.value <= self.bar


def make_inputs(tokens: int, kind: str, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v (1, heads, tokens, d) and landmarks: 49 tokens of q, or 49 means of stretches of q."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 1, HEADS, tokens, HEAD_DIM, generator=generator)
    if kind == "tokens":
        landmarks = q[:, :, torch.linspace(0, tokens - 1, LANDMARKS).long()]
    else:
        landmarks = torch.stack([part.mean(2) for part in q.tensor_split(LANDMARKS, 2)], 2)
    return q, k, v, landmarks


def check(tokens: int, kind: str, settings: dict) -> tuple[float, float]:
    """Relative errors against the float64 reference: of the output, and the largest of the gradients."""
    q, _, v, landmarks = make_inputs(tokens, kind)
    grad = torch.randn(v.shape, generator=torch.Generator().manual_seed(1))
    results = []
    for dtype, chosen in ((torch.float32, {}), (torch.float64, {"backend": "reference"})):
        inputs = [t.detach().to(dtype, copy=True).requires_grad_() for t in (q, v, landmarks)]
        out = softfree.soft_attention(inputs[0], None, *inputs[1:], **settings | chosen)
        out.backward(grad.to(dtype))
        results.append([out.detach(), *(t.grad for t in inputs)])
    errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(*results, strict=True)]
    return errors[0], max(errors[1:])


def forward_figure(tokens: int, kind: str, settings: dict, bar: float, budget: float) -> Figure:
    q, k, v, landmarks = make_inputs(tokens, kind)
    soft, softmax = time_in_turn(
        [
            lambda: softfree.soft_attention(q, None, v, landmarks, **settings),
            lambda: F.scaled_dot_product_attention(q, k, v),
        ],
        budget,
    )
    return Figure(
        "forward", kind, f"{tokens:,}", 1e3 * soft, 1e3 * softmax, softmax / soft, "x", bar, True
    )


def backward_figure(tokens: int, kind: str, settings: dict, bar: float, budget: float) -> Figure:
    q, k, v, landmarks = (t.requires_grad_() for t in make_inputs(tokens, kind))
    grad = torch.randn_like(v)

    def soft_step() -> None:
        out = softfree.soft_attention(q, None, v, landmarks, **settings)
        torch.autograd.grad(out, (q, v, landmarks), grad)

    def softmax_step() -> None:
        torch.autograd.grad(F.scaled_dot_product_attention(q, k, v), (q, k, v), grad)

    soft, softmax = time_in_turn([soft_step, softmax_step], budget)
    return Figure(
        "fwd + bwd", kind, f"{tokens:,}", 1e3 * soft, 1e3 * softmax, softmax / soft, "x", bar,
        True,
    )  # fmt: skip


def memory_figure(tokens: int, kind: str, settings: dict, bar: float) -> Figure:
    q, _, v, landmarks = make_inputs(tokens, kind)
    attend = functools.partial(softfree.soft_attention, q, None, v, landmarks, **settings)
    held = peak_extra_memory(attend) / 2**20
    return Figure("memory", kind, f"{tokens:,}", None, None, held, "MiB", bar, False)


def growth_figure(
    short: int, long: int, kind: str, settings: dict, bar: float, budget: float
) -> Figure:
    calls = []
    for tokens in (short, long):
        q, _, v, landmarks = make_inputs(tokens, kind)
        calls.append(functools.partial(softfree.soft_attention, q, None, v, landmarks, **settings))
    first, last = time_in_turn(calls, budget)
    return Figure(
        "growth", kind, f"{short // 1024}k to {long // 1024}k", 1e3 * last, None,
        last / first / (long / short), "x", bar, False,
    )  # fmt: skip


def print_figures(console: Console, figures: list[Figure]) -> None:
    table = Table(header_style="bold", box=SIMPLE, pad_edge=False)
    table.add_column("figure")
    table.add_column("landmarks")
    for title in ("tokens", "ours\n(ms)", "softmax\n(ms)", "measured", "bar", ""):
        table.add_column(title, justify="right")
    for f in figures:
        table.add_row(
            f.what,
            f.landmarks,
            f.tokens,
            *("-" if ms is None else f"{ms:.2f}" for ms in (f.soft_ms, f.softmax_ms)),
            f"{f.value:.3g} {f.unit}",
            f"{'>=' if f.at_least else '<='} {f.bar:g}",
            "[green]holds[/]" if f.holds else "[red]missed[/]",
        )
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--csv", type=Path, help="also write the figures to this file")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    parser.add_argument(
        "--seconds", type=float, default=4.0, help="time for each figure (default 4)"
    )
    parser.add_argument("--inverse", default="solve", help="solve (default) or newton")
    parser.add_argument("--backend", default="auto", help="auto (default), native or torch")
    arguments = parser.parse_args()
    settings = {"inverse": arguments.inverse, "backend": arguments.backend}
    torch.set_num_threads(arguments.threads)
    console = Console()
    load = os.getloadavg()[0]
    console.print(
        f"{cpu_name()}, {arguments.threads} threads, torch {torch.__version__}, "
        f"{datetime.date.today()}, load before the run {load:.1f}",
        highlight=False,
    )
    for kind in KINDS:
        for tokens in (*FORWARD_BARS, MEMORY_TOKENS):
            error, gradients = check(tokens, kind, settings)
            console.print(
                f"{kind}, {tokens:,} tokens: relative error {error:.1e}, gradients {gradients:.1e}",
                style="dim",
            )
            if not (error <= TOLERANCE and gradients <= GRADIENT_TOLERANCE):
                console.print(
                    f"more than {TOLERANCE} or {GRADIENT_TOLERANCE}: nothing timed", style="red"
                )
                return 1
    figures = []
    for kind in KINDS:
        for tokens, bar in FORWARD_BARS.items():
            figures.append(forward_figure(tokens, kind, settings, bar, arguments.seconds))
        figures.append(
            backward_figure(BACKWARD_TOKENS, kind, settings, BACKWARD_BAR, arguments.seconds)
        )
        figures.append(memory_figure(MEMORY_TOKENS, kind, settings, MEMORY_BAR))
        figures.append(growth_figure(*GROWTH_TOKENS, kind, settings, GROWTH_BAR, arguments.seconds))
    print_figures(console, figures)
    console.print(
        "forward, fwd + bwd: softmax's time over ours.\n"
        "memory: the most a call held beyond its inputs.\n"
        "growth: of our time over that of the tokens, 1 is linear; with fresh memory for the result.\n"
        f"Load after the run {os.getloadavg()[0]:.1f}; above {arguments.threads}.0, something else ran.",
        style="dim",
    )
    if arguments.csv:
        rows = [{**settings, **f._asdict(), "holds": f.holds} for f in figures]
        write_csv(arguments.csv, rows, describe_environment())
        console.print(f"written to {arguments.csv}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
