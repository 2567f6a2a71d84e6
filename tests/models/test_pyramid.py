"""The pyramid's architecture and the keywords that change it."""

import pytest
import torch
from torch import nn

from softfree.layers import SoftAttention, SoftmaxAttention
from softfree.layers.landmarks import AverageLandmarks, ConvLandmarks
from softfree.models import SoftPyramid

from .small import PYRAMID, small


def attentions(model: nn.Module) -> list[SoftAttention]:
    return [module for module in model.modules() if isinstance(module, SoftAttention)]


def landmark_counts(model: nn.Module, *size: int) -> list[int]:
    """Landmarks per block for one image."""
    counts: list[int] = []
    for attention in attentions(model):
        attention.sampler.register_forward_hook(lambda m, i, out: counts.append(out[0].shape[2]))
    with torch.no_grad():
        model.eval()(torch.randn(1, 3, *size))
    return counts


def test_a_stage_has_the_sampling_and_the_value_convolution_of_table_1():
    model = small("softpp_tiny")
    assert [a.sampler.stride for a in attentions(model)] == [8, 4, 2, 1]
    assert [a.value_conv.weight.shape[-1] for a in attentions(model)] == [9, 5, 3, 3]
    assert [a.head_dim for a in attentions(model)] == [16] * 4
    assert [stage.cls_token is not None for stage in model.stages] == [False, False, False, True]


def test_there_are_49_landmarks_at_224_and_one_more_for_the_class_token():
    assert landmark_counts(small("softpp_tiny"), 224, 224) == [49, 49, 49, 50]


def test_a_fixed_stride_lets_landmarks_grow_with_the_image_and_a_fixed_count_does_not():
    assert landmark_counts(small("softpp_tiny"), 256, 256) == [64, 64, 64, 65]
    assert landmark_counts(small("softpp_tiny", landmarks="conv:49"), 256, 256) == [49, 49, 49, 50]
    assert max(landmark_counts(small("softpp_tiny", landmarks=16), 224, 320)) == 17


def test_the_release_ends_in_pre_norm_softmax_blocks_and_a_norm():
    model = small("softpp_tiny_release")
    (block,) = model.stages[3].blocks
    assert isinstance(block.attn, SoftmaxAttention) and block.pre_norm
    assert block.mlp.act.approximate == "none"
    assert block.norm1.eps == block.norm2.eps == model.norm.eps == 1e-6
    for stage in model.stages[:3]:
        (block,) = stage.blocks
        assert isinstance(block.attn, SoftAttention) and not block.pre_norm
        assert block.mlp.act.approximate == "tanh"
        assert block.norm1.eps == block.attn.sampler.norm.eps == 1e-5


def test_a_paper_model_has_no_final_norm_since_its_blocks_end_in_one():
    model = small("softpp_tiny")
    assert isinstance(model.norm, nn.Identity)
    assert all(not block.pre_norm for stage in model.stages for block in stage.blocks)


def test_dims_heads_and_depths_override_the_names():
    dims, heads, depths = (8, 16, 24, 40), (1, 2, 3, 5), (2, 1, 3, 1)
    model = small("soft_large", embed_dims=dims, num_heads=heads, depths=depths)
    assert tuple(len(stage.blocks) for stage in model.stages) == depths
    assert tuple(stage.blocks[0].attn.num_heads for stage in model.stages) == heads
    assert tuple(info["num_chs"] for info in model.feature_info) == dims
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 5)


@pytest.mark.parametrize("landmarks", ["conv", "average", "random:9", "first:9", ("average", 9), 9])
@pytest.mark.parametrize("size", [(32, 32), (97, 65)])
def test_every_sampler_works_in_a_whole_model_at_any_size(landmarks, size):
    model = small("softpp_tiny", landmarks=landmarks)
    out = model(torch.randn(2, 3, *size))
    out.square().sum().backward()
    assert out.isfinite().all()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []


def test_landmarks_choose_the_sampler():
    average = small("softpp_tiny", landmarks="average:16")
    assert {type(a.sampler) for a in attentions(average)} == {AverageLandmarks}
    assert {a.sampler.count for a in attentions(average)} == {16}
    assert {type(a.sampler) for a in attentions(small("softpp_tiny"))} == {ConvLandmarks}


@pytest.mark.parametrize("size", [(64, 64), (97, 65)])
def test_without_overlap_the_maps_have_the_same_sizes(size):
    x = torch.randn(2, 3, *size)
    overlapping, apart = small("softpp_tiny").eval(), small("softpp_tiny", overlap=False).eval()
    maps = overlapping.forward_intermediates(x, intermediates_only=True)
    others = apart.forward_intermediates(x, intermediates_only=True)
    assert [m.shape for m in maps] == [m.shape for m in others]
    kernels = [m.kernel_size for m in apart.modules() if isinstance(m, nn.Conv2d)]
    assert kernels == [(4, 4), (2, 2), (2, 2), (2, 2)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(depths=(1, 1, 1)), "depths must have 4 values"),
        (dict(embed_dims=(16, 32, 48, 64, 80)), "embed_dims must have 4 values"),
        (dict(num_heads=(1, 2, 3, 5)), "dim=64, num_heads=5"),
        (dict(landmarks="pool"), "sampler must be one of"),
        (dict(iterations=1.5), "iterations"),
        (dict(start="warm"), "start must be one of"),
        (dict(backend="none"), "backend must be one of"),
    ],
)
def test_architectures_that_cannot_be_meant_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        small("softpp_tiny", **change)


def test_iterations_and_start_change_the_result():
    torch.manual_seed(0)
    base = small("softpp_tiny").eval()
    x = torch.randn(1, 3, 64, 64)
    expected = base(x)
    for change in (dict(iterations=1), dict(normalize=False), dict(ridge=1.0)):
        other = small("softpp_tiny", **change).eval()
        other.load_state_dict(base.state_dict())
        assert not torch.allclose(other(x), expected), change


def test_backends_agree():
    base = small("softpp_tiny").eval()
    other = small("softpp_tiny", backend="reference").eval()
    other.load_state_dict(base.state_dict())
    x = torch.randn(2, 3, 96, 64)
    torch.testing.assert_close(base(x), other(x), atol=1e-5, rtol=1e-4)


def test_the_class_can_be_used_without_the_registry():
    model = SoftPyramid(img_size=64, num_classes=3, **PYRAMID)
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 3)


def test_the_class_token_and_its_position_come_first():
    model = small("softpp_tiny").eval()
    x = torch.randn(1, 3, 64, 64)
    assert model.forward_features(x).shape == (1, 1 + 4, 64)
    assert model.num_prefix_tokens == 1
    with torch.no_grad():
        before = model(x)
        model.stages[3].cls_token += 1 - 2 * torch.rand_like(model.stages[3].cls_token)
        assert not torch.equal(model(x), before)
