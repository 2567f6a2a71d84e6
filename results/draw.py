"""Draw the pictures of docs/README.md that no command draws, from the dated CSV files beside this script.

    python results/draw.py

Writes, each with 2026-11-15_nvidia-h200_ before its name: accuracy.png, top-1 against training speed and against the
size of the test pictures; attention_bfloat16.png, what `softfree benchmark attention --plot` draws, from its figures.
"""

import csv
from math import sqrt
from pathlib import Path
from statistics import fmean

from matplotlib.axes import Axes

from softfree.analysis.attention_cost import Cost
from softfree.commands import _benchmark_plot
from softfree.commands._common import new_figure, save_figure

RESULTS = Path(__file__).parent
PREFIX = "2026-11-15_nvidia-h200"
TRAINED_AT = "128"  # pixels of a picture's side
TEST_PICTURES = 5000  # 50 of each of the 100 classes
NAMES = {
    "softpp": "SOFT++",
    "soft": "SOFT",
    "softmax": "softmax",
    "linformer": "Linformer",
    "performer": "Performer",
    "nystromformer": "Nyströmformer",
}
COLOURS = {attention: f"C{number}" for number, attention in enumerate(NAMES)}
# Where a label is, if not above: its distance in points, and which of its sides is there.
LABELS = {"soft": ((9, 0), "left", "center"), "performer": ((0, -16), "center", "top")}
# What the name of a run has after its attention: the class token is replaced by the mean of the tokens.
AVERAGE = "_average_pooling_drop_path_0.1"
LANDMARKS = {"stride": ("-", "fixed stride"), "count": ("--", "16 landmarks")}

Row = dict[str, str]


def read(what: str) -> list[Row]:
    """The rows of one CSV file of this date and device."""
    with (RESULTS / f"{PREFIX}_{what}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def average(rows: list[Row]) -> list[Row]:
    """One row of a run, size and kind of landmarks: its first seed's, with the mean of all seeds' accuracy."""
    seeds: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        seeds.setdefault((row["run"], row["img_size"], row["landmarks"]), []).append(row)
    return [
        {**group[0], "top1": str(fmean(float(row["top1"]) for row in group))}
        for group in seeds.values()
    ]


def draw_speed(axes: Axes, accuracies: list[Row], speeds: dict[str, Row]) -> None:
    """Top-1 against training images a second, with the memory of training in words.

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
    axes.margins(x=0.38, y=0.15)  # room for the labels
    axes.set_xlabel("training images a second at 224 x 224, batch 256")
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
                    *zip(*points, strict=True), f"o{style}", color=COLOURS[attention], label=label
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


def draw_times() -> None:
    """Time of one attention call against tokens, as the command that measured it draws it."""
    rows = read("attention_bfloat16")
    costs = [
        Cost(
            int(row["batch_heads"]), int(row["tokens"]), int(row["dim"]), int(row["landmarks"]),
            row["dtype"], row["attention"], row["backend"], forward_ms=float(row["forward_ms"]),
            forward_backward_ms=float(row["forward_backward_ms"]),
        )
        for row in rows
    ]  # fmt: skip
    one = costs[0]
    title = (
        f"Attention, {one.dim} channels a head, {one.landmarks} landmarks, {one.dtype}\n"
        f"{rows[0]['device']}, {rows[0]['date']}"
    )
    figure = _benchmark_plot.draw(costs, title)
    save_figure(figure, RESULTS / f"{PREFIX}_attention_bfloat16.png", "figure")


def main() -> None:
    """Draw and write the pictures."""
    draw_times()
    speeds = {row["attention"]: row for row in read("throughput_224")}
    # A run of the pyramid whose speed was measured has the name of its attention.
    wanted = [row for row in read("tiny_imagenet") if row["run"].removesuffix(AVERAGE) in speeds]
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
        "average: one, SOFT++ two\n"
        f"{first['device']}, {' and '.join(sorted({row['date'] for row in wanted}))}",
        fontsize=11,
    )
    save_figure(figure, RESULTS / f"{PREFIX}_accuracy.png", "figure")


if __name__ == "__main__":
    main()
