"""SoftAttention against the operator and torch's own layers; masks, sizes, sequences, cross-attention."""

import copy

import pytest
import torch
import torch.nn.functional as F

import softfree
from softfree.layers import SoftmaxAttention
from softfree.layers.attention import ValueConv
from softfree.layers.landmarks import create_sampler
from softfree.ops import image_attention

DIM, HEADS = 12, 3
SPECS = ["conv", "average", "random:9", "first:9", "conv:9", ("average", 9), 9]
SIZES = [(8, 8), (7, 5), (9, 1), (3, 4)]


def layer(**kwargs) -> softfree.SoftAttention:
    return softfree.SoftAttention(DIM, HEADS, **{"stride": 2, **kwargs}).double().eval()


def tokens(count: int, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, count, DIM, dtype=torch.float64)


def share(attention: softfree.SoftAttention, landmarks: int, windows: int) -> float:
    """What the operator's result is multiplied by, for samplers that pool windows."""
    return landmarks / windows if hasattr(attention.sampler, "stride") else 1.0


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(2, (HEADS, -1)).transpose(1, 2)


def enlarge(x: torch.Tensor, size: tuple[int, int], times: int) -> torch.Tensor:
    """Each token of an image ``times`` x ``times``."""
    x = x.unflatten(1, size).repeat_interleave(times, 1).repeat_interleave(times, 2)
    return x.flatten(1, 2)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize("normalize", [True, False])
def test_an_image_layer_is_the_operator_between_its_projections(spec, size, prefix, normalize):
    attention = layer(landmarks=spec, normalize=normalize)
    x = tokens(prefix + size[0] * size[1])
    q, v = attention.qv(x).chunk(2, -1)
    landmarks, _ = attention.sampler(heads(q), size)
    out = softfree.soft_attention(
        heads(q), None, heads(v), landmarks, normalize=normalize, backend="reference"
    )
    windows = -(-size[0] // 2) * -(-size[1] // 2)
    out = out * share(attention, landmarks.shape[2], windows)
    expected = attention.proj(out.transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(x, size), expected)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("length", [9, 10, 31])
def test_a_sequence_layer_takes_any_length(spec, length):
    attention = layer(landmarks=spec, sequence=True, value_conv=3)
    x = tokens(length)
    out = attention(x)
    assert out.shape == x.shape
    assert out.isfinite().all()
    torch.testing.assert_close(attention(x[:1]), out[:1])


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("sequence", [False, True])
def test_every_parameter_and_the_input_get_a_gradient(spec, sequence):
    attention = layer(landmarks=spec, sequence=sequence, value_conv=3)
    x = tokens(35).requires_grad_()
    attention(x, None if sequence else (7, 5)).square().sum().backward()
    assert x.grad.abs().sum() > 0
    for name, parameter in attention.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("size", [(8, 8), (7, 5)])
@pytest.mark.parametrize("kernel_size", [3, 5])
def test_the_value_convolution_is_the_grouped_one_of_the_release(size, kernel_size):
    """There V is permuted so that heads are the channels of a convolution with one group per head."""
    conv = ValueConv(HEADS, kernel_size).double()
    v = tokens(size[0] * size[1])
    permuted = heads(v).transpose(2, 3).unflatten(3, size).transpose(1, 2)
    convolved = F.conv2d(
        permuted.flatten(0, 1), conv.weight, padding=kernel_size // 2, groups=HEADS
    )
    expected = convolved.unflatten(0, (2, -1)).permute(0, 3, 4, 2, 1).flatten(3).flatten(1, 2)
    torch.testing.assert_close(conv(v, size), expected)


def test_the_value_convolution_leaves_the_class_token_alone():
    conv = ValueConv(HEADS, 3).double()
    v = tokens(1 + 35)
    out = conv(v, (7, 5))
    assert torch.equal(out[:, 0], v[:, 0])
    torch.testing.assert_close(out[:, 1:], conv(v[:, 1:], (7, 5)))


@pytest.mark.parametrize("prefix", [0, 1])
def test_the_value_convolution_is_added_to_the_operator(prefix):
    attention = layer(value_conv=3)
    x = tokens(prefix + 35)
    v = attention.qv(x).chunk(2, -1)[1]
    convolved = F.linear(attention.value_conv(v, (7, 5)), attention.proj.weight)
    with_conv = attention(x, (7, 5))
    attention.value_conv = None
    torch.testing.assert_close(with_conv, attention(x, (7, 5)) + convolved)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("size", [(7, 5), None])
@pytest.mark.parametrize("prefix", [0, 1])
def test_what_stands_at_masked_tokens_does_not_matter_to_real_ones(spec, size, prefix):
    if size is None and prefix:
        pytest.skip("sequences have no prefix tokens")
    attention = layer(landmarks=spec, sequence=size is None, value_conv=3)
    x = tokens(prefix + 35)
    mask = torch.rand(x.shape[:2]) > 0.5
    expected = attention(x, size, mask)[mask]
    assert expected.isfinite().all()
    for filling in (torch.nan, torch.inf, 1e6):
        other = torch.where(mask[..., None], x, filling)
        torch.testing.assert_close(attention(other, size, mask)[mask], expected)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(
    ("landmarks", "stride", "length"),
    [
        ("average", 4, 16),
        ("average", 4, 18),
        ("average", 1, 5),
        # As many landmarks as windows, or fewer, so that both lengths have the same windows.
        ("average:6", 4, 18),
        ("average:3", 4, 18),
        ("average:2", 1, 5),
        ("conv:3", 4, 18),
        ("first:9", 4, 18),
        ("random:9", 4, 18),
    ],
)
def test_a_padded_sample_has_the_output_of_the_unpadded_one(landmarks, stride, length, normalize):
    attention = layer(
        landmarks=landmarks, stride=stride, sequence=True, value_conv=3, normalize=normalize
    )
    x = tokens(24 if stride > 1 else 6)
    mask = torch.arange(x.shape[1]) < torch.tensor([[length], [x.shape[1]]])
    out = attention(x, mask=mask)
    torch.testing.assert_close(out[:1, :length], attention(x[:1, :length]))
    torch.testing.assert_close(out[1:], attention(x[1:]))


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_with_a_fixed_count_an_enlarged_image_has_the_output_of_the_image(
    normalize, stride, masked
):
    attention = layer(landmarks="average:16", stride=stride, normalize=normalize)
    size = (4 * stride, 4 * stride)
    x = tokens(size[0] * size[1])
    mask = torch.ones(x.shape[:2], dtype=torch.bool)
    mask[0, : 2 * size[1]] = not masked
    expected = attention(x, size, mask)
    for times in (2, 3):
        large = (times * size[0], times * size[1])
        out = attention(enlarge(x, size, times), large, enlarge(mask, size, times))
        torch.testing.assert_close(out, enlarge(expected, size, times))


def test_what_is_pooled_keeps_its_dtype_under_a_mask():
    attention = layer(landmarks="average:4").bfloat16()
    x = tokens(64).bfloat16()
    out = attention(x, (8, 8), torch.ones(2, 64, dtype=torch.bool))
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, attention(x, (8, 8)), atol=0.02, rtol=0.02)


@pytest.mark.parametrize("spec", ["average", "average:4"])
def test_a_sample_without_real_tokens_disturbs_nobody(spec):
    attention = layer(landmarks=spec, sequence=True)
    x = tokens(12)
    mask = torch.tensor([[True] * 12, [False] * 12])
    out = attention(x, mask=mask)
    assert out.isfinite().all()
    torch.testing.assert_close(out[:1], attention(x[:1]))


@pytest.mark.parametrize("spec", SPECS)
def test_cross_attention_takes_keys_values_and_landmarks_from_the_context(spec):
    attention = layer(landmarks=spec, value_conv=3)
    x, context = tokens(6), tokens(35)
    mask = torch.rand(2, 35) > 0.3
    k, v = attention.qv(context).chunk(2, -1)
    q = attention.qv(x).chunk(2, -1)[0]
    landmarks, landmark_mask = attention.sampler(heads(k), (7, 5), mask)
    out = softfree.soft_attention(
        heads(q),
        heads(k),
        heads(v),
        landmarks,
        key_mask=mask,
        landmark_mask=landmark_mask,
        backend="reference",
    )
    real_windows = F.max_pool2d(mask.unflatten(1, (7, 5)).double(), 2, ceil_mode=True).sum((1, 2))
    parts = [share(attention, *n) for n in zip(landmark_mask.sum(1), real_windows, strict=True)]
    out = out * torch.tensor(parts, dtype=torch.float64)[:, None, None, None]
    expected = attention.proj(out.transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(x, (7, 5), mask, context), expected)


def test_attending_to_itself_as_context_is_self_attention():
    attention = layer(landmarks="average", sequence=True, qv_bias=False)
    x = tokens(20)
    torch.testing.assert_close(attention(x, context=x), attention(x))


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_the_settings_reach_the_operator(backend):
    x = tokens(35)
    base = layer(backend=backend)
    expected = base(x, (7, 5))
    for change in (
        dict(iterations=2),
        dict(start="scaled"),
        dict(ridge=0.5),
        dict(normalize=False),
        dict(inverse="solve", ridge=0.1),
        dict(inverse="solve", ridge=0.1, order=1),
    ):
        other = copy.deepcopy(base)
        for name, value in change.items():
            setattr(other, name, value)
        changed = layer(backend=backend, **change)
        changed.load_state_dict(base.state_dict())
        assert not torch.allclose(changed(x, (7, 5)), expected), change
        assert torch.equal(changed(x, (7, 5)), other(x, (7, 5)))


def test_gains_multiply_the_initial_weights_of_queries_output_and_landmarks():
    def build(**options):
        torch.manual_seed(0)
        return layer(**options).state_dict()

    plain, gained = build(), build(query_gain=2, output_gain=4, landmark_gain=0.25)
    plain["qv.weight"][:DIM] *= 2
    plain["proj.weight"] *= 4
    plain["sampler.norm.weight"] *= 0.25
    torch.testing.assert_close(gained, plain, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (dict(dim=10, num_heads=3), "dim=10, num_heads=3"),
        (dict(dim=10, num_heads=0), "num_heads=0"),
        (dict(dim=0, num_heads=1), "dim=0"),
        (dict(dim=8, num_heads=2, value_conv=4), "value_conv must be 0 or an odd number, got 4"),
        (dict(dim=8, num_heads=2, value_conv=-1), "value_conv"),
        (dict(dim=8, num_heads=2, stride=0), "stride"),
        (dict(dim=8, num_heads=2, landmarks="pool"), "sampler must be one of.*'pool'"),
        (dict(dim=8, num_heads=2, backend="cuda"), "backend must be one of.*'cuda'"),
        (dict(dim=8, num_heads=2, start="warm"), "start must be one of.*'warm'"),
        (dict(dim=8, num_heads=2, iterations=-1), "iterations"),
        (dict(dim=8, num_heads=2, ridge=-0.1), "ridge"),
        (dict(dim=8, num_heads=2, query_gain=0), "query_gain must be > 0, got 0"),
        (dict(dim=8, num_heads=2, output_gain=-1), "output_gain must be > 0, got -1"),
        (dict(dim=8, num_heads=2, landmark_gain=0), "landmark_gain must be > 0, got 0"),
        (
            dict(dim=8, num_heads=2, landmarks="average", landmark_gain=0.5),
            "landmark_gain is for convolution landmarks, got 0.5 with landmarks='average'",
        ),
    ],
)
def test_invalid_settings_are_refused_when_the_layer_is_built(kwargs, message):
    with pytest.raises(ValueError, match=message):
        softfree.SoftAttention(**kwargs)


@pytest.mark.parametrize(
    ("shape", "size", "message"),
    [
        ((2, 35), (7, 5), "x must have shape"),
        ((2, 35, 11), (7, 5), r"x must have shape \(batch, tokens, 12\).*11"),
        ((2, 0, 12), (1, 1), "at least one token"),
        ((2, 35, 12), None, "sequence=True"),
        ((2, 35, 12), (7, 6), r"35 tokens given, got \(7, 6\)"),
        ((2, 35, 12), (0, 5), r"got \(0, 5\)"),
        ((2, 35, 12), (-7, -5), r"got \(-7, -5\)"),
        ((2, 35, 12), (35,), r"size must be \(H, W\)"),
    ],
)
def test_tokens_and_sizes_that_do_not_fit_are_refused(shape, size, message):
    with pytest.raises(ValueError, match=message):
        layer()(torch.randn(shape, dtype=torch.float64), size)


def test_a_size_given_to_a_sequence_layer_is_refused():
    with pytest.raises(ValueError, match="size must be None with sequence=True"):
        layer(landmarks="average", sequence=True)(tokens(35), (7, 5))


@pytest.mark.parametrize("attention", [layer(), SoftmaxAttention(DIM, HEADS).double()])
def test_masks_and_contexts_that_do_not_fit_are_refused(attention):
    x, context = tokens(35), tokens(20)
    for mask in (torch.full((2, 35), torch.nan), torch.ones(2, 35, dtype=torch.int64), [[True]]):
        with pytest.raises(TypeError, match="mask must be a bool tensor"):
            attention(x, (7, 5), mask)
    with pytest.raises(ValueError, match=r"mask must have shape \(2, 35\).*\(2, 36\)"):
        attention(x, (7, 5), torch.ones(2, 36, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"mask must have shape \(2, 20\)"):
        attention(x, (4, 5), torch.ones(2, 35, dtype=torch.bool), context)
    with pytest.raises(ValueError, match="context must have x's batch 2, got 1"):
        attention(x, (4, 5), None, context[:1])
    with pytest.raises(ValueError, match="context must have shape"):
        attention(x, (4, 5), None, context[..., :3])
    with pytest.raises(TypeError, match="x must be a tensor, got list"):
        attention([1.0], (4, 5))


def test_more_landmarks_than_tokens_are_refused():
    with pytest.raises(ValueError, match="50 of the tokens"):
        layer(landmarks="first:50")(tokens(35), (7, 5))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_layers_stay_close_to_float64(spec, dtype):
    attention = layer(landmarks=spec, value_conv=3)
    x = tokens(35).to(dtype)
    expected = attention(x.double(), (7, 5))
    out = copy.deepcopy(attention).to(dtype)(x, (7, 5))
    assert out.dtype == dtype
    assert (out.double() - expected).norm() / expected.norm() < 0.1


def test_all_between_the_projections_is_one_operator_where_nothing_needs_its_parts(monkeypatch):
    monkeypatch.setattr(image_attention, "fits", lambda *_: True)

    def is_one(change=lambda layer: None, **options):
        layer = softfree.SoftAttention(32, 2, stride=2, **{"value_conv": 3, **options})
        change(layer)
        return layer._is_one_operator(torch.empty(1, 4, 32))

    assert is_one()
    assert is_one(backend="triton", normalize=False)
    assert not is_one(backend="torch")
    assert is_one(value_conv=0)
    assert is_one(landmarks="conv:4")
    assert not is_one(landmarks="average")
    assert not is_one(lambda layer: layer.sampler.register_forward_hook(print))
    assert not is_one(lambda layer: layer.value_conv.register_forward_hook(print))
    assert not is_one(lambda layer: setattr(layer.sampler, "norm", torch.nn.Identity()))
    without_bias = torch.nn.LayerNorm(16, bias=False)
    assert not is_one(lambda layer: setattr(layer.sampler, "norm", without_bias))
    assert not is_one(lambda layer: layer.proj.register_forward_hook(print))
    assert not is_one(lambda layer: layer.qv.requires_grad_(False))
    with torch.no_grad():
        assert is_one(lambda layer: layer.qv.requires_grad_(False))


def test_softmax_attention_is_torchs_multi_head_attention():
    attention = SoftmaxAttention(DIM, HEADS).double()
    theirs = torch.nn.MultiheadAttention(DIM, HEADS, batch_first=True).double()
    theirs.in_proj_weight.data, theirs.in_proj_bias.data = attention.qkv.weight, attention.qkv.bias
    theirs.out_proj.load_state_dict(attention.proj.state_dict())
    x, context = tokens(10), tokens(7)
    mask = torch.rand(2, 7) > 0.3
    mask[:, 0] = True
    torch.testing.assert_close(attention(x), theirs(x, x, x)[0])
    expected = theirs(x, context, context, key_padding_mask=~mask)[0]
    torch.testing.assert_close(attention(x, None, mask, context), expected)


def test_a_layer_says_what_it_is():
    assert "SOFT++, heads=3" in repr(layer())
    assert "SOFT, heads=3" in repr(layer(normalize=False))
    assert "stride=2, count=9" in repr(create_sampler("average:9", 4, 2))


@pytest.mark.parametrize("size", [(4, 5), None])
def test_with_all_tokens_as_landmarks_and_a_converged_inverse_soft_is_gaussian_attention(size):
    attention = layer(
        landmarks="average", stride=1, sequence=size is None, normalize=False, iterations=60
    )
    # Tokens further apart: otherwise the kernel matrix is nearly singular.
    attention.qv.weight.data[:DIM] *= 5
    x = tokens(20)
    q, v = (heads(t) for t in attention.qv(x).chunk(2, -1))
    distances = (q[..., :, None, :] - q[..., None, :, :]).square().sum(-1)
    out = torch.exp(-distances / (2 * (DIM // HEADS) ** 0.5)) @ v
    expected = attention.proj(out.transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(x, size), expected, atol=1e-8, rtol=1e-8)


def normed(q: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(q, q.shape[-1:])


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("size", [(7, 5), None])
def test_normed_queries_and_landmarks_of_them_are_divided_by_the_bandwidth(spec, size):
    attention = layer(landmarks=spec, sequence=size is None, query_norm=True, bandwidth="learned")
    torch.nn.init.uniform_(attention.log_bandwidth, -1, 1)
    x = tokens(35 if size is None else 1 + 35)
    q, v = map(heads, attention.qv(x).chunk(2, -1))
    width = attention.log_bandwidth.exp()[:, None, None]
    landmarks, _ = attention.sampler(normed(q), size)
    out = softfree.soft_attention(normed(q) / width, None, v, landmarks / width)
    out = out * share(attention, landmarks.shape[2], 18 if size is None else 12)
    expected = attention.proj(out.transpose(1, 2).flatten(2))
    # The norm of convolution landmarks sees queries that are divided already, which matters to its eps.
    exact = {} if "conv" not in str(spec) and spec != 9 else dict(rtol=0, atol=1e-2)
    torch.testing.assert_close(attention(x, size), expected, **exact)


@pytest.mark.parametrize("spec", ["conv", "average", "average:9"])
def test_normed_landmarks_lie_on_the_sphere_of_the_queries(spec):
    attention = layer(landmarks=spec, query_norm=True, bandwidth=0.5, landmark_norm=True)
    q = 5 * heads(tokens(35))
    keys, (landmarks, _) = attention.keys_and_landmarks(q, (7, 5))
    expected = normed(attention.sampler(normed(q), (7, 5))[0]) / 0.5
    torch.testing.assert_close(landmarks, expected, rtol=1e-3, atol=1e-3)
    radius = torch.full_like(keys[..., 0], 2 * attention.head_dim**0.5)
    torch.testing.assert_close(keys.norm(dim=-1), radius, rtol=1e-3, atol=0)
    torch.testing.assert_close(
        landmarks.norm(dim=-1), radius[:, :, : landmarks.shape[2]], rtol=1e-2, atol=0
    )
    with pytest.raises(ValueError, match="landmark_norm is for normed queries"):
        layer(landmark_norm=True)


def test_a_norm_makes_the_size_of_the_queries_irrelevant():
    attention = layer(landmarks="average", query_norm=True)
    x = tokens(35)
    expected = attention(x, (7, 5))
    with torch.no_grad():
        attention.qv.weight[:DIM] *= 30
        attention.qv.bias[:DIM] *= 30
    torch.testing.assert_close(attention(x, (7, 5)), expected, rtol=0, atol=1e-3)


def test_a_bandwidth_is_a_number_or_learned_from_one():
    x = tokens(35)
    torch.manual_seed(0)
    fixed = layer(query_norm=True, bandwidth=1.4)
    torch.manual_seed(0)
    learned = layer(query_norm=True, bandwidth="learned:1.4")
    assert set(learned.state_dict()) - set(fixed.state_dict()) == {"log_bandwidth"}
    torch.testing.assert_close(learned(x, (7, 5)), fixed(x, (7, 5)))
    learned(x, (7, 5)).square().sum().backward()
    assert (learned.log_bandwidth.grad != 0).all()
    assert "query_norm, bandwidth=1.4, learned" in repr(learned)


def test_without_a_norm_a_bandwidth_is_the_scale_of_the_kernel():
    attention = layer(landmarks="average", bandwidth=2)
    x = tokens(35)
    q, v = map(heads, attention.qv(x).chunk(2, -1))
    landmarks, _ = attention.sampler(q, (7, 5))
    scale = attention.head_dim**-0.5 / 4
    out = softfree.soft_attention(q, None, v, landmarks, scale=scale)
    torch.testing.assert_close(attention(x, (7, 5)), attention.proj(out.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("size", [(7, 5), None])
def test_normed_queries_attend_to_a_context_as_to_themselves(size):
    attention = layer(
        landmarks="average", sequence=size is None, query_norm=True, bandwidth="learned:0.7"
    )
    x = tokens(35)
    mask = torch.rand(2, 35) > 0.3
    torch.testing.assert_close(
        attention(x, size, mask, context=x)[mask], attention(x, size, mask)[mask]
    )
    assert attention(tokens(4), size, context=x).shape == (2, 4, DIM)


@pytest.mark.parametrize("size", [(4, 3), None])
def test_gradients_of_normed_queries_are_the_derivatives(size):
    attention = layer(
        landmarks="average", sequence=size is None, query_norm=True, bandwidth="learned",
        inverse="solve",
    )  # fmt: skip
    x, width = tokens(12, batch=1).requires_grad_(), attention.log_bandwidth
    mask = torch.ones(1, 12, dtype=torch.bool)
    mask[0, 5] = False
    assert torch.autograd.gradcheck(
        lambda x, _: attention(x, size, mask), (x, width), fast_mode=True
    )


@pytest.mark.parametrize("bandwidth", [0, -1, float("inf"), "wide", "learned:", "learned:x", True])
def test_a_bandwidth_that_is_none_is_refused(bandwidth):
    with pytest.raises(ValueError, match=r"bandwidth must be a finite number > 0, 'learned' or"):
        layer(bandwidth=bandwidth)


def test_a_context_may_have_channels_of_its_own():
    attention = layer(context_dim=5, sequence=True, query_norm=True, bandwidth="learned:0.7")
    x, context = tokens(6), torch.randn(2, 9, 5, dtype=torch.float64)
    mask = torch.arange(9) < torch.tensor([[9], [4]])
    out = attention(x, None, mask, context)
    k, v = map(heads, attention.qv(context).chunk(2, -1))
    queries, keys = (normed(each) / 0.7 for each in (heads(attention.q(x)), k))
    landmarks, landmark_mask = attention.sampler(keys, None, mask)
    landmarks = landmarks / 0.7  # the norm of convolution landmarks has undone the bandwidth
    expected = softfree.soft_attention(
        queries, keys, v, landmarks, key_mask=mask, landmark_mask=landmark_mask
    )
    torch.testing.assert_close(out, attention.proj(expected.transpose(1, 2).flatten(2)))
    out.sum().backward()
    assert all(p.grad is not None for p in attention.parameters())
    with pytest.raises(ValueError, match="context: this layer was built with context_dim"):
        attention(x)
    with pytest.raises(ValueError, match=r"context must have shape \(batch, tokens, 5\)"):
        attention(x, context=x)


def test_dropout_is_of_what_heads_attend_to_and_in_training_alone():
    attention, x = layer(dropout=0.5, sequence=True), tokens(20)
    torch.testing.assert_close(attention(x), attention(x))
    attention.train()
    assert not torch.equal(attention(x), attention(x))
    with pytest.raises(ValueError, match="dropout must lie in"):
        layer(dropout=1.0)


@pytest.mark.parametrize("sequence", [True, False])
def test_queries_keys_and_values_by_habit_get_an_error_that_names_the_context(sequence):
    x = tokens(6)
    with pytest.raises(TypeError, match="context=tokens.*MultiheadSoftAttention"):
        layer(sequence=sequence)(x, x, x)
