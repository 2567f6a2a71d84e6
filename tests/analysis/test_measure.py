"""Time and memory of a call."""

import weakref
from types import SimpleNamespace

import pytest
import torch

from softfree.analysis import (
    Timing,
    capture_graph,
    copy_bandwidth,
    measure,
    peak_extra_memory,
    time_call,
    time_graph,
    time_in_turn,
    time_queued,
)
from softfree.analysis.measure import Measured, Work, relate

KIB = 1024


def test_peak_counts_what_is_held_at_once():
    def one_after_the_other():
        for _ in range(10):
            torch.zeros(KIB)

    assert peak_extra_memory(lambda: torch.zeros(KIB)) == 4 * KIB
    assert peak_extra_memory(lambda: torch.zeros(KIB) + torch.ones(KIB)) == 12 * KIB
    assert peak_extra_memory(one_after_the_other) == 4 * KIB


def test_peak_leaves_out_what_was_there_before():
    x = torch.zeros(10 * KIB)
    assert peak_extra_memory(lambda: x.neg_()) == 0
    assert peak_extra_memory(lambda: x.neg()) == 40 * KIB


def test_peak_sees_inside_the_operator():
    import softfree

    q, v = torch.randn(2, 1, 2, 500, 16)
    result = q.numel() * 4
    assert peak_extra_memory(lambda: softfree.soft_attention(q, None, v, q[:, :, :9])) > result


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_peak_on_a_gpu():
    x = torch.zeros(2**20, device="cuda")
    assert peak_extra_memory(lambda: x.neg(), "cuda") == 4 * 2**20


def test_memory_and_time_of_a_call_that_was_warmed_up():
    made = []

    def prepare():
        made.append("prepared")
        return Work(lambda: made.append(torch.zeros(KIB)) or made.pop(), lambda: 100)

    found = measure.measure(prepare, seconds=0.001)
    assert made == ["prepared"]
    assert (found.extra_bytes, found.held_bytes, found.peak_bytes) == (4 * KIB, 100, 4 * KIB + 100)
    assert found.timer == "host" and found.per_second(6) == 6 / found.seconds
    alone = measure.measure(prepare, seconds=0)
    assert alone.extra_bytes == 4 * KIB and alone.seconds is None and alone.per_second(6) is None


@pytest.mark.parametrize("calls", [0, 1, 2, 5])
def test_memory_that_runs_out_at_any_point_is_noted(calls):
    left = iter(range(calls))

    def call():
        if next(left, None) is None:
            raise torch.OutOfMemoryError

    def prepare():
        if not calls:
            call()
        return Work(call)

    assert measure.measure(prepare, seconds=60.0) == Measured(note="out of memory")


@pytest.mark.parametrize("graph", [2e-3, None])
def test_on_a_gpu_the_graph_is_the_figure_and_eager_stands_beside_it(graph, monkeypatch):
    def time_graph(*_, **__):
        if graph is None:
            raise RuntimeError("operation not permitted when stream is capturing")
        return Timing(graph, 20, graph)

    monkeypatch.setattr(measure, "peak_extra_memory", lambda call, device: 2**20)
    monkeypatch.setattr(measure, "time_graph", time_graph)
    monkeypatch.setattr(measure, "time_queued", lambda *_, **__: Timing(5e-3, 20, 4e-3))
    monkeypatch.setattr(measure, "release", lambda device: None)
    found = measure.measure(lambda: Work(lambda: None), "cuda", cuda_graph=None)
    assert found.eager_seconds == 5e-3 and found.extra_bytes == 2**20
    assert found.seconds == (5e-3 if graph is None else graph)
    assert found.timer == ("events" if graph is None else "CUDA graph")


def test_ratios_are_to_the_base_and_missing_where_either_figure_is():
    def row(ms):
        return SimpleNamespace(ms=ms, ratio=None)

    rows = [row(2.0), row(4.0), row(None)]
    relate(rows, rows[1], {"ms": "ratio"})
    assert [each.ratio for each in rows] == [0.5, 1.0, None]
    relate(rows, rows[1], {"ms": "ratio"}, lower_is_better=True)
    assert [each.ratio for each in rows] == [2.0, 1.0, None]
    others = [row(2.0)]
    relate(others, None, {"ms": "ratio"})
    assert others[0].ratio is None


def test_call_is_repeated_within_the_bounds():
    calls = []
    timing = time_call(lambda: calls.append(0), min_repeats=3, max_repeats=5, budget=60.0)
    assert timing.repeats == 5 and len(calls) == 6
    calls.clear()
    timing = time_call(lambda: calls.append(0), min_repeats=3, max_repeats=5, budget=0.0)
    assert timing.repeats == 3 and len(calls) == 4
    assert 0 <= timing.fastest <= timing.median


def test_impossible_repeats_are_refused():
    with pytest.raises(ValueError, match="got 0 and 5"):
        time_call(lambda: None, min_repeats=0, max_repeats=5)


def test_calls_take_turns(monkeypatch):
    monkeypatch.setattr(measure, "TURN", 1e-4)
    order = []
    calls = [lambda: order.append("a"), lambda: order.append("b")]
    medians = time_in_turn(calls, 0.0, min_rounds=2)
    turns = [name for name, before in zip(order, [None, *order], strict=False) if name != before]
    assert turns == ["a", "b", "a", "b"]
    assert len(medians) == 2 and min(medians) > 0


def test_queued_calls_on_a_cpu_are_repeated_within_the_bounds():
    calls = []
    timing = time_queued(lambda: calls.append(0), "cpu", min_repeats=2, max_repeats=4, budget=0.0)
    assert timing.repeats == 2 and len(calls) == 3


def test_bandwidth_counts_reading_and_writing(monkeypatch):
    timing = measure.Timing(0.5, 1, 0.5)
    monkeypatch.setattr(measure, "time_queued", lambda call, device, budget: timing)
    assert copy_bandwidth("cpu", size=1000) == 4000


@pytest.mark.long  # compares times, so it wants the GPU for itself
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_queued_and_graphed_times_of_a_long_call_agree():
    x = torch.zeros(2**28, device="cuda")
    queued, graphed = time_queued(x.neg, "cuda", budget=0.1), time_graph(x.neg, budget=0.1)
    assert 0.5 < queued.median / graphed.median < 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_short_call_in_a_graph_costs_no_more_than_from_python():
    x = torch.zeros(2**10, device="cuda")
    found = measure.measure(lambda: Work(x.neg), "cuda", seconds=0.1, cuda_graph=None)
    assert found.timer == "CUDA graph" and found.seconds < found.eager_seconds


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_call_that_cannot_be_captured_is_timed_from_python():
    x = torch.zeros(2**10, device="cuda")
    found = measure.measure(lambda: Work(x.sum().item), "cuda", seconds=0.1)
    assert found.timer == "events"
    generator = torch.cuda.default_generators[x.device.index].manual_seed(0)
    expected = torch.rand(4, generator=torch.Generator("cuda").manual_seed(0), device="cuda")
    found = measure.measure(
        lambda: Work(lambda: x.sum().item()), "cuda", seconds=0.1, cuda_graph=None
    )
    assert found.timer == "events" and found.seconds == found.eager_seconds
    # Nor does the attempt leave the GPU's random numbers in the capture, or change them.
    assert torch.equal(torch.rand(4, generator=generator, device="cuda"), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_training_step_trains():
    layer = torch.nn.Linear(8, 1, device="cuda")
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, capturable=True)
    x = torch.randn(64, 8, device="cuda")

    def step():
        layer(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    replay, before = capture_graph(step), layer.weight.norm().item()
    held = weakref.ref(step)
    del step
    assert held() is not None  # and what it writes to
    for _ in range(20):
        replay()
    assert layer.weight.norm().item() < before
