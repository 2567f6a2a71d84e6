"""`softfree figure resolution`: accuracy against the size of the images (Table 6 of the papers)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from rich.console import Console

from softfree.analysis.plots import Curve, draw_resolution, save_figure
from softfree.analysis.subject import checkpoint_title
from softfree.commands.common import (
    Repeated,
    check_figure,
    check_img_size,
    check_positive,
    make_table,
)
from softfree.models.checks import check_at_least
from softfree.training.settings import WORKERS


def resolution(
    checkpoint: Annotated[tuple[Path, ...], Repeated],
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
        checkpoint: folder that `softfree train` wrote, such as OUT/best; may be repeated to compare.
        data_dir: folder with train/ and val/; otherwise what each checkpoint was trained on.
        dataset: a data set as timm names it, in --data-dir.
        img_size: sides of the images.
        batch_size: images at a time.
        workers: processes that load images.
        output: the file to write: .png, .svg or .pdf.
        device: 'cuda', 'cpu', or 'auto' for the GPU if there is one.
    """
    from softfree.commands.validate.base import check_classes
    from softfree.data.classification import load_images
    from softfree.training.checkpoint import data_settings
    from softfree.training.classification import Classification, score_classifier
    from softfree.training.distributed import join_processes

    check_figure("--output", output)
    check_positive("--batch-size", batch_size)
    check_at_least(0, workers=workers)
    check_img_size(*img_size)
    curves: dict[str, list[tuple[int, float]]] = {}
    trained: dict[str, int] = {}
    with join_processes(device) as processes:
        for path in checkpoint:
            network, metadata = Classification.load(path, processes.device)
            trained_on = data_settings(path)
            data = (
                load_images(data_dir, dataset=dataset)
                if data_dir is not None or dataset
                else load_images(trained_on["data_dir"], dataset=trained_on["dataset"])
            )
            check_classes(path, metadata["class_names"], data.class_names)
            title = f"{checkpoint_title(path)} ({metadata['model']})"
            trained[title] = metadata["img_size"]
            curves[title] = []
            for size in sorted(set(img_size)):
                scores, _ = score_classifier(
                    network,
                    metadata,
                    data.val,
                    size,
                    processes,
                    batch_size=batch_size,
                    workers=workers,
                )
                curves[title].append((size, scores["top1"]))
        if processes.main:
            print_table(curves)
            save_figure(draw_resolution(curves, trained), output)
    return 0


def print_table(curves: Mapping[str, Curve]) -> None:
    """The same numbers as text."""
    sizes = [size for size, _ in next(iter(curves.values()))]
    table = make_table(["top-1 (%)", *(f"{size}²" for size in sizes)])
    for title, curve in curves.items():
        table.add_row(title, *(f"{accuracy:.1f}" for _, accuracy in curve))
    Console(highlight=False).print(table)
