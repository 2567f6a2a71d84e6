"""`softfree validate longrange`."""

import dataclasses
from pathlib import Path
from typing import Literal

from rich.console import Console

from softfree.commands.common import check_positive
from softfree.training.checkpoint import SETTINGS, check_task, locate, read_metadata
from softfree.training.devices import AmpDtype
from softfree.training.distributed import join_processes
from softfree.training.longrange import (
    LongRange,
    LongRangeSettings,
    load_data,
    score_checkpoint,
)
from softfree.training.settings import check_workers, read_settings


def longrange(
    checkpoint: Path,
    data_dir: str | None = None,
    split: Literal["dev", "test"] = "test",
    batch_size: int = 32,
    workers: int = 2,
    amp_dtype: AmpDtype = "auto",
    device: str = "auto",
) -> int:
    """Accuracy and loss on a task of the Long Range Arena.

    Args:
        checkpoint: a checkpoint folder, such as OUT/best.
        data_dir: the task's files; otherwise what the checkpoint was trained on.
        split: test or dev.
        batch_size: samples at a time.
        workers: processes that load samples.
        amp_dtype: autocast; 'auto': bfloat16 on a GPU, none on a CPU.
        device: 'cuda', 'cpu', or 'auto' for the GPU if there is one.
    """
    check_positive("--batch-size", batch_size)
    check_workers(workers)
    folder = locate(checkpoint)
    check_task(checkpoint, read_metadata(folder), LongRange.name)
    settings = read_settings(LongRangeSettings, folder / SETTINGS).data
    if data_dir is not None:
        settings = dataclasses.replace(settings, data_dir=data_dir)
    samples = getattr(load_data(settings), split)
    with join_processes(device) as processes:
        scores = score_checkpoint(
            folder,
            samples,
            processes,
            batch_size=batch_size,
            workers=workers,
            amp_dtype=amp_dtype,
        )
        if processes.main:
            Console(highlight=False, soft_wrap=True).print(
                f"{settings.task} {split}: accuracy {scores['accuracy']:.2f}%, "
                f"loss {scores['loss']:.4f}, {scores['samples']:,} samples"
            )
    return 0
