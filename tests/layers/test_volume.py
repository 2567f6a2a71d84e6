"""Three dimensions, (T, H, W): landmarks, value convolution and layers against plain definitions."""

import itertools
import math

import pytest
import timm
import torch
import torch.nn.functional as F

import softfree
from softfree.layers.landmarks import AverageLandmarks, create_sampler, pooled_share
from softfree.ops.value_conv import value_conv

SIZES = [(4, 4, 4), (3, 5, 2), (1, 7, 3), (2, 1, 5)]
HEADS, CHANNELS = 2, 4


def queries(size, prefix=0):
    tokens = prefix + math.prod(size)
    return torch.randn(2, HEADS, tokens, CHANNELS, dtype=torch.float64)


def windows_of(size, stride):
    """Of each window of the volume, in order, the numbers of its tokens."""
    numbers = torch.arange(math.prod(size)).view(size)
    starts = itertools.product(*(range(0, side, stride) for side in size))
    return [numbers[t : t + stride, y : y + stride, x : x + stride].flatten() for t, y, x in starts]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("prefix", [0, 2])
def test_average_landmarks_are_the_means_of_cubes(size, stride, prefix):
    q = queries(size, prefix)
    landmarks, mask = AverageLandmarks(stride)(q, size)
    means = [q[:, :, prefix + window].mean(2) for window in windows_of(size, stride)]
    if stride == 1:
        means = [*q[:, :, :prefix].unbind(2), *means]
    assert mask is None
    torch.testing.assert_close(landmarks, torch.stack(means, 2))


def test_masked_tokens_are_left_out_of_the_means():
    size = (3, 5, 2)
    q, mask = queries(size), torch.rand(2, 30, generator=torch.Generator().manual_seed(0)) > 0.5
    landmarks, present = AverageLandmarks(2)(q, size, mask)
    for number, window in enumerate(windows_of(size, 2)):
        for sample in range(2):
            real = window[mask[sample, window]]
            assert present[sample, number] == (len(real) > 0)
            if len(real):
                mean = q[sample][:, real].mean(1)
                torch.testing.assert_close(landmarks[sample, :, number], mean)


@pytest.mark.parametrize("count", [8, 30, 49])
def test_a_fixed_count_pools_adaptively_in_three_dimensions(count):
    size = (4, 6, 8)
    q = queries(size)
    sampler = AverageLandmarks(1, count)
    landmarks, _ = sampled = sampler(q, size)
    target = {8: (2, 2, 2), 30: (3, 3, 3), 49: (3, 4, 4)}[count]
    volume = q.flatten(0, 1).mT.unflatten(2, size)
    expected = F.adaptive_avg_pool3d(volume, target).flatten(2).mT.unflatten(0, (2, HEADS))
    torch.testing.assert_close(landmarks, expected)
    share = pooled_share(sampler, sampled, q.shape[2], size)
    assert share == math.prod(target) / math.prod(size)
    masked, present = sampler(q, size, torch.ones(2, q.shape[2], dtype=torch.bool))
    torch.testing.assert_close(masked, landmarks)
    assert present.all()


@pytest.mark.parametrize("size", SIZES)
def test_conv_landmarks_are_a_convolution_of_their_stride(size):
    q = queries(size)
    sampler = create_sampler("conv", CHANNELS, 2, volume=True).double()
    scale = CHANNELS**-0.25
    pad = [n for side in reversed(size) for n in (0, -side % 2)]
    volume = F.pad((q * scale).flatten(0, 1).mT.unflatten(2, size), pad)
    convolved = F.conv3d(volume, sampler.weight, stride=2).flatten(2).mT.unflatten(0, (2, HEADS))
    expected = F.gelu(F.layer_norm(convolved, (CHANNELS,), sampler.norm.weight)) / scale
    torch.testing.assert_close(sampler(q, size)[0], expected)


def test_conv_landmarks_of_another_kind_of_input_say_what_they_were_built_for():
    with pytest.raises(ValueError, match="built for images, but size is .T, H, W."):
        create_sampler("conv", CHANNELS, 2)(queries((2, 2, 2)).float(), (2, 2, 2))
    with pytest.raises(ValueError, match="built for volumes, but size is .H, W."):
        create_sampler("conv", CHANNELS, 2, volume=True)(queries((4, 2, 1)).float(), (4, 2))


@pytest.mark.parametrize("size", SIZES)
def test_the_value_convolution_is_depthwise_in_three_dimensions(size):
    v = torch.randn(2, math.prod(size), 8, dtype=torch.float64)
    weight = torch.randn(4, 1, 3, 3, 3, dtype=torch.float64)
    padded = F.pad(v.unflatten(1, size), (0, 0, 1, 1, 1, 1, 1, 1))
    expected = torch.zeros(2, *size, 8, dtype=torch.float64)
    for t, y, x in itertools.product(range(3), repeat=3):
        shifted = padded[:, t : t + size[0], y : y + size[1], x : x + size[2]]
        expected += shifted * weight[:, 0, t, y, x].repeat_interleave(2)
    torch.testing.assert_close(value_conv(v, weight, size), expected.flatten(1, 3))
    base = torch.randn_like(v)
    torch.testing.assert_close(value_conv(v, weight, size, base), base + expected.flatten(1, 3))


@pytest.mark.parametrize("spec", ["average", "average:9", "conv", "conv:9", "random:9", "first:9"])
@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("value_conv", [0, 3])
def test_a_layer_of_a_volume_is_the_operator_between_its_projections(spec, prefix, value_conv):
    size = (3, 5, 2)
    layer = softfree.SoftAttention(
        8, 2, landmarks=spec, stride=2, value_conv=value_conv, volume=True
    )
    layer = layer.double().eval()
    x = torch.randn(2, prefix + 30, 8, dtype=torch.float64)
    q, v = layer.qv(x).chunk(2, -1)
    heads, values = (t.unflatten(2, (2, 4)).transpose(1, 2) for t in (q, v))
    landmarks, mask = layer.sampler(heads, size)
    out = softfree.soft_attention(heads, None, values, landmarks, backend="reference")
    share = pooled_share(layer.sampler, (landmarks, mask), x.shape[1], size)
    out = (out * (1 if share is None else share)).transpose(1, 2).flatten(2)
    if value_conv:
        moved = value_conv_of(v[:, prefix:], layer.value_conv.weight, size)
        out = out + torch.cat([v[:, :prefix], moved], 1)
    torch.testing.assert_close(layer(x, size), layer.proj(out))


def value_conv_of(v, weight, size):
    filters = weight.repeat_interleave(v.shape[2] // weight.shape[0], 0)
    volume = v.mT.unflatten(2, size)
    return F.conv3d(volume, filters, padding="same", groups=v.shape[2]).flatten(2).mT


def test_one_frame_is_the_image_with_average_landmarks():
    torch.manual_seed(0)
    image = softfree.SoftAttention(8, 2, landmarks="average", stride=2)
    video = softfree.SoftAttention(8, 2, landmarks="average", stride=2, volume=True)
    video.load_state_dict(image.state_dict())
    x = torch.randn(2, 35, 8)
    torch.testing.assert_close(video(x, (1, 7, 5)), image(x, (7, 5)))


def test_sizes_that_do_not_fit_are_refused():
    video = softfree.SoftAttention(8, 2, landmarks="average", volume=True)
    image = softfree.SoftAttention(8, 2, landmarks="average")
    x = torch.randn(1, 8, 8)
    with pytest.raises(ValueError, match=r"size must be \(T, H, W\), got \(2, 4\)"):
        video(x, (2, 4))
    with pytest.raises(ValueError, match=r"got \(2, 2, 2\); build the layer with volume=True"):
        image(x, (2, 2, 2))
    with pytest.raises(ValueError, match=r"size must be \(T, H, W\) of at most the 8 tokens"):
        video(x, (2, 2, 3))
    with pytest.raises(ValueError, match="sequence and volume"):
        softfree.SoftAttention(8, 2, volume=True, sequence=True)
    with pytest.raises(TypeError, match="volume"):
        timm.create_model("softpp_tiny", volume=True)
