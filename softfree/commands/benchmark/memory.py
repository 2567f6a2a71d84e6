"""`softfree benchmark memory`: Fig. 1b of the papers, memory against the number of tokens."""

import dataclasses
from collections.abc import Callable

from softfree.analysis.attention_cost import (
    DTYPES,
    LAYERS,
    LENGTHS,
    LayerMemory,
    draw_memory,
    measure_layer_memory,
)
from softfree.commands.benchmark.attention import DEFAULT_DTYPE
from softfree.commands.common import (
    REPORT,
    Report,
    check_choices,
    check_positive,
    digits,
    progress,
)

# Dimension and heads: the papers' network without a pyramid, and a small one for CPUs.
DEFAULT_SIZE = {"cuda": (384, 12), "cpu": (64, 2)}


def memory(
    attentions: tuple[str, ...] = LAYERS,
    tokens: tuple[int, ...] = LENGTHS,
    batch_size: int = 1,
    dim: int | None = None,
    num_heads: int | None = None,
    dtype: str = "auto",
    report: Report = REPORT,
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
    """
    where = report.check()
    check_choices("--attentions", attentions, LAYERS)
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

    rows = []
    with progress() as say:
        for name in dict.fromkeys(attentions):
            for length in sorted(set(tokens)):
                say(f"{name}: {length} tokens")
                row = LayerMemory(name, length, batch_size, channels, count, chosen)
                rows.append(measure_layer_memory(row, where))
    found = {(row.attention, row.tokens): digits(row.forward_backward_mib) for row in rows}

    def column(length: int) -> Callable[[str], str]:
        return lambda name: found[name, length]

    lengths = {f"{length:,}": column(length) for length in sorted(set(tokens))}
    report.publish(
        f"Memory of an attention layer: {channels} channels, {count} heads, batch {batch_size}, {chosen}",
        list(dict.fromkeys(attentions)),
        {"tokens": str, **lengths},
        "MiB: the most that forward and backward held at once beyond weights and input;\n"
        "a dash where memory ran out. The CSV has the forward pass alone, too.",
        lambda title: draw_memory(rows, title),
        records=[dataclasses.asdict(row) for row in rows],
    )
    return 0
