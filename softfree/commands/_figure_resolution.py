"""`softfree figure resolution`: accuracy against the size of the images (Table 6 of the papers)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from softfree.commands._common import (
    NARROWEST,
    check_figure,
    check_positive,
    make_table,
    new_figure,
    save_figure,
)
from softfree.commands._figure_common import checkpoint_title
from softfree.training.settings import WORKERS, check_workers

Curve = Sequence[tuple[int, float]]
MARKERS = "os^Dv"


def resolution(
    checkpoint: tuple[Path, ...],
    data_dir: str | None = None,
    dataset: str = "",
    img_size: tuple[int, ...] = (224, 288, 384, 448, 512),
    batch_size: int = 64,
    workers: int = WORKERS,
    output: Path = Path("resolution.png"),
    device: str = "auto",
) -> int:
    """Draw the accuracy of classifiers against the size of the images (Table 6).

    Args:
        checkpoint: one or several folders that `softfree train` wrote, such as A/best B/best.
        data_dir: folder with train/ and val/; otherwise what each checkpoint was trained on.
        dataset: a data set as timm names it, in --data-dir.
        img_size: sides of the images.
        batch_size: images at a time.
        workers: processes that load images.
        output: the file to write: .png, .svg or .pdf.
        device: 'cuda', 'cpu', or 'auto' for the GPU if there is one.
    """
    from softfree.commands.validate import load_network, score, trained_on
    from softfree.data.images import load_images
    from softfree.training.distributed import join_processes

    check_figure("--output", output)
    check_positive("--batch-size", batch_size)
    check_workers(workers)
    if not img_size or min(img_size) < NARROWEST:
        raise ValueError(
            f"--img-size must each be at least {NARROWEST}, got {' '.join(map(str, img_size))}"
        )
    curves: dict[str, list[tuple[int, float]]] = {}
    trained: dict[str, int] = {}
    with join_processes(device) as processes:
        for path in checkpoint:
            given = (data_dir, dataset) if data_dir is not None or dataset else trained_on(path)
            data = load_images(given[0], dataset=given[1])
            network, metadata = load_network(path, "", data.class_names, processes.device, {})
            title = f"{checkpoint_title(path)} ({metadata['model']})"
            trained[title] = metadata["img_size"]
            curves[title] = [
                (
                    size,
                    score(
                        network, metadata, data.val, size, batch_size, workers, "auto", processes
                    )["top1"],
                )
                for size in sorted(set(img_size))
            ]
        if processes.main:
            print_table(curves)
            save_figure(draw(curves, trained), output)
    return 0


def print_table(curves: Mapping[str, Curve]) -> None:
    """The same numbers as text."""
    sizes = [size for size, _ in next(iter(curves.values()))]
    table = make_table(["top-1 (%)", *(f"{size}²" for size in sizes)])
    for title, curve in curves.items():
        table.add_row(title, *(f"{accuracy:.1f}" for _, accuracy in curve))
    Console(highlight=False).print(table)


def draw(curves: Mapping[str, Curve], trained: Mapping[str, int]) -> Any:
    """Accuracy against size, a line a checkpoint; a ring where it was trained."""
    figure = new_figure(7, 4.8)
    axes = figure.add_subplot()
    for index, (title, curve) in enumerate(curves.items()):
        marker = MARKERS[index % len(MARKERS)]
        sizes, accuracies = zip(*curve, strict=True)
        axes.plot(sizes, accuracies, f"C{index % 10}-", marker=marker, label=title)
        for size, accuracy in curve:
            if size == trained[title]:
                axes.plot(
                    size, accuracy, "o", color=f"C{index % 10}", markersize=14, fillstyle="none"
                )
    axes.set_xticks(sizes)
    axes.set(xlabel="side of the square image (pixels)", ylabel="top-1 accuracy (%)", ylim=(0, 100))
    axes.set_title(
        "Accuracy against image size; a ring marks the size of the training", fontsize=10
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure
