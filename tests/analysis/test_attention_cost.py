"""The gate before the timing, and the floor it is compared with."""

import pytest
import torch

from softfree.analysis import Timing, attention_cost
from softfree.analysis.attention_cost import (
    DTYPES,
    MAX_CHECKED,
    OURS,
    TOLERANCE,
    Cost,
    Inputs,
    Shape,
    largest_error,
    measure_costs,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("attention", OURS)
def test_our_attentions_pass_the_gate_and_are_not_exact(attention, dtype):
    error = largest_error(attention, "torch", Shape(2, 70, 16, 9), dtype, CPU)
    assert 0 < error <= TOLERANCE[dtype]


def test_the_reference_in_float64_has_no_error():
    assert largest_error("softpp", "reference", Shape(1, 30, 8, 5), torch.float64, CPU) == 0


def test_drawn_landmarks_are_tokens_and_draws_repeat():
    shape = Shape(3, 50, 8, 7)
    one, two = (Inputs.draw(shape, torch.float32, CPU) for _ in range(2))
    assert one.landmarks.shape == (1, 3, 7, 8)
    assert torch.equal(one.landmarks[:, :, 1], one.q[:, :, 7])
    assert torch.equal(one.grad, two.grad)
    assert not torch.equal(one.q, one.v)


@pytest.mark.parametrize(("heads", "tokens"), [(2560, 196), (12, 65536), (4, 2**20), (1, 49)])
def test_the_checked_draw_is_smaller_and_of_the_same_kind(heads, tokens):
    shape = Shape(heads, tokens)
    small = shape.smaller()
    assert small.heads * small.tokens * small.landmarks <= MAX_CHECKED
    assert (small.dim, small.landmarks) == (shape.dim, shape.landmarks)
    assert small.tokens == tokens or small.tokens > 40_000


@pytest.mark.parametrize("graph", [2e-3, None])
def test_on_a_gpu_the_graph_is_the_figure_and_eager_stands_beside_it(graph, monkeypatch):
    monkeypatch.setattr(attention_cost, "peak_extra_memory", lambda call, device: 2**20)
    monkeypatch.setattr(attention_cost, "time_graph", lambda call, budget: graph)
    monkeypatch.setattr(
        attention_cost, "time_queued", lambda call, device, **_: Timing(5e-3, 20, 4e-3)
    )
    cost = Cost(1, 30, 8, 5, "float32", "softpp", "torch")
    inputs = Inputs.draw(Shape(1, 30, 8, 5), torch.float32, CPU)
    attention_cost._time([cost], inputs, torch.device("cuda"), 0.1, backward=False)
    assert cost.forward_eager_ms == 5 and cost.forward_extra_mib == 1
    assert cost.forward_ms == (5 if graph is None else 2)
    assert cost.timer == ("events" if graph is None else "CUDA graph")


def test_what_does_not_fit_into_memory_is_noted_and_not_timed(monkeypatch):
    def full(call, device):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(attention_cost, "peak_extra_memory", full)
    cost = Cost(1, 30, 8, 5, "float32", "softpp", "torch")
    inputs = Inputs.draw(Shape(1, 30, 8, 5), torch.float32, CPU)
    attention_cost._time([cost], inputs, CPU, 0.1, backward=False)
    assert cost.note == "out of memory" and not cost.faulty
    assert cost.forward_ms is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_costs_on_a_gpu_have_both_times():
    device = torch.device("cuda")
    (costs,) = measure_costs(
        [Shape(4, 784)], ["softpp", "softmax"], ["auto"], "bfloat16", device,
        bandwidth=1e12, seconds=0.05,
    )  # fmt: skip
    for cost in costs:
        assert not cost.note
        assert cost.forward_ms > 0 and cost.forward_eager_ms > 0
        assert cost.forward_backward_ms > 0 and cost.forward_backward_eager_ms > 0
