"""Landmark samplers against torch's own pooling and convolution, at sizes that divide and that do not."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from softfree.layers.landmarks import (
    SAMPLERS,
    AverageLandmarks,
    ConvLandmarks,
    FirstLandmarks,
    LandmarkSpec,
    RandomLandmarks,
    SpreadLandmarks,
    create_sampler,
)

HEADS, CHANNELS = 2, 4
SIZES = [(8, 8), (7, 5), (1, 9), (6, 1), (2, 3)]


def queries(tokens: int, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, HEADS, tokens, CHANNELS, dtype=torch.float64)


def as_maps(q: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """(batch, heads, H * W, d) as (batch * heads, d, H, W)."""
    return q.flatten(0, 1).mT.unflatten(2, size)


def as_landmarks(maps: torch.Tensor) -> torch.Tensor:
    return maps.flatten(2).mT.unflatten(0, (-1, HEADS))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("conv", ("conv", None)),
        ("average:9", ("average", 9)),
        (("average", 9), ("average", 9)),
        (["random", None], ("random", None)),
        (9, ("conv", 9)),
        (LandmarkSpec("first", 3), ("first", 3)),
    ],
)
def test_every_way_to_write_landmarks_is_understood(given, expected):
    assert LandmarkSpec.parse(given) == LandmarkSpec(*expected)


@pytest.mark.parametrize(
    "given",
    [
        "convolution",
        "conv:",
        "conv:x",
        "conv:-3",
        "conv:0",
        "conv:²",
        "",
        0,
        True,
        1.5,
        None,
        ("conv",),
        ("conv", 1.5),
        ("conv", True),
        ("conv", 1, 2),
    ],
)
def test_invalid_landmarks_are_refused_by_name(given):
    with pytest.raises(ValueError, match="landmarks"):
        LandmarkSpec.parse(given)


def test_a_stride_below_one_is_refused():
    with pytest.raises(ValueError, match="stride must be >= 1, got 0"):
        create_sampler("conv", CHANNELS, 0)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("stride", [1, 2, 3, 8])
def test_average_landmarks_are_average_pooling(size, stride):
    q = queries(size[0] * size[1])
    landmarks, mask = AverageLandmarks(stride)(q, size)
    pooled = F.avg_pool2d(as_maps(q, size), stride, ceil_mode=True, count_include_pad=False)
    assert mask is None
    torch.testing.assert_close(landmarks, as_landmarks(pooled))


@pytest.mark.parametrize("size", [(8, 8), (7, 5), (9, 4), (3, 3)])
@pytest.mark.parametrize(("count", "grid"), [(9, (3, 3)), (8, (2, 4)), (1, (1, 1))])
def test_a_fixed_count_is_adaptive_pooling_of_the_windows(size, count, grid):
    q = queries(size[0] * size[1])
    landmarks, _ = AverageLandmarks(1, count)(q, size)
    grid = (min(grid[0], size[0]), min(grid[1], size[1]))
    pooled = F.adaptive_avg_pool2d(as_maps(q, size), grid)
    assert landmarks.shape[2] <= count
    torch.testing.assert_close(landmarks, as_landmarks(pooled))


def test_a_fixed_count_pools_what_the_stride_leaves():
    q = queries(12 * 10)
    landmarks, _ = AverageLandmarks(2, 9)(q, (12, 10))
    pooled = F.adaptive_avg_pool2d(F.avg_pool2d(as_maps(q, (12, 10)), 2), (3, 3))
    torch.testing.assert_close(landmarks, as_landmarks(pooled))


@pytest.mark.parametrize("size", [(1, 40), (40, 1), (2, 30), (13, 11)])
@pytest.mark.parametrize("sampler", ["conv", "average"])
def test_there_are_never_more_landmarks_than_the_count(size, sampler):
    q = queries(size[0] * size[1]).float()
    landmarks, _ = create_sampler((sampler, 7), CHANNELS, 2)(q, size)
    assert 1 <= landmarks.shape[2] <= 7


@pytest.mark.parametrize(
    ("size", "stride", "prefix"),
    [((14, 20), 2, 0), ((9, 7), 1, 1), ((1, 40), 4, 0), ((4, 4), 4, 2)],
)
def test_pooling_is_a_product_with_one_matrix(size, stride, prefix):
    sampler = AverageLandmarks(stride, count=12)
    tokens = prefix + size[0] * size[1]
    q = torch.randn(2, 3, tokens, 8)
    grid, window, pooling = sampler.windows_and_pooling(q[:, 0], size)
    every_window = sampler.reduce(q[:, :, tokens - grid[0] * grid[1] :], None, grid, window)
    found = every_window if pooling is None else pooling @ every_window
    torch.testing.assert_close(found, sampler(q, size)[0])


def test_a_pooling_matrix_made_in_inference_serves_in_training():
    sampler = AverageLandmarks(1, count=4)
    with torch.inference_mode():
        sampler.windows_and_pooling(torch.empty(1, 31 * 17, 2), (31, 17))
    with FakeTensorMode():  # and one without numbers serves nobody else
        sampler.windows_and_pooling(torch.empty(1, 30 * 17, 2), (30, 17))
    _, _, pooling = sampler.windows_and_pooling(torch.empty(1, 30 * 17, 2), (30, 17))
    assert type(pooling) is torch.Tensor
    _, _, pooling = sampler.windows_and_pooling(torch.empty(1, 31 * 17, 2), (31, 17))
    tokens = torch.randn(31 * 17, 2, requires_grad=True)
    (pooling @ tokens).sum().backward()
    assert tokens.grad.abs().sum() > 0


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_conv_landmarks_are_convolution_norm_and_gelu_per_head(size, stride):
    q = queries(size[0] * size[1])
    sampler = ConvLandmarks(CHANNELS, stride).double()
    torch.nn.init.normal_(sampler.norm.weight)
    torch.nn.init.normal_(sampler.norm.bias)
    scale = CHANNELS**-0.25
    pad = (0, -size[1] % stride, 0, -size[0] % stride)
    convolved = F.conv2d(F.pad(as_maps(q * scale, size), pad), sampler.weight, stride=stride)
    normed = F.layer_norm(
        as_landmarks(convolved), (CHANNELS,), sampler.norm.weight, sampler.norm.bias, 1e-5
    )
    landmarks, mask = sampler(q, size)
    assert mask is None
    torch.testing.assert_close(landmarks, F.gelu(normed) / scale)


def test_the_norm_of_conv_landmarks_may_be_hooked_or_replaced():
    class Doubled(torch.nn.LayerNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    sampler = ConvLandmarks(CHANNELS, 2).double()
    q, calls = queries(16), []
    before = sampler(q, (4, 4))[0]
    handle = sampler.norm.register_forward_hook(lambda *_: calls.append(1))
    assert torch.equal(sampler(q, (4, 4))[0], before) and calls
    handle.remove()
    sampler.norm = Doubled(CHANNELS).double()
    assert not torch.allclose(sampler(q, (4, 4))[0], before)


def test_conv_landmarks_of_a_sequence_are_a_convolution_along_it():
    q = queries(11)
    sampler = ConvLandmarks(CHANNELS, 4, sequence=True).double()
    scale = CHANNELS**-0.25
    padded = F.pad(q.flatten(0, 1).mT * scale, (0, 1))
    convolved = as_landmarks(F.conv1d(padded, sampler.weight, stride=4))
    expected = F.gelu(F.layer_norm(convolved, (CHANNELS,), eps=1e-5)) / scale
    torch.testing.assert_close(sampler(q, None)[0], expected)


def test_average_landmarks_of_a_sequence_are_means_of_stretches():
    q = queries(10)
    landmarks, _ = AverageLandmarks(4)(q, None)
    expected = torch.stack([q[:, :, :4].mean(2), q[:, :, 4:8].mean(2), q[:, :, 8:].mean(2)], 2)
    torch.testing.assert_close(landmarks, expected)


@pytest.mark.parametrize("sampler", ["conv", "average"])
def test_the_class_token_is_a_landmark_where_windows_are_single_tokens(sampler):
    q = queries(1 + 6)
    build = create_sampler(sampler, CHANNELS, 1).double()
    landmarks, _ = build(q, (2, 3))
    assert landmarks.shape[2] == 7
    alone, _ = build(q[:, :, :1], (1, 1))
    torch.testing.assert_close(landmarks[:, :, :1], alone)


@pytest.mark.parametrize("sampler", ["conv", "average"])
def test_the_class_token_touches_no_landmark_of_larger_windows(sampler):
    q = queries(1 + 12)
    build = create_sampler(sampler, CHANNELS, 2).double()
    with_token, _ = build(q, (4, 3))
    without, _ = build(q[:, :, 1:], (4, 3))
    assert torch.equal(with_token, without)


def test_first_landmarks_are_the_first_tokens():
    q = queries(12)
    landmarks, mask = FirstLandmarks(5)(q, (4, 3))
    assert mask is None
    assert torch.equal(landmarks, q[:, :, :5])


@pytest.mark.parametrize("tokens", [5, 6, 7, 9, 49, 1000])
def test_random_landmarks_are_different_tokens_in_training_and_evaluation(tokens):
    sampler = RandomLandmarks(5)
    for training in (False, True):
        sampler.train(training)
        for _ in range(50):
            chosen = sampler.choose(tokens, 5, torch.device("cpu"))
            assert len(set(chosen.tolist())) == 5
            assert chosen.min() >= 0 and chosen.max() < tokens


def test_random_landmarks_stay_inside_where_the_draw_is_as_near_to_one_as_floats_allow():
    sampler = RandomLandmarks(49).eval()
    sampler.fixed.fill_(1 - 2**-24)
    assert sampler.choose(3136, 49, torch.device("cpu")).max() == 3135


def test_random_landmarks_repeat_in_evaluation_and_are_fresh_in_training():
    q = queries(400)
    sampler = RandomLandmarks(9).eval()
    assert torch.equal(sampler(q, None)[0], sampler(q, None)[0])
    assert torch.equal(sampler(q, None)[0], RandomLandmarks(9).eval()(q, None)[0])
    sampler.train()
    assert not torch.equal(sampler(q, None)[0], sampler(q, None)[0])


def test_random_landmarks_reach_every_token():
    sampler = RandomLandmarks(3)
    seen = {i for _ in range(300) for i in sampler.choose(10, 3, torch.device("cpu")).tolist()}
    assert seen == set(range(10))


@pytest.mark.parametrize("sampler", ["random", "first", "spread"])
def test_more_landmarks_than_tokens_are_refused_with_what_would_work(sampler):
    build = create_sampler((sampler, 10), CHANNELS, 1)
    with pytest.raises(ValueError, match=r"10 of the tokens were asked for.*only 6.*at most 6"):
        build(queries(6), (2, 3))


@pytest.mark.parametrize("sampler", ["random", "first", "spread"])
def test_a_lenient_sampler_takes_all_tokens_there_are(sampler):
    q = queries(6)
    landmarks, _ = create_sampler((sampler, 10), CHANNELS, 1, strict=False)(q, (2, 3))
    # Spread-out tokens come in the order of their choice.
    assert torch.equal(landmarks.sort(2).values, q.sort(2).values)


@pytest.mark.parametrize(
    "spec", ["average", "average:3", "conv", "conv:3", "first:5", "random:5", "spread:5"]
)
@pytest.mark.parametrize("size", [(7, 5), None])
def test_masked_tokens_do_not_matter_to_the_landmarks(spec, size):
    sampler = create_sampler(spec, CHANNELS, 2, sequence=size is None).double().eval()
    q = queries(35)
    mask = torch.rand(2, 35) > 0.4
    mask[:, :8] = False
    dirty = torch.where(mask[:, None, :, None], q, torch.nan)
    landmarks, landmark_mask = sampler(q, size, mask)
    others, other_mask = sampler(dirty, size, mask)
    assert torch.equal(landmark_mask, other_mask)
    real = landmark_mask[:, None, :, None].expand_as(landmarks)
    assert landmark_mask.any(1).all()
    torch.testing.assert_close(landmarks[real], others[real])


def test_a_window_without_real_tokens_gives_no_landmark():
    mask = torch.tensor([[True] * 5 + [False] * 7])
    _, landmark_mask = AverageLandmarks(4)(queries(12, batch=1), None, mask)
    assert landmark_mask.tolist() == [[True, True, False]]


@pytest.mark.parametrize("spec", ["first:5", "random:5", "spread:5"])
@pytest.mark.parametrize("real", [1, 3, 5, 6, 17])
def test_tokens_are_chosen_among_the_real_ones_as_if_there_were_no_others(spec, real):
    sampler = create_sampler(spec, CHANNELS, 1, strict=False).double().eval()
    q = queries(20)
    mask = torch.zeros(2, 20, dtype=torch.bool)
    mask[0, torch.randperm(20)[:real]] = True
    landmarks, landmark_mask = sampler(q, None, mask)
    alone, _ = sampler(q[:1, :, mask[0]], None)
    assert torch.equal(landmarks[:1, :, landmark_mask[0]], alone)
    assert not landmark_mask[1].any()


@pytest.mark.parametrize(
    "spec", ["average", "average:3", "conv", "conv:3", "first:3", "random:3", "spread:3"]
)
@pytest.mark.parametrize("size", [(7, 5), None])
def test_a_mask_of_real_tokens_alone_changes_nothing(spec, size):
    sampler = create_sampler(spec, CHANNELS, 2, sequence=size is None).double().eval()
    q = queries(35)
    landmarks, landmark_mask = sampler(q, size, torch.ones(2, 35, dtype=torch.bool))
    assert landmark_mask.all()
    torch.testing.assert_close(landmarks, sampler(q, size)[0])


@pytest.mark.parametrize("spec", ["average:3", "average:9", "conv:3", "conv:9"])
@pytest.mark.parametrize("real", [1, 7, 16, 30])
def test_padding_a_sequence_does_not_change_its_fixed_number_of_landmarks(spec, real):
    sampler = create_sampler(spec, CHANNELS, 2, sequence=True).double().eval()
    q = queries(31)
    mask = (torch.arange(31) < real).expand(2, -1)
    landmarks, landmark_mask = sampler(q, None, mask)
    alone, _ = sampler(q[:, :, :real], None)
    assert landmark_mask.sum(1).tolist() == [alone.shape[2]] * 2
    torch.testing.assert_close(landmarks[:, :, : alone.shape[2]], alone)


@pytest.mark.parametrize("spec", [*SAMPLERS, "conv:4", "average:4"])
def test_landmarks_keep_the_gradient_of_the_tokens(spec):
    spec = f"{spec}:4" if spec in ("random", "first", "spread") else spec
    q = queries(35).requires_grad_()
    landmarks, _ = create_sampler(spec, CHANNELS, 2).double()(q, (7, 5))
    (grad,) = torch.autograd.grad(landmarks.square().sum(), q)
    assert grad.abs().sum() > 0


@pytest.mark.parametrize("count", [1, 4, 11])
def test_each_spread_landmark_is_the_farthest_token_from_those_before_it(count):
    q = queries(20)
    landmarks, mask = SpreadLandmarks(count)(q, None)
    assert mask is None and landmarks.shape == (2, HEADS, count, CHANNELS)
    centre = (q - q.mean(2, keepdim=True)).norm(dim=-1)
    first = q.take_along_dim(centre.argmax(2)[..., None, None], 2)
    torch.testing.assert_close(landmarks[:, :, :1], first)
    for number in range(1, count):
        away = torch.cdist(q, landmarks[:, :, :number]).amin(3).amax(2)
        found = torch.cdist(landmarks[:, :, number : number + 1], landmarks[:, :, :number])
        torch.testing.assert_close(found.amin((2, 3)), away)


def test_spread_landmarks_take_equal_tokens_last_and_no_token_twice():
    values = queries(12)
    q = values[:, :, torch.arange(24) % 12]
    landmarks, _ = SpreadLandmarks(12)(q, None)
    torch.testing.assert_close(landmarks.sort(2).values, values.sort(2).values)
    every, _ = SpreadLandmarks(24)(q, None)
    torch.testing.assert_close(every.sort(2).values, q.sort(2).values)


def test_spread_landmarks_do_not_depend_on_the_order_nor_on_training():
    q = queries(30)
    sampler = SpreadLandmarks(7)
    landmarks, _ = sampler(q, None)
    torch.testing.assert_close(sampler(q[:, :, torch.randperm(30)], None)[0], landmarks)
    torch.testing.assert_close(sampler.eval()(q, None)[0], landmarks)


@pytest.mark.parametrize("masked", [False, True])
def test_spread_landmarks_compile_as_one_graph(masked):
    torch.compiler.reset()
    q, mask = queries(30), torch.rand(2, 30) > 0.3 if masked else None
    sampler = SpreadLandmarks(5)
    compiled = torch.compile(sampler, fullgraph=True, backend="aot_eager")
    found, present = compiled(q, None, mask)
    expected, expected_mask = sampler(q, None, mask)
    torch.testing.assert_close(found, expected)
    assert present is None if mask is None else torch.equal(present, expected_mask)


def test_conv_landmarks_of_images_and_sequences_are_not_mistaken_for_each_other():
    with pytest.raises(ValueError, match="built for images"):
        ConvLandmarks(CHANNELS, 2).double()(queries(8), None)
    with pytest.raises(ValueError, match="built for sequences"):
        ConvLandmarks(CHANNELS, 2, sequence=True).double()(queries(8), (2, 4))
