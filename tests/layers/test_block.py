"""Blocks: the two formulas, and stochastic depth."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from timm.layers import DropPath
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor

import softfree
from softfree.layers import Block, SoftmaxAttention
from softfree.layers import block as blocks
from softfree.ops import image_attention
from softfree.ops.norm import add_norm


def block(**kwargs) -> softfree.SoftBlock:
    settings = {"stride": 2, "value_conv": 3, **kwargs}
    return softfree.SoftBlock(dim=12, num_heads=3, **settings).double()


def mlp(x: torch.Tensor, module: torch.nn.Module, approximate: str) -> torch.Tensor:
    return module.fc2(F.gelu(module.fc1(x), approximate=approximate))


def test_a_post_norm_block_norms_each_sum():
    b, x = block(), torch.randn(2, 35, 12, dtype=torch.float64)
    torch.nn.init.normal_(b.norm1.weight)
    y = b.norm1(x + b.attn(x, (7, 5)))
    torch.testing.assert_close(b(x, (7, 5)), b.norm2(y + mlp(y, b.mlp, "tanh")))


def test_a_pre_norm_block_norms_the_input_of_each_branch():
    b, x = block(pre_norm=True), torch.randn(2, 35, 12, dtype=torch.float64)
    torch.nn.init.normal_(b.norm1.weight)
    y = x + b.attn(b.norm1(x), (7, 5))
    torch.testing.assert_close(b(x, (7, 5)), y + mlp(b.norm2(y), b.mlp, "tanh"))


def test_exact_gelu_is_the_error_functions():
    b = Block(12, SoftmaxAttention(12, 3), exact_gelu=True, norm_eps=1e-6).double()
    x = torch.randn(2, 35, 12, dtype=torch.float64)
    y = b.norm1(x + b.attn(x))
    torch.testing.assert_close(b(x), b.norm2(y + mlp(y, b.mlp, "none")))
    assert b.norm1.eps == b.norm2.eps == 1e-6


def test_mlp_ratio_sets_the_hidden_channels():
    assert block(mlp_ratio=2.5).mlp.fc1.out_features == 30


def test_a_mask_reaches_the_attention():
    b = block(landmarks="average", sequence=True)
    x = torch.randn(2, 20, 12, dtype=torch.float64)
    mask = torch.arange(20).expand(2, 20) < 14
    torch.testing.assert_close(b(x, None, mask)[:, :14], b(x[:, :14]))


@pytest.mark.parametrize("pre_norm", [False, True])
def test_drop_path_skips_whole_branches_in_training_alone(pre_norm):
    b = block(drop_path=0.5, pre_norm=pre_norm)
    assert isinstance(b.drop_path, DropPath)
    x = torch.randn(1, 35, 12, dtype=torch.float64).expand(64, -1, -1)
    out = b.train()(x, (7, 5))
    # Each of the two branches is taken or not, a sample at a time: four different results.
    assert len({round(value, 9) for value in out[:, 0, 0].tolist()}) == 4
    steady = b.eval()(x, (7, 5))
    torch.testing.assert_close(steady, steady[:1].expand_as(steady))


def test_dropout_acts_in_training_alone():
    b, x = block(proj_drop=0.5), torch.randn(2, 35, 12, dtype=torch.float64)
    assert not torch.equal(b(x, (7, 5)), b(x, (7, 5)))
    b.eval()
    assert torch.equal(b(x, (7, 5)), b(x, (7, 5)))


class NormAsUnderAutocast(torch.nn.LayerNorm):
    """In float32 whatever it is given: what autocast does on a GPU, but not on a CPU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float())


@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_tokens_keep_their_dtype_under_autocast(pre_norm, dtype):
    b, x = block(pre_norm=pre_norm).float(), torch.randn(2, 35, 12)
    b.norm1, b.norm2 = NormAsUnderAutocast(12), NormAsUnderAutocast(12)
    with torch.autocast("cpu", torch.bfloat16):
        out = b(x.to(dtype), (7, 5))
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), b(x, (7, 5)), rtol=0.05, atol=0.05)


class Doubled(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("name, widths", [("fc1", (12, 48)), ("fc2", (48, 12))])
def test_a_layer_in_place_of_one_of_the_mlps_is_called(name, widths):
    b, x = block(), torch.randn(2, 35, 12, dtype=torch.float64)
    setattr(b.mlp, name, Doubled(*widths).double())
    torch.testing.assert_close(b.mlp(x), mlp(x, b.mlp, "tanh"))


def test_a_norm_inside_the_mlp_is_used():
    b, x = block(), torch.randn(2, 35, 12, dtype=torch.float64)
    b.mlp.norm = torch.nn.LayerNorm(48).double()
    hidden = F.gelu(b.mlp.fc1(x), approximate="tanh")
    torch.testing.assert_close(b.mlp(x), b.mlp.fc2(b.mlp.norm(hidden)))


def test_the_mlp_may_have_no_biases():
    b, x = block(), torch.randn(2, 35, 12, dtype=torch.float64)
    b.mlp.fc1.bias = None
    torch.testing.assert_close(b.mlp(x), mlp(x, b.mlp, "tanh"))
    b.mlp.fc2.bias = None
    torch.testing.assert_close(b.mlp(x), mlp(x, b.mlp, "tanh"))


@pytest.mark.parametrize("name", ["drop1", "drop2"])
def test_each_dropout_of_the_mlp_acts(name):
    b, x = block(), torch.randn(2, 35, 12, dtype=torch.float64)
    getattr(b.mlp, name).p = 0.5
    assert not torch.equal(b.mlp(x), b.mlp(x))


@pytest.mark.parametrize("name", ["fc1", "act", "drop1", "norm", "fc2", "drop2"])
def test_hooks_inside_the_mlp_are_called(name):
    b, x = block(), torch.randn(2, 35, 12, dtype=torch.float64)
    seen = []
    getattr(b.mlp, name).register_forward_hook(lambda module, inputs, out: seen.append(out))
    out = b.mlp(x)
    hidden = b.mlp.fc1(x)
    if name in ("fc2", "drop2"):
        expected = out
    else:
        expected = hidden if name == "fc1" else F.gelu(hidden, approximate="tanh")
    torch.testing.assert_close(seen[0], expected)


def test_another_gelu_in_its_place_is_used():
    b, x = block(), torch.randn(2, 35, 12, dtype=torch.float64)
    b.mlp.act = torch.nn.GELU()
    torch.testing.assert_close(b.mlp(x), b.mlp.fc2(F.gelu(b.mlp.fc1(x))), rtol=0, atol=1e-12)


def test_hooks_before_the_backward_pass_of_the_mlp_are_called():
    b, x = block(), torch.randn(2, 35, 12, dtype=torch.float64, requires_grad=True)
    seen = []
    b.mlp.fc1.register_full_backward_pre_hook(lambda module, grad: seen.append(module))
    b.mlp(x).sum().backward()
    assert seen == [b.mlp.fc1]


def conv_block(**options) -> softfree.SoftBlock:
    b = block(mlp_conv=3, **options)
    torch.nn.init.normal_(b.mlp.conv.bias)
    return b


def convolved(x: torch.Tensor, module: torch.nn.Module, size: tuple[int, ...]) -> torch.Tensor:
    image = module.fc1(x).unflatten(1, size).movedim(-1, 1)
    hidden = F.gelu(module.conv(image), approximate="tanh").movedim(1, -1).flatten(1, -2)
    return module.fc2(hidden)


@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize(
    "size, options",
    [
        ((7, 5), {}),
        ((35,), dict(sequence=True, landmarks="average")),
        ((7, 5, 1), dict(volume=True, landmarks="average")),
    ],
    ids=["image", "sequence", "volume"],
)
def test_the_mlps_hidden_tokens_are_convolved(size, options, pre_norm):
    b, x = conv_block(pre_norm=pre_norm, **options), torch.randn(2, 35, 12, dtype=torch.float64)
    given = None if len(size) == 1 else size
    if pre_norm:
        y = x + b.attn(b.norm1(x), given)
        expected = y + convolved(b.norm2(y), b.mlp, size)
    else:
        y = b.norm1(x + b.attn(x, given))
        expected = b.norm2(y + convolved(y, b.mlp, size))
    torch.testing.assert_close(b(x, given), expected)


def test_masked_tokens_do_not_reach_their_neighbours_in_the_mlp():
    b = conv_block(landmarks="average", sequence=True)
    x = torch.randn(2, 20, 12, dtype=torch.float64)
    mask = torch.arange(20).expand(2, 20) < 14
    torch.testing.assert_close(b(x, None, mask)[:, :14], b(x[:, :14]))


@pytest.mark.parametrize("side", [-1, 2])
def test_a_convolution_of_an_even_side_is_refused(side):
    with pytest.raises(ValueError, match=f"mlp_conv must be 0 or odd, got {side}"):
        block(mlp_conv=side)


@pytest.mark.parametrize("name", ["fc1", "conv", "act", "drop1", "norm", "fc2", "drop2"])
def test_hooks_inside_an_mlp_with_a_convolution_are_called(name):
    b, x = conv_block(), torch.randn(2, 35, 12, dtype=torch.float64)
    expected, seen = b.mlp(x, SIZE), []
    getattr(b.mlp, name).register_forward_hook(lambda *_: seen.append(name))
    torch.testing.assert_close(b.mlp(x, SIZE), expected)
    assert seen == [name]


def test_a_convolution_without_a_bias_or_with_exact_gelu_may_be_in_the_mlp():
    b, x = conv_block(exact_gelu=True), torch.randn(2, 35, 12, dtype=torch.float64)
    b.mlp.conv.bias = None
    image = b.mlp.fc1(x).unflatten(1, SIZE).movedim(-1, 1)
    hidden = F.gelu(b.mlp.conv(image)).movedim(1, -1).flatten(1, -2)
    torch.testing.assert_close(b.mlp(x, SIZE), b.mlp.fc2(hidden))


def test_attn_drop_acts_on_the_attention_alone_and_in_training_alone():
    b = Block(12, SoftmaxAttention(12, 3), attn_drop=1 - 1e-12, pre_norm=True).double()
    x = torch.randn(2, 35, 12, dtype=torch.float64)
    torch.testing.assert_close(b.train()(x), x + b.mlp(b.norm2(x)))
    y = x + b.attn(b.norm1(x))
    torch.testing.assert_close(b.eval()(x), y + b.mlp(b.norm2(y)))


@pytest.mark.parametrize("pre_norm", [True, False])
def test_a_block_attends_to_a_context(pre_norm):
    block = softfree.SoftBlock(
        8, 2, landmarks="average", stride=2, sequence=True, context_dim=5, pre_norm=pre_norm
    ).eval()
    x, context = torch.randn(2, 6, 8), torch.randn(2, 9, 5)
    mask = torch.arange(9) < torch.tensor([[9], [4]])
    out = block(x, None, mask, context=context)
    if pre_norm:
        middle = x + block.attn(block.norm1(x), None, mask, context)
        expected = middle + block.mlp(block.norm2(middle))
    else:
        middle = block.norm1(x + block.attn(x, None, mask, context))
        expected = block.norm2(middle + block.mlp(middle))
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("pre_norm", [True, False])
@pytest.mark.parametrize(("name", "times"), [("attn_drop", 1), ("drop_path", 2)])
def test_hooks_of_what_does_nothing_are_called(name, times, pre_norm):
    b, x = block(pre_norm=pre_norm), torch.randn(2, 35, 12, dtype=torch.float64)
    expected = b(x, (7, 5))
    getattr(b, name).register_forward_hook(lambda module, inputs, out: 2 * out)
    seen = []
    getattr(b, name).register_forward_hook(lambda *_: seen.append(name))
    assert not torch.equal(b(x, (7, 5)), expected)
    assert seen == [name] * times


@pytest.fixture
def at_once(monkeypatch) -> list[bool]:
    """Blocks as on a GPU, with stand-ins for its kernels; for each call of the attention, whether it is unseen."""
    calls, compute, with_conv = [], blocks.mlp, blocks.conv_mlp

    def attend(x, *operands, unseen, **settings):
        calls.append(unseen)
        return x / 2

    monkeypatch.setattr(image_attention, "fits", lambda *_: True)
    monkeypatch.setattr(image_attention, "image_attention", attend)
    monkeypatch.setattr(blocks, "add_norm_over", add_norm)
    monkeypatch.setattr(blocks, "mlp", lambda *inputs, unseen=False: compute(*inputs))
    monkeypatch.setattr(blocks, "conv_mlp", lambda *inputs, unseen=False: with_conv(*inputs))
    return calls


SIZE = (7, 5)


def half_block(**options) -> tuple[softfree.SoftBlock, torch.Tensor]:
    return block(**options).bfloat16().eval(), torch.randn(2, 35, 12, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "options",
    [{}, dict(drop_path=0.5, attn_drop=0.5, proj_drop=0.5), dict(mlp_conv=3, value_conv=0)],
)
def test_a_block_without_a_gradient_asks_its_questions_once(at_once, options):
    b, x = half_block(**options)
    before = x.clone()
    with torch.no_grad():
        found = b(x, SIZE)
        middle = b.norm1(x + x / 2)
        expected = b.norm2(middle + b.mlp(middle, *[SIZE] * ("mlp_conv" in options)))
    assert at_once == [True] and torch.equal(x, before)
    torch.testing.assert_close(found, expected)
    with torch.inference_mode():
        assert torch.equal(b(x, SIZE), found)
    assert at_once == [True] * 2


PARTS = [
    "attn", "attn.qv", "attn.proj", "attn.sampler", "attn.sampler.norm", "attn.value_conv",
    "norm1", "mlp", "mlp.fc1", "mlp.act", "mlp.drop1", "mlp.norm", "mlp.fc2", "mlp.drop2", "norm2",
    "attn_drop", "drop_path", "mlp.conv",
]  # fmt: skip


@pytest.mark.parametrize("name", PARTS)
def test_a_hook_on_any_part_is_called_and_ends_that(at_once, name):
    b, x = half_block(mlp_conv=3 * (name == "mlp.conv"))
    seen = []
    b.get_submodule(name).register_forward_hook(lambda *_: seen.append(name))
    with torch.no_grad():
        b(x, SIZE)
    assert seen and not any(at_once)


@pytest.mark.parametrize("name", ["attn", "mlp", "norm1", "drop_path"])
def test_a_forward_of_its_own_and_one_compiled_in_place_are_called(at_once, name):
    for how in ("forward", "_compiled_call_impl"):
        b, x = half_block()
        part, seen = b.get_submodule(name), []
        forward = part.forward
        setattr(part, how, lambda *a, f=forward, s=seen: s.append(name) or f(*a))
        with torch.no_grad():
            b(x, SIZE)
        assert seen and not any(at_once)


def test_hooks_of_all_modules_see_the_parts(at_once):
    b, x = half_block()
    seen = []
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, *_: seen.append(module)
    )
    try:
        with torch.no_grad():
            b(x, SIZE)
    finally:
        handle.remove()
    assert {b, b.attn, b.mlp} <= set(seen) and at_once == [False]


class Names(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("onlooker", ["gradient", "mode", "profiler", "autocast", "subclass"])
def test_with_an_onlooker_a_block_is_taken_in_its_parts(at_once, onlooker):
    b, x = half_block()
    onlookers = dict(
        gradient=torch.enable_grad, mode=Names, autocast=lambda: torch.autocast("cpu"),
        profiler=lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
        subclass=contextlib.nullcontext,
    )  # fmt: skip
    if onlooker == "subclass":
        b.norm2.weight = torch.nn.Parameter(TwoTensor(b.norm2.weight, b.norm2.weight))
    with torch.no_grad(), onlookers[onlooker]():
        b(x, SIZE)
    assert at_once == [False]


def test_a_mask_a_context_or_no_size_are_not_for_a_block_at_once(at_once):
    b, x = half_block()
    with torch.no_grad():
        with pytest.raises(ValueError, match="size must be"):
            b(x)
        with pytest.raises(TypeError, match="size must be a tuple"):
            b(x, x)
        b(x, list(SIZE))
        half_block(pre_norm=True)[0](x, SIZE)
        b.float()(x.float(), SIZE)
    assert not any(at_once)


def test_weights_given_for_one_call_are_used(at_once):
    b, x = half_block()
    with torch.no_grad():
        given = {name: p + 0.5 for name, p in b.named_parameters()}
        found = torch.func.functional_call(b, given, (x, SIZE))
        assert at_once == [True]
        assert not torch.equal(found, b(x, SIZE))
        for name, parameter in b.named_parameters():
            parameter.data = given[name]
        assert torch.equal(found, b(x, SIZE))
