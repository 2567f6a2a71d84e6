"""The pyramid's architecture and the keywords that change it."""

import pytest
import timm
import torch
from torch import nn
from torch.export import Dim

from softfree.analysis.complexity import count_parameters
from softfree.layers import (
    AgentAttention,
    FocusedLinearAttention,
    LinformerAttention,
    NystromformerAttention,
    PerformerAttention,
    SoftAttention,
    SoftmaxAttention,
)
from softfree.layers.landmarks import AverageLandmarks, ConvLandmarks
from softfree.models import SoftPyramid

from .small import PYRAMID, small

CLASSES = {
    "softfree": SoftAttention,
    "soft": SoftAttention,
    "softpp": SoftAttention,
    "softmax": SoftmaxAttention,
    "linformer": LinformerAttention,
    "performer": PerformerAttention,
    "nystromformer": NystromformerAttention,
    "agent": AgentAttention,
    "flatten": FocusedLinearAttention,
}
RIVALS = [name for name in CLASSES if not name.startswith("soft") or name == "softmax"]


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


def test_our_own_models_have_at_most_128_landmarks_at_any_size_and_no_class_token():
    assert landmark_counts(small("softfree_tiny"), 224, 224) == [49] * 4
    assert landmark_counts(small("softfree_tiny"), 512, 768) == [121] * 4
    assert landmark_counts(small("softfree_tiny"), 64, 96) == [6] * 4
    assert landmark_counts(small("softfree_tiny", attention="softpp"), 256, 256) == [64] * 4


def test_a_class_token_can_be_had_and_left_out():
    model = small("softfree_tiny", class_token=True, global_pool="token")
    assert model.num_prefix_tokens == 1 and landmark_counts(model, 224, 224) == [49, 49, 49, 50]
    with pytest.raises(ValueError, match=r"global_pool must be one of \['avg', ''\], got 'token'"):
        small("softfree_tiny", global_pool="token")


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


def test_pre_norm_holds_in_all_stages_and_brings_a_final_norm():
    model = small("softpp_tiny", pre_norm=True)
    assert all(block.pre_norm for stage in model.stages for block in stage.blocks)
    assert isinstance(model.norm, nn.LayerNorm)
    tokens = model.eval().forward_features(torch.randn(1, 3, 64, 64))
    torch.testing.assert_close(tokens.mean(-1), torch.zeros(1, 1 + 4), atol=1e-4, rtol=0)


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
def test_invalid_architectures_are_refused(change, message):
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


@pytest.mark.parametrize("attention", CLASSES)
@pytest.mark.parametrize("name", ["soft_tiny", "softpp_tiny_release"])
def test_attention_takes_the_place_of_softs_own(attention, name):
    model = small(name, attention=attention)
    blocks = [block for stage in model.stages for block in stage.blocks]
    release = name.endswith("release")
    expected = [CLASSES[attention]] * 3 + [SoftmaxAttention if release else CLASSES[attention]]
    assert [type(block.attn) for block in blocks] == expected
    assert [block.pre_norm for block in blocks] == [False] * 3 + [release]


@pytest.mark.parametrize("attention", RIVALS)
@pytest.mark.parametrize("size", [(32, 32), (64, 64), (97, 65)])
def test_a_rival_works_in_a_whole_model_at_any_size(attention, size):
    model = small("softpp_tiny", attention=attention)
    out = model(torch.randn(2, 3, *size))
    out.square().sum().backward()
    assert out.shape == (2, 5) and out.isfinite().all()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("attention", RIVALS)
def test_a_rivals_result_does_not_depend_on_the_batch(attention):
    model = small("softpp_tiny", attention=attention).double().eval()
    x = torch.randn(3, 3, 64, 64, dtype=torch.float64)
    x[1] *= 100
    torch.testing.assert_close(model(x)[:1], model(x[:1]))


@pytest.mark.full
@pytest.mark.parametrize("attention", ["linformer", "nystromformer"])
def test_a_model_with_a_rival_compiles_as_one_graph(attention):
    torch.compiler.reset()
    model = small("softpp_tiny", attention=attention).eval()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), atol=1e-4, rtol=1e-4)


@pytest.mark.full
def test_one_exported_program_with_a_rival_serves_any_size():
    model = small("softpp_tiny", attention="linformer").eval()
    sizes = {2: Dim("height", min=33), 3: Dim("width", min=33)}
    program = torch.export.export(model, (torch.randn(2, 3, 96, 64),), dynamic_shapes=(sizes,))
    x = torch.randn(2, 3, 64, 130)
    with torch.no_grad():
        torch.testing.assert_close(program.module()(x), model(x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("attention", CLASSES)
def test_every_attention_has_the_same_budget_in_the_tiny_pyramid(attention):
    with torch.device("meta"):
        sizes = [
            count_parameters(timm.create_model("softpp_tiny", attention=name))
            for name in ("softpp", attention)
        ]
    assert abs(sizes[1] / sizes[0] - 1) < 0.05


@pytest.mark.parametrize("attention", CLASSES)
def test_a_mlp_ratio_that_is_given_holds_for_every_attention(attention):
    def hidden(**kwargs) -> list[int]:
        model = small("softpp_tiny", attention=attention, **kwargs)
        return [stage.blocks[0].mlp.fc1.out_features for stage in model.stages]

    assert hidden(mlp_ratio=4.0) == [64, 128, 192, 256]
    assert hidden() == ([64, 128, 192, 256] if attention not in RIVALS else [56, 112, 168, 224])


def test_the_attentions_name_sets_the_operator_and_keywords_still_override_it():
    def settings(name: str, **kwargs):
        attention = attentions(small(name, **kwargs))[0]
        return attention.normalize, attention.start, attention.ridge

    assert settings("soft_tiny") == settings("softpp_tiny", attention="soft")
    assert settings("softpp_tiny") == settings("soft_tiny", attention="softpp")
    assert settings("soft_tiny", attention="softpp", ridge=0.5) == (True, "halving", 0.5)


def test_attention_options_reach_the_attention():
    options = dict(kernel="relu", features=24)
    model = small("softpp_tiny", attention="performer", **options)
    for stage in model.stages:
        attention = stage.blocks[0].attn
        assert attention.kernel == "relu" and attention.features.shape[0] == 24
    with pytest.raises(
        TypeError,
        match="SoftPyramid with attention 'performer' has no option 'kernels'; "
        "there are .*'depths'.*'features'.*; got kernels='relu'",
    ):
        small("softpp_tiny", attention="performer", kernels="relu")
    # A single one would silently stand in for the four.
    for name in ("stride", "value_conv"):
        with pytest.raises(TypeError, match=f"has no option '{name}'; there are .*'{name}s'"):
            small("softpp_tiny", **{name: 3})
    with pytest.raises(TypeError, match="attention 'softmax' has no option 'iterations'"):
        small("softpp_tiny", attention="softmax", iterations=5)


def test_linformer_and_nystromformer_reduce_by_the_sampling_of_the_stage():
    model = small("softpp_tiny", attention="linformer", img_size=(224, 160))
    grids = [tuple(stage.blocks[0].attn.projection.shape) for stage in model.stages]
    assert grids == [(35, 56, 40), (35, 28, 20), (35, 14, 10), (35, 7, 5)]
    model = small("softpp_tiny", attention="nystromformer")
    assert [stage.blocks[0].attn.sampler.stride for stage in model.stages] == [8, 4, 2, 1]
    assert [stage.blocks[0].attn.value_conv.weight.shape[-1] for stage in model.stages] == [
        9,
        5,
        3,
        3,
    ]


def test_reformer_and_unknown_attentions_are_refused():
    with pytest.raises(ValueError, match="'reformer' is for sequences.*images can have 'soft'"):
        small("softpp_tiny", attention="reformer")
    with pytest.raises(ValueError, match="attention must be one of .*got 'flash'"):
        small("softpp_tiny", attention="flash")
