"""Models for inference, replayed: a tape of tests/training stands for CUDA graphs on a CPU."""

import threading

import pytest
import timm
import torch
from torch import nn

import softfree
from softfree.models.graphs import WARM_UP, Captured
from tests.training.tape import Tape

from .small import small

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Net(nn.Module):
    """Counts the calls of Python; gives a dict."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(3, 2), 0

    def forward(self, x, offset=None, *, twice=False):
        self.calls += 1
        x = self.linear(x if offset is None else x + offset)
        return {"out": x * (2 if twice else 1), "sum": x.sum()}


@pytest.fixture
def net():
    return Net().eval()


def call(net, *args, **kwargs):
    with torch.no_grad():
        return net(*args, **kwargs)


def test_a_shape_is_replayed_from_its_fourth_call_on_and_results_are_the_callers(net):
    tape = Tape()
    fast = Captured(net, tape, most=4)
    inputs = [torch.randn(4, 3) for _ in range(6)]
    results = [fast(x) for x in inputs]
    assert (tape.recorded, tape.replayed, net.calls) == (1, 6 - WARM_UP, WARM_UP + 1)
    for x, result in zip(inputs, results, strict=True):
        torch.testing.assert_close(result, call(net, x), rtol=0, atol=0)
        assert not result["out"].requires_grad
    with torch.inference_mode():
        again = fast(torch.ones(4, 3))
    torch.testing.assert_close(again, call(net, torch.ones(4, 3)), rtol=0, atol=0)


def test_shapes_layouts_dtypes_arguments_and_precisions_have_graphs_of_their_own(net):
    tape = Tape()
    fast = Captured(net, tape, most=9)
    x, offset = torch.randn(4, 3), torch.randn(4, 3)
    cases = [((x,), {}), ((x[:2],), {}), ((x.T.contiguous().T,), {}), ((x, offset), {})]
    cases += [((x,), {"offset": offset}), ((x,), {"twice": True})]
    for number, (args, kwargs) in enumerate(cases, 1):
        for _ in range(WARM_UP + 2):
            result = fast(*args, **kwargs)
        assert tape.recorded == number
        torch.testing.assert_close(result, call(net, *args, **kwargs), rtol=0, atol=0)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(WARM_UP + 2):
            result = fast(x)
        assert tape.recorded == 1 + len(cases) and result["out"].dtype == torch.bfloat16
    assert fast(x)["out"].dtype == torch.float32


def test_the_graph_used_least_recently_is_dropped(net):
    tape = Tape()
    fast = Captured(net, tape, most=2)
    for batch in (1, 2, 1, 3):  # drops that of 2
        for _ in range(WARM_UP + 1):
            fast(torch.randn(batch, 3))
    assert tape.recorded == 3
    fast(torch.randn(1, 3))
    assert tape.recorded == 3
    fast(torch.randn(2, 3))
    assert tape.recorded == 4


def test_weights_may_change_in_place_and_move(net):
    tape = Tape()
    fast = Captured(net, tape, most=2)
    x = torch.randn(4, 3)
    for _ in range(WARM_UP + 1):
        fast(x)
    net.load_state_dict({name: 2 * value for name, value in net.state_dict().items()})
    replayed = tape.replayed
    torch.testing.assert_close(fast(x), call(net, x), rtol=0, atol=0)
    assert tape.replayed == replayed + 1
    net.double().float()
    net.linear.bias.data.add_(1)
    for _ in range(WARM_UP + 2):
        torch.testing.assert_close(fast(x), call(net, x), rtol=0, atol=0)
    assert tape.recorded == 2


def test_a_model_in_training_is_called_as_it_is(net):
    with pytest.raises(ValueError, match="`model` is in training mode"):
        softfree.capture(net.train(), torch.randn(1, 3))
    tape = Tape()
    fast = Captured(net, tape, most=2)
    for _ in range(WARM_UP + 2):
        fast(torch.randn(1, 3))
    assert not tape.recorded


def test_a_model_that_asks_for_a_number_is_refused_in_a_sentence(net):
    class Asking(Net):
        def forward(self, x):
            return x * float(x.sum())

    fast = Captured(Asking().eval(), Tape(), most=2)
    with pytest.raises(
        ValueError, match=r"`model` Asking can't be captured as a CUDA graph \(.+\)"
    ):
        for _ in range(WARM_UP + 1):
            fast(torch.randn(1, 3))


def test_on_a_cpu_the_model_is_called(net):
    fast = softfree.capture(net, torch.randn(1, 3))
    x = torch.randn(4, 3)
    torch.testing.assert_close(fast(x), call(net, x), rtol=0, atol=0)
    with pytest.raises(ValueError, match="`most` must be at least 1, got 0"):
        softfree.capture(net, most=0)


def test_a_pyramid_is_replayed_at_several_sizes():
    model = small("softpp_tiny").eval()
    tape = Tape()
    fast = Captured(model, tape, most=4)
    for side in (32, 64):
        for _ in range(WARM_UP + 2):
            x = torch.randn(1, 3, side, side)
            torch.testing.assert_close(fast(x), call(model, x), rtol=0, atol=0)
    assert tape.recorded == 2


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["softpp_tiny", "soft_tiny_release", "resnet18"])
def test_on_a_gpu_replays_give_what_the_model_gives(name, dtype):
    model = timm.create_model(name).eval().cuda()
    example = torch.randn(1, 3, 224, 224, device="cuda")
    with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
        fast = softfree.capture(model, example)
        for batch in (1, 2, 1):
            for _ in range(WARM_UP + 2):
                x = torch.randn(batch, 3, 224, 224, device="cuda")
                torch.testing.assert_close(fast(x), call(model, x), rtol=2e-2, atol=2e-2)
    assert len(fast.graphs) == 2


@pytest.mark.gpu
@NEEDS_GPU
def test_on_a_gpu_threads_and_streams_do_not_mix_up_their_results():
    model = timm.create_model("resnet18").eval().cuda()
    fast = softfree.capture(model, torch.randn(1, 3, 64, 64, device="cuda"))
    inputs = torch.randn(4, 20, 1, 3, 64, 64, device="cuda")
    results: dict[int, list] = {}
    torch.cuda.synchronize()

    def work(number):
        with torch.cuda.stream(torch.cuda.Stream()):
            results[number] = [fast(x) for x in inputs[number]]
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, found in results.items():
        for x, result in zip(inputs[number], found, strict=True):
            torch.testing.assert_close(result, call(model, x), rtol=1e-3, atol=1e-3)
