"""`softfree benchmark memory`: Fig. 1b of the papers, memory against the number of tokens."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from softfree.analysis import describe_environment, peak_extra_memory
from softfree.analysis.attention_cost import DTYPES
from softfree.commands._benchmark_attention import DEFAULT_DTYPE
from softfree.commands._common import (
    check_choices,
    check_figure,
    check_output,
    check_positive,
    digits,
    heading,
    make_table,
    new_figure,
    progress,
    save_figure,
    save_rows,
)
from softfree.layers import ATTENTIONS, create_attention
from softfree.training.devices import choose_device

UNIT = 784
LENGTHS = tuple(UNIT * p for p in range(1, 9))
# Softmax attention as it is written down, with its n x n matrix; torch's fused one has none.
UNFUSED = "softmax-unfused"
KNOWN = (*ATTENTIONS, UNFUSED)
# Dimension and heads: the papers' network without a pyramid, and a small one for CPUs.
DEFAULT_SIZE = {"cuda": (384, 12), "cpu": (64, 2)}
LANDMARKS = 49
LABELS = {
    "soft": "SOFT",
    "softpp": "SOFT++",
    "softmax": "softmax (fused)",
    UNFUSED: "softmax (whole matrix)",
    "linformer": "Linformer",
    "performer": "Performer",
    "nystromformer": "Nyströmformer",
    "reformer": "Reformer",
}


@dataclass
class Memory:
    """One attention at one length; None where memory ran out."""

    attention: str
    tokens: int
    batch_size: int
    dim: int
    heads: int
    dtype: str
    forward_mib: float | None = None
    forward_backward_mib: float | None = None
    note: str = ""


def memory(
    attentions: tuple[str, ...] = KNOWN,
    tokens: tuple[int, ...] = LENGTHS,
    batch_size: int = 1,
    dim: int | None = None,
    num_heads: int | None = None,
    dtype: str = "auto",
    device: str = "auto",
    csv: Path | None = None,
    plot: Path | None = None,
) -> int:
    """Memory of one attention layer against the number of tokens, forward and backward (Fig. 1b).

    SOFT, Nyströmformer and Linformer have 49 landmarks or slots at any length.

    Args:
        attentions: among soft, softpp, softmax, linformer, performer, nystromformer, reformer and
            softmax-unfused, which keeps the n x n matrix that torch's fused softmax attention avoids.
        tokens: numbers of tokens.
        batch_size: sequences at a time.
        dim: channels; otherwise 384 on a GPU, 64 on a CPU.
        num_heads: heads; otherwise 12 on a GPU, 2 on a CPU.
        dtype: bfloat16, float16 or float32; 'auto': bfloat16 on a GPU, float32 on a CPU.
        device: 'cuda', 'cpu', or 'auto' for the GPU if there is one.
        csv: write the figures to this file, with date, device and versions in every row.
        plot: draw memory against tokens into this file (.png, .pdf or .svg).
    """
    where = choose_device(device)
    check_choices("--attentions", attentions, KNOWN)
    if not tokens:
        raise ValueError("--tokens needs at least one number")
    channels, count = (
        given if given is not None else preset
        for given, preset in zip((dim, num_heads), DEFAULT_SIZE[where.type], strict=True)
    )
    named = {"--tokens": min(tokens), "--batch-size": batch_size, "--dim": channels}
    for option, value in {**named, "--num-heads": count}.items():
        check_positive(option, value)
    chosen = DEFAULT_DTYPE[where.type] if dtype == "auto" else dtype
    check_choices("--dtype", [chosen], DTYPES)
    check_output("--csv", csv)
    check_figure("--plot", plot)

    console = Console(highlight=False)
    rows = []
    with progress() as report:
        for name in dict.fromkeys(attentions):
            for length in sorted(set(tokens)):
                report(f"{name}: {length} tokens")
                row = Memory(name, length, batch_size, channels, count, chosen)
                rows.append(measure(row, where))
    measured_in = describe_environment(where)
    title = f"Memory of an attention layer: {channels} channels, {count} heads, batch {batch_size}, {chosen}"
    heading(console, title, measured_in, threads=where.type == "cpu")
    print_rows(console, rows)
    save_rows(csv, [dataclasses.asdict(row) for row in rows], measured_in)
    if plot is not None:
        words = f"{title}\n{measured_in['device']}, {measured_in['date']}"
        save_figure(draw(rows, words), plot, "plot")
    return 0


def build(row: Memory) -> nn.Module:
    """The layer, with as many landmarks or slots at any length."""
    name = "softmax" if row.attention == UNFUSED else row.attention
    torch.manual_seed(0)
    return create_attention(
        name,
        row.dim,
        row.heads,
        sequence=True,
        grid=row.tokens,
        landmarks=f"average:{LANDMARKS}",
        stride=UNIT // LANDMARKS,
        slots=LANDMARKS,
    )


def measure(row: Memory, device: torch.device) -> Memory:
    """Fill in what the layer holds at most beyond its weights and its input."""
    unfused = row.attention == UNFUSED
    try:
        layer = build(row).to(device, DTYPES[row.dtype])
        shape = (row.batch_size, row.tokens, row.dim)
        x = torch.randn(shape, device=device).to(DTYPES[row.dtype]).requires_grad_()
        with sdpa_kernel(SDPBackend.MATH) if unfused else contextlib.nullcontext():
            for figure, call in calls(layer, x).items():
                call()
                layer.zero_grad()
                x.grad = None
                setattr(row, figure, peak_extra_memory(call, device) / 2**20)
    except torch.OutOfMemoryError:
        row.note = "out of memory"
    return row


def calls(layer: nn.Module, x: Tensor) -> dict[str, Callable[[], object]]:
    """The passes to measure, by the name of their figure."""

    def forward() -> object:
        with torch.no_grad():
            return layer(x)

    def forward_backward() -> object:
        return layer(x).sum().backward()

    return {"forward_mib": forward, "forward_backward_mib": forward_backward}


def print_rows(console: Console, rows: Sequence[Memory]) -> None:
    """A line an attention, a column a length."""
    lengths = sorted({row.tokens for row in rows})
    table = make_table(["tokens", *(f"{length:,}" for length in lengths)])
    for name in dict.fromkeys(row.attention for row in rows):
        found = {row.tokens: row.forward_backward_mib for row in rows if row.attention == name}
        table.add_row(name, *(digits(found[length]) for length in lengths))
    console.print(table)
    console.print(
        "MiB: the most that forward and backward held at once beyond weights and input;\n"
        "a dash where memory ran out. The CSV has the forward pass alone, too.",
        style="dim",
    )


def draw(rows: Sequence[Memory], title: str) -> Any:
    """Memory against tokens, a curve an attention."""
    from matplotlib.ticker import LogLocator

    picture = new_figure(7, 5)
    axes = picture.add_subplot()
    for name in dict.fromkeys(row.attention for row in rows):
        points = [
            (row.tokens, row.forward_backward_mib)
            for row in rows
            if row.attention == name and row.forward_backward_mib is not None
        ]
        if points:
            # SOFT and SOFT++ hold the same: both must be seen.
            line = "o--" if name == "softpp" else "o-"
            colour = f"C{KNOWN.index(name)}"
            axes.plot(
                *zip(*points, strict=True), line, markersize=4, color=colour, label=LABELS[name]
            )
    axes.set(yscale="log", xlabel="tokens", ylabel="MiB, forward and backward")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")
    lengths = sorted({row.tokens for row in rows})
    if len(lengths) <= 8:
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.grid(alpha=0.3)
    axes.set_title(title, fontsize=9)
    if axes.lines:
        picture.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return picture
