"""The kernels on a GPU, against the float64 reference there."""

import warnings

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import softfree
from softfree.ops.attention.kernels import launch
from softfree.ops.attention.settings import AttentionSettings, InverseSettings
from softfree.ops.mlp import operator as mlp
from softfree.ops.shared.registration import flatten
from softfree.ops.value_conv import operator as value_conv

from .cases import LARGE, SMALL, Case, arguments, errors, results
from .gpu import (
    DTYPES,
    ON_GPU,
    SIXTEEN_BIT,
    check_against_plain,
    plain_pytorch,
    poisoned_memory,
    spread,
)

pytestmark = ON_GPU
CASES = {**SMALL, **{f"{name} (large)": case for name, case in LARGE.items()}}
TYPICAL = {name: LARGE[name] for name in ("stage 1", "stage 3", "stage 3, solve")}


inverses = pytest.mark.parametrize("inverse", ["newton", "solve"])


def attend(
    q: torch.Tensor, v: torch.Tensor, landmarks: torch.Tensor, inverse: str = "newton"
) -> torch.Tensor:
    return softfree.soft_attention(q, None, v, landmarks, backend="triton", inverse=inverse)


@pytest.mark.parametrize("name, dtype", spread(CASES, DTYPES, in_full=("masks", "stage 1 (large)")))
def test_result_and_gradients_are_as_exact_as_plain_pytorch(name, dtype):
    with poisoned_memory():
        found = errors(CASES[name], dtype, "cuda")
    for part, (error, allowed) in found.items():
        assert error <= allowed, part


@pytest.mark.parametrize("case", TYPICAL.values(), ids=TYPICAL)
def test_twice_gives_the_same_bits(case):
    tensors = arguments(case, "cuda")
    once, again = (results(case, tensors, torch.bfloat16, "triton") for _ in range(2))
    for name in once:
        assert torch.equal(once[name], again[name]), name


@pytest.mark.parametrize("case", TYPICAL.values(), ids=TYPICAL)
def test_a_sample_alone_equals_the_sample_in_a_batch(case):
    tensors = arguments(case, "cuda")
    alone = {name: t if t is None else t[1:] for name, t in tensors.items()}
    whole = results(case, tensors, torch.float32, "triton")
    part = results(case, alone, torch.float32, "triton")
    for name in whole:
        assert torch.allclose(whole[name][1:], part[name], rtol=1e-5, atol=1e-5), name


@pytest.mark.parametrize("m", [1, 15, 16, 17, 33, 49, 64])
@pytest.mark.parametrize("inverse", ["newton", "solve"])
def test_one_launch_gives_what_several_give(inverse, m, monkeypatch):
    case = Case(130, m, 32, inverse=inverse, ridge=0.1)
    tensors, found = arguments(case, "cuda"), []
    for one_launch in (launch.ONE_LAUNCH, ()):
        monkeypatch.setattr(launch, "ONE_LAUNCH", one_launch)
        launch.remembered_call.cache_clear()
        found.append(results(case, tensors, torch.float16, "triton"))
    launch.remembered_call.cache_clear()
    for name, once in found[0].items():
        several = found[1][name].float()
        assert (once.float() - several).norm() <= 2e-3 * several.norm(), name


def test_kernels_say_why_they_cannot_take_an_input():
    q = torch.randn(1, 1, 64, 32, device="cuda", dtype=torch.float64)
    with pytest.raises(ValueError, match="backend 'triton'.*float64"):
        softfree.soft_attention(q, None, q, q[:, :, :8], backend="triton")


@inverses
@pytest.mark.parametrize("every", [64, 22], ids=["one program", "by blocks"])
def test_a_graph_replays_with_new_inputs(inverse, every):
    q, v, grad = torch.randn(3, 1, 4, 3136, 32, device="cuda").bfloat16()
    landmarks = q[:, :, ::every].contiguous()
    inputs = [t.requires_grad_() for t in (q, v, landmarks)]

    def results():
        x = attend(*inputs, inverse)
        return x.detach(), *torch.autograd.grad(x, inputs, grad)

    results()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results()
    with torch.no_grad():
        v.copy_(torch.randn_like(v))
    graph.replay()
    for found, expected in zip(captured, results(), strict=True):
        assert torch.equal(found, expected)


@inverses
def test_strided_inputs_and_an_empty_batch(inverse):
    qv = torch.randn(2, 400, 2, 4, 32, device="cuda").bfloat16()
    q, v = (t.transpose(1, 2) for t in qv.unbind(2))
    landmarks = q[:, :, ::8]
    expected = attend(q.contiguous(), v.contiguous(), landmarks.contiguous(), inverse)
    assert torch.equal(attend(q, v, landmarks, inverse), expected)
    assert attend(q[:0], v[:0], landmarks[:0], inverse).shape == (0, 4, 400, 32)


@pytest.mark.parametrize("method", [InverseSettings(), InverseSettings.solve(None, 2)])
def test_operator_is_registered_correctly(method):
    case = Case(70, 9, 16, key_mask=True)
    tensors = arguments(case, "cuda")
    names = ("q", "k", "v", "landmarks")
    inputs = [t if t is None else t.float().requires_grad_() for t in (tensors[n] for n in names)]
    settings = flatten(AttentionSettings(0.25, inverse=method), "triton")
    torch.library.opcheck(
        torch.ops.softfree.attention, (*inputs, tensors["key_mask"], None, *settings)
    )


@inverses
def test_compiled_model_equals_eager(inverse):
    settings = dict(stride=4, value_conv=3, backend="triton", inverse=inverse)
    layer = softfree.SoftAttention(64, 2, **settings).cuda()
    x = torch.randn(2, 28 * 28, 64, device="cuda")
    compiled = torch.compile(layer, fullgraph=True)
    assert torch.allclose(compiled(x, (28, 28)), layer(x, (28, 28)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "case, dtype", spread([(9, 56, 56), (5, 27, 29), (3, 7, 7), (9, 70, 130)], SIXTEEN_BIT)
)
def test_value_convolution_is_as_exact_as_plain_pytorch(case, dtype):
    kernel, height, width = case
    both = torch.randn(3, height * width, 2, 64, device="cuda", dtype=dtype)
    v, base = both[:, :, 1], torch.randn(3, height * width, 64, device="cuda", dtype=dtype)
    weight = torch.randn(2, 1, kernel, kernel, device="cuda").to(dtype)
    grad = torch.randn_like(base)

    def results(*inputs):
        leaves = [t.detach().requires_grad_() for t in inputs]
        out = value_conv.value_conv(*leaves[:2], (height, width), leaves[2])
        return (out, *torch.autograd.grad(out, leaves, grad.to(out.dtype)))

    assert value_conv._fits(v, weight.float(), base)
    with poisoned_memory():
        found = results(v, weight.float(), base)
    with plain_pytorch():
        plain = results(v, weight, base)
        exact = results(v.double(), weight.double(), base.double())
    check_against_plain(found, plain, exact)
    for added in (None, base.requires_grad_()):
        inputs = (v.detach().requires_grad_(), weight.float().requires_grad_(), added)
        torch.library.opcheck(torch.ops.softfree.value_conv, (*inputs, height, width))


def test_value_convolution_takes_more_heads_than_a_grids_second_axis():
    v = torch.randn(70_000, 4, 32, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(2, 1, 3, 3, device="cuda")
    out = value_conv.value_conv(v, weight, (2, 2))
    expected = value_conv._by_library(v.float(), weight, (2, 2))
    assert (out.float() - expected).norm() < 5e-3 * expected.norm()


def mlp_inputs(rows, channels: int, hidden: int) -> list[torch.Tensor]:
    """x, and the parameters at the size that training starts from."""
    first, second = torch.nn.Linear(channels, hidden), torch.nn.Linear(hidden, channels)
    inputs = torch.randn(*rows, channels), *first.parameters(), *second.parameters()
    return [t.detach().cuda() for t in inputs]


@pytest.mark.parametrize("hidden, dtype", spread([20, 384], SIXTEEN_BIT))
def test_the_mlp_is_as_exact_as_plain_pytorch(hidden, dtype):
    inputs = [t.to(dtype).requires_grad_() for t in mlp_inputs((3, 700), 96, hidden)]
    grad = torch.randn(3, 700, 96, device="cuda").to(dtype)

    def results(leaves):
        out = mlp.mlp(*leaves)
        return (out, *torch.autograd.grad(out, leaves, grad.to(out.dtype)))

    with poisoned_memory():
        found = results(inputs)
    assert "View" in found[0].grad_fn.name()  # of the operator's result
    # That of our operator, not of one of PyTorch's in its place.
    assert found[0].grad_fn.next_functions[0][0].name() in (
        "DifferentiableBackward",
        "ShownBackward",
    )
    with plain_pytorch():
        plain = results(inputs)
        exact = results([t.detach().double().requires_grad_() for t in inputs])
    check_against_plain(found, plain, exact)
    torch.library.opcheck(
        torch.ops.softfree.mlp, (inputs[0].detach()[0, :9].requires_grad_(), *inputs[1:])
    )


def test_the_mlps_gradients_are_the_same_bits_twice():
    inputs = [t.requires_grad_() for t in mlp_inputs((8, 3136), 64, 512)]
    found = []
    for _ in range(2):
        with torch.autocast("cuda", torch.bfloat16):
            out = mlp.mlp(*inputs)
        found.append(torch.autograd.grad(out.float().square().sum(), inputs))
    for once, again in zip(*found, strict=True):
        assert once.dtype == torch.float32
        assert torch.equal(once, again)


@pytest.mark.parametrize("hidden, dtype", spread([20, 384], SIXTEEN_BIT))
def test_the_mlp_without_a_gradient_is_as_exact_as_plain_pytorch(hidden, dtype):
    inputs = mlp_inputs((3, 700), 96, hidden)
    with torch.no_grad(), torch.autocast("cuda", dtype):
        found = mlp.mlp(*inputs), mlp.mlp(inputs[0][:0], *inputs[1:])
        with plain_pytorch():
            plain = mlp.mlp(*inputs)
    exact = mlp.mlp(*(t.double() for t in inputs))
    assert found[0].dtype == dtype and found[1].shape == (0, 700, 96)
    check_against_plain(found[:1], [plain], [exact])


def test_whoever_counts_or_transforms_sees_the_mlps_layers():
    inputs = [t.bfloat16() for t in mlp_inputs((3, 70), 96, 384)]
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        mlp.mlp(*inputs)
    assert counter.get_total_flops() == 2 * 2 * 210 * 96 * 384
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        found = torch.func.vmap(mlp.mlp, (0, *[None] * 4))(*inputs)
    x, *parameters = inputs
    # Outside: the first derivative of its kind loads parts of PyTorch that warn of themselves.
    _, tangent = torch.func.jvp(lambda x: mlp.mlp(x, *parameters), (x,), (x,))
    assert (found - mlp.mlp(*inputs)).norm() < 0.01 * found.norm()
    assert tangent.isfinite().all() and tangent.any()


@pytest.mark.parametrize("compiled", [False, True])
def test_the_mlp_of_many_rows_without_a_gradient_holds_a_part_of_its_hidden_layer(
    compiled, monkeypatch
):
    monkeypatch.setattr(mlp, "PART_BYTES", 2**25)
    inputs = [t.bfloat16() for t in mlp_inputs((63, 3136), 64, 512)]
    call = torch.compile(mlp.mlp) if compiled else mlp.mlp
    out = call(*inputs)  # makes what calls share
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = call(*inputs)
    assert torch.cuda.max_memory_allocated() - before < 1.05 * (mlp.PART_BYTES + out.nbytes)
    assert torch.equal(found, out)
    with plain_pytorch():
        plain = mlp.mlp(*inputs)
    check_against_plain([found], [plain], [mlp.mlp(*(t.double() for t in inputs))])


def test_the_mlp_keeps_its_hidden_layer_once():
    inputs = [t.bfloat16().requires_grad_() for t in mlp_inputs((64, 3136), 64, 512)]
    hidden = 64 * 3136 * 512 * 2
    before = torch.cuda.memory_allocated()
    out = mlp.mlp(*inputs)
    assert torch.cuda.memory_allocated() - before < 1.5 * hidden
    torch.cuda.reset_peak_memory_stats()
    out.sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 4 * hidden


@pytest.mark.long
def test_more_elements_than_an_int32_can_count():
    if torch.cuda.get_device_properties(0).total_memory < 60 * 2**30:
        pytest.skip("needs 60 GiB of GPU memory")
    n = 2**31 // 64 + 5000
    q = torch.randn(1, 1, n, 64, device="cuda", dtype=torch.bfloat16)
    landmarks = q[:, :, -49:].contiguous()
    x = attend(q, q, landmarks)
    tail = softfree.soft_attention(q[:, :, -64:], q, q, landmarks, backend="torch")
    assert (x[:, :, -64:].float() - tail.float()).norm() < 1e-2 * tail.float().norm()
