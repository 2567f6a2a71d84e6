"""timm's contract, for every kind of network."""

import copy
from typing import Any

import pytest
import timm
import torch
from timm.layers import DropPath
from timm.optim import param_groups_layer_decay, param_groups_weight_decay

from softfree.layers import SoftAttention

from .small import ISOTROPIC, KINDS, PLAIN, small

SIZES = [(32, 32), (64, 64), (96, 64), (97, 65), (33, 130), (160, 160)]
TOKENLESS = ["softfree_tiny", *ISOTROPIC]  # without a class token
POOLS = [(name, pool) for name in KINDS for pool in ("token", "avg", "")
         if pool != "token" or name not in TOKENLESS]  # fmt: skip


def image(*size: int, batch: int = 2, channels: int = 3) -> torch.Tensor:
    return torch.randn(batch, channels, *(size or (64, 64)))


def steps(model: torch.nn.Module) -> int:
    return len(model.feature_info)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_any_image_size_works(name, size):
    model = small(name).eval()
    with torch.no_grad():
        out = model(image(*size))
    assert out.shape == (2, 5)
    assert out.isfinite().all()


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("img_size", [96, (64, 128), (50, 70), 32])
def test_img_size_sets_the_size_at_which_positions_are_learned(name, img_size):
    model = small(name, img_size=img_size).eval()
    height, width = (img_size, img_size) if isinstance(img_size, int) else img_size
    reduction = PLAIN["patch_size"] if name in ISOTROPIC else 4
    positions = model.pos_embed if name in ISOTROPIC else model.stages[0].pos_embed
    assert positions.grid == (-(-height // reduction), -(-width // reduction))
    assert model(image(height, width)).shape == (2, 5)
    assert model(image()).shape == (2, 5)


def test_img_size_384_is_offered_by_the_full_model():
    with torch.device("meta"):
        model = timm.create_model("softpp_tiny", num_classes=37, img_size=384)
    assert [stage.pos_embed.grid for stage in model.stages] == [
        (96, 96),
        (48, 48),
        (24, 24),
        (12, 12),
    ]
    assert model.head.out_features == 37


@pytest.mark.parametrize("img_size", [0, (64, -1), (1, 2, 3)])
@pytest.mark.parametrize("name", KINDS)
def test_invalid_image_sizes_are_refused(name, img_size):
    with pytest.raises(ValueError, match="img_size"):
        small(name, img_size=img_size)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("channels", [1, 5])
def test_in_chans_sets_the_channels_of_the_image(name, channels):
    assert small(name, in_chans=channels)(image(channels=channels)).shape == (2, 5)


@pytest.mark.parametrize(("name", "pool"), POOLS)
def test_the_head_pools_as_global_pool_says(name, pool):
    model = small(name, global_pool=pool).eval()
    x = image()
    tokens = model.forward_features(x)
    prefix = model.num_prefix_tokens
    pooled = {"token": tokens[:, 0], "avg": tokens[:, prefix:].mean(1), "": tokens}[pool]
    torch.testing.assert_close(model.forward_head(tokens, pre_logits=True), pooled)
    torch.testing.assert_close(model.forward_head(tokens), model.head(pooled))
    torch.testing.assert_close(model(x), model.head(pooled))
    model.reset_classifier(0)
    torch.testing.assert_close(model(x), pooled)


@pytest.mark.parametrize("name", KINDS)
def test_pools_a_model_does_not_have_are_refused(name):
    with pytest.raises(ValueError, match=r"global_pool must be one of.*'max'"):
        small(name, global_pool="max")
    if name in TOKENLESS:
        with pytest.raises(ValueError, match=r"global_pool must be one of.*'token'"):
            small(name, global_pool="token")


@pytest.mark.parametrize("name", KINDS)
def test_without_classes_the_model_gives_features(name):
    model = small(name, num_classes=0).eval()
    assert isinstance(model.head, torch.nn.Identity)
    assert model(image()).shape == (2, model.num_features)
    assert model.head_hidden_size == model.num_features
    assert model.num_classes == 0


@pytest.mark.parametrize("name", KINDS)
def test_a_classifier_is_replaced_at_the_same_dtype_and_mode(name):
    model = small(name).double().eval()
    model.reset_classifier(7, "avg")
    assert model(image().double()).shape == (2, 7)
    assert model.global_pool == "avg" and model.num_classes == 7
    assert model.get_classifier().weight.dtype == torch.float64
    assert not model.head.training
    with pytest.raises(ValueError, match="num_classes must be >= 0, got -1"):
        model.reset_classifier(-1)


@pytest.mark.parametrize("name", KINDS)
def test_drop_rate_drops_before_the_classifier_in_training(name):
    model = small(name, drop_rate=0.5).eval()
    x = image()
    tokens = model.forward_features(x)
    assert torch.equal(model.forward_head(tokens), model.forward_head(tokens))
    model.head_drop.train()
    assert (model.forward_head(tokens, pre_logits=True) == 0).any()


@pytest.mark.parametrize("name", KINDS)
def test_drop_path_grows_along_the_depth_and_acts_in_training_alone(name):
    model = small(name, drop_path_rate=0.6)
    blocks = [m for m in model.modules() if hasattr(m, "drop_path")]
    rates = [b.drop_path.drop_prob if isinstance(b.drop_path, DropPath) else 0 for b in blocks]
    expected = torch.linspace(0, 0.6, len(blocks)).tolist()
    assert rates == pytest.approx(expected)
    x = image()
    for norm in (m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)):
        norm.momentum = 0.0
    assert not torch.equal(model(x), model(x))
    model(x).sum().backward()
    model.eval()
    assert torch.equal(model(x), model(x))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("size", [(64, 64), (97, 65)])
def test_feature_info_describes_the_maps(name, size):
    model = small(name).eval()
    final, maps = model.forward_intermediates(image(*size))
    assert len(maps) == steps(model)
    for info, feature in zip(model.feature_info, maps, strict=True):
        expected = [-(-side // info["reduction"]) for side in size]
        assert feature.shape == (2, info["num_chs"], *expected)
        assert model.get_submodule(info["module"]) is not None
    assert final.shape[2] == model.num_features


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("norm", [False, True])
def test_intermediates_are_the_tokens_on_the_way(name, norm):
    model = small(name).eval()
    x = image(64, 96)
    final, maps = model.forward_intermediates(x, norm=norm)
    torch.testing.assert_close(final, model.forward_features(x))
    _, tokens = model.forward_intermediates(x, norm=norm, output_fmt="NLC")
    for feature, row in zip(maps, tokens, strict=True):
        torch.testing.assert_close(feature.flatten(2).mT, row)
    last = tokens[-1] if norm else model.norm(tokens[-1])
    torch.testing.assert_close(last, final[:, model.num_prefix_tokens :])


@pytest.mark.parametrize("name", KINDS)
def test_indices_choose_intermediates(name):
    model = small(name).eval()
    x, parts = image(), steps(model)
    everything = model.forward_intermediates(x, intermediates_only=True)
    features = model.forward_features(x)
    for indices in (None, 1, 2, [0], [1, 2], [-1], [-3, -2], (0, 2), [2, 0]):
        if indices is None or isinstance(indices, int):
            wanted = list(range(parts))[-(indices or parts) :]
        else:
            wanted = [index % parts for index in indices]
        for stop_early in (False, True):
            final, some = model.forward_intermediates(x, indices, stop_early=stop_early)
            assert len(some) == len(wanted), indices
            for feature, index in zip(some, wanted, strict=True):
                torch.testing.assert_close(feature, everything[index])
            if not stop_early or max(wanted) == parts - 1:
                torch.testing.assert_close(final, features)


@pytest.mark.parametrize("name", KINDS)
def test_stopping_early_runs_nothing_after_the_last_feature(name):
    model = small(name).eval()
    info = model.feature_info[-1]
    model.get_submodule(info["module"]).register_forward_hook(lambda *_: pytest.fail("was run"))
    model.forward_intermediates(image(), [0, 1], stop_early=True)
    model.forward_intermediates(image(), [0, 1], intermediates_only=True)


@pytest.mark.parametrize("name", KINDS)
def test_intermediates_that_do_not_exist_are_refused(name):
    model = small(name)
    with pytest.raises(ValueError, match="output_fmt"):
        model.forward_intermediates(image(), output_fmt="NHWC")
    for indices in ([steps(model)], [-steps(model) - 1], 99):
        with pytest.raises((ValueError, AssertionError)):
            model.forward_intermediates(image(), indices)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("n", [1, 2, [0, 2]])
def test_intermediate_layers_are_the_intermediates(name, n):
    model = small(name).eval()
    x = image()
    for reshape, output_fmt in ((True, "NCHW"), (False, "NLC")):
        layers = model.get_intermediate_layers(x, n, reshape=reshape, norm=True)
        expected = model.forward_intermediates(
            x, n, norm=True, output_fmt=output_fmt, intermediates_only=True
        )
        assert isinstance(layers, tuple) and len(layers) == len(expected)
        for layer, feature in zip(layers, expected, strict=True):
            torch.testing.assert_close(layer, feature)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    "out_indices", [None, (0, 1, 2), (1, 2), (2,), (0,), (-1,), (-2, -1), (0, -1)]
)
def test_a_feature_extractor_has_no_unused_parameters(name, out_indices):
    kwargs = {} if out_indices is None else dict(out_indices=out_indices)
    extractor = small(name, features_only=True, **kwargs)
    x = image(64, 96)
    maps = extractor(x)
    assert len(maps) == (
        len(out_indices) if out_indices else len(extractor.feature_info.channels())
    )
    for feature, channels, reduction in zip(
        maps, extractor.feature_info.channels(), extractor.feature_info.reduction(), strict=True
    ):
        assert feature.shape == (2, channels, 64 // reduction, 96 // reduction)
    # Weights, since a sum over channels is constant after a norm.
    sum((feature * torch.randn_like(feature)).sum() for feature in maps).backward()
    assert [n for n, p in extractor.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("name", KINDS)
def test_a_feature_extractor_gives_the_features_of_the_whole_model(name):
    model = small(name).eval()
    extractor = small(name, features_only=True, out_indices=(1, 2)).eval()
    missing = extractor.load_state_dict(
        {f"model.{k}": v for k, v in model.state_dict().items()}, False
    )
    assert missing.missing_keys == []
    x = image()
    expected = model.forward_intermediates(x, [1, 2], intermediates_only=True)
    for feature, other in zip(extractor(x), expected, strict=True):
        torch.testing.assert_close(feature, other)


@pytest.mark.parametrize("name", KINDS)
def test_pruning_keeps_the_norm_where_the_last_feature_is_kept(name):
    whole, part = small(name), small(name)
    norm = type(whole.norm)
    whole.prune_intermediate_layers([-1], prune_norm=False, prune_head=False)
    assert type(whole.norm) is norm and whole.num_classes == 5
    part.prune_intermediate_layers([0], prune_norm=False)
    (feature,) = part.forward_intermediates(image(), [0], norm=True, intermediates_only=True)
    assert feature.shape[1] == part.feature_info[0]["num_chs"]


@pytest.mark.parametrize("name", KINDS)
def test_every_parameter_of_a_classifier_gets_a_gradient(name):
    model = small(name)
    model(image()).square().sum().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("name", KINDS)
def test_gradient_checkpointing_changes_neither_outputs_nor_gradients(name):
    model = small(name)
    other = copy.deepcopy(model)
    other.set_grad_checkpointing()
    runs = []
    for block in (m for m in other.modules() if hasattr(m, "drop_path")):
        block.register_forward_pre_hook(lambda *_: runs.append(1))
    x = image()
    out, recomputed = model(x), other(x)
    torch.testing.assert_close(out, recomputed)
    once = len(runs)
    out.square().sum().backward()
    recomputed.square().sum().backward()
    assert len(runs) == 2 * once
    for (key, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=key)
    other.set_grad_checkpointing(False)
    runs.clear()
    other(x).sum().backward()
    assert len(runs) == once


@pytest.mark.parametrize("name", KINDS)
def test_positions_and_class_tokens_are_spared_weight_decay(name):
    model = small(name)
    spared = model.no_weight_decay()
    names = {n for n, _ in model.named_parameters()}
    assert spared == {n for n in names if "pos_embed" in n or "cls_token" in n}
    assert spared
    groups = param_groups_weight_decay(model, 0.05, no_weight_decay_list=spared)
    undecayed = {id(p) for group in groups if group["weight_decay"] == 0 for p in group["params"]}
    assert all(id(model.get_parameter(n)) in undecayed for n in spared)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("coarse", [False, True])
def test_layer_groups_hold_every_parameter_and_follow_the_depth(name, coarse):
    depths = {} if name in ISOTROPIC else dict(depths=(2, 1, 3, 1))
    model = small(name, **depths)
    groups = timm.models.group_parameters(model, model.group_matcher(coarse=coarse), reverse=True)
    assert set(groups) == {n for n, _ in model.named_parameters()}
    assert set(groups.values()) == set(range(max(groups.values()) + 1))

    def order(prefix: str) -> int:
        (group,) = {g for n, g in groups.items() if n.startswith(prefix)}
        return group

    if name in ISOTROPIC:
        assert groups["pos_embed.weight"] == order("patch_embed")
        path = ["patch_embed", "blocks.0.", "blocks.1.", "blocks.2.", "head"]
    elif coarse:
        path = ["stem", "stages.0", "downsamples.0", "stages.1", "downsamples.1", "stages.2"]
        path += ["downsamples.2", "stages.3", "head"]
    else:
        path = ["stem", "stages.0.blocks.0", "stages.0.blocks.1", "downsamples.0"]
        path += ["stages.1.blocks.0", "downsamples.1", "stages.2.blocks.0", "stages.2.blocks.1"]
        path += ["stages.2.blocks.2", "downsamples.2", "stages.3.blocks.0", "head"]
        assert groups["stages.2.pos_embed.weight"] == order("stages.2.blocks.0")
        if name not in TOKENLESS:
            assert groups["stages.3.cls_token"] == order("stages.3.blocks.0")
    found = [order(prefix) for prefix in path]
    assert found == sorted(found)
    # Downsampling goes with the layer before it; every other step is a group of its own.
    own = [group for prefix, group in zip(path, found, strict=True) if "down" not in prefix]
    assert len(set(own)) == len(own)


@pytest.mark.parametrize("name", KINDS)
def test_layer_wise_learning_rates_fall_towards_the_stem(name):
    model = small(name)
    groups = param_groups_layer_decay(model, 0.05, layer_decay=0.5)
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    scales = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    first = scales[id(next(model.parameters()))]
    assert first == min(scales.values()) < scales[id(model.head.weight)] == 1


@pytest.mark.parametrize("name", KINDS)
def test_a_sample_has_the_same_output_alone_and_in_any_batch(name):
    model = small(name).eval()
    x = image(batch=3)
    x[1] *= 100
    with torch.no_grad():
        together = model(x)
        alone = torch.cat([model(sample[None]) for sample in x])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["soft_tiny", "softpp_tiny_release", "softpp_vit_small"])
def test_gains_multiply_the_weights_that_a_model_draws_however_often(name):
    def draw(times: int, **gains: float) -> torch.nn.Module:
        torch.manual_seed(0)
        model = small(name, **gains)
        for _ in range(times - 1):
            model.init_weights()
        return model

    for times in (1, 2):
        plain, gained = draw(times), draw(times, query_gain=2, output_gain=4, landmark_gain=0.25)
        expected = plain.state_dict()
        layers = [key for key, m in plain.named_modules() if isinstance(m, SoftAttention)]
        assert len(layers) >= 3
        for layer in layers:
            weight = expected[f"{layer}.qv.weight"]
            weight[: weight.shape[1]] *= 2
            expected[f"{layer}.proj.weight"] *= 4
            expected[f"{layer}.sampler.norm.weight"] *= 0.25
        for key, value in gained.state_dict().items():
            assert torch.equal(value, expected[key]), key


@pytest.mark.parametrize("name", [*KINDS, "linformer"])
def test_init_weights_fills_an_empty_model_as_a_new_one_is(name):
    kwargs: dict[str, Any] = dict(attention=name) if name == "linformer" else {}
    name = "softpp_tiny" if name == "linformer" else name
    with torch.device("meta"):
        model = small(name, **kwargs)
    model = model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(torch.nan if tensor.is_floating_point() else -1)
    model.init_weights()
    new = small(name, **kwargs).state_dict()
    for key, value in model.state_dict().items():
        assert value.isfinite().all(), key
        deviation, expected = value.float().std(correction=0), new[key].float().std(correction=0)
        assert 0.5 * expected <= deviation <= 2 * expected + 1e-9, key
        assert (value.float().mean() - new[key].float().mean()).abs() <= expected + 1e-9, key


def test_init_weights_fills_the_draws_of_random_landmarks_and_of_the_performer():
    for kwargs in (dict(landmarks="random:9"), dict(attention="performer")):
        model, new = (small("softpp_tiny", **kwargs) for _ in range(2))
        for buffer in model.buffers():
            buffer.fill_(-7)
        model.init_weights()
        assert all(buffer.isfinite().all() and (buffer != -7).all() for buffer in model.buffers())
        if "landmarks" in kwargs:
            assert torch.equal(*(m.stages[0].blocks[0].attn.sampler.fixed for m in (model, new)))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("output_fmt", ["NCHW", "NLC"])
def test_prefix_tokens_are_returned_beside_the_features_that_have_them(name, output_fmt):
    model, x = small(name).eval(), image()
    plain = model.forward_intermediates(x, output_fmt=output_fmt, norm=True)[1]
    found = model.forward_intermediates(
        x, output_fmt=output_fmt, norm=True, return_prefix_tokens=True
    )[1]
    if name in TOKENLESS:
        assert all(map(torch.equal, found, plain))
        return
    features, prefixes = zip(*found, strict=True)
    assert all(map(torch.equal, features, plain))
    assert prefixes[:-1] == (None,) * 3
    assert torch.equal(prefixes[-1], model.forward_features(x)[:, :1])


@pytest.mark.parametrize("name", KINDS)
def test_device_and_dtype_are_those_of_the_new_model(name):
    model = small(name, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.bfloat16)}
    extractor = small(name, dtype=torch.float64, features_only=True)
    assert {p.dtype for p in extractor.parameters()} == {torch.float64}


@pytest.mark.parametrize("name", ["softpp_tiny", "softpp_vit_small"])
@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (dict(output_stride=16), "can't be dilated: leave output_stride out"),
        (dict(feature_cls="fx"), "feature_cls must be 'getter', the default, or 'hook', got 'fx'"),
    ],
)
def test_what_timms_other_models_can_and_these_cannot_is_said(name, kwargs, message):
    with pytest.raises(ValueError, match=message):
        small(name, features_only=True, **kwargs)


@pytest.mark.parametrize("name", ["softpp_tiny", "softpp_vit_small"])
def test_torchscript_is_refused_in_one_sentence(name):
    with pytest.raises(RuntimeError, match="can't be a TorchScript program; torch.export and"):
        torch.jit.script(torch.nn.Sequential(small(name)))


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        *((name, {}) for name in KINDS),
        ("softpp_tiny", dict(landmarks="conv:4")),
        ("softpp_tiny", dict(landmarks="random:4")),
        ("softpp_tiny", dict(attention="linformer")),
        ("softpp_tiny", dict(attention="nystromformer")),
    ],
)
def test_a_traced_model_serves_other_sizes(name, kwargs):
    model = small(name, **kwargs).eval()
    with torch.no_grad():
        traced = torch.jit.trace(model, image(64, 64), check_trace=False)
        # The last map of the last one is one row high.
        for size in [(64, 64), (97, 65), (33, 160), (32, 160)]:
            x = image(*size, batch=3)
            torch.testing.assert_close(traced(x), model(x), rtol=1e-4, atol=1e-5)
