"""Time and memory of a call, measured on the device it runs on. The tables are made with :func:`measure`."""

import gc
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from softfree.models.graphs import WARM_UP, recording

TURN = 0.1
REPLAY = 1e-3  # seconds of a CUDA graph
MOST_IN_GRAPH = 100
MOST_REPEATS = 1000
# For a call on a GPU that takes more seconds than this, the host does not matter, and replaying a graph takes
# long.
LONG = 0.1


class Timing(NamedTuple):
    """Seconds of one call: the median, the number of calls, and the fastest."""

    median: float
    repeats: int
    fastest: float


class Work(NamedTuple):
    """The call to measure, and the bytes held between calls: weights, inputs, an optimizer's state."""

    call: Callable[[], object]
    held: Callable[[], int] = lambda: 0


class Measured(NamedTuple):
    """The result of :func:`measure`; a figure is None if it was not measured, and ``note`` says why.

    Attributes:
        seconds: median of a call, measured by ``timer``: "host", "events" (in the GPU's queue) or "CUDA
            graph".
        eager_seconds: time of a call on a GPU, started from Python, if both were requested.
        extra_bytes: peak memory of a call beyond what was held before, including its result.
        held_bytes: memory held between calls.
    """

    seconds: float | None = None
    eager_seconds: float | None = None
    extra_bytes: int | None = None
    held_bytes: int | None = None
    timer: str = ""
    note: str = ""

    def per_second(self, count: int) -> float | None:
        """Items per second, with ``count`` items in a call."""
        return None if self.seconds is None else count / self.seconds

    @property
    def peak_bytes(self) -> int | None:
        """Peak memory."""
        return None if self.extra_bytes is None else self.extra_bytes + (self.held_bytes or 0)


def measure(
    prepare: Callable[[], Work],
    device: torch.device | str = "cpu",
    *,
    seconds: float = 1.0,
    cuda_graph: bool | None = False,
    once: bool = False,
) -> Measured:
    """Measure memory and time of a call after a warm-up. If memory runs out at any point, a note says so.

    Args:
        prepare: builds the work, such as a model on the device and a step of its training.
        device: where it computes.
        seconds: time for the timing; 0: measure only memory.
        cuda_graph: time it as a CUDA graph; None: both ways, or only from Python if it can't be captured or
            takes more than ``LONG``.
        once: make one call, a long one, and read memory and time from it.

    Example:
        >>> found = measure(lambda: Work(lambda: torch.zeros(1000)), seconds=0.01)
        >>> found.extra_bytes, found.timer, found.seconds > 0
        (4000, 'host', True)
    """
    device = torch.device(device)
    try:
        call, held = prepare()
        if once:
            began = time.perf_counter()
            extra = peak_extra_memory(call, device)
            return Measured(time.perf_counter() - began, extra_bytes=extra, timer="host")
        call()
        extra = peak_extra_memory(call, device)
        found = Measured(extra_bytes=extra, held_bytes=held())
        return found if not seconds else _timed(found, call, device, seconds, cuda_graph)
    except torch.OutOfMemoryError:
        return Measured(note="out of memory")
    finally:
        call = held = None  # type: ignore[assignment]
        if device.type == "cuda":
            release(device)


def _timed(
    found: Measured,
    call: Callable[[], object],
    device: torch.device,
    seconds: float,
    cuda_graph: bool | None,
) -> Measured:
    limits: Any = {"max_repeats": MOST_REPEATS, "budget": seconds}
    if device.type != "cuda":
        return found._replace(seconds=time_call(call, **limits).median, timer="host")
    if not cuda_graph:
        eager = time_queued(call, device, **limits).median
        found = found._replace(seconds=eager, timer="events")
        if cuda_graph is None:
            found = found._replace(eager_seconds=eager)
        if cuda_graph is not None or eager > LONG:
            return found
    try:
        graph = time_graph(call, device, **limits).median
        return found._replace(seconds=graph, timer="CUDA graph")
    except RuntimeError as error:
        if cuda_graph or "captur" not in str(error):
            raise
        return found


def relate(
    rows: Sequence[Any], base: Any, ratios: Mapping[str, str], *, lower_is_better: bool = False
) -> None:
    """Fill in how many times better each row is than the row ``base`` (None: there is none).

    ``ratios`` maps the field that is compared to the field for the ratio.
    """
    for row in rows:
        for field, ratio in ratios.items():
            own, other = getattr(row, field), getattr(base, field, None)
            if own is not None and other is not None:
                setattr(row, ratio, other / own if lower_is_better else own / other)


def first_line(error: Exception) -> str:
    """The first line of an error message, or the error's type if it has no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def release(device: torch.device | str) -> None:
    """Free unused memory, so that all of it is available for the next measurement."""
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()


def time_call(
    call: Callable[[], object],
    device: torch.device | str = "cpu",
    *,
    min_repeats: int = 3,
    max_repeats: int = 200,
    budget: float = 1.0,
) -> Timing:
    """Time ``call`` after one warm-up, again and again until ``budget`` seconds are spent.

    Work that it queues on ``device`` is waited for.
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
    """Median seconds of each call on a CPU, for ratios.

    Other load on the machine affects all of them equally. The calls take turns of ``TURN`` seconds, at least
    one timed call each, until ``budget`` is spent.
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
    """Like :func:`time_call`, but calls on a GPU are queued one after another, as in a training loop.

    On a GPU, events in its queue are timed. If the host launches a call more slowly than the GPU runs it, the
    host's time counts. On a CPU this is :func:`time_call`.
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


def time_graph(
    call: Callable[[], object],
    device: torch.device | str = "cuda",
    *,
    max_repeats: int = 200,
    budget: float = 1.0,
) -> Timing:
    """Seconds of ``call`` in a CUDA graph, without the host's part; caches are not flushed between calls.

    Launching a graph of one short call takes longer than the call, so it has as many calls as fill
    ``REPLAY``.
    """
    replay = capture_graph(call)
    first = time_queued(replay, device, max_repeats=3, budget=0.0)
    calls = min(max(1, round(REPLAY / max(first.median, 1e-6))), MOST_IN_GRAPH)
    if calls > 1:
        replay = capture_graph(call, calls)
    timing = time_queued(replay, device, max_repeats=max_repeats, budget=budget)
    return Timing(timing.median / calls, timing.repeats * calls, timing.fastest / calls)


@dataclass(frozen=True)
class Replay:
    """A CUDA graph, and the call whose tensors it reads and writes.

    The graph itself does not keep them alive.
    """

    graph: Any
    call: Callable[[], object]

    def __call__(self) -> None:
        self.graph.replay()


def capture_graph(call: Callable[[], object], calls: int = 1) -> Replay:
    """Capture ``calls`` repetitions of ``call`` as a CUDA graph, which needs only a single launch.

    The tensors it reads and writes must stay in place, and it may not read a number from the GPU.
    """
    # Warmed up on a separate stream, as PyTorch requires, so that all initialization is done.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with recording(graph):
        for _ in range(calls):
            call()
    return Replay(graph, call)


def copy_bandwidth(device: torch.device | str = "cpu", *, size: int | None = None) -> float:
    """Bytes per second that a large copy reads and writes in total: the practical memory bandwidth."""
    # Larger than the caches.
    size = size or (2**30 if torch.device(device).type == "cuda" else 2**27)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / time_queued(lambda: target.copy_(source), device, budget=0.3).median


def peak_extra_memory(call: Callable[[], object], device: torch.device | str = "cpu") -> int:
    """Peak memory in bytes of ``call`` beyond what was held before it, including its result.

    Memory from PyTorch's allocator is counted, on a CPU as well as on a GPU. Memory that a library such as
    MKL allocates itself is not.

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
    # Otherwise the profiler reports on every machine without a GPU that it found none.
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
