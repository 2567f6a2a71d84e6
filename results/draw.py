"""Draw the charts of this folder again, from the dated CSV files beside this script.

    python results/draw.py

Writes 2026-11-19_nvidia-h200_overview.png, time against tokens beside a heat map; 2026-11-15_nvidia-h200_accuracy.png, top-1
against training speed and against the size of the test pictures; and with 2026-11-16_nvidia-h200_ before its name:
training.png, top-1 against epochs; precision.png, loss and gradient norm against steps in three precisions; longrange.png,
accuracy against steps of Long Range Arena. Also, from the figures of `softfree benchmark`, what its --draw draws: times, memory, throughput.
"""

import csv
from math import sqrt
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

from matplotlib.axes import Axes
from PIL import Image

from softfree.analysis import attention_cost, plots, speed
from softfree.analysis.attention_cost import Cost, LayerMemory
from softfree.analysis.plots import COLOURS, new_figure, save_figure

RESULTS = Path(__file__).parent
FIRST, SECOND = "2026-11-15_nvidia-h200", "2026-11-16_nvidia-h200"
LAST = "2026-11-19_nvidia-h200"
CPU = "2026-11-15_amd-epyc"
TRAINED_AT = "128"  # pixels of a picture's side
TEST_PICTURES = 5000  # 50 of each of the 100 classes
ATTENTIONS = ("softpp", "soft", "softmax", "linformer", "performer", "nystromformer")
NAMES = {attention: plots.LABELS[attention].partition(" (")[0] for attention in ATTENTIONS}
HEAT_MAPS = "2026-11-20_nvidia-h200_heatmap_own.jpg"
# Pixels in it: the photo and the maps of three heads.
HEAT_MAPS_BOXES = {
    "photo": (11, 66, 209, 263),
    "stage 2": (471, 303, 669, 500),
    "stage 3": (264, 540, 462, 737),
    "stage 4": (264, 777, 462, 974),
}
# Where a label is, if not above: its distance in points, and which of its sides is there.
LABELS = {
    "soft": ((9, 0), "left", "center"),
    "linformer": ((0, -16), "center", "top"),
    "performer": ((0, -16), "center", "top"),
}
# What the name of a run has after its attention: the class token is replaced by the mean of the tokens.
AVERAGE = "_average_pooling_drop_path_0.1"
CONTROL = "softpp_without_attention" + AVERAGE
LANDMARKS = {"stride": ("-", "fixed stride"), "count": ("--", "16 landmarks")}
MARKERS = dict(zip(NAMES, "osD^vX", strict=True))
# The runs of each attention in float32, bfloat16 and float16, and how they are drawn: as their lines lie on each other,
# a broad one below, then two with gaps.
PRECISION_RUNS = {
    "softpp": ("fp32", "bf16", "fp16"),
    "soft": ("soft_fp32_stopped", "soft_bf16", "soft_fp16"),
}
PRECISION_STYLES = (
    {"label": "float32", "color": "silver", "lw": 4},
    {"label": "bfloat16", "color": "tab:blue", "ls": "--"},
    {"label": "float16", "color": "tab:red", "ls": ":"},
)
TASKS = {
    "listops": (FIRST, "ListOps"),
    "lra_image": (SECOND, "image: CIFAR-10 in grey"),
    "lra_text": (SECOND, "text: IMDb reviews"),
}
LARGER = "-gains"  # what the name of a run has after its attention that starts with larger weights
# What the legend says of runs that do not start as their attention does by default.
OTHER_START = {"soft": ", query_gain=1", "softpp" + LARGER: ", query_gain=2, output_gain=30"}

Row = dict[str, str]


def read(what: str, prefix: str = FIRST) -> list[Row]:
    """The rows of one CSV file of this date and device."""
    with (RESULTS / f"{prefix}_{what}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def number(text: str) -> float | None:
    """A cell; None where nothing was measured."""
    return float(text) if text else None


def measured(rows: list[Row]) -> str:
    """Device and dates of these rows."""
    return f"{rows[0]['device']}, {' and '.join(sorted({row['date'] for row in rows}))}"


def average(rows: list[Row]) -> list[Row]:
    """One row of a run, size and kind of landmarks: its first seed's, with the mean of all seeds' accuracy."""
    seeds: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        seeds.setdefault((row["run"], row["img_size"], row["landmarks"]), []).append(row)
    return [
        {**group[0], "top1": str(fmean(float(row["top1"]) for row in group))}
        for group in seeds.values()
    ]


def curves(rows: list[Row], across: str, along: str) -> dict[str, list[tuple[float, float]]]:
    """The points of each run's line: at every value of ``across`` the mean of its seeds' ``along``."""
    values: dict[str, dict[float, list[float]]] = {}
    for row in rows:
        points = values.setdefault(row["run"], {})
        points.setdefault(float(row[across]), []).append(float(row[along]))
    return {run: [(x, fmean(y)) for x, y in sorted(of.items())] for run, of in values.items()}


def draw_speed(axes: Axes, accuracies: list[Row], speeds: dict[str, Row]) -> None:
    """Top-1 against training images per second, with the memory of training in words.

    Hollow: with the class token; full: with average pooling and drop path. A bar is one standard error of a
    share p of n test pictures, sqrt(p (1 - p) / n).
    """
    chosen = [r for r in accuracies if (r["img_size"], r["landmarks"]) == (TRAINED_AT, "stride")]
    top1 = {row["run"]: float(row["top1"]) for row in chosen}
    for attention, name in NAMES.items():
        speed = float(speeds[attention]["train_img_per_s"])
        for run, face in ((attention, "white"), (attention + AVERAGE, COLOURS[attention])):
            if run in top1:
                error = sqrt(top1[run] * (100 - top1[run]) / TEST_PICTURES)
                axes.errorbar(
                    speed, top1[run], error, fmt="o", ms=8, capsize=4, color=COLOURS[attention], mfc=face
                )  # fmt: skip
        runs = [run for run in (attention, attention + AVERAGE) if run in top1]
        low, high = top1[runs[0]], top1[runs[-1]]
        place, across, along = LABELS.get(attention, ((0, 15), "center", "bottom"))
        axes.annotate(
            f"{name}\n{high:.1f}%, {float(speeds[attention]['train_peak_gib']):.1f} GiB",
            (speed, low if along == "top" else high),
            xytext=place,
            textcoords="offset points",
            ha=across,
            va=along,
            fontsize=9,
        )
    axes.axhline(top1[CONTROL], xmax=0.64, color="grey", ls=":")
    axes.annotate(
        f"SOFT++ without its attention {top1[CONTROL]:.1f}%", (0.02, top1[CONTROL]),
        xycoords=("axes fraction", "data"), xytext=(0, 4), textcoords="offset points", fontsize=9,
    )  # fmt: skip
    axes.margins(x=0.38, y=0.15)  # room for the labels
    axes.set_xlabel("training images per second at 224 x 224, batch 256")
    axes.set_ylabel(f"top-1 in % at {TRAINED_AT} x {TRAINED_AT}")
    axes.set_title(
        "Accuracy against throughput\n"
        "(hollow: class token; full: average pooling, drop path; GiB: in training)",
        fontsize=10,
    )


def draw_sizes(axes: Axes, accuracies: list[Row]) -> None:
    """Top-1 against the side of the test pictures; dashed where the number of landmarks stays the same."""
    for attention, name in NAMES.items():
        for landmarks, (style, words) in LANDMARKS.items():
            points = sorted(
                (int(row["img_size"]), float(row["top1"]))
                for row in accuracies
                if (row["run"], row["landmarks"]) == (attention, landmarks)
            )
            if points:
                label = f"{name}, {words}" if attention in ("softpp", "soft") else name
                axes.plot(
                    *zip(*points, strict=True),
                    style,
                    marker=MARKERS[attention],
                    color=COLOURS[attention],
                    label=label,
                )
    axes.set_xticks(sorted({int(row["img_size"]) for row in accuracies}))
    axes.set_ylim(0, 65)
    axes.set_xlabel("side of the test pictures in pixels")
    axes.set_ylabel("top-1 in %")
    axes.set_title(
        f"Accuracy at sizes not trained on\n(class token, trained at {TRAINED_AT} x {TRAINED_AT})",
        fontsize=10,
    )
    axes.legend(loc="lower left", fontsize=8)


def read_costs(rows: list[Row]) -> list[Cost]:
    """What `softfree benchmark attention` measured."""
    return [
        Cost(
            int(row["batch_heads"]), int(row["tokens"]), int(row["dim"]), int(row["landmarks"]),
            row["dtype"], row["attention"], row["backend"],
            forward_ms=number(row["forward_ms"]),
            forward_backward_ms=number(row["forward_backward_ms"]),
        )
        for row in rows
    ]  # fmt: skip


def draw_overview() -> None:
    """Softmax beside softfree: time against tokens, and where a patch attends to."""
    rows = read("attention_solve", LAST)
    figure = new_figure(10, 4.4)
    photo, *stages = HEAT_MAPS_BOXES
    places = figure.subplot_mosaic(
        [["time", photo, stages[0]], ["time", *stages[1:]]], width_ratios=(2.6, 1, 1)
    )
    left = places.pop("time")
    costs = read_costs(rows)
    for attention, label in (
        ("softmax", "softmax (torch's fused)"),
        ("softpp-solve", "softfree (SOFT++, solved)"),
    ):
        for passes, style, what in (
            ("forward_backward_ms", "s--", "with its gradient"),
            ("forward_ms", "o-", "forward"),
        ):
            points = attention_cost.time_curves(
                [cost for cost in costs if cost.attention == attention], passes
            )
            ((_, curve),) = points.items()
            words = f"{label}, {what}"
            left.plot(*zip(*curve, strict=True), style, color=COLOURS[attention], label=words, ms=4)
            if attention == "softmax" and passes == "forward_ms":
                slowest = curve[-1]
    tokens, fast = curve[-1]
    left.annotate(
        "", (tokens, fast), (tokens, slowest[1]), arrowprops=dict(arrowstyle="<->", color="grey")
    )
    left.annotate(
        f"{slowest[1] / fast:.0f} times  ",
        (tokens, sqrt(fast * slowest[1])),
        ha="right",
        va="center",
    )
    left.plot([196, tokens], [fast * 196 / tokens, fast], ":", color="grey")
    left.annotate(
        "twice the tokens, twice the time", (900, fast * 500 / tokens), fontsize=8, rotation=14
    )
    left.set(xscale="log", yscale="log", xlabel="tokens", ylabel="ms for each head")
    left.set_xticks(ticks := sorted({cost.tokens for cost in costs}), [f"{t:,}" for t in ticks])
    left.xaxis.minorticks_off()
    left.grid(alpha=0.3)
    left.legend(fontsize=8, loc="upper left")
    left.set_title(f"One attention call, bfloat16, {measured(rows)}", fontsize=9)
    maps = Image.open(RESULTS / HEAT_MAPS)
    for words, axes in places.items():
        axes.imshow(maps.crop(HEAT_MAPS_BOXES[words]))
        axes.set(xticks=[], yticks=[])
        axes.set_title(words, fontsize=9)
    places[stages[1]].set_xlabel(
        "where the marked patch attends to,\nin a trained softfree_tiny", fontsize=9, loc="left"
    )
    save_figure(figure, RESULTS / f"{LAST}_overview.png", "figure")


def draw_measured() -> None:
    """Times, memory and throughput, as the commands that measured them draw them."""
    figures = {}
    for prefix, what in (
        (FIRST, "attention_bfloat16"), (SECOND, "attention_linear"), (CPU, "attention_float32")
    ):  # fmt: skip
        rows = read(what, prefix)
        costs = read_costs(rows)
        one = costs[0]
        title = f"Attention: {one.dim} channels per head, {one.landmarks} landmarks, {one.dtype}"
        figures[prefix, what] = attention_cost.draw_times(costs, f"{title}\n{measured(rows)}")
    for prefix in (CPU, SECOND):
        rows = read("memory", prefix)
        layers = [
            LayerMemory(
                row["attention"], int(row["tokens"]), int(row["batch_size"]), int(row["dim"]),
                int(row["heads"]), row["dtype"],
                forward_backward_mib=number(row["forward_backward_mib"]),
            )
            for row in rows
        ]  # fmt: skip
        layer = layers[0]
        title = f"Memory of an attention layer: {layer.dim} channels, {layer.heads} heads, "
        title += f"batch {layer.batch_size}, {layer.dtype}\n{measured(rows)}"
        figures[prefix, "memory"] = attention_cost.draw_memory(layers, title)
    rows = read("throughput_224")
    speeds = [
        SimpleNamespace(
            **{f"{kind}_{figure}": number(row[f"{kind}_{figure}"])
               for kind in speed.KINDS for figure in ("img_per_s", "peak_gib")}
        )
        for row in rows
    ]  # fmt: skip
    first = rows[0]
    title = f"Attentions in {first['model']}: batch {first['batch_size']}, {first['img_size']}²\n"
    figures[FIRST, "throughput_224"] = speed.draw_speeds(
        speeds, [row["attention"] for row in rows], speed.KINDS, title + measured(rows)
    )
    for (prefix, what), figure in figures.items():
        save_figure(figure, RESULTS / f"{prefix}_{what}.png", "figure")


def draw_accuracy() -> None:
    """Top-1 of the trained models: against their speed, and against the size of the test pictures."""
    speeds = {row["attention"]: row for row in read("throughput_224")}
    # A run of the pyramid whose speed was measured has the name of its attention.
    wanted = [
        row
        for row in read("tiny_imagenet")
        if row["run"].removesuffix(AVERAGE) in speeds or row["run"] == CONTROL
    ]
    accuracies = average(wanted)
    figure = new_figure(10, 5)
    left, right = figure.subplots(1, 2)
    draw_speed(left, accuracies, speeds)
    draw_sizes(right, accuracies)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    first = accuracies[0]
    figure.suptitle(
        f"Attentions in {first['model']}, Tiny-ImageNet-100, {first['epochs']} epochs\n"
        "class token: mean of three seeds, of one for Linformer, Performer, Nyströmformer; "
        "average: one, SOFT++ three, SOFT two\n"
        f"{measured(wanted)}",
        fontsize=11,
    )
    save_figure(figure, RESULTS / f"{FIRST}_accuracy.png", "figure")


def draw_training() -> None:
    """Top-1 against epochs, of runs that came to their end."""
    scores = [row for row in read("tiny_imagenet") if row["run"].removesuffix(AVERAGE) in NAMES]
    ended = {(row["run"], row["seed"]) for row in scores}
    tests = [row for row in read("tiny_imagenet_curves") if row["kind"] == "eval"]
    points = curves([row for row in tests if (row["run"], row["seed"]) in ended], "epoch", "top1")
    figure = new_figure(10, 5)
    panels = figure.subplots(1, 2, sharey=True)
    titles = {"": "Class token", AVERAGE: "Average pooling, drop path 0.1"}
    for axes, (ending, title) in zip(panels, titles.items(), strict=True):
        for attention, name in NAMES.items():
            run = attention + ending
            if run in points:
                seeds = sum(run == of for of, _ in ended)
                axes.plot(
                    *zip(*points[run], strict=True), color=COLOURS[attention], mfc="none",
                    marker=MARKERS[attention], label=f"{name}, {seeds} seed{'' if seeds == 1 else 's'}",
                )  # fmt: skip
        axes.set_xticks([epoch for epoch, _ in points["softpp"]])
        axes.set_xlabel("epoch")
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right", fontsize=9)
    panels[0].set_ylabel(f"top-1 in % at {TRAINED_AT} x {TRAINED_AT}")
    figure.suptitle(
        f"Attentions in {scores[0]['model']}, Tiny-ImageNet-100, mean of seeds\n{measured(scores)}",
        fontsize=11,
    )
    save_figure(figure, RESULTS / f"{SECOND}_training.png", "figure")


def draw_precision() -> None:
    """Loss and gradient norm against steps: a row of panels per attention, a line per precision."""
    rows = [row for row in read("ablations_curves", SECOND) if row["kind"] == "train"]
    skipped = {row["run"]: row["skipped_steps"] for row in rows}  # counts all steps until there
    figure = new_figure(10, 8)
    grid = figure.subplots(2, 2, sharex=True, sharey="col")
    for panels, (attention, runs) in zip(grid, PRECISION_RUNS.items(), strict=True):
        for axes, number in zip(panels, ("loss", "grad_norm"), strict=True):
            points = curves(rows, "step", number)
            for run, style in zip(runs, PRECISION_STYLES, strict=True):
                stopped = ", stopped" if run.endswith("_stopped") else ""
                label = f"{style['label']}{stopped}, skipped steps: {skipped[run]}"
                axes.plot(*zip(*points[run], strict=True), **{**style, "label": label})
            axes.set_ylabel(f"{NAMES[attention]}: {number.replace('grad_norm', 'gradient norm')}")
            axes.grid(alpha=0.3)
        panels[0].legend(loc="upper right", fontsize=9)
    for axes in grid[-1]:
        axes.set_xlabel("step")
    scores = [
        row for row in read("ablations", SECOND) if row["run"] in sum(PRECISION_RUNS.values(), ())
    ]
    first = scores[0]
    figure.suptitle(
        f"Precisions, {first['model']}, Tiny-ImageNet-100, seed {first['seed']}, means of up to 10 steps\n"
        f"{measured(scores)}",
        fontsize=11,
    )
    save_figure(figure, RESULTS / f"{SECOND}_precision.png", "figure")


def draw_longrange() -> None:
    """Accuracy on dev against steps: a panel per task, a line per attention."""
    tasks = {
        title: (read(task, prefix), read(f"{task}_curves", prefix))
        for task, (prefix, title) in TASKS.items()
    }
    figure = new_figure(1 + 4.5 * len(tasks), 5)
    lines = {}
    for axes, (title, (_, rows)) in zip(figure.subplots(1, len(tasks)), tasks.items(), strict=True):
        points = curves([row for row in rows if row["kind"] == "eval"], "step", "accuracy")
        points = {run.rpartition("/")[2]: line for run, line in points.items()}
        for attention, name in NAMES.items():
            for run in (attention, attention + LARGER):
                if run in points:
                    (lines[name + OTHER_START.get(run, "")],) = axes.plot(
                        *zip(*points[run], strict=True), color=COLOURS[attention],
                        ls="--" if run in OTHER_START else "-", marker=MARKERS[attention], mfc="none",
                    )  # fmt: skip
        axes.set_xlim(left=0)
        axes.set_xlabel("step")
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("accuracy in % on dev")
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=6, fontsize=9)
    scores = [row for of_task, _ in tasks.values() for row in of_task]
    figure.suptitle(
        f"Attentions in Long Range Arena, seed {scores[0]['seed']}\n{measured(scores)}", fontsize=11
    )
    save_figure(figure, RESULTS / f"{SECOND}_longrange.png", "figure")


def main() -> None:
    """Draw and write the pictures."""
    draw_overview()
    draw_measured()
    draw_accuracy()
    draw_training()
    draw_precision()
    draw_longrange()


if __name__ == "__main__":
    main()
