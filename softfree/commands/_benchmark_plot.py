"""The plot of `softfree benchmark attention`."""

from collections.abc import Sequence
from typing import Any

from softfree.analysis.attention_cost import Cost
from softfree.commands._common import new_figure

WORDS = {"softpp": "SOFT++", "soft": "SOFT", "softmax": "softmax (torch)"}
STYLES = {
    "forward_ms": ("forward", "-", "o"),
    "forward_backward_ms": ("forward + backward", "--", "s"),
}


def curves(costs: Sequence[Cost], figure: str) -> dict[str, list[tuple[int, float]]]:
    """By attention, tokens and milliseconds, ascending; per head where shapes differ in their heads."""
    per_head = len({cost.batch_heads for cost in costs}) > 1
    found: dict[str, list[tuple[int, float]]] = {}
    for cost in sorted(costs, key=lambda cost: cost.tokens):
        ms = getattr(cost, figure)
        if ms is not None:
            value = ms / cost.batch_heads if per_head else ms
            found.setdefault(cost.name, []).append((cost.tokens, value))
    return found


def describe(cost: Cost) -> str:
    """An attention in words, for the legend; which backend, unless it was left open."""
    backend = "" if cost.attention == "softmax" or cost.backend == "auto" else f" ({cost.backend})"
    return WORDS[cost.attention] + backend


def draw(costs: Sequence[Cost], title: str) -> Any:
    """Time against tokens, both axes logarithmic, a colour for each attention."""
    picture = new_figure(7, 5.5)
    axes = picture.add_subplot()
    words = {cost.name: describe(cost) for cost in costs}
    names = list(words)
    for figure, (what, line, marker) in STYLES.items():
        for name, points in curves(costs, figure).items():
            axes.plot(
                *zip(*points, strict=True),
                line,
                marker=marker,
                markersize=4,
                color=f"C{names.index(name) % 10}",
                label=f"{words[name]}, {what}",
            )
    heads = sorted({cost.batch_heads for cost in costs})
    axes.set(xscale="log", yscale="log", xlabel="tokens")
    axes.set_ylabel("ms for each head" if len(heads) > 1 else f"ms for {heads[0]} heads")
    tokens = sorted({cost.tokens for cost in costs})
    if len(tokens) <= 8:
        axes.set_xticks(tokens, [f"{count:,}" for count in tokens])
        axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.set_title(title, fontsize=9)
    if axes.lines:
        picture.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return picture
