"""MultiheadSoftAttention: torch's constructor, call, masks and encoders, with softmax-free attention inside."""

import copy
import inspect

import pytest
import torch
from torch import nn

import softfree
from softfree.layers.torch_interface import MultiheadSoftAttention

DIM, HEADS = 12, 3


def layer(**kwargs) -> MultiheadSoftAttention:
    torch.manual_seed(0)
    made = MultiheadSoftAttention(DIM, HEADS, **{"batch_first": True, **kwargs})
    return made.double().eval()


def tokens(count: int, dim: int = DIM, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, count, dim, dtype=torch.float64)


def test_constructor_and_call_are_those_of_torch():
    for ours, theirs in (
        (MultiheadSoftAttention.__init__, nn.MultiheadAttention.__init__),
        (MultiheadSoftAttention.forward, nn.MultiheadAttention.forward),
    ):
        expected = list(inspect.signature(theirs).parameters.values())
        found = list(inspect.signature(ours).parameters.values())[: len(expected)]
        for mine, other in zip(found, expected, strict=True):
            assert mine.name == other.name
            # n x n weights for nothing are the one habit that is left out.
            assert mine.default == other.default or mine.name == "need_weights"


def test_self_attention_is_soft_attention_with_the_same_weights():
    mine = layer()
    other = softfree.SoftAttention(
        DIM, HEADS, landmarks="average:49", stride=1, sequence=True, query_norm=True,
        bandwidth="learned", inverse="solve",
    ).double()  # fmt: skip
    with torch.no_grad():
        other.qv.weight.copy_(torch.cat([mine.q_proj.weight, mine.v_proj.weight]))
        other.qv.bias.copy_(torch.cat([mine.q_proj.bias, mine.v_proj.bias]))
        other.proj.load_state_dict(mine.out_proj.state_dict())
    x, padded = tokens(60), torch.rand(2, 60) > 0.8
    torch.testing.assert_close(mine(x, x, x)[0], other(x))
    found, _ = mine(x, x, x, key_padding_mask=padded)
    torch.testing.assert_close(found, other(x, mask=~padded))
    context = tokens(20)
    found, _ = mine(x, context, context)
    torch.testing.assert_close(found, other(x, context=context))


def test_batches_come_second_by_default_and_may_be_left_out():
    first, second = layer(), layer(batch_first=False)
    x, k = tokens(9), tokens(5)
    expected, weights = first(x, k, k, need_weights=True)
    found, same = second(*(t.transpose(0, 1) for t in (x, k, k)), need_weights=True)
    torch.testing.assert_close(found.transpose(0, 1), expected)
    torch.testing.assert_close(same, weights)
    mask = torch.tensor([False, False, True, False, True])
    for each in (first, second):
        out, alone = each(x[0], k[0], k[0], key_padding_mask=mask, need_weights=True)
        assert out.shape == (9, DIM) and alone.shape == (9, 5)
        expected, _ = first(x[:1], k[:1], k[:1], key_padding_mask=mask[None])
        torch.testing.assert_close(out, expected[0])


def test_a_copy_of_the_keys_as_query_changes_nothing():
    mine, x, v = layer(), tokens(30), tokens(30)
    torch.testing.assert_close(mine(x, x.clone(), x.clone())[0], mine(x, x, x)[0])
    torch.testing.assert_close(mine(x, x.clone(), v)[0], mine(x, x, v)[0])


@pytest.mark.parametrize("dims", [dict(kdim=5, vdim=7), dict(kdim=5), dict(vdim=7)])
def test_keys_and_values_may_have_channels_of_their_own(dims):
    mine = layer(**dims)
    key, value = tokens(8, dims.get("kdim", DIM)), tokens(8, dims.get("vdim", DIM))
    out, weights = mine(tokens(4), key, value, need_weights=True, average_attn_weights=False)
    assert out.shape == (2, 4, DIM) and weights.shape == (2, HEADS, 4, 8)
    out.sum().backward()
    assert all(p.grad is not None for p in mine.parameters())


@pytest.mark.parametrize("masked", [True, False])
def test_weights_times_values_are_the_output(masked):
    mine = layer(landmarks="average:7")
    q, k, v = tokens(6), tokens(20), tokens(20)
    padded = torch.rand(2, 20) > 0.7 if masked else None
    out, weights = mine(
        q, k, v, key_padding_mask=padded, need_weights=True, average_attn_weights=False
    )
    values = mine.split(mine.v_proj(v))
    expected = mine.out_proj((weights @ values).transpose(1, 2).flatten(2))
    torch.testing.assert_close(out, expected)
    mean = mine(q, k, v, key_padding_mask=padded, need_weights=True)[1]
    torch.testing.assert_close(mean, weights.mean(1))
    if masked:
        assert (weights.transpose(1, 3)[padded] == 0).all()


def test_weights_have_no_dropout_and_the_output_has():
    mine = layer(dropout=0.5).train()
    x = tokens(20)
    first, weights = mine(x, x, x, need_weights=True)
    second, same = mine(x, x, x, need_weights=True)
    assert mine.training and not torch.equal(first, second)
    torch.testing.assert_close(weights, same)


def test_padding_is_ignored_whatever_stands_there_as_bool_and_as_minus_infinity():
    mine, x = layer(), tokens(30)
    padded = torch.arange(30) >= torch.tensor([[20], [30]])
    expected, _ = mine(x[:1, :20], x[:1, :20], x[:1, :20])
    spoilt = torch.where(padded[..., None], 1e3, x)
    as_float = torch.zeros(2, 30, dtype=torch.float64).masked_fill(padded, -torch.inf)
    for mask in (padded, as_float):
        found, _ = mine(spoilt, spoilt, spoilt, key_padding_mask=mask)
        torch.testing.assert_close(found[:1, :20], expected)


def test_what_landmarks_make_impossible_is_refused_with_the_reason():
    mine, x = layer(), tokens(6)
    for wrong in (dict(is_causal=True), dict(attn_mask=torch.ones(6, 6).triu(1).bool())):
        with pytest.raises(ValueError, match="causal.*landmarks.*made of all tokens"):
            mine(x, x, x, **wrong)
    for wrong in (dict(add_bias_kv=True), dict(add_zero_attn=True)):
        with pytest.raises(ValueError, match="add_bias_kv and add_zero_attn"):
            layer(**wrong)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((tokens(6), tokens(6, 5), tokens(6)), ValueError, "key must have shape"),
        ((tokens(6), tokens(6), tokens(7)), ValueError, "as many tokens"),
        ((tokens(6, batch=3), tokens(6), tokens(6)), ValueError, "as many samples"),
        ((tokens(6),) * 3 + (torch.zeros(2, 5).bool(),), ValueError, r"shape \(2, 6\)"),
        (
            (tokens(6),) * 3 + (torch.zeros(2, 6).long(),),
            TypeError,
            "bool, True at tokens to ignor",
        ),
        ((tokens(6),) * 3 + (torch.full((2, 6), -5.0),), ValueError, "0 or minus infinity"),
    ],
)
def test_what_does_not_fit_is_named(arguments, error, message):
    with pytest.raises(error, match=message):
        layer()(*arguments)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_torch_s_encoders_do_not_take_their_fused_softmax_past_the_layer(norm_first, grad):
    one = nn.TransformerEncoderLayer(
        DIM, 2, 16, dropout=0.0, batch_first=True, norm_first=norm_first
    )
    one.self_attn = MultiheadSoftAttention(DIM, 2, batch_first=True)
    encoder = nn.TransformerEncoder(one, 2, enable_nested_tensor=False).double()
    # As if the attention had been replaced after the encoder was made.
    encoder.use_nested_tensor = True
    x, padded = tokens(10), torch.arange(10) >= torch.tensor([[7], [10]])
    with torch.set_grad_enabled(grad):
        for mask in (None, padded):
            training = encoder.train()(x, src_key_padding_mask=mask)
            evaluation = encoder.eval()(x, src_key_padding_mask=mask)
            torch.testing.assert_close(training, evaluation)


def test_the_device_and_the_dtype_are_those_asked_for():
    made = MultiheadSoftAttention(DIM, HEADS, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in made.parameters()} == {("meta", torch.bfloat16)}
    again = copy.deepcopy(layer())
    assert again.in_proj_weight is layer().in_proj_weight  # of the class: neither copied nor saved


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dims", [{}, dict(kdim=5, vdim=7)])
def test_weights_of_a_softmax_layer_are_taken_over(bias, dims):
    theirs = nn.MultiheadAttention(DIM, HEADS, bias=bias, batch_first=True, dropout=0.1, **dims)
    nn.init.normal_(theirs.out_proj.weight)
    mine = MultiheadSoftAttention.of(theirs.eval(), landmarks="average:9")
    q, _, v = (
        theirs.in_proj_weight.chunk(3)
        if not dims
        else (theirs.q_proj_weight, None, theirs.v_proj_weight)
    )
    assert torch.equal(mine.q_proj.weight, q) and torch.equal(mine.v_proj.weight, v)
    assert torch.equal(mine.out_proj.weight, theirs.out_proj.weight)
    assert (mine.k_proj is not None) == bool(dims) and mine.sampler.count == 9
    assert mine.dropout == 0.1 and mine.batch_first and not mine.training
    assert (mine.q_proj.bias is not None) == bias
