"""Captured attention: rows from the factors are rows of the matrix, and the diagnostics are right."""

from dataclasses import replace

import pytest
import timm
import torch
from torch import nn

import softfree
from softfree.analysis.capture import (
    SAMPLED_ROWS,
    SoftLayer,
    SoftmaxLayer,
    capture_attention,
    capture_sequence,
)
from softfree.models.sequence import SequenceClassifier
from softfree.ops.attention import reference
from softfree.ops.attention.settings import AttentionSettings, Inputs, InverseSettings

from .small import small

SIZE = (64, 96)


def capture(name: str = "softpp_tiny", **kwargs):
    return capture_attention(small(name, **kwargs), torch.randn(3, *SIZE))


def explicit_matrix(layer: SoftLayer) -> torch.Tensor:
    """The n x n matrix, by letting the definition attend to an identity."""
    values = torch.eye(layer.tokens).double().expand(1, layer.heads, -1, -1)
    q, landmarks = layer.queries[None].double(), layer.landmarks[None].double()
    inverse = InverseSettings.of(
        layer.method, layer.iterations, layer.start, layer.ridge, layer.order
    )
    settings = AttentionSettings(layer.scale, layer.normalize, inverse)
    out = reference.soft_attention(Inputs(q, None, values, landmarks), settings)
    return layer.share * out[0]


@pytest.mark.parametrize("name", ["softfree_tiny", "soft_tiny", "softpp_tiny", "softpp_vit_small"])
@pytest.mark.parametrize("landmarks", ["conv", "average:9", "random:9"])
def test_rows_are_those_of_the_explicit_matrix(name, landmarks):
    layers = capture(name, landmarks=landmarks).soft_layers
    for layer in layers:
        torch.testing.assert_close(
            layer.rows(range(layer.tokens)), explicit_matrix(layer).float(), atol=1e-6, rtol=0
        )


@pytest.mark.parametrize(
    "name", ["softfree_tiny", "soft_tiny", "softpp_tiny_release", "softpp_vit_small"]
)
@pytest.mark.parametrize("landmarks", ["conv", "average:4"])
def test_captured_rows_times_values_are_what_each_layer_computed(name, landmarks):
    """The factors must be those that the layer used."""
    model = small(name, landmarks=landmarks).eval()
    image = torch.randn(3, *SIZE)
    seen: dict[str, tuple] = {}
    for key, module in model.named_modules():
        if isinstance(module, softfree.SoftAttention):
            module.value_conv = None
        if hasattr(module, "proj") and hasattr(module, "num_heads"):
            nn.init.eye_(module.proj.weight)
            nn.init.zeros_(module.proj.bias)
            module.register_forward_hook(
                lambda module, args, out, key=key: seen.update({key: (module, args[0], out)})
            )
    found = capture_attention(model, image)
    assert len(found.layers) == len(seen)
    for layer in found.layers:
        module, x, out = seen[layer.name]
        project = module.qv if isinstance(layer, SoftLayer) else module.qkv
        values = project(x)[0, :, -x.shape[2] :].unflatten(-1, (layer.heads, -1)).transpose(0, 1)
        given = (layer.rows(range(layer.tokens)) @ values).transpose(0, 1).flatten(1)
        torch.testing.assert_close(given, out[0], atol=1e-5, rtol=1e-4)


def test_softmax_layers_are_captured_too():
    layer = capture("softpp_tiny_release").layer(stage=4)
    assert isinstance(layer, SoftmaxLayer) and layer.prefix == 1
    rows = layer.rows([0, 3])
    torch.testing.assert_close(rows.sum(-1), torch.ones(layer.heads, 2))


@pytest.mark.parametrize(
    ("attention", "options"),
    [
        ("softmax", {}),
        ("nystromformer", {}),
        ("performer", {"kernel": "softmax"}),
        ("performer", {"kernel": "relu"}),
        ("linformer", {}),
        ("agent", {}),
        ("agent", {"agent_bias": False}),
        ("flatten", {}),
    ],
)
def test_rows_of_rivals_times_values_are_what_they_compute(attention, options):
    model = small("softpp_tiny", attention=attention, **options)
    found = capture_attention(model, torch.randn(3, *SIZE))
    modules = dict(model.named_modules())
    assert len(found.layers) == 4
    for layer in found.layers:
        module = modules[layer.name]
        module.value_conv = None
        q, k = layer.queries[None], layer.keys[None]
        values = torch.randn_like(q)
        expected = module.attend(q, k, values, layer.size, None)[0]
        given = layer.rows(range(layer.tokens)) @ values[0]
        torch.testing.assert_close(given, expected, atol=1e-5, rtol=1e-4)


def test_layers_know_where_they_are():
    found = capture(depths=(1, 2, 1, 1))
    assert found.stages == (1, 2, 3, 4)
    assert [layer.name for layer in found.layers][:2] == [
        "stages.0.blocks.0.attn",
        "stages.1.blocks.0.attn",
    ]
    layer = found.layer(2)
    assert (layer.stage, layer.block, layer.size, layer.heads) == (2, 2, (8, 12), 2)
    assert layer.token_at(0, 0) == 0 and layer.token_at(1, 1) == layer.tokens - 1
    assert layer.token_at(0.5, 0.5) == 4 * 12 + 6
    assert found.layer(4).token_at(0, 0) == 1  # after the class token
    assert found.output.shape == (1, 5)
    with pytest.raises(ValueError, match="stage must be one of 1, 2, 3, 4, got 5"):
        found.layer(5)
    with pytest.raises(ValueError, match="block must be at most 2"):
        found.layer(2, 3)


def test_a_feature_extractor_is_captured_by_its_stages():
    model = small("softpp_tiny", features_only=True, out_indices=(0, 1))
    found = capture_attention(model, torch.randn(1, 3, *SIZE))
    assert found.stages == (1, 2) and len(found.output) == 2


@pytest.mark.parametrize("attention", ["softpp", "softmax"])
def test_queries_are_computed_once(attention, monkeypatch):
    model = small("softpp_tiny", attention=attention)
    wanted = {id(m) for n, m in model.named_modules() if n.endswith((".qv", ".qkv"))}
    projected = []
    forward = nn.Linear.forward

    def count(module, x):
        if id(module) in wanted:
            projected.append(id(module))
        return forward(module, x)

    monkeypatch.setattr(nn.Linear, "forward", count)
    capture_attention(model, torch.randn(3, *SIZE))
    assert len(projected) == len(wanted) == 4


def test_the_model_is_left_as_it_was():
    model = small("softpp_tiny").train()
    model.stages[0].eval()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    capture_attention(model, torch.randn(3, *SIZE))
    assert model.training and not model.stages[0].training and model.stages[1].training
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_half_precision_models_are_captured_in_float32():
    model = small("softpp_tiny").to(torch.bfloat16)
    layer = capture_attention(model, torch.randn(3, *SIZE)).layers[0]
    assert layer.row(0).dtype == torch.float32 and layer.row(0).isfinite().all()


def test_what_if_questions_change_the_settings_alone():
    layer = capture().layer(1)
    fewer = replace(layer, iterations=2)
    assert fewer.landmarks is layer.landmarks
    torch.testing.assert_close(
        fewer.inverse, softfree.newton_inverse(layer.a, 2, start=layer.start), atol=0, rtol=0
    )
    assert not torch.equal(fewer.row(5), layer.row(5))
    softmax = layer.as_softmax().row(5)
    torch.testing.assert_close(softmax.sum(-1), torch.ones(layer.heads))


def planted(landmarks: torch.Tensor, **kwargs) -> SoftLayer:
    """A layer whose tokens are its landmarks."""
    settings = dict(normalize=False, iterations=20, start="scaled", ridge=0.0) | kwargs
    size = (1, landmarks.shape[1])
    return SoftLayer(
        "planted", "SOFT", size, landmarks, landmarks, landmarks, scale=1.0, **settings
    )


def test_tokens_that_are_the_landmarks_have_no_nystrom_error():
    landmarks = 3 * torch.randn(2, 9, 4)
    assert planted(landmarks).nystrom_error().max() < 1e-4
    halved = replace(planted(landmarks), landmarks=landmarks[:, :4])
    assert halved.nystrom_error().min() > 0.1


def test_sampled_rows_are_rows_from_the_first_token_to_the_last():
    layer = capture().layer(1)
    rows = layer.rows(range(layer.tokens))
    sampled = layer.sampled_rows()
    assert sampled.shape[1] == SAMPLED_ROWS
    torch.testing.assert_close(sampled[:, [0, -1]], rows[:, [0, -1]])


def test_a_sequence_is_captured_as_its_layers_attend():
    model = SequenceClassifier(0, 20, 2, "softpp", channels=3, pooling="none", stride=1).eval()
    found = capture_sequence(model, torch.randn(20, 3))
    assert [layer.name for layer in found.layers] == ["blocks.0.attn", "blocks.1.attn"]
    assert found.layers[0].rows([0, 5]).shape == (2, 2, 20) and found.layers[1].block == 2
    pair = SequenceClassifier(9, 20, 2, "softmax", pair=True).eval()
    assert capture_sequence(pair, torch.randint(1, 9, (2, 15))).layers[0].tokens == 15


def test_condition_sees_landmarks_that_nearly_coincide():
    landmarks = 3 * torch.randn(1, 9, 4)
    assert planted(landmarks).condition().item() < 100
    landmarks[0, 1] = landmarks[0, 0] + 1e-4
    assert planted(landmarks).condition().item() > 1e6
    assert planted(landmarks).kept_eigenvalues().item() == 8
    landmarks[0, 1] = landmarks[0, 0]
    assert planted(landmarks).condition().item() > 1e12


@pytest.mark.parametrize("ridge", [0.0, 0.01])
@pytest.mark.parametrize("start", ["scaled", "halving"])
def test_expected_residuals_are_those_measured(start, ridge):
    layer = planted(torch.randn(2, 12, 4), start=start, ridge=ridge)
    measured = layer.residuals(30)
    torch.testing.assert_close(layer.expected_residuals(30), measured, atol=1e-9, rtol=1e-4)
    needed = layer.steps_needed()
    assert needed is not None
    assert measured[:, needed].max() <= 1e-2 < measured[:, needed - 1].max()


@pytest.mark.parametrize("order", [1, 2])
def test_a_layer_that_solves_is_read_as_it_computes(order):
    options = dict(landmarks="average", query_gain=30.0, inverse="solve", order=order)
    for layer in capture(**options).soft_layers:
        inverse = InverseSettings.solve(layer.ridge, layer.order)
        assert inverse.ridge == {1: 0.01, 2: 0.1}[order]
        settings = AttentionSettings(layer.scale, layer.normalize, inverse)
        q, landmarks = layer.queries[None].double(), layer.landmarks[None].double()
        values = torch.eye(layer.tokens).double().expand(1, layer.heads, -1, -1)
        out = reference.soft_attention(Inputs(q, None, values, landmarks), settings)[0]
        torch.testing.assert_close(layer.rows(range(layer.tokens)), out.float(), atol=1e-5, rtol=0)
        assert layer.residuals(3).shape == (layer.heads, 4)


def test_a_solve_keeps_more_of_the_spectrum_than_the_halving_start():
    line = torch.linspace(0, 4, 25)[:, None] * torch.ones(1, 1, 4)
    newton = planted(line, start="halving")
    solved = replace(newton, method="solve", ridge=0.1)
    assert solved.kept_eigenvalues().item() > newton.kept_eigenvalues().item()


def test_kept_eigenvalues_follow_the_steps():
    layer = planted(torch.randn(1, 12, 2))
    kept = [layer.kept_eigenvalues(steps).item() for steps in (0, 5, 40)]
    assert kept[0] < kept[1] < kept[2]
    assert replace(layer, iterations=5).kept_eigenvalues().item() == kept[1]


def test_spectral_norm_is_that_of_the_mixing_matrix():
    layer = planted(torch.randn(2, 9, 4))
    expected = torch.linalg.svdvals(layer.inverse)[:, 0]
    torch.testing.assert_close(layer.spectral_norm(), expected)
    assert (layer.spectral_norm(normalize=True) < expected).all()


def test_wrong_inputs_say_what_would_work():
    model = small("softpp_tiny")
    with pytest.raises(ValueError, match="one image, got a batch of 2"):
        capture_attention(model, torch.randn(2, 3, 64, 64))
    with pytest.raises(ValueError, match=r"\(channels, H, W\), got \(64, 64\)"):
        capture_attention(model, torch.randn(64, 64))
    with pytest.raises(ValueError, match="Conv2d has no attention layer of softfree"):
        capture_attention(nn.Conv2d(3, 3, 1), torch.randn(3, 64, 64))
    layer = capture().layer(1)
    with pytest.raises(ValueError, match="query must be a token below 384, got 384"):
        layer.row(384)
    with pytest.raises(ValueError, match=r"in \[0, 1\], got 2 and 0"):
        layer.token_at(2, 0)
    with pytest.raises(ValueError, match="sequence, which has no map"):
        replace(layer, size=None).heat_map(0)


@pytest.mark.slow
def test_a_row_at_2048_pixels_holds_no_square_matrix():
    """262,144 tokens: the matrix would take 256 GiB per head, a row and its chunks a few dozen MiB."""
    torch.manual_seed(0)
    model = timm.create_model(
        "softpp_tiny", landmarks="conv:49", embed_dims=(32, 32, 32, 32), num_heads=(1, 1, 1, 1),
        depths=(1, 1, 1, 1),
    )  # fmt: skip
    layer = capture_attention(model, torch.randn(3, 2048, 2048)).layer(1)
    heat = []
    held = softfree.analysis.peak_extra_memory(
        lambda: heat.append(layer.heat_map(layer.token_at(0.5, 0.5))), torch.device("cpu")
    )
    assert heat[0].shape == (1, 512, 512) and heat[0].isfinite().all()
    assert held < 200 * 2**20


@pytest.mark.parametrize("name", ["softfree_tiny", "softpp_tiny"])
def test_before_training_tokens_of_our_own_model_see_different_places_and_those_of_softpp_the_same(
    name,
):
    torch.manual_seed(0)
    noise = (torch.randn(1, 3, side, side) for side in (4, 8, 16, 56))
    image = sum(nn.functional.interpolate(x, size=(224, 224), mode="bicubic") for x in noise)
    found = capture_attention(timm.create_model(name, depths=(1, 1, 1, 1)), image / 2)
    for layer in found.soft_layers:
        rows = layer.rows(range(0, layer.tokens, max(1, layer.tokens // 64)))
        differing = ((rows - rows.mean(1, keepdim=True)).norm() / rows.norm()).item()
        assert differing > 0.4 if name == "softfree_tiny" else differing < 0.1, layer.name


@pytest.mark.parametrize(
    ("name", "kind"),
    [("soft_tiny", "SOFT"), ("softpp_tiny", "SOFT++"), ("softfree_tiny", "softfree")],
)
def test_a_layer_has_the_name_of_its_attention(name, kind):
    layers = capture_attention(small(name), torch.randn(3, 64, 64)).layers
    assert {layer.kind for layer in layers} == {kind}


def test_weights_that_are_not_finite_are_named_in_one_sentence():
    model = small("softfree_tiny")
    layer = "stages.1.blocks.0.attn"
    with torch.no_grad():
        model.get_submodule(layer).qv.weight[0, 0] = torch.nan
    with pytest.raises(
        ValueError, match=f"^{layer}: its queries, keys or landmarks are not finite"
    ):
        capture_attention(model, torch.randn(3, 64, 64))
