"""Score a trained model: accuracy, average precision or mIoU, at any image size.

`softfree validate classification --checkpoint OUT/best --data-dir D`, alone or under torchrun: each picture
counts once.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from softfree.analysis import describe_environment
from softfree.commands._validate_dense import (
    check_classes,
    data_settings,
    detection,
    segmentation,
    show,
)
from softfree.commands._validate_longrange import longrange
from softfree.commands.common import (
    check_output,
    check_positive,
    make_table,
    run_subcommand,
    save_rows,
)
from softfree.data.images import Batch, ImageDataset, collate_images, load_images
from softfree.data.resident import ResidentImages
from softfree.training import checkpoint
from softfree.training.classification import (
    Classification,
    Normalize,
    create_network,
    eval_transform,
    evaluate_classifier,
    load_classifier,
    load_pretrained,
    parse_model_kwargs,
    preparation_of,
    resident_batches,
)
from softfree.training.devices import AmpDtype, autocast, to_device
from softfree.training.distributed import Processes, gather, join_processes
from softfree.training.sampling import EvalSampler, short_errors
from softfree.training.settings import WORKERS, check_workers


def main(argv: Sequence[str]) -> int:
    """Run ``softfree validate`` with these arguments; return the exit code."""
    return run_subcommand("validate", TASKS, argv, question="validate what?", description=__doc__)


def classification(
    checkpoint: Path,
    data_dir: str | None = None,
    dataset: str = "",
    img_size: tuple[int, ...] = (),
    crop_pct: float | None = None,
    model: str = "",
    model_kwargs: tuple[str, ...] = (),
    batch_size: int = 128,
    workers: int = WORKERS,
    amp_dtype: AmpDtype = "auto",
    device: str = "auto",
    strict_data: bool = False,
    data_on_device: bool = False,
    results_file: Path | None = None,
) -> int:
    """Top-1 and top-5 accuracy, loss and throughput on the validation pictures.

    Args:
        checkpoint: a checkpoint folder, such as OUT/best; or a weights file, with --model.
        data_dir: folder with train/ and val/; otherwise what the checkpoint was trained on.
        dataset: a data set as timm names it, in --data-dir.
        img_size: one or several sides of the pictures; otherwise that of the training.
        crop_pct: share of the shorter side that the centre crop takes; otherwise the checkpoint's.
        model: for a weights file: the model it belongs to, e.g. softpp_tiny_release.
        model_kwargs: arguments of the model other than in training, e.g. landmarks=conv:49.
        batch_size: pictures at a time.
        workers: processes that load pictures.
        amp_dtype: autocast; 'auto': bfloat16 on a GPU, none on a CPU.
        device: 'cuda', 'cpu', or 'auto' for the GPU if there is one.
        strict_data: stop at the first picture that can't be read.
        data_on_device: keep all pictures, of one size, in the device's memory and resize them there.
        results_file: write the table to this CSV file, with date, device and versions.
    """
    check_output("--results-file", results_file)
    check_positive("--batch-size", batch_size)
    check_workers(workers)
    for size in img_size:
        check_positive("--img-size", size)
    if checkpoint.is_file() and not model:
        raise ValueError(f"--checkpoint {checkpoint} is a file: give the --model it belongs to")
    if data_dir is None and not dataset:
        data_dir, dataset = trained_on(checkpoint)
    data = load_images(data_dir, dataset=dataset, strict=strict_data)
    with join_processes(device) as processes:
        network, metadata = load_network(
            checkpoint, model, data.class_names, processes.device, parse_model_kwargs(model_kwargs)
        )
        if crop_pct is not None:
            metadata = {**metadata, "crop_pct": crop_pct}
        rows = []
        pictures: ImageDataset | ResidentImages = data.val
        if data_on_device:
            pictures = ResidentImages(data.val, processes.device, workers)
        for size in img_size or (metadata["img_size"],):
            scores = score(
                network, metadata, pictures, size, batch_size, workers, amp_dtype, processes
            )
            rows.append({"checkpoint": str(checkpoint), "img_size": size, **scores})
        if processes.main:
            print_scores(rows, metadata["model"])
            save_rows(results_file, rows, describe_environment(processes.device))
    return 0


TASKS: dict[str, Callable[..., int]] = {
    "classification": classification,
    "detection": detection,
    "longrange": longrange,
    "segmentation": segmentation,
}


def trained_on(path: Path) -> tuple[str | None, str]:
    """--data-dir and --dataset of the run that wrote a checkpoint."""
    if not path.is_dir():
        raise ValueError(
            f"--data-dir is needed: {path} is no checkpoint folder that names its data"
        )
    checkpoint.check_task(path, checkpoint.read_metadata(path), Classification.name)
    data = data_settings(path)
    return data["data_dir"], data["dataset"]


def load_network(
    path: Path,
    name: str,
    class_names: Sequence[str],
    device: torch.device,
    kwargs: dict[str, Any],
) -> tuple[nn.Module, dict[str, Any]]:
    """The model of a checkpoint folder or of a weights file, and how its pictures are prepared."""
    if path.is_dir() or not name:
        network, metadata = load_classifier(path, device, kwargs)
        check_classes(path, metadata["class_names"], class_names)
        return network, metadata
    network = create_network(name, len(class_names), img_size=224, kwargs=kwargs)
    if not load_pretrained(network, path, name):
        raise ValueError(f"--checkpoint {path} has no head for the {len(class_names)} classes here")
    return network.eval().to(device), {"model": name, **preparation_of(network, 224)}


def score(
    network: nn.Module,
    metadata: dict[str, Any],
    data: ImageDataset | ResidentImages,
    img_size: int,
    batch_size: int,
    workers: int,
    amp_dtype: AmpDtype,
    processes: Processes,
) -> dict[str, float]:
    """One row: scores and throughput at one size."""
    device = processes.device
    # Networks of a fixed size can be told another; ours take any.
    set_size = getattr(network, "set_input_size", None)
    if set_size is not None:
        set_size(img_size=img_size)
    sampler = EvalSampler(len(data), batch_size, processes.rank, processes.count)
    unreadable = []

    def batches() -> Iterator[Batch]:
        if isinstance(data, ResidentImages):
            yield from resident_batches(data, sampler.on_device(device), img_size, metadata)
            return
        data.transform = eval_transform(metadata, img_size)
        loader: DataLoader = DataLoader(
            data,
            batch_sampler=sampler,
            collate_fn=collate_images,
            num_workers=workers,
            pin_memory=device.type == "cuda",
        )
        with short_errors():
            for batch in loader:
                unreadable.extend(batch.unreadable)
                yield to_device(batch, device)

    began = time.perf_counter()
    with torch.inference_mode(), autocast(amp_dtype, device):
        normalize = Normalize(metadata["mean"], metadata["std"])
        scores = evaluate_classifier(network, batches(), normalize, processes)
    scores["img_per_s"] = scores["samples"] / (time.perf_counter() - began)
    skipped = gather(unreadable, processes)
    scores["unreadable"] = len(skipped)
    if processes.main:
        for file in skipped:
            print(f"skipped {file.path}: {file.reason}")
    return scores


def print_scores(rows: Sequence[dict[str, Any]], name: str) -> None:
    """The rows for people."""
    table = make_table(["img size", "top-1 %", "top-5 %", "loss", "pictures", "img/s"])
    for row in rows:
        table.add_row(
            str(row["img_size"]),
            f"{row['top1']:.2f}",
            f"{row['top5']:.2f}",
            f"{row['loss']:.4f}",
            f"{row['samples']:,}",
            f"{row['img_per_s']:,.0f}",
        )
    show(f"{name}, {rows[0]['checkpoint']}", table)
