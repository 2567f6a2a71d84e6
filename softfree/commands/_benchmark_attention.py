"""`softfree benchmark attention`."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape

from softfree.analysis import copy_bandwidth, describe_environment
from softfree.analysis.attention_cost import ATTENTIONS, DTYPES, Cost, Shape, measure_costs
from softfree.commands._common import (
    check_choices,
    check_figure,
    check_output,
    check_positive,
    digits,
    heading,
    make_table,
    percent,
    progress,
    save_figure,
    save_rows,
)
from softfree.ops.attention import BACKENDS
from softfree.training.devices import choose_device

# Tokens and batch times heads. The GPU's are stages 1 to 3 of a backbone at batch 128, and a large image.
DEFAULTS = {
    "cpu": {784: 2, 3136: 2, 16384: 2},
    "cuda": {196: 2560, 784: 1024, 3136: 256, 65536: 12},
}
DEFAULT_HEADS = {"cpu": 2, "cuda": 12}
DEFAULT_DTYPE = {"cpu": "float32", "cuda": "bfloat16"}


def attention(
    tokens: tuple[int, ...] = (),
    heads_times_batch: tuple[int, ...] = (),
    head_dim: int = 32,
    landmarks: int = 49,
    dtype: str = "auto",
    device: str = "auto",
    attentions: tuple[str, ...] = ATTENTIONS,
    backends: tuple[str, ...] = ("auto",),
    backward: bool = True,
    seconds: float = 0.5,
    csv: Path | None = None,
    plot: Path | None = None,
) -> int:
    """Time and memory of the operator and of torch's softmax attention, in one run.

    Each of ours is first compared with the float64 reference, result and gradients. One that is wrong is
    not timed, and the exit code is 1.

    Args:
        tokens: numbers of tokens; otherwise 784 3136 16384 on a CPU, 196 784 3136 65536 on a GPU.
        heads_times_batch: batch times heads, one number, or one for each of --tokens.
        head_dim: channels of a head.
        landmarks: landmarks of our attentions.
        dtype: bfloat16, float16 or float32; 'auto': bfloat16 on a GPU, float32 on a CPU.
        device: 'cuda', 'cpu', or 'auto' for the GPU if there is one.
        attentions: among softpp, soft, softmax.
        backends: of our attentions, among auto, torch, triton, reference.
        backward: also time forward and backward together.
        seconds: time for each figure.
        csv: write the figures to this file, with date, device and versions in every row.
        plot: draw time against tokens into this file (.png, .pdf or .svg).
    """
    where = choose_device(device)
    check_choices("--attentions", attentions, ATTENTIONS)
    check_choices("--backends", backends, BACKENDS)
    chosen = DEFAULT_DTYPE[where.type] if dtype == "auto" else dtype
    check_choices("--dtype", [chosen], DTYPES)
    check_positive("--seconds", seconds)
    check_output("--csv", csv)
    check_figure("--plot", plot)
    shapes = pair_shapes(tokens, heads_times_batch, head_dim, landmarks, where.type)

    console = Console(highlight=False)
    costs: list[Cost] = []
    with progress() as report:
        report("measuring the memory's speed with a large copy")
        bandwidth = copy_bandwidth(where)
        for group in measure_costs(
            shapes, list(dict.fromkeys(attentions)), list(dict.fromkeys(backends)), chosen, where,
            bandwidth=bandwidth, backward=backward, seconds=seconds, report=report,
        ):  # fmt: skip
            costs += group
    measured_in = describe_environment(where)
    title = f"Attention: {head_dim} channels a head, {landmarks} landmarks, {chosen}"
    heading(console, title, measured_in, threads=where.type == "cpu")
    print_costs(console, costs, where, bandwidth, backward)
    save_rows(csv, [dataclasses.asdict(cost) for cost in costs], measured_in)
    if plot is not None:
        from softfree.commands._benchmark_plot import draw

        words = f"{title}\n{measured_in['device']}, {measured_in['date']}"
        save_figure(draw(costs, words), plot, "plot")
    return int(any(cost.faulty for cost in costs))


def pair_shapes(
    tokens: Sequence[int], heads: Sequence[int], dim: int, landmarks: int, device: str
) -> list[Shape]:
    """The shapes that the options ask for, checked, in the order given."""
    if not tokens:
        tokens, preset = zip(*DEFAULTS[device].items(), strict=True)
        heads = heads or preset
    heads = heads or (DEFAULT_HEADS[device],)
    if len(heads) == 1:
        heads = tuple(heads) * len(tokens)
    if len(heads) != len(tokens):
        raise ValueError(
            f"--heads-times-batch must be one number or one for each of the {len(tokens)} numbers of "
            f"tokens, got {len(heads)}"
        )
    named = {"--heads-times-batch": heads, "--head-dim": [dim], "--landmarks": [landmarks]}
    for option, values in named.items():
        check_positive(option, min(values))
    if min(tokens) < landmarks:
        raise ValueError(
            f"--tokens must be at least the number of landmarks, {landmarks}, got {min(tokens)}"
        )
    return [Shape(h, n, dim, landmarks) for h, n in zip(heads, tokens, strict=True)]


def print_costs(
    console: Console, costs: Sequence[Cost], device: torch.device, bandwidth: float, backward: bool
) -> None:
    """The table, one section a shape, and how to read it."""
    gpu = device.type == "cuda"
    titles = ["heads x tokens", "forward\nms", "times\nfaster"]
    titles += ["eager\nms"] if gpu else []
    titles += ["fwd+bwd\nms", "times\nfaster"] if backward else []
    titles += ["memory\nMiB", "memory\nfloor"]
    table = make_table(titles)
    previous = None
    for cost in costs:
        if (cost.batch_heads, cost.tokens) != previous:
            previous = (cost.batch_heads, cost.tokens)
            table.add_section()
            table.add_row(f"[bold]{cost.batch_heads:,} x {cost.tokens:,}[/]")
        memory = cost.forward_backward_extra_mib if backward else cost.forward_extra_mib
        cells = [digits(cost.forward_ms), digits(cost.forward_times_faster_than_softmax)]
        cells += [digits(cost.forward_eager_ms)] if gpu else []
        if backward:
            cells += [digits(cost.forward_backward_ms)]
            cells += [digits(cost.forward_backward_times_faster_than_softmax)]
        cells += [digits(memory), percent(cost.share_of_floor)]
        table.add_row(f"  {cost.name}", *cells)
    console.print(table)
    for cost in costs:
        if cost.note:
            console.print(
                f"{cost.batch_heads:,} x {cost.tokens:,} tokens, {cost.name}: {escape(cost.note)}",
                style="red" if cost.faulty else "yellow",
            )
    worst = max((c.error for c in costs if c.error is not None and not c.faulty), default=None)
    if worst is not None:
        console.print(
            f"Checked first, against the float64 reference: errors up to {worst:.1e}.", style="dim"
        )
    passes = "forward and backward" if backward else "forward"
    timed = "Medians, in a CUDA graph (caches not flushed); eager: forward, from Python."
    console.print(
        f"{timed if gpu else 'Medians.'}\n"
        "Heads: batch times heads.\n"
        "Times faster: than torch's softmax attention in this run.\n"
        f"Memory: the most that {passes} held beyond the inputs.\n"
        "Memory floor: share reached, forward, of the speed of the least traffic (q read\n"
        "twice, v read once, the result written once) at the memory's speed, which is\n"
        f"{bandwidth / 1e9:,.0f} GB/s by a large copy in this run.",
        style="dim",
    )
