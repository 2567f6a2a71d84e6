"""What holds for every attention: masks, padding, batches, sizes, precisions, gradients, compiling."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from softfree.layers import ATTENTIONS, SoftAttention, create_attention
from softfree.layers.factory import attention_name

DIM, HEADS = 16, 2
# Small enough that windows, segments, slots, buckets and chunks are many.
SEQUENCE: dict[str, Any] = dict(
    stride=2, value_conv=3, grid=20, features=16, rounds=3, buckets=4, chunk=4
)
COUNTS = {
    **dict.fromkeys(("softfree", "soft", "softpp"), "average"),
    **dict.fromkeys(("nystromformer", "agent"), 5),
}
IMAGES = [name for name in ATTENTIONS if name != "reformer"]
CROSS = ["softmax", "linformer", "performer"]


def sequences(name: str, **options: Any) -> nn.Module:
    options = {**SEQUENCE, "landmarks": COUNTS.get(name), **options}
    return create_attention(name, DIM, HEADS, sequence=True, **options).double().eval()


def images(name: str, **options: Any) -> nn.Module:
    options = dict(stride=2, value_conv=3, grid=(7, 5), features=16) | options
    return create_attention(name, DIM, HEADS, **options).double().eval()


def tokens(count: int, batch: int = 2) -> Tensor:
    return torch.randn(batch, count, DIM, dtype=torch.float64)


@given(
    name=st.sampled_from(ATTENTIONS),
    lengths=st.lists(st.integers(1, 30), min_size=2, max_size=3),
    padding=st.integers(0, 9),
)
def test_a_padded_sample_has_the_output_of_the_unpadded_one(name, lengths, padding):
    torch.manual_seed(0)
    attention = sequences(name)
    x = tokens(max(lengths) + padding, batch=len(lengths))
    mask = torch.arange(x.shape[1]) < torch.tensor(lengths)[:, None]
    out = attention(x, None, mask)
    for sample, result, length in zip(x, out, lengths, strict=True):
        torch.testing.assert_close(result[:length], attention(sample[None, :length])[0])


@pytest.mark.parametrize("name", ATTENTIONS)
def test_a_sequence_masked_in_the_middle_ignores_what_stands_there(name):
    attention, x = sequences(name), tokens(30)
    mask = torch.rand(2, 30) > 0.4
    expected = attention(x, None, mask)[mask]
    assert expected.isfinite().all()
    for filling in (torch.nan, torch.inf, 1e6):
        other = torch.where(mask[..., None], x, filling)
        torch.testing.assert_close(attention(other, None, mask)[mask], expected)


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("size", [(7, 5), (4, 9)])
def test_an_image_ignores_what_stands_at_masked_tokens(name, prefix, size):
    attention, x = images(name), tokens(prefix + size[0] * size[1])
    mask = torch.rand(x.shape[:2]) > 0.4
    mask[1, 0] = False
    expected = attention(x, size, mask)[mask]
    for filling in (torch.nan, 1e6):
        other = torch.where(mask[..., None], x, filling)
        torch.testing.assert_close(attention(other, size, mask)[mask], expected)
    assert not torch.allclose(attention(x, size)[mask], expected)


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize("stride", [1, 2])
def test_a_mask_of_ones_changes_nothing(name, prefix, stride):
    attention, x = images(name, stride=stride), tokens(prefix + 35)
    mask = torch.ones(x.shape[:2], dtype=torch.bool)
    torch.testing.assert_close(attention(x, (7, 5), mask), attention(x, (7, 5)))


@pytest.mark.parametrize("name", ATTENTIONS)
def test_a_sample_without_real_tokens_is_finite_and_disturbs_nobody(name):
    attention, x = sequences(name), tokens(12)
    mask = torch.tensor([[True] * 12, [False] * 12])
    out = attention(x, None, mask)
    assert out.isfinite().all()
    torch.testing.assert_close(out[:1], attention(x[:1]))


@given(name=st.sampled_from(ATTENTIONS), scale=st.sampled_from([1e-3, 1.0, 30.0]))
def test_a_sample_has_the_same_output_alone_and_in_any_batch(name, scale):
    torch.manual_seed(0)
    for attention, size in [(sequences(name), None)] + [
        (images(name), (7, 5)) for _ in range(name in IMAGES)
    ]:
        x = tokens(35, batch=3)
        x[1:] *= scale
        together = attention(x, size)
        assert together.isfinite().all()
        torch.testing.assert_close(together[:1], attention(x[:1], size))


@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize("length", [1, 2, 19, 20, 21, 67])
def test_a_sequence_has_any_length(name, length):
    out = sequences(name)(tokens(length))
    assert out.shape == (2, length, DIM) and out.isfinite().all()


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("size", [(1, 1), (1, 9), (8, 8), (11, 3)])
@pytest.mark.parametrize("prefix", [0, 1])
def test_an_image_has_any_size(name, size, prefix):
    x = tokens(prefix + size[0] * size[1])
    out = images(name)(x, size)
    assert out.shape == x.shape and out.isfinite().all()


@pytest.mark.parametrize("name", ATTENTIONS)
def test_every_parameter_and_the_input_get_a_gradient(name):
    attention, x = sequences(name), tokens(30).requires_grad_()
    mask = torch.arange(30).expand(2, 30) < 25
    attention(x, None, mask)[mask].square().sum().backward()
    for key, tensor in [("x", x), *attention.named_parameters()]:
        assert tensor.grad.isfinite().all() and tensor.grad.abs().sum() > 0, key
    assert (x.grad[~mask] == 0).all()


@pytest.mark.parametrize("name", IMAGES)
def test_gradients_are_the_derivatives(name):
    # Newton's steps have the gradient of an exact inverse, so let them converge.
    attention = images(name, landmarks="average", iterations=40)
    x = tokens(1 + 12, batch=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: attention(x, (4, 3)), x, fast_mode=True, atol=1e-4)


@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_stays_close_to_float64(name, dtype):
    attention, x = sequences(name, buckets=1, chunk=64), tokens(30).to(dtype)
    attention.load_state_dict({k: v.to(dtype) for k, v in attention.state_dict().items()})
    mask = torch.arange(30).expand(2, 30) < 25
    expected = attention(x.double(), None, mask)
    out = copy.deepcopy(attention).to(dtype)(x, None, mask)
    assert out.dtype == dtype
    assert (out.double() - expected)[mask].norm() / expected[mask].norm() < 0.05


@pytest.mark.parametrize("name", ATTENTIONS)
def test_autocast_stays_close_to_float32_for_large_activations(name):
    attention, x = sequences(name, buckets=1, chunk=64).float(), 10 * tokens(30).float()
    expected = attention(x)
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(x)
        out.float().square().sum().backward()
    assert out.dtype == torch.bfloat16
    assert (out.float() - expected).norm() / expected.norm() < 0.1
    assert all(p.grad.isfinite().all() for p in attention.parameters())


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in ATTENTIONS if name != "soft"])
@pytest.mark.parametrize("masked", [False, True])
def test_an_attention_compiles_as_one_graph(name, masked):
    torch.compiler.reset()
    attention, x = sequences(name), tokens(30)
    mask = torch.rand(2, 30) > 0.3 if masked else None
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, None, mask), attention(x, None, mask))
    if name in IMAGES:
        attention = images(name)
        compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x, (4, 7), mask), attention(x, (4, 7), mask))


@pytest.mark.parametrize("name", ATTENTIONS)
def test_no_attention_asks_its_device_for_a_value(name):
    """On fake tensors a question for a value raises; on a GPU it would wait for all work before."""
    attention = sequences(name)
    with FakeTensorMode(allow_non_fake_inputs=True):
        x, mask = tokens(30), torch.rand(2, 30) > 0.3
        assert attention(x, None, mask).shape == x.shape
        with pytest.raises(DataDependentOutputException):
            mask.any().item()


@pytest.mark.parametrize("name", CROSS)
def test_attending_to_itself_as_context_is_self_attention(name):
    attention, x = images(name), tokens(1 + 35)
    torch.testing.assert_close(attention(x, (7, 5), context=x), attention(x, (7, 5)))
    assert attention(tokens(4), (7, 5), context=x).shape == (2, 4, DIM)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_the_name_of_a_models_attention_is_the_one_it_was_made_with(name):
    layers = [
        create_attention(kind, 16, 2, sequence=True, grid=16, stride=4)
        for kind in ("softmax", name)
    ]
    assert attention_name(nn.Sequential(*layers)) == name


def test_the_names_are_those_of_the_comparison():
    assert ATTENTIONS == (
        "softfree", "soft", "softpp", "softmax", "linformer", "performer", "nystromformer",
        "reformer", "agent", "flatten",
    )  # fmt: skip


def test_soft_and_softpp_are_the_authors_settings_unless_others_are_given():
    soft, softpp = images("soft"), images("softpp", ridge=0.5)
    assert isinstance(soft, SoftAttention) and isinstance(softpp, SoftAttention)
    assert (soft.normalize, soft.start, soft.ridge) == (False, "scaled", 0.01)
    assert (softpp.normalize, softpp.start, softpp.ridge) == (True, "halving", 0.5)


def test_softfree_is_softpp_with_normed_queries_learned_widths_and_a_solve():
    own = images("softfree")
    assert (own.query_norm, own.normalize, own.inverse, own.ridge) == (True, True, "solve", 0.1)
    assert own.log_bandwidth.tolist() == [0.0] * HEADS
    newton = images("softfree", inverse="newton")
    assert newton.inverse_settings == images("softpp").inverse_settings


def test_a_solve_has_a_ridge_of_its_own_in_both_unless_one_is_given():
    for name in ("soft", "softpp"):
        assert images(name, inverse="solve").inverse_settings.ridge == 0.1
        assert images(name, inverse="solve", order=1).inverse_settings.ridge == 0.01
        given = images(name, inverse="solve", ridge=0.3).inverse_settings
        assert (given.method, given.ridge, given.order) == ("solve", 0.3, 2)


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        (
            "linear",
            {},
            ValueError,
            "attention must be one of 'softfree', .*'flatten', got 'linear'",
        ),
        ("performer", dict(featurs=8), TypeError, "no option 'featurs'; there are .*'features'"),
        ("performer", dict(features=0), ValueError, "features must be >= 1, got 0"),
        ("performer", dict(kernel="elu"), ValueError, "kernel must be one of.*got 'elu'"),
        ("reformer", {}, ValueError, "'reformer' is for sequences.*'performer'"),
        ("linformer", dict(grid=49), ValueError, "grid must be .H, W. for images, got 49"),
        ("linformer", dict(grid=(7, 0)), ValueError, "grid"),
        ("linformer", dict(slots=0), ValueError, "slots=0"),
        ("linformer", dict(sequence=True, grid=(7, 7)), ValueError, "grid must be a length"),
        ("nystromformer", dict(value_conv=2), ValueError, "value_conv must be 0 or an odd"),
        ("nystromformer", dict(landmarks="pool"), ValueError, "sampler must be one of"),
        ("nystromformer", dict(inverse_steps=-1), ValueError, "inverse_steps must be >= 0"),
        ("agent", dict(value_conv=4), ValueError, "value_conv must be 0 or an odd number, got 4"),
        ("flatten", dict(focus=0), ValueError, "focus must be > 0, got 0"),
        ("flatten", dict(focus="x"), ValueError, "focus must be a number, got 'x'"),
        ("reformer", dict(sequence=True, buckets=3), ValueError, "buckets must be 1 or an even"),
        ("reformer", dict(sequence=True, chunk=0), ValueError, "chunk=0"),
        ("softmax", dict(dim=15), ValueError, "dim=15, num_heads=2"),
        ("reformer", dict(sequence=True, dim=15), ValueError, "dim=15, num_heads=2"),
    ],
)
def test_invalid_settings_are_refused(name, options, error, message):
    with pytest.raises(error, match=message):
        create_attention(name, **{"dim": DIM, "num_heads": HEADS, **options})


@pytest.mark.parametrize("name", ["linformer", "nystromformer", "reformer", "agent", "flatten"])
def test_a_size_that_does_not_fit_is_refused(name):
    with pytest.raises(ValueError, match="size must be None with sequence=True"):
        sequences(name)(tokens(35), (7, 5))
    if name in IMAGES:
        with pytest.raises(ValueError, match=r"size must be \(H, W\)"):
            images(name)(tokens(35))
        with pytest.raises(ValueError, match="at most the 35 tokens given"):
            images(name)(tokens(35), (7, 6))


def test_an_attention_without_cross_attention_says_so():
    with pytest.raises(ValueError, match="context: NystromformerAttention has no cross-attention"):
        images("nystromformer")(tokens(35), (7, 5), context=tokens(35))
