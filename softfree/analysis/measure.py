"""Time and memory of a call, measured on the device it runs on."""

import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

TURN = 0.1


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


def time_in_turn(
    calls: Sequence[Callable[[], object]], budget: float, *, min_rounds: int = 3
) -> list[float]:
    """Median seconds of each call on a CPU, for ratios: what else the machine does meets all of them.

    The calls take turns of ``TURN`` seconds, at least one timed call each, until ``budget`` is spent.
    """
    times: list[list[float]] = [[] for _ in calls]
    begin = time.perf_counter()
    rounds = 0
    while rounds < min_rounds or time.perf_counter() - begin < budget:
        for call, into in zip(calls, times, strict=True):
            call()  # warms the caches that the other call has filled
            turn = time.perf_counter()
            while (now := time.perf_counter()) < turn + TURN:
                call()
                into.append(time.perf_counter() - now)
        rounds += 1
    return [statistics.median(each) for each in times]


def time_queued(
    call: Callable[[], object],
    device: torch.device | str,
    *,
    min_repeats: int = 3,
    max_repeats: int = 200,
    budget: float = 1.0,
) -> Timing:
    """Like :func:`time_call`, but calls on a GPU are queued one behind the other, as in a training loop.

    On a GPU events in its queue are timed; a call that the host starts more slowly than the GPU ends it
    counts with the host's time. On a CPU this is :func:`time_call`.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return time_call(
            call, device, min_repeats=min_repeats, max_repeats=max_repeats, budget=budget
        )
    first = time_call(call, device, min_repeats=3, max_repeats=3, budget=0.0)
    repeats = min(max(int(budget / max(first.median, 1e-6)), min_repeats), max_repeats)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize(device)
    times = [1e-3 * a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
    return Timing(statistics.median(times), repeats, min(times))


def time_graph(call: Callable[[], object], *, budget: float = 1.0) -> float | None:
    """Median seconds of ``call`` in a CUDA graph, so without the host's part.

    None where Triton, whose timer this is, is missing, or where the call can't be captured. Caches are
    not flushed between calls.
    """
    try:
        from triton.testing import do_bench_cudagraph
    except ImportError:
        return None
    # Triton replays a graph of `rep` milliseconds ten times.
    rep = max(1, round(1e3 * budget / 10))
    try:
        return 1e-3 * do_bench_cudagraph(call, rep=rep, return_mode="median")
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if "captur" not in str(error):
            raise
        return None


def capture_graph(call: Callable[[], object]) -> Callable[[], object]:
    """``call`` as a CUDA graph: the same work on the GPU, begun by the host in one go.

    What it reads and writes must stay where it is, and it may not ask the GPU for a number.
    """
    # On a stream of its own, as PyTorch asks for, until nothing is set up for the first time.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def copy_bandwidth(device: torch.device | str = "cpu", *, size: int | None = None) -> float:
    """Bytes a second that a large copy reads and writes together: the memory's practical speed.

    Args:
        device: whose memory.
        size: bytes to copy; None: 1 GiB on a GPU, 128 MiB on a CPU, more than caches hold.
    """
    device = torch.device(device)
    size = size or (2**30 if device.type == "cuda" else 2**27)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / time_queued(lambda: target.copy_(source), device, budget=0.3).median


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
