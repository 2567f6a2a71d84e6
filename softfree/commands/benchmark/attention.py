"""`softfree benchmark attention` and `memory`: comparisons of attentions."""

from collections.abc import Sequence

from softfree.analysis import attention_cost, copy_bandwidth
from softfree.commands.common import (
    REPORT,
    Columns,
    Report,
    check_choices,
    check_positive,
    digits,
    field,
    percent,
    progress,
)
from softfree.ops.attention import BACKENDS

# Tokens, and batch times heads. On a GPU: stages 1 to 3 of a backbone at batch 128, and a large image.
DEFAULTS = {
    "cpu": {784: 2, 3136: 2, 16384: 2},
    "cuda": {196: 2560, 784: 1024, 3136: 256, 65536: 12},
}
DEFAULT_HEADS = {"cpu": 2, "cuda": 12}
DEFAULT_DTYPE = {"cpu": "float32", "cuda": "bfloat16"}
# Dimension and heads of a layer: the papers' network without a pyramid, and a small one for CPUs.
DEFAULT_SIZE = {"cuda": (384, 12), "cpu": (64, 2)}


def attention(
    tokens: tuple[int, ...] = (),
    heads_times_batch: tuple[int, ...] = (),
    head_dim: int = 32,
    landmarks: int = 49,
    dtype: str = "auto",
    attentions: tuple[str, ...] = attention_cost.OPERATORS,
    backends: tuple[str, ...] = ("auto",),
    backward: bool = True,
    seconds: float = 0.5,
    report: Report = REPORT,
) -> int:
    """Measure time and memory of the operator and of torch's softmax attention in one run.

    Results and gradients of our attentions are first compared with the float64 reference. One that is wrong
    is not timed, and the exit code is 1.

    Args:
        tokens: numbers of tokens; otherwise 784 3136 16384 on a CPU, 196 784 3136 65536 on a GPU.
        heads_times_batch: batch size times heads: one number, or one for each of --tokens.
        head_dim: channels per head.
        landmarks: landmarks of our attentions.
        dtype: bfloat16, float16 or float32; 'auto': bfloat16 on a GPU, float32 on a CPU.
        attentions: one or more of softpp, softpp-solve, soft, softmax.
        backends: backends for our attentions: auto, native, torch, triton, reference.
        backward: also time forward and backward together.
        seconds: time for each figure.
    """
    where = report.check()
    check_choices("--attentions", attentions, attention_cost.OPERATORS)
    check_choices("--backends", backends, BACKENDS)
    chosen = choose_dtype(dtype, where.type)
    check_positive("--seconds", seconds)
    shapes = pair_shapes(tokens, heads_times_batch, head_dim, landmarks, where.type)

    with progress() as say:
        say("measuring the memory bandwidth with a large copy")
        bandwidth = copy_bandwidth(where)
        costs = attention_cost.measure_costs(
            shapes, list(dict.fromkeys(attentions)), list(dict.fromkeys(backends)), chosen, where,
            bandwidth=bandwidth, backward=backward, seconds=seconds, report=say,
        )  # fmt: skip
    report.publish(
        f"Attention: {head_dim} channels per head, {landmarks} landmarks, {chosen}",
        costs,
        cost_columns(where.type == "cuda", backward),
        legend(costs, where.type == "cuda", bandwidth, backward),
        lambda title: attention_cost.draw_times(costs, title),
        section=lambda cost: f"{cost.batch_heads:,} x {cost.tokens:,}",
    )
    return int(any(cost.faulty for cost in costs))


def pair_shapes(
    tokens: Sequence[int], heads: Sequence[int], dim: int, landmarks: int, device: str
) -> list[attention_cost.Shape]:
    """The shapes given by the options, checked, in the order given."""
    if not tokens:
        tokens, preset = zip(*DEFAULTS[device].items(), strict=True)
        heads = heads or preset
    heads = heads or (DEFAULT_HEADS[device],)
    if len(heads) == 1:
        heads = tuple(heads) * len(tokens)
    if len(heads) != len(tokens):
        raise ValueError(
            f"--heads-times-batch must be one number, or one for each of the {len(tokens)} values of "
            f"--tokens, got {len(heads)}"
        )
    named = {"--heads-times-batch": heads, "--head-dim": [dim], "--landmarks": [landmarks]}
    for option, values in named.items():
        check_positive(option, min(values))
    if min(tokens) < landmarks:
        raise ValueError(
            f"--tokens must be at least the number of landmarks, {landmarks}, got {min(tokens)}"
        )
    return [attention_cost.Shape(h, n, dim, landmarks) for h, n in zip(heads, tokens, strict=True)]


def cost_columns(gpu: bool, backward: bool) -> Columns:
    """The columns of the table."""
    both = {
        "fwd+bwd\nms": field("forward_backward_ms"),
        "fwd+bwd\nfaster": field("forward_backward_times_faster_than_softmax"),
    }
    return {
        "heads x tokens": lambda cost: cost.name,
        "forward\nms": field("forward_ms"),
        "times\nfaster": field("forward_times_faster_than_softmax"),
        **({"eager\nms": field("forward_eager_ms")} if gpu else {}),
        **(both if backward else {}),
        "memory\nMiB": field("forward_backward_extra_mib" if backward else "forward_extra_mib"),
        "memory\nfloor": lambda cost: percent(cost.share_of_floor),
    }


def legend(
    costs: Sequence[attention_cost.Cost], gpu: bool, bandwidth: float, backward: bool
) -> str:
    """The explanation below the table."""
    errors = [cost.error for cost in costs if cost.error is not None and not cost.faulty]
    checked = "Checked first, against the float64 reference: errors up to {:.1e}.\n"
    passes = "forward and backward" if backward else "forward"
    timed = "Medians, in a CUDA graph (caches not flushed); eager: forward, from Python."
    return (
        (checked.format(max(errors)) if errors else "") + f"{timed if gpu else 'Medians.'}\n"
        "Heads: batch times heads.\n"
        "Times faster: than torch's softmax attention in this run.\n"
        f"Memory: the most that {passes} held beyond the inputs.\n"
        "Memory floor: the time that the least possible traffic (q read twice, v read\n"
        "once, the result written once) takes at the memory's bandwidth, as a share of\n"
        f"the forward time. Bandwidth of a large copy in this run: {bandwidth / 1e9:,.0f} GB/s."
    )


def memory(
    attentions: tuple[str, ...] = attention_cost.LAYERS,
    tokens: tuple[int, ...] = attention_cost.LENGTHS,
    batch_size: int = 1,
    dim: int | None = None,
    num_heads: int | None = None,
    dtype: str = "auto",
    report: Report = REPORT,
) -> int:
    """Measure the memory of one attention layer, forward and backward, as tokens grow (Fig. 1b).

    SOFT, Nyströmformer, agent attention and Linformer have 49 landmarks, agents or slots at any length.

    Args:
        attentions: one or more of softfree, soft, softpp, softmax, linformer, performer, nystromformer,
            reformer, agent, flatten and softmax-unfused, which keeps the n x n matrix that torch's fused
            softmax attention avoids.
        tokens: numbers of tokens.
        batch_size: sequences at a time.
        dim: channels; otherwise 384 on a GPU, 64 on a CPU.
        num_heads: heads; otherwise 12 on a GPU, 2 on a CPU.
        dtype: bfloat16, float16 or float32; 'auto': bfloat16 on a GPU, float32 on a CPU.
    """
    where = report.check()
    check_choices("--attentions", attentions, attention_cost.LAYERS)
    if not tokens:
        raise ValueError("--tokens needs at least one number")
    channels, count = (
        given if given is not None else preset
        for given, preset in zip((dim, num_heads), DEFAULT_SIZE[where.type], strict=True)
    )
    named = {"--tokens": min(tokens), "--batch-size": batch_size, "--dim": channels}
    for option, value in {**named, "--num-heads": count}.items():
        check_positive(option, value)
    chosen = choose_dtype(dtype, where.type)
    names, lengths = list(dict.fromkeys(attentions)), sorted(set(tokens))
    rows = []
    with progress() as say:
        for name in names:
            for length in lengths:
                say(f"{name}: {length} tokens")
                row = attention_cost.LayerMemory(name, length, batch_size, channels, count, chosen)
                rows.append(attention_cost.measure_layer_memory(row, where))
    found = {(row.attention, row.tokens): digits(row.forward_backward_mib) for row in rows}
    cells: Columns = {f"{n:,}": lambda name, n=n: found[name, n] for n in lengths}  # type: ignore[misc]
    report.publish(
        f"Memory of an attention layer: {channels} channels, {count} heads, batch {batch_size}, {chosen}",
        names,
        {"tokens": str, **cells},
        "MiB: the most that forward and backward held at once beyond weights and input;\n"
        "a dash where memory ran out. The CSV also has the forward pass by itself.",
        lambda title: attention_cost.draw_memory(rows, title),
        records=[vars(row) for row in rows],
    )
    return 0


def choose_dtype(dtype: str, device: str) -> str:
    """Check --dtype; "auto" becomes the dtype that suits the device."""
    chosen = DEFAULT_DTYPE[device] if dtype == "auto" else dtype
    check_choices("--dtype", [chosen], attention_cost.DTYPES)
    return chosen
