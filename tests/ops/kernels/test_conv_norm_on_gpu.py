"""What follows a convolution, and blocks without a gradient, on a GPU."""

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

import softfree
from softfree.layers import block as blocks
from softfree.layers.embeddings import downsample, stem
from softfree.ops.conv_norm import operator as conv_norm

from .gpu import ON_GPU, SIXTEEN_BIT, check_against_plain, plain_pytorch, poisoned_memory, spread

pytestmark = ON_GPU
SHAPES = [(256, 64, 56, 56), (1, 32, 112, 112), (3, 20, 7, 5), (5, 1500, 3, 1), (2, 8, 1, 1)]
OWN = dict(landmarks="average:49", query_norm=True, bandwidth="learned", inverse="solve")
# channels, heads, stride, side of the values' convolution, side of the image
STAGES = [(64, 2, 8, 9, 56), (128, 4, 4, 5, 28), (320, 10, 2, 3, 14), (512, 16, 1, 3, 7)]


def problem(shape: tuple, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(shape, device="cuda").to(dtype, memory_format=torch.channels_last)
    shift, mean, variance, weight, bias = torch.randn(5, shape[1], device="cuda").to(dtype)
    return [x, shift, mean, variance.square(), weight, bias]


def plain(x, shift, mean, variance, weight, bias, eps):
    return F.relu(
        F.batch_norm(x + shift[:, None, None], mean, variance, weight, bias, False, 0.1, eps)
    )


@pytest.mark.parametrize("shape, dtype", spread(SHAPES, SIXTEEN_BIT, in_full=SHAPES[:1]))
@torch.no_grad()
def test_it_is_as_exact_as_plain_pytorch(shape, dtype):
    inputs = problem(shape, dtype)
    with poisoned_memory():
        found = conv_norm.norm_relu(*inputs, 1e-5)
        of_rows = conv_norm.norm_relu(inputs[0].contiguous(), *inputs[1:], 1e-5)
    assert found.dtype == dtype and torch.equal(of_rows, found)
    assert found.is_contiguous(memory_format=torch.channels_last)
    exact = plain(*(t.double() for t in inputs), 1e-5)
    check_against_plain([found], [plain(*inputs, 1e-5)], [exact])


@torch.no_grad()
def test_nan_stays_and_an_empty_batch_is_no_error():
    x, *vectors = problem((2, 8, 5, 3), torch.bfloat16)
    x[0, 0, 0, 0] = float("nan")
    found = conv_norm.norm_relu(x, *vectors, 1e-5)
    assert found.isnan().sum() == 1 and found[0, 0, 0, 0].isnan()
    assert conv_norm.norm_relu(x[:0], *vectors, 1e-5).shape == (0, 8, 5, 3)


def test_operator_is_registered_correctly():
    with torch.no_grad():
        arguments = (*problem((3, 16, 5, 7), torch.bfloat16), 1e-5)
        tests = "test_schema", "test_faketensor"
        torch.library.opcheck(torch.ops.softfree.norm_relu, arguments, test_utils=tests)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(stem(3, 64), downsample(64, 128), downsample(128, 24, overlap=False))
    for module in made.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.weight, module.bias, module.running_mean):
                nn.init.normal_(tensor)
            nn.init.uniform_(module.running_var, 0.5, 2)
    return made.cuda().eval()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
@torch.no_grad()
def test_stem_and_downsampling_are_as_exact_as_plain_pytorch(dtype, autocast):
    network = layers().to(torch.float32 if autocast else dtype)
    image = torch.randn(2, 3, 67, 45, device="cuda")
    image = image.to(network[1].conv.weight.dtype, memory_format=torch.channels_last)
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        forward = conv_norm.FORWARD
        patch.setattr(conv_norm, "FORWARD", lambda *a: calls.append(1) or forward(*a))
        with torch.autocast("cuda", dtype, enabled=autocast):
            found = network(image)
            assert len(calls) == 5
            with plain_pytorch():
                expected = network(image)
    assert len(calls) == 5 and found.dtype == expected.dtype == dtype
    assert found.stride() == expected.stride()
    with plain_pytorch():
        exact = network.double()(image.double())
    check_against_plain([found], [expected], [exact])


@torch.no_grad()
def test_hooks_inside_a_stem_are_called():
    network, seen = layers().bfloat16(), []
    image = torch.randn(2, 3, 32, 32, device="cuda", dtype=torch.bfloat16)
    expected = network(image)
    for name in ("conv", "bn", "bn.drop", "bn.act"):
        part = network[0][1].get_submodule(name)
        handle = part.register_forward_hook(lambda *_, name=name: seen.append(name))
        torch.testing.assert_close(network(image), expected, rtol=0.05, atol=0.05)
        handle.remove()
    assert seen == ["conv", "bn", "bn.drop", "bn.act"]


def block_of(stage: tuple, dtype: torch.dtype, **options):
    channels, heads, stride, conv, side = stage
    torch.manual_seed(0)
    block = softfree.SoftBlock(channels, heads, stride=stride, value_conv=conv, **options)
    for norm in (block.norm1, block.norm2):
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    x = torch.randn(2, side * side, channels, device="cuda", dtype=dtype)
    return block.to("cuda", dtype).eval(), x, (side, side)


def in_parts(block: nn.Module, *inputs) -> torch.Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "_evaluate", lambda *_: None)
        return block(*inputs)


def at_once(block: nn.Module, *inputs) -> torch.Tensor:
    results, evaluate = [], blocks._evaluate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            blocks, "_evaluate", lambda *parts: results.append(evaluate(*parts)) or results[-1]
        )
        out = block(*inputs)
    assert results[0] is out
    return out


@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
@pytest.mark.parametrize("options", [{}, OWN], ids=["SOFT++", "softfree"])
@pytest.mark.parametrize("stage", STAGES, ids=str)
@torch.no_grad()
def test_a_block_without_a_gradient_has_the_bits_of_its_parts(stage, options, dtype):
    block, x, size = block_of(stage, dtype, **options)
    before = x.clone()
    expected = in_parts(block, x, size)
    for _ in range(3):
        with poisoned_memory():
            assert torch.equal(at_once(block, x, size), expected)
    assert torch.equal(x, before)
    with torch.inference_mode():
        assert torch.equal(at_once(block, x, size), expected)
    assert not block(x[:0], size).numel()


@torch.no_grad()
def test_a_block_with_pooled_or_many_landmarks_has_the_bits_of_its_parts():
    for landmarks in ("average:16", "average"):
        options = OWN | dict(landmarks=landmarks, drop_path=0.3)
        block, x, size = block_of((64, 2, 2, 3, 32), torch.bfloat16, **options)
        assert torch.equal(at_once(block, x, size), in_parts(block, x, size))


@torch.no_grad()
def test_new_weights_are_used_however_they_came():
    block, x, size = block_of(STAGES[2], torch.bfloat16, **OWN)
    block(x, size)
    other = block_of(STAGES[2], torch.bfloat16, **OWN)[0]
    for parameter in other.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    expected = in_parts(other, x, size)
    found = torch.func.functional_call(block, dict(other.named_parameters()), (x, size))
    assert torch.equal(found, expected)
    for mine, new in zip(block.parameters(), other.parameters(), strict=True):
        mine.data = new.data.clone()
    assert torch.equal(block(x, size), expected)
    block.load_state_dict(block_of(STAGES[2], torch.bfloat16, **OWN)[0].state_dict())
    assert not torch.equal(block(x, size), expected)
    block.load_state_dict(other.state_dict())
    assert torch.equal(block(x, size), expected)


@torch.no_grad()
def test_a_block_runs_on_the_current_stream_and_in_a_graph():
    block, x, size = block_of(STAGES[2], torch.bfloat16, **OWN)
    expected = at_once(block, x, size)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        found = at_once(block, x + 0, size)  # ready only after the stream has slept
    stream.synchronize()
    assert torch.equal(found, expected)
    given, graph = torch.zeros_like(x), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = block(given, size)
    given.copy_(x)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, expected)


@torch.no_grad()
def test_a_block_on_a_gpu_that_is_not_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    block, x, size = block_of(STAGES[2], torch.bfloat16, **OWN)
    expected = block(x, size)
    assert torch.equal(block.to("cuda:1")(x.to("cuda:1"), size).cpu(), expected.cpu())


@pytest.mark.parametrize("name", ["softfree_tiny", "softpp_tiny"])
@torch.no_grad()
def test_a_model_of_one_picture_is_close_to_plain_pytorch(name):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=10).cuda().eval()
    picture = torch.randn(1, 3, 224, 224, device="cuda")
    with plain_pytorch():
        exact = model.double()(picture.double())
        expected = model.bfloat16()(picture.bfloat16())
    found = model(picture.bfloat16())
    check_against_plain([found], [expected], [exact], times=3, floor=0.02)
    with torch.autocast("cuda", torch.bfloat16):
        check_against_plain([model.float()(picture)], [expected], [exact], times=3, floor=0.02)
