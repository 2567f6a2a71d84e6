"""Time and memory of a call, measured on the device it runs on."""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch


class Timing(NamedTuple):
    """Seconds of one call: the median, over how many calls, and the fastest."""

    median: float
    repeats: int
    fastest: float


def time_call(
    call: Callable[[], object],
    device: torch.device | str = "cpu",
    *,
    min_repeats: int = 3,
    max_repeats: int = 200,
    budget: float = 1.0,
) -> Timing:
    """Time ``call`` after one warm-up, again and again until ``budget`` seconds are spent.

    Args:
        call: what to time; its result is thrown away.
        device: where it computes; work queued there is waited for.
        min_repeats, max_repeats: bounds on the number of timed calls.
        budget: seconds after which no further call is begun.
    """
    if min_repeats < 1 or max_repeats < min_repeats:
        raise ValueError(
            f"need 1 <= min_repeats <= max_repeats, got {min_repeats} and {max_repeats}"
        )
    call()
    synchronize(device)
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < min_repeats or (
        len(times) < max_repeats and time.perf_counter() - begin < budget
    ):
        before = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - before)
    return Timing(statistics.median(times), len(times), min(times))


def peak_extra_memory(call: Callable[[], object], device: torch.device | str = "cpu") -> int:
    """Most bytes that ``call`` held at once beyond what was held before it, its result included.

    What PyTorch's allocator hands out is counted, on a CPU as well as on a GPU; what a library such as
    MKL takes for itself is not.

    Example:
        >>> peak_extra_memory(lambda: torch.zeros(1000) + torch.ones(1000))
        12000
    """
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    # The profiler would report on every machine without a GPU that it found none.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as run:
        call()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        run.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = sorted(
        (event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]"
    )
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak


def synchronize(device: torch.device | str) -> None:
    """Wait for the work queued on ``device``."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
