"""The gate before the timing, and the floor it is compared with."""

import pytest
import torch

from softfree.analysis import attention_cost
from softfree.analysis.attention_cost import (
    DTYPES,
    MAX_CHECKED,
    OURS,
    TOLERANCE,
    Cost,
    Inputs,
    LayerMemory,
    Shape,
    largest_error,
    measure_costs,
    measure_layer_memory,
    time_curves,
)
from softfree.analysis.measure import Measured
from softfree.layers import ATTENTIONS

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


def test_figures_of_a_measurement_reach_the_row(monkeypatch):
    found = Measured(2e-3, 5e-3, 2**20, 0, "CUDA graph")
    monkeypatch.setattr(attention_cost, "measure", lambda *_, **__: found)
    cost = Cost(1, 30, 8, 5, "float32", "softpp", "torch")
    inputs = Inputs.draw(Shape(1, 30, 8, 5), torch.float32, CPU)
    attention_cost._time([cost], inputs, torch.device("cuda"), 0.1, backward=False)
    assert (cost.forward_ms, cost.forward_eager_ms, cost.forward_extra_mib) == (2, 5, 1)
    assert cost.timer == "CUDA graph"


def test_what_does_not_fit_into_memory_is_noted_and_not_timed(monkeypatch):
    def full(call, device):
        raise torch.OutOfMemoryError

    monkeypatch.setattr("softfree.analysis.measure.peak_extra_memory", full)
    cost = Cost(1, 30, 8, 5, "float32", "softpp", "torch")
    inputs = Inputs.draw(Shape(1, 30, 8, 5), torch.float32, CPU)
    attention_cost._time([cost], inputs, CPU, 0.1, backward=False)
    assert cost.note == "out of memory" and not cost.faulty
    assert cost.forward_ms is None


def test_curves_are_sorted_by_tokens_and_per_head_where_heads_differ():
    def cost(heads, tokens, ms):
        return Cost(heads, tokens, 8, 5, "float32", "softmax", "torch", forward_ms=ms)

    same = [cost(2, 50, 6.0), cost(2, 20, 2.0), cost(2, 90, None)]
    assert time_curves(same, "forward_ms") == {"softmax": [(20, 2.0), (50, 6.0)]}
    mixed = [cost(3, 50, 6.0), cost(2, 20, 2.0)]
    assert time_curves(mixed, "forward_ms") == {"softmax": [(20, 1.0), (50, 2.0)]}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_costs_on_a_gpu_have_both_times():
    device = torch.device("cuda")
    costs = measure_costs(
        [Shape(4, 784)], ["softpp", "softmax"], ["auto"], "bfloat16", device,
        bandwidth=1e12, seconds=0.05,
    )  # fmt: skip
    for cost in costs:
        assert not cost.note
        assert cost.forward_ms > 0 and cost.forward_eager_ms > 0
        assert cost.forward_backward_ms > 0 and cost.forward_backward_eager_ms > 0


def growth(name):
    """How many times the memory of 2048 tokens that of 4096 is."""
    few, many = (
        measure_layer_memory(LayerMemory(name, tokens, 1, 16, 1, "float32"), CPU)
        for tokens in (2048, 4096)
    )
    return many.forward_backward_mib / few.forward_backward_mib


@pytest.mark.parametrize("name", ATTENTIONS)
def test_memory_grows_with_the_tokens_and_no_faster(name):
    assert growth(name) < 2.3


def test_memory_of_the_whole_matrix_grows_with_the_square_of_the_tokens():
    assert growth("softmax-unfused") > 3.5
