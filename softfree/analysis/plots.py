"""Charts of measurements. Each is a matplotlib figure for :func:`save_figure`."""

import io
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from PIL import Image

from softfree.data.files import replace_durably

LABELS = {
    "softfree": "softfree",
    "soft": "SOFT",
    "softpp": "SOFT++",
    "softpp-solve": "SOFT++, solved",
    "softmax": "softmax (fused)",
    "softmax-unfused": "softmax (whole matrix)",
    "linformer": "Linformer",
    "performer": "Performer",
    "nystromformer": "Nyströmformer",
    "reformer": "Reformer",
    "agent": "agent attention",
    "flatten": "FLatten",
    "none": "without attention",
}
# An attention has one colour in all plots; ours are warm.
COLOURS = {
    "softfree": "#d62728",
    "softpp": "#ff7f0e",
    "softpp-solve": "#b8860b",
    "soft": "#f0b400",
    "softmax": "#1f77b4",
    "softmax-unfused": "#8fbfe0",
    "linformer": "#2ca02c",
    "performer": "#9467bd",
    "nystromformer": "#17becf",
    "reformer": "#8c564b",
    "agent": "#006d5b",
    "flatten": "#e377c2",
    "none": "#7f7f7f",
}
OTHER = "#404040"  # models without one of these attentions
MARKERS = "os^Dv"
STYLES = ("-", "--", "-.", ":")
LEAST_RANGE = 10  # smallest range of an accuracy axis, in percent
MOST_TICKS = 8  # numbers of tokens below an axis
# Maximum number of classes for which a matrix shows names, and numbers.
MOST_NAMED, MOST_NUMBERED = 100, 25
LONGEST_NAME = 28
Curve = Sequence[tuple[int, float]]


class Line(NamedTuple):
    """A curve, with its legend and how it is drawn."""

    label: str
    points: Curve
    colour: str
    style: str


def new_figure(
    width: float, height: float, layout: Literal["constrained"] | None = "constrained"
) -> Any:
    """An empty matplotlib figure of this size in inches; with ``layout=None`` axes are not moved."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout=layout)
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, output: Path, kind: str = "figure") -> None:
    """Write the figure in the format of the file's extension, and print its name."""
    # Run-length encoding compresses such pictures nearly as well as zlib's default, and much faster.
    png = {"pil_kwargs": {"compress_type": Image.RLE}} if output.suffix.lower() == ".png" else {}
    write_figure(figure, output, dpi=150, **png)
    print(f"{kind} written to {output}")


def write_figure(figure: Any, output: Path, **options: Any) -> None:
    """Write the figure, completely or not at all; create its folder if necessary."""
    content = io.BytesIO()
    figure.savefig(content, format=output.suffix[1:].lower(), **options)
    output.parent.mkdir(parents=True, exist_ok=True)
    replace_durably(output, content.getvalue())


def draw_against_tokens(
    lines: Sequence[Line], y_label: str, title: str, linear: str = "", **settings: Any
) -> Any:
    """Draw lines against the number of tokens, with a logarithmic y axis.

    ``settings`` are for matplotlib's axes. ``linear`` is the legend of a line proportional to the tokens,
    which ends where the lowest line does.
    """
    from matplotlib.ticker import LogLocator

    picture = new_figure(7, 5.5)
    axes = picture.add_subplot()
    for line in lines:
        across, along = zip(*line.points, strict=True)
        axes.plot(across, along, line.style, markersize=4, color=line.colour, label=line.label)
    if linear and lines:
        lowest = min(lines, key=lambda line: line.points[-1][1])
        tokens, (count, value) = [point[0] for point in lowest.points], lowest.points[-1]
        ends = [tokens[0], count]
        axes.plot(ends, [value * end / count for end in ends], ":", color="grey", label=linear)
    axes.set(yscale="log", xlabel="tokens", ylabel=y_label, **settings)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")
    tokens = sorted({count for line in lines for count, _ in line.points})
    if len(tokens) <= MOST_TICKS:
        axes.set_xticks(tokens, [f"{count:,}" for count in tokens])
        axes.xaxis.minorticks_off()
    axes.grid(alpha=0.3)
    axes.set_title(title, fontsize=9)
    if lines:
        picture.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return picture


def colour_of(name: str | None) -> str:
    """The colour of an attention, or of a model named after its attention; None: the colour for others.

    Example:
        >>> colour_of("softpp_tiny") == colour_of("softpp"), colour_of("resnet50") == OTHER
        (True, True)
    """
    name = name or ""
    return COLOURS.get(name) or COLOURS.get(name.partition("_")[0], OTHER)


def shades(colour: str, count: int) -> list[str]:
    """A colour and lighter shades of it, ``count`` in total.

    Example:
        >>> shades("#000000", 3)
        ['#000000', '#595959', '#b2b2b2']
    """
    parts = [int(colour[place : place + 2], 16) for place in (1, 3, 5)]
    light = [0.7 * number / max(count - 1, 1) for number in range(count)]
    mixed = ([int(part + share * (255 - part)) for part in parts] for share in light)
    return ["#" + "".join(f"{part:02x}" for part in each) for each in mixed]


def draw_bars(
    names: Sequence[str],
    panels: Mapping[str, Mapping[str, Sequence[float | None]]],
    title: str,
    colours: Sequence[str],
) -> Any:
    """Draw one panel per figure, with a group of bars for each name; None leaves a gap.

    Args:
        panels: for each panel title and each legend entry, one value for each of ``names``.
        colours: the colour of each name; lighter for the second legend entry and so on.
    """
    picture = new_figure(2 + 3 * len(panels), 1.4 + 0.5 * len(names))
    row = picture.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    most = max(map(len, panels.values()))
    for axes, (words, bars) in zip(row, panels.items(), strict=True):
        for number, (label, values) in enumerate(bars.items()):
            height = 0.8 / len(bars)
            places = [index - 0.4 + (number + 0.5) * height for index in range(len(names))]
            lengths = [value or 0.0 for value in values]
            own = [shades(colour, most)[number] for colour in colours]
            axes.barh(places, lengths, height, color=own, label=label)
        axes.set_xlabel(words)
        axes.locator_params(axis="x", nbins=4)  # numbers such as 0.0025 are wide
        axes.grid(axis="x", alpha=0.3)
    row[0].set_yticks(range(len(names)), names)
    row[0].invert_yaxis()
    named = max((axes.get_legend_handles_labels() for axes in row), key=lambda found: len(found[1]))
    if len(named[1]) > 1:
        picture.legend(*named, loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    picture.suptitle(title, fontsize=9)
    return picture


def draw_resolution(
    curves: Mapping[str, Curve], trained: Mapping[str, int], colours: Mapping[str, str]
) -> Any:
    """Draw accuracy against image size, one line per checkpoint; a ring marks the training size.

    Checkpoints with the same attention have the same colour, but different lines and markers.
    """
    figure = new_figure(7, 4.8)
    axes = figure.add_subplot()
    drawn: Counter[str] = Counter()
    for title, curve in curves.items():
        colour = colours[title]
        style, marker = (kinds[drawn[colour] % len(kinds)] for kinds in (STYLES, MARKERS))
        drawn[colour] += 1
        sizes, accuracies = zip(*curve, strict=True)
        axes.plot(sizes, accuracies, style, color=colour, marker=marker, label=title)
        axes.axvline(trained[title], color=colour, linestyle=":", linewidth=1)
        for point in (point for point in curve if point[0] == trained[title]):
            axes.plot(*point, "o", color=colour, markersize=14, fillstyle="none")
    axes.set_xticks(sorted({size for curve in curves.values() for size, _ in curve}))
    axes.set(xlabel="side of the square image (pixels)", ylabel="top-1 accuracy (%)")
    low, high = axes.get_ylim()
    # The axis has a minimum range, so that nearly flat lines look flat.
    middle, half = (low + high) / 2, max(high - low, LEAST_RANGE) / 2
    axes.set_ylim(max(0.0, middle - half), min(100.0, middle + half))
    words = "Accuracy against image size; ring and dots mark the size of the training"
    axes.set_title(words, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure


def draw_confusion(
    names: Sequence[str],
    shares: Any,
    bars: Mapping[str, Sequence[float | None]],
    title: str,
) -> Any:
    """Draw a confusion matrix as a heat map, with true classes as rows, and a panel of bars for each figure.

    Args:
        names: the names of rows and columns.
        shares: (n, n), each row in percent of its sum.
        bars: by name, percentages of the first classes, or of all; None leaves a gap.
    """
    count = len(names)
    cell = min(0.42, max(0.13, 9 / count)) if count <= MOST_NAMED else 12 / count
    side = max(2.2, cell * count)
    letters = min(9.0, max(4.0, 60 * cell / 2.2))
    picture = new_figure(side + 2.2 + 1.3 * len(bars), side + 1.9)
    ratios = [side, *[1.2] * len(bars)]
    heat, *others = picture.subplots(1, 1 + len(bars), sharey=True, width_ratios=ratios)
    heat.imshow(shares, cmap="Blues", vmin=0, vmax=100, aspect="auto", interpolation="nearest")
    heat.set(xlabel="what the model says", ylabel="truth, % of the row")
    if count <= MOST_NAMED:
        short = [n if len(n) <= LONGEST_NAME else f"{n[: LONGEST_NAME - 1]}…" for n in names]
        places = range(count)
        heat.set_yticks(places, short, fontsize=letters, parse_math=False)
        heat.set_xticks(places, short, fontsize=letters, rotation=90, parse_math=False)
    if count <= MOST_NUMBERED:
        for row, line in enumerate(shares):
            for column, share in enumerate(line):
                if share > 0:
                    ink = "white" if share > 55 else "black"
                    place = dict(ha="center", va="center", fontsize=letters)
                    heat.text(column, row, f"{share:.0f}", color=ink, **place)
    for axes, (words, values) in zip(others, bars.items(), strict=True):
        lengths = [value or 0.0 for value in values]
        axes.barh(range(len(values)), lengths, 0.8, color="C0")
        axes.set(xlim=(0, 100), xlabel=f"{words} (%)", xticks=(0, 50, 100))
        axes.grid(axis="x", alpha=0.3)
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right"]].set_visible(False)
    picture.suptitle(title, fontsize=9)
    return picture
