"""Blocks: the two formulas, and stochastic depth."""

import pytest
import torch
import torch.nn.functional as F
from timm.layers import DropPath

import softfree
from softfree.layers import Block, SoftmaxAttention


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
