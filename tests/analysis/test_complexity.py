"""Counts of parameters and multiply-adds, against counts by hand."""

import pytest
import timm
import torch
from torch import nn

import softfree
from softfree.analysis import count_macs, count_parameters

DIMS, HEADS, STEPS = (64, 128, 320, 512), (2, 4, 10, 16), 20


def attention_by_hand(tokens: int, dim: int, heads: int, stride: int, landmarks: int, conv: int):
    """qv, landmark convolution, operator, convolution of V, output projection."""
    d = dim // heads
    image_tokens = tokens - tokens % 7  # without the class token
    operator = tokens * landmarks * 3 * d + landmarks**2 * 2 * d + 2 * STEPS * landmarks**3
    return (
        tokens * dim * 2 * dim
        + heads * landmarks * (stride * stride * d) * d
        + heads * operator
        + image_tokens * dim * conv * conv
        + tokens * dim * dim
    )


def pyramid_by_hand(depths: tuple[int, ...], softmax_last_stage: bool) -> int:
    total = 112**2 * 32 * 27 + 112**2 * 32 * 32 * 9 + 56**2 * 64 * 32 * 9
    for i, (side, dim, heads, depth) in enumerate(
        zip((56, 28, 14, 7), DIMS, HEADS, depths, strict=True)
    ):
        if i > 0:
            total += side**2 * dim * DIMS[i - 1] * 9
        tokens = side**2 + (i == 3)
        if softmax_last_stage and i == 3:
            attention = tokens * dim * 4 * dim + 2 * tokens**2 * dim
        else:
            landmarks, conv = 49 + (i == 3), (9, 5, 3, 3)[i]
            attention = attention_by_hand(tokens, dim, heads, 8 >> i, landmarks, conv)
        total += depth * (attention + tokens * 8 * dim * dim)
    return total + DIMS[-1] * 1000


@pytest.mark.parametrize(
    ("name", "depths"), [("softpp_tiny", (2, 2, 5, 2)), ("soft_tiny_release", (1, 2, 3, 2))]
)
def test_macs_of_a_backbone_are_those_counted_by_hand(name, depths):
    model = timm.create_model(name)
    assert count_macs(model, 224) == pyramid_by_hand(depths, name.endswith("release"))


def test_macs_of_simple_layers():
    assert count_macs(nn.Conv2d(3, 8, 3, padding=1), 10) == 10 * 10 * 8 * 27
    assert count_macs(nn.Conv2d(4, 4, 5, padding=2, groups=4), (6, 9), in_chans=4) == 54 * 4 * 25


def test_fused_softmax_attention_is_counted():
    class Softmax(nn.Module):
        def forward(self, x):
            return nn.functional.scaled_dot_product_attention(x, x, x)

    assert count_macs(Softmax(), (20, 8), in_chans=2) == 2 * (2 * 20 * 20 * 8)


def test_model_may_be_on_the_meta_device():
    with torch.device("meta"):
        model = timm.create_model("softpp_vit_small")
    assert count_macs(model, 64) == count_macs(timm.create_model("softpp_vit_small"), 64)


def test_model_is_left_as_it_was():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Dropout())
    model[2].eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    count_macs(model, 8)
    assert [module.training for module in model.modules()] == [True, True, True, False]
    for name, tensor in model.state_dict().items():
        assert type(tensor) is torch.Tensor
        torch.testing.assert_close(tensor, before[name])


def test_impossible_size_is_refused():
    with pytest.raises(ValueError, match="size must be at least 1, got 0"):
        count_macs(nn.Conv2d(3, 4, 1), 0)


def test_shared_parameters_count_once():
    layer = nn.Linear(10, 5)
    assert count_parameters(nn.ModuleList([layer, layer])) == 55
    attention = softfree.SoftAttention(64, 2, landmarks="average")
    assert count_parameters(attention) == 64 * 128 + 128 + 64 * 64 + 64
