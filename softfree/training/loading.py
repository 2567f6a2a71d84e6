"""Batches on the device, read by loading processes."""

import contextlib
import signal
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from softfree.data.images import Unreadable
from softfree.training.devices import AmpDtype, autocast, to_device
from softfree.training.distributed import Processes
from softfree.training.sampling import EvalSampler, StepSampler
from softfree.training.signals import STOPPING

Collate = Callable[[list[Any]], Any]
Report = Callable[[Unreadable], None]


def read_batches(
    data: Any,
    sampler: StepSampler | EvalSampler,
    collate: Collate,
    device: torch.device,
    report: Report,
    workers: int = 0,
    channels_last: bool = False,
) -> Generator[Any]:
    """Yield batches of a map-style data set on the device; ``report`` is called for unreadable files."""
    loader: DataLoader = DataLoader(
        data,
        batch_sampler=sampler,
        collate_fn=collate,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        worker_init_fn=ignore_signals,
        prefetch_factor=4 if workers else None,
    )
    iterator = iter(loader)
    try:
        with short_errors():
            for batch in iterator:
                for file in getattr(batch, "unreadable", ()):
                    report(file)
                yield to_device(batch, device, channels_last)
    finally:
        # An error's traceback keeps the iterator alive, and with it its processes, which ignore signals.
        if workers:
            iterator._shutdown_workers()  # type: ignore[attr-defined]


def evaluation_batches(
    data: Any,
    collate: Collate,
    batch_size: int,
    processes: Processes,
    report: Report,
    workers: int = 0,
    channels_last: bool = False,
) -> Generator[Any]:
    """This process's share of the samples, each once."""
    sampler = EvalSampler(len(data), batch_size, processes.rank, processes.count)
    if isinstance(data, range):
        # There are no files to read, and loading processes would cost more than the indices.
        return sampler.on_device(processes.device)
    return read_batches(data, sampler, collate, processes.device, report, workers, channels_last)


@contextlib.contextmanager
def evaluation(
    data: Any,
    collate: Collate,
    processes: Processes,
    *,
    batch_size: int,
    workers: int = 0,
    amp_dtype: AmpDtype = "auto",
) -> Iterator[tuple[Iterable[Any], list[Unreadable]]]:
    """Context with this process's share of the samples, and a list that collects its unreadable files."""
    unreadable: list[Unreadable] = []
    with torch.inference_mode(), autocast(amp_dtype, processes.device):
        yield (
            evaluation_batches(data, collate, batch_size, processes, unreadable.append, workers),
            unreadable,
        )


@contextlib.contextmanager
def short_errors() -> Iterator[None]:
    """Context for a loop over a loader: errors of loading processes are raised without their traceback."""
    try:
        yield
    except ValueError as error:
        traceback, _, message = str(error).strip().rpartition("\nValueError: ")
        if not traceback:
            raise
        raise ValueError(message) from None


def ignore_signals(worker: int) -> None:
    """Let a loading process live as long as the loop: Ctrl-C also reaches it, but is not meant for it."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
