"""Stem, downsampling and positions."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from softfree.layers.embeddings import PositionEmbedding, downsample, resize_positions, stem
from softfree.ops import conv_norm


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("size", [(32, 32), (33, 31), (1, 6)])
def test_the_stem_gives_a_quarter_of_the_size_rounded_up(overlap, size):
    out = stem(3, 8, overlap=overlap).eval()(torch.randn(1, 3, *size))
    assert out.shape == (1, 8, -(-size[0] // 4), -(-size[1] // 4))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("size", [(8, 8), (7, 5), (1, 1)])
def test_downsampling_gives_half_of_the_size_rounded_up(overlap, size):
    out = downsample(4, 8, overlap=overlap).eval()(torch.randn(1, 4, *size))
    assert out.shape == (1, 8, -(-size[0] // 2), -(-size[1] // 2))


def test_windows_side_by_side_do_not_see_each_other():
    layer = stem(3, 8, overlap=False).eval()
    image = torch.randn(1, 3, 8, 8)
    changed = image.clone()
    changed[..., :4, :4] += 1
    differs = (layer(image) != layer(changed)).any(1)[0]
    assert differs.tolist() == [[True, False], [False, False]]


def test_positions_are_added_as_they_are_at_the_size_they_were_learned_at():
    positions = PositionEmbedding((3, 4), 8, prefix=1)
    x = torch.randn(2, 13, 8)
    assert torch.equal(positions(x, (3, 4)), x + positions.weight)


def test_positions_are_resized_bilinearly_and_prefixes_kept():
    positions = PositionEmbedding((3, 4), 8, prefix=1)
    out = positions(torch.zeros(2, 1 + 5 * 7, 8), (5, 7))
    grid = positions.weight[:, 1:].reshape(1, 3, 4, 8).permute(0, 3, 1, 2)
    resized = F.interpolate(grid, size=(5, 7), mode="bilinear", align_corners=False)
    torch.testing.assert_close(out[:, 1:], resized.flatten(2).mT.expand(2, -1, -1))
    torch.testing.assert_close(out[:, :1], positions.weight[:, :1].expand(2, -1, -1))


def test_constant_positions_stay_constant_at_any_size():
    weight = torch.full((1, 12, 8), 0.25, dtype=torch.bfloat16)
    resized = resize_positions(weight, (3, 4), (9, 2))
    assert resized.dtype == torch.bfloat16
    assert torch.equal(resized, torch.full((1, 18, 8), 0.25, dtype=torch.bfloat16))


def test_positions_keep_the_dtype_of_the_tokens():
    assert PositionEmbedding((2, 2), 8)(torch.zeros(1, 4, 8).half(), (2, 2)).dtype == torch.half


@pytest.mark.parametrize("overlap", [True, False])
def test_a_stem_in_evaluation_is_its_modules_one_by_one(overlap):
    layer = stem(3, 8, overlap=overlap)
    for module in layer.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
    image = torch.randn(2, 3, 16, 12)
    for _ in range(2):  # running statistics of their own
        layer(image)
    layer.eval()
    found, expected = layer(image), image
    for part in layer:
        expected = part.bn.act(F.batch_norm(
            part.conv(expected), part.bn.running_mean, part.bn.running_var, part.bn.weight, part.bn.bias,
            eps=part.bn.eps,
        ))  # fmt: skip
    assert torch.equal(found, expected)
    layer.train()
    assert not torch.equal(layer(image), found)


@pytest.mark.parametrize("name", ["conv", "bn", "bn.drop", "bn.act"])
def test_hooks_inside_a_stem_are_called_in_evaluation(name):
    layer, seen = stem(3, 8).eval(), []
    layer[1].get_submodule(name).register_forward_hook(lambda *_: seen.append(name))
    layer(torch.randn(1, 3, 8, 8))
    assert seen == [name]


def as_on_a_gpu(monkeypatch) -> list[str]:
    """What follows a convolution is left to our operator; returns where its calls are noted."""
    calls, operator = [], conv_norm.norm_relu
    monkeypatch.setattr(conv_norm, "fits", lambda x, channels: True)
    monkeypatch.setattr(conv_norm, "norm_relu", lambda *a: calls.append("norm") or operator(*a))
    return calls


@pytest.mark.parametrize("overlap", [True, False])
def test_one_operator_in_the_place_of_bias_norm_and_relu_gives_the_same(overlap, monkeypatch):
    layer = stem(3, 8, overlap=overlap).double()
    for module in layer.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
    image = torch.randn(2, 3, 16, 12).double()
    layer(image)  # running statistics of their own
    expected = layer.eval()(image)
    calls = as_on_a_gpu(monkeypatch)
    torch.testing.assert_close(layer(image), expected)
    assert len(calls) == len(layer)
    layer.train()(image)
    assert len(calls) == len(layer)


@pytest.mark.parametrize("name", ["conv", "bn", "bn.drop", "bn.act"])
def test_hooks_inside_a_stem_are_called_where_it_would_be_one_operator(name, monkeypatch):
    layer, seen = stem(3, 8).eval(), []
    calls = as_on_a_gpu(monkeypatch)
    layer[1].get_submodule(name).register_forward_hook(lambda *_: seen.append(name))
    layer(torch.randn(1, 3, 8, 8))
    assert seen == [name] and len(calls) == 2


def test_a_convolution_or_norm_without_biases_is_none_for_the_operator(monkeypatch):
    layer = stem(3, 8).eval()
    layer[0].conv.bias = None
    layer[1].bn.weight = layer[1].bn.bias = None
    image = torch.randn(1, 3, 8, 8)
    expected = layer(image)
    calls = as_on_a_gpu(monkeypatch)
    torch.testing.assert_close(layer(image), expected)
    assert calls == ["norm"]
