"""The authors' checkpoints: golden outputs, every way of packing them, and every way of not fitting."""

import argparse
import pickle
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import softfree
from softfree.models.checkpoints import filter_checkpoint

from .small import small

FIXTURES = Path(__file__).parents[3] / "shared" / "fixtures"
WEIGHTS = FIXTURES / "release_micro.weights.safetensors"
GOLDEN = FIXTURES / "release_micro.golden.safetensors"
MICRO = dict(
    embed_dims=(32, 64, 96, 128), num_heads=(1, 2, 3, 4), depths=(1, 1, 2, 1), num_classes=10
)
needs_fixtures = pytest.mark.skipif(
    not (WEIGHTS.is_file() and GOLDEN.is_file()),
    reason="the golden outputs of the authors' code are not beside this repository",
)

SOFT_BLOCK = {
    "attn.proj": "att.mha.ff",
    "attn.sampler.norm": "att.mha.attn.Qnorm_act.0",
    "attn.sampler": "att.mha.attn.Qlandmark_op",
    "attn.value_conv": "att.mha.attn.conv",
    "mlp.fc1": "att.ff1",
    "mlp.fc2": "att.ff2",
    "norm1": "att.norm1",
    "norm2": "att.norm2",
}


def release_layout(model: nn.Module) -> dict[str, Tensor]:
    """The weights of a release model as the authors' code names and splits them."""
    state = {}
    for key, tensor in model.state_dict().items():
        words = key.split(".")
        if words[0] == "stem":
            step = 3 * int(words[1]) + (words[2] == "bn")
            state[f"patch_embed1.proj.{step}.{words[3]}"] = tensor
        elif words[0] == "downsamples":
            step = int(words[2] == "bn")
            state[f"patch_embed{int(words[1]) + 2}.proj.{step}.{words[3]}"] = tensor
        elif words[0] == "stages" and words[2] == "pos_embed":
            state[f"pos_embed{int(words[1]) + 1}"] = tensor
        elif words[0] == "stages" and words[2] == "cls_token":
            state["cls_token"] = tensor
        elif words[0] == "stages":
            block = f"block{int(words[1]) + 1}.{words[3]}"
            module, kind = ".".join(words[4:-1]), words[-1]
            rows = tensor.shape[0]
            if module == "attn.qv":
                state[f"{block}.att.mha.W_q.{kind}"] = tensor[: rows // 2].clone()
                state[f"{block}.att.mha.W_v.{kind}"] = tensor[rows // 2 :].clone()
            elif module == "attn.qkv":
                state[f"{block}.attn.q.{kind}"] = tensor[: rows // 3].clone()
                state[f"{block}.attn.kv.{kind}"] = tensor[rows // 3 :].clone()
            elif words[1] == "3":
                state[f"{block}.{module}.{kind}"] = tensor
            else:
                state[f"{block}.{SOFT_BLOCK[module]}.{kind}"] = tensor
        else:
            state[key] = tensor
    return state


def release_model(name: str = "softpp_tiny_release", **kwargs) -> nn.Module:
    """A small release model whose every weight and statistic is random."""
    model = small(name, **kwargs).eval()
    for key, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            torch.nn.init.uniform_(
                tensor, 0.5 if "var" in key else -0.2, 1.0 if "var" in key else 0.2
            )
    return model


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {key: tensor.clone() for key, tensor in model.state_dict().items()}


def assert_same_weights(model: nn.Module, expected: dict[str, Tensor]) -> None:
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[key]), key


@needs_fixtures
@pytest.mark.parametrize("kind", ["soft", "softpp"])
def test_the_authors_outputs_are_met(kind):
    model = timm.create_model(f"{kind}_tiny_release", **MICRO).eval()
    softfree.load_release_checkpoint(model, WEIGHTS)
    golden = load_file(GOLDEN)
    with torch.no_grad():
        logits = model(golden["224x224.input"])
    torch.testing.assert_close(logits, golden[f"224x224.{kind}.logits"], atol=1e-4, rtol=0)


@needs_fixtures
def test_the_layout_of_these_tests_is_the_authors():
    model = timm.create_model("soft_tiny_release", **MICRO)
    expected = {key: tensor.shape for key, tensor in load_file(WEIGHTS).items()}
    assert {key: tensor.shape for key, tensor in release_layout(model).items()} == expected


PACKINGS = {
    "plain": lambda state: state,
    "model": lambda state: {"model": state, "epoch": 3},
    "state_dict": lambda state: {"state_dict": state, "optimizer": {"lr": 0.1}},
    "both": lambda state: {"state_dict": {"model": state}},
    "module": lambda state: {f"module.{key}": tensor for key, tensor in state.items()},
    "model and module": lambda s: {"model": {f"module.{key}": tensor for key, tensor in s.items()}},
    "arguments": lambda state: {"model": state, "args": argparse.Namespace(lr=0.1, name="tiny")},
}


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("name", ["soft_tiny_release", "softpp_tiny_release"])
def test_a_pth_file_is_read_however_its_weights_are_packed(tmp_path, packing, name):
    source, target = release_model(name), release_model(name)
    torch.save(PACKINGS[packing](release_layout(source)), tmp_path / "weights.pth")
    assert softfree.load_release_checkpoint(target, tmp_path / "weights.pth") is target
    assert_same_weights(target, source.state_dict())


@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_safetensors_file_is_read(tmp_path, prefix):
    source, target = release_model(), release_model()
    state = {prefix + key: tensor.contiguous() for key, tensor in release_layout(source).items()}
    save_file(state, tmp_path / "weights.safetensors")
    softfree.load_release_checkpoint(target, str(tmp_path / "weights.safetensors"))
    assert_same_weights(target, source.state_dict())
    x = torch.randn(1, 3, 64, 64)
    assert torch.equal(source(x), target(x))


def test_our_own_layout_is_read_too(tmp_path):
    source, target = release_model(), release_model()
    torch.save(source.state_dict(), tmp_path / "weights.pth")
    softfree.load_release_checkpoint(target, tmp_path / "weights.pth")
    assert_same_weights(target, source.state_dict())


def test_a_half_precision_file_fills_a_float_model(tmp_path):
    source, target = release_model(), release_model()
    half = {k: t.half() if t.is_floating_point() else t for k, t in release_layout(source).items()}
    torch.save(half, tmp_path / "weights.pth")
    softfree.load_release_checkpoint(target, tmp_path / "weights.pth")
    assert target.head.weight.dtype == torch.float32
    torch.testing.assert_close(target.head.weight, source.head.weight, atol=1e-3, rtol=0)


def test_an_error_names_every_key_as_the_file_has_it_and_leaves_the_model_alone(tmp_path):
    model = release_model()
    before = weights(model)
    state = release_layout(release_model())
    missing = ["block1.0.att.mha.W_q.weight", "block4.0.attn.kv.bias", "pos_embed2", "head.bias"]
    for key in missing:
        del state[key]
    state["block9.0.extra.weight"] = torch.zeros(3)
    state["aux_head.weight"] = torch.zeros(2, 2)
    state["block2.0.att.mha.W_v.weight"] = torch.zeros(31, 17)
    state["block3.0.att.mha.attn.conv.weight"] = torch.zeros(3, 1, 5, 5)
    state["cls_token"] = torch.zeros(64)
    state["pos_embed1"] = torch.zeros(16)
    torch.save(state, tmp_path / "weights.pth")
    with pytest.raises(ValueError) as caught:
        softfree.load_release_checkpoint(model, tmp_path / "weights.pth")
    message = str(caught.value)
    assert "weights.pth does not fit this SoftPyramid" in message
    absent, _, rest = message.partition("not in the model:")
    unexpected, _, mismatched = rest.partition("of another shape:")
    assert absent.split("missing in the file:")[1].split() == sorted(missing)
    assert unexpected.split() == ["aux_head.weight", "block9.0.extra.weight"]
    lines = mismatched.strip().splitlines()
    assert [line.split(":")[0].strip() for line in lines] == [
        "block2.0.att.mha.W_v.weight",
        "block3.0.att.mha.attn.conv.weight",
        "cls_token",
        "pos_embed1",
    ]
    assert "(31, 17) in the file, (32, 32) in the model" in lines[0]
    assert_same_weights(model, before)


def test_two_wrong_shapes_that_would_make_a_right_sum_are_found(tmp_path):
    model = release_model()
    state = release_layout(model)
    state["block2.0.att.mha.W_q.bias"] = torch.zeros(30)
    state["block2.0.att.mha.W_v.bias"] = torch.zeros(34)
    torch.save(state, tmp_path / "weights.pth")
    with pytest.raises(ValueError, match=r"W_q\.bias: \(30,\)[^$]*W_v\.bias: \(34,\)"):
        softfree.load_release_checkpoint(model, tmp_path / "weights.pth")


def test_a_checkpoint_of_another_size_is_refused(tmp_path):
    torch.save(release_layout(release_model(depths=(1, 1, 2, 1))), tmp_path / "weights.pth")
    with pytest.raises(ValueError, match=r"(?s)not in the model.*block3\.1\.att\.ff1\.bias"):
        softfree.load_release_checkpoint(release_model(), tmp_path / "weights.pth")


class _Harmful:
    def __reduce__(self):
        return (Path.touch, (Path("harm"),))


def test_a_pickle_with_code_is_refused_and_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = release_model()
    torch.save({"model": release_layout(model), "args": _Harmful()}, "torch.pth")
    Path("plain.pth").write_bytes(pickle.dumps({"model": _Harmful()}))
    for name in ("torch.pth", "plain.pth"):
        with pytest.raises(ValueError, match=f"{name} can't be read as weights alone"):
            softfree.load_release_checkpoint(model, name)
    assert not Path("harm").exists()


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("kept", [0, 5, 1000, 0.5])
def test_a_truncated_file_is_refused_by_name(tmp_path, suffix, kept):
    model = release_model()
    path = tmp_path / f"weights{suffix}"
    state = {key: tensor.contiguous() for key, tensor in release_layout(model).items()}
    if suffix == ".pth":
        torch.save(state, path)
    else:
        save_file(state, path)
    data = path.read_bytes()
    path.write_bytes(data[: int(kept * len(data)) if isinstance(kept, float) else kept])
    with pytest.raises(ValueError, match=f"weights{suffix}"):
        softfree.load_release_checkpoint(model, path)


@pytest.mark.parametrize("content", [[1, 2], {"epoch": 3}, torch.zeros(3), {"model": {"a": "b"}}])
def test_a_file_without_a_state_dict_is_refused(tmp_path, content):
    torch.save(content, tmp_path / "weights.pth")
    with pytest.raises(ValueError, match="holds no state dict of tensors"):
        softfree.load_release_checkpoint(release_model(), tmp_path / "weights.pth")


@pytest.mark.parametrize(
    "key, change, message",
    [
        ("head.bias", lambda t: t.to_sparse(), "'head.bias' is no plain tensor"),
        ("head.bias", lambda t: t.to("meta"), "'head.bias' is no plain tensor"),
        ("head.bias", lambda t: t.to(torch.complex64), "'head.bias' is no plain tensor"),
        ("head.bias", lambda t: t.long(), "of another kind:\n  head.bias: torch.int64"),
        ("pos_embed1", lambda t: t.bool(), "of another kind:\n  pos_embed1: torch.bool"),
        ("block1.0.att.mha.W_q.weight", lambda t: t.to("meta"), "is no plain tensor"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_that_no_weight_can_be_made_of_leave_the_model_alone(
    tmp_path, key, change, message
):
    other, model = (small("soft_tiny_release") for _ in range(2))
    state = release_layout(other)
    assert key in state
    torch.save({**state, key: change(state[key])}, tmp_path / "a.pth")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        softfree.load_release_checkpoint(model, tmp_path / "a.pth")
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())


def test_weights_that_are_not_finite_are_said(tmp_path, caplog):
    model = small("soft_tiny_release")
    state = release_layout(model)
    torch.save({**state, "head.bias": state["head.bias"] * float("nan")}, tmp_path / "a.pth")
    softfree.load_release_checkpoint(model, tmp_path / "a.pth")
    assert "1 of its tensors are not finite, e.g. head.bias" in caplog.text


def test_keys_that_are_no_names_are_refused(tmp_path):
    torch.save({3: torch.zeros(2)}, tmp_path / "a.pth")
    with pytest.raises(ValueError, match="holds no state dict of tensors"):
        softfree.load_release_checkpoint(small("soft_tiny_release"), tmp_path / "a.pth")


def test_a_missing_file_is_said_to_be_missing(tmp_path):
    for path in (tmp_path / "nowhere.pth", tmp_path):
        with pytest.raises(FileNotFoundError, match="no checkpoint at"):
            softfree.load_release_checkpoint(release_model(), path)


# At (32, 128) the grids have as many positions as at 64, in another arrangement.
@pytest.mark.parametrize("img_size", [96, 32, (64, 96), (32, 128)])
def test_positions_are_resized_to_the_models_image_size(tmp_path, img_size):
    source, target = release_model(), release_model(img_size=img_size)
    torch.save(release_layout(source), tmp_path / "weights.pth")
    softfree.load_release_checkpoint(target, tmp_path / "weights.pth")
    for old, new in zip(source.stages, target.stages, strict=True):
        prefix = old.pos_embed.prefix
        grid = old.pos_embed.weight[:, prefix:].unflatten(1, old.pos_embed.grid).permute(0, 3, 1, 2)
        resized = F.interpolate(grid, new.pos_embed.grid, mode="bilinear").flatten(2).mT
        torch.testing.assert_close(new.pos_embed.weight[:, prefix:], resized)
        assert torch.equal(new.pos_embed.weight[:, :prefix], old.pos_embed.weight[:, :prefix])
    x = torch.randn(1, 3, *((img_size, img_size) if isinstance(img_size, int) else img_size))
    torch.testing.assert_close(target(x), source(x))


@pytest.mark.parametrize("name", ["softpp_tiny", "softpp_vit_small"])
def test_timm_loads_our_own_checkpoints_at_another_image_size(tmp_path, name):
    source = small(name).eval()
    torch.save(source.state_dict(), tmp_path / "weights.pth")
    overlay = dict(file=str(tmp_path / "weights.pth"), num_classes=5)
    target = small(name, img_size=96, pretrained=True, pretrained_cfg_overlay=overlay).eval()
    x = torch.randn(1, 3, 96, 96)
    torch.testing.assert_close(target(x), source(x))


def test_timm_fine_tunes_an_authors_checkpoint_for_other_classes(tmp_path):
    source = release_model()
    torch.save(release_layout(source), tmp_path / "weights.pth")
    overlay = dict(file=str(tmp_path / "weights.pth"), num_classes=5)
    target = small(
        "softpp_tiny_release", num_classes=9, pretrained=True, pretrained_cfg_overlay=overlay
    ).eval()
    x = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(target.forward_features(x), source.forward_features(x))
    assert target(x).shape == (1, 9)


def test_our_own_rectangular_positions_are_kept_as_they_are():
    model = small("softpp_tiny", img_size=(32, 128))
    state = filter_checkpoint(model.state_dict(), model)
    assert torch.equal(state["stages.0.pos_embed.weight"], model.stages[0].pos_embed.weight)
