"""Eager calls on a GPU, whose launches are prepared once: never a kernel of an earlier call that does not fit."""

import threading

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import softfree
from softfree.ops.shared import launching

from .gpu import ON_GPU

pytestmark = ON_GPU
INVERSES = ("newton", "solve")


def tokens(
    n: int, *, heads: int = 2, d: int = 32, m: int = 49, dtype=torch.bfloat16, shift: int = 0
):
    """q, v and landmarks; with a ``shift`` their first elements lie at no multiple of 16 bytes."""

    def normal(length: int) -> Tensor:
        flat = torch.randn(heads * length * d + shift, device="cuda").to(dtype)
        return flat[shift:].view(1, heads, length, d)

    return normal(n), normal(n), normal(m)


def results(inputs: tuple[Tensor, ...], inverse: str) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in inputs]
    q, v, landmarks = leaves
    out = softfree.soft_attention(q, None, v, landmarks, inverse=inverse, backend="triton")
    return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]


def ordinary(inputs: tuple[Tensor, ...], inverse: str, monkeypatch) -> list[Tensor]:
    """By Triton's own launches."""
    with monkeypatch.context() as patch:
        patch.setattr(launching, "_hooked", lambda: True)
        return results(inputs, inverse)


@pytest.mark.parametrize("inverse", INVERSES)
def test_whatever_came_before_results_are_those_of_ordinary_launches(inverse, monkeypatch):
    calls = [
        tokens(196),
        tokens(196, shift=1),
        tokens(2048),
        tokens(2048, shift=3),
        tokens(196, d=16),
        tokens(196, m=16),
        tokens(196, m=1),
        tokens(1, m=1),
        tokens(196, heads=16),
        tokens(196, dtype=torch.float16),
        tokens(196, dtype=torch.float32),
        tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in tokens(196)),
    ]
    for _ in range(2):
        for number, inputs in enumerate(calls):
            expected = ordinary(inputs, inverse, monkeypatch)
            for again in range(3):
                found = results(inputs, inverse)
                assert all(map(torch.equal, found, expected)), (number, again)


def test_a_second_launch_goes_past_triton(monkeypatch):
    if not launching.KNOWN_VERSION:
        pytest.skip("another version of Triton")
    inputs = tokens(196)
    expected = results(inputs, "newton")
    kind = launching.triton.runtime.JITFunction
    monkeypatch.setattr(kind, "run", lambda *_, **__: pytest.fail("launched by Triton"))
    assert all(map(torch.equal, results(inputs, "newton"), expected))


@pytest.mark.parametrize("inverse", INVERSES)
def test_kernels_run_on_the_current_stream(inverse):
    inputs = tokens(2048)
    expected = results(inputs, inverse)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late = tuple(t + 0 for t in inputs)  # ready only after the stream has slept
        found = results(late, inverse)
    stream.synchronize()
    assert all(map(torch.equal, found, expected))


def test_threads_do_not_mix_their_calls():
    calls = [tokens(n) for n in (64, 196, 500, 2048)]
    expected = [results(inputs, "solve") for inputs in calls]
    wrong = []

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(30):
                found = results(calls[number], "solve")
                torch.cuda.current_stream().synchronize()
                if not all(map(torch.equal, found, expected[number])):
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_every_gpu_has_its_own_kernels():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    here = tokens(196)
    there = tuple(t.to("cuda:1") for t in here)
    expected = results(here, "newton")
    for _ in range(2):
        for inputs in (here, there):
            assert all(
                torch.equal(f.cpu(), e.cpu())
                for f, e in zip(results(inputs, "newton"), expected, strict=True)
            )


def test_hooks_of_a_profiler_see_every_launch():
    seen = []
    inputs = tokens(196)
    results(inputs, "newton")
    hook = lambda metadata: seen.append(metadata.get()["name"])  # noqa: E731
    launching.triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        results(inputs, "newton")
    finally:
        launching.triton.knobs.runtime.launch_enter_hook.remove(hook)
    assert seen == ["short_forward_kernel", "short_backward_kernel"]


def test_torchs_profiler_shows_the_operator():
    inputs = tokens(196)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        results(inputs, "newton")
    names = {event.key for event in profiler.key_averages()}
    assert {"softfree::attention", "softfree::attention_backward"} <= names


@pytest.mark.parametrize("own", [False, True], ids=["SOFT++", "softfree"])
def test_a_layers_kernels_run_on_the_current_stream_and_in_a_graph(own):
    options = dict(landmarks="average", query_norm=True, bandwidth="learned", inverse="solve")
    torch.manual_seed(0)
    layer = softfree.SoftAttention(64, 2, stride=2, value_conv=3, **(options if own else {}))
    layer.to("cuda", torch.bfloat16)
    x = torch.randn(2, 196, 64, device="cuda", dtype=torch.bfloat16)

    def gradients(tokens: Tensor) -> list[Tensor]:
        leaf = tokens.detach().requires_grad_()
        out = layer(leaf, (14, 14))
        found = torch.autograd.grad(out, [leaf, *layer.parameters()], torch.ones_like(out))
        return [out.detach(), *found]

    expected = gradients(x)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        found = gradients(x + 0)  # ready only after the stream has slept
    stream.synchronize()
    assert all(map(torch.equal, found, expected))
    given, graph = torch.zeros_like(x), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(given)
    given.copy_(x)
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, captured, expected))


def test_a_layer_under_autocast_and_checkpointing_is_the_layer():
    layer = softfree.SoftAttention(64, 2, stride=2, value_conv=3).cuda()
    x = torch.randn(2, 196, 64, device="cuda", requires_grad=True)

    def gradients(run) -> list[Tensor]:
        with torch.autocast("cuda", torch.bfloat16):
            out = run(x, (14, 14))
        return list(torch.autograd.grad(out.float().square().sum(), [x, *layer.parameters()]))

    expected = gradients(layer)
    for run in (layer, lambda *inputs: checkpoint(layer, *inputs, use_reentrant=False)):
        assert all(map(torch.equal, gradients(run), expected))


def test_products_stay_exact_where_tf32_is_allowed():
    inputs = tokens(150, m=140, dtype=torch.float32)  # more landmarks than one program inverts
    expected = results(inputs, "solve")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        found = results(inputs, "solve")
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    assert all(map(torch.equal, found, expected))
