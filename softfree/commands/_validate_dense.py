"""`softfree validate detection` and `softfree validate segmentation`."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from torch.utils.data import DataLoader, Dataset

from softfree.analysis import describe_environment
from softfree.commands.common import check_output, check_positive, make_table, save_rows
from softfree.training import checkpoint as checkpoints
from softfree.training.coco_metrics import FIGURES
from softfree.training.devices import AmpDtype, autocast, to_device
from softfree.training.distributed import Processes, join_processes
from softfree.training.sampling import EvalSampler
from softfree.training.settings import WORKERS, check_workers


def detection(
    checkpoint: Path,
    data_dir: str | None = None,
    skip_bad_annotations: bool = False,
    batch_size: int = 8,
    workers: int = WORKERS,
    amp_dtype: AmpDtype = "auto",
    device: str = "auto",
    results_file: Path | None = None,
) -> int:
    """COCO's average precision on the validation pictures: boxes, and masks for Mask R-CNN.

    Args:
        checkpoint: a checkpoint folder, such as OUT/best.
        data_dir: folder with annotations/ and pictures; otherwise what the checkpoint was trained on.
        skip_bad_annotations: leave out annotations that can't be used, instead of an error.
        batch_size: pictures at a time.
        workers: processes that load pictures.
        amp_dtype: autocast; 'auto': bfloat16 on a GPU, none on a CPU.
        device: 'cuda', 'cpu', or 'auto' for the GPU if there is one.
        results_file: write the table to this CSV file, with date, device and versions.
    """
    from softfree.data.detection import collate_detection, load_split
    from softfree.training.detection import evaluate_detector, for_evaluation, load_detector

    check_output("--results-file", results_file)
    check_workers(workers)
    check_positive("--batch-size", batch_size)
    with join_processes(device) as processes:
        model, metadata = load_detector(checkpoint, processes.device)
        masks = metadata["detector"] == "mask-rcnn"
        trained_on = data_settings(checkpoint)
        data = load_split(
            data_dir or trained_on["data_dir"],
            "val",
            masks=masks,
            skip_bad=skip_bad_annotations or trained_on["skip_bad_annotations"],
        )
        check_classes(checkpoint, metadata["class_names"], data.class_names)
        pictures = for_evaluation(
            data, metadata["arguments"]["min_size"], metadata["arguments"]["max_size"]
        )
        with torch.inference_mode(), autocast(amp_dtype, processes.device):
            scores = evaluate_detector(
                model,
                batches(pictures, collate_detection, batch_size, workers, processes),
                data,
                masks,
                processes,
            )
        rows = [
            {
                "checkpoint": str(checkpoint),
                "kind": kind,
                **{name: scores.get(f"{kind}_{name}") for name in FIGURES},
            }
            for kind in (("box", "mask") if masks else ("box",))
        ]
        if processes.main:
            table = make_table(["", *FIGURES])
            for row in rows:
                figures = [row[name] for name in FIGURES]
                table.add_row(
                    str(row["kind"]), *("-" if x is None else f"{x:.1f}" for x in figures)
                )
            show(f"{metadata['detector']} on {metadata['model']}, {checkpoint}", table)
            save_rows(results_file, rows, describe_environment(processes.device))
    return 0


def segmentation(
    checkpoint: Path,
    data_dir: str | None = None,
    window: int | None = None,
    short_side: int | None = None,
    workers: int = WORKERS,
    amp_dtype: AmpDtype = "auto",
    device: str = "auto",
    results_file: Path | None = None,
) -> int:
    """Mean intersection over union (mIoU) on the validation pictures, and that of each class.

    Args:
        checkpoint: a checkpoint folder, such as OUT/best.
        data_dir: folder in one of the known layouts; otherwise what the checkpoint was trained on.
        window: side of the windows that slide over a picture; 0: the whole picture at once. Otherwise as
            in the training.
        short_side: short side that pictures are resized to; 0: as they are. Otherwise as in the training.
        workers: processes that load pictures.
        amp_dtype: autocast; 'auto': bfloat16 on a GPU, none on a CPU.
        device: 'cuda', 'cpu', or 'auto' for the GPU if there is one.
        results_file: write the table to this CSV file, with date, device and versions.
    """
    from softfree.data.segmentation import EvalTransform, collate_pictures, load_split
    from softfree.training.classification import Normalize
    from softfree.training.segmentation import evaluate_segmenter, load_segmenter

    check_output("--results-file", results_file)
    check_workers(workers)
    with join_processes(device) as processes:
        model, metadata = load_segmenter(checkpoint, processes.device)
        trained_on = data_settings(checkpoint)
        data, names = load_split(
            data_dir or trained_on["data_dir"], "val", ignore_label=trained_on["ignore_label"]
        )
        check_classes(checkpoint, metadata["class_names"], names)
        side = metadata["short_side"] if short_side is None else short_side
        data.transform = EvalTransform(side or None)
        with torch.inference_mode(), autocast(amp_dtype, processes.device):
            scores, of_class = evaluate_segmenter(
                model,
                batches(data, collate_pictures, 1, workers, processes),
                Normalize(metadata["mean"], metadata["std"]),
                len(names),
                processes,
                window=metadata["window"] if window is None else window,
            )
        rows: list[dict[str, Any]] = [
            {"checkpoint": str(checkpoint), "class": name, "IoU": iou}
            for name, iou in [("all (mean)", scores["mIoU"]), *zip(names, of_class, strict=True)]
        ]
        if processes.main:
            table = make_table(["class", "IoU %"])
            for row in rows[1:]:
                iou = row["IoU"]
                table.add_row(escape(row["class"]), "-" if math.isnan(iou) else f"{iou:.1f}")
            show(f"UPerNet on {metadata['model']}, {checkpoint}", table)
            print(f"mIoU {scores['mIoU']:.2f} %, pixel accuracy {scores['accuracy']:.2f} %")
            save_rows(results_file, rows, describe_environment(processes.device))
    return 0


def batches(
    data: Dataset, collate: Callable[..., Any], batch_size: int, workers: int, processes: Processes
) -> Iterator[Any]:
    """This process's share of the pictures, each once, on the device; names the files it can't read."""
    count = len(data)  # type: ignore[arg-type]
    loader: DataLoader = DataLoader(
        data,
        batch_sampler=EvalSampler(count, batch_size, processes.rank, processes.count),
        collate_fn=collate,
        num_workers=workers,
        pin_memory=processes.device.type == "cuda",
    )
    for batch in loader:
        for file in batch.unreadable:
            print(f"skipped {file.path}: {file.reason}")
        yield to_device(batch, processes.device)


def data_settings(path: Path) -> dict[str, Any]:
    """What the run that wrote a checkpoint was told about its data."""
    return json.loads((checkpoints.locate(path) / checkpoints.SETTINGS).read_text())["data"]


def check_classes(path: Path, known: Sequence[str], given: Sequence[str]) -> None:
    """Refuse data with other classes than the checkpoint's."""
    if list(known) != list(given):
        raise ValueError(
            f"--checkpoint {path} knows {len(known)} classes ({', '.join(known[:3])}, ...), --data-dir "
            f"has {len(given)} ({', '.join(given[:3])}, ...); they must be the same"
        )


def show(title: str, table: Any) -> None:
    """A title and the table."""
    console = Console(highlight=False)
    console.print(title, style="bold", markup=False, soft_wrap=True)
    console.print(table)
