"""Parameter groups of dense models: every parameter once, no decay where none is due, slower early layers."""

import dataclasses

import pytest
import timm
import torch

from softfree.commands.settings import resolve
from softfree.models.detection import retinanet
from softfree.training.dense import (
    SMALL_BACKBONE,
    BackboneSettings,
    any_sizes,
)
from softfree.training.detection import RECIPES as DETECTION
from softfree.training.detection import Detection
from softfree.training.parameters import parameter_groups
from softfree.training.segmentation import RECIPES as SEGMENTATION
from softfree.training.segmentation import Segmentation
from softfree.training.settings import OptimSettings, override
from tests.data.test_detection import write_coco
from tests.data.test_layouts import write_yolo
from tests.data.test_segmentation import folders
from tests.models.small import PYRAMID


@pytest.fixture(scope="module")
def model():
    return retinanet("softpp_tiny", 3, width=16, backbone_kwargs=PYRAMID)


@pytest.mark.parametrize("layer_decay", [1.0, 0.5])
def test_every_parameter_is_in_one_group(model, layer_decay):
    optim = OptimSettings(layer_decay=layer_decay, weight_decay=0.1)
    groups = parameter_groups(model, optim, model.backbone.features.body)
    grouped = [id(p) for group in groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())


@pytest.mark.parametrize("layer_decay", [1.0, 0.5])
def test_biases_norms_and_positions_are_not_decayed(model, layer_decay):
    optim = OptimSettings(layer_decay=layer_decay, weight_decay=0.1)
    groups = parameter_groups(model, optim, model.backbone.features.body)
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        free = parameter.ndim == 1 or "pos_embed" in name or "cls_token" in name
        assert decay[id(parameter)] == (0 if free else 0.1), name


def test_early_layers_learn_slower_and_the_heads_at_the_full_rate(model):
    optim = OptimSettings(layer_decay=0.5)
    groups = parameter_groups(model, optim, model.backbone.features.body)
    scale = {id(p): group.get("lr_scale", 1.0) for group in groups for p in group["params"]}
    backbone = model.backbone.features.body.model
    stem = scale[id(backbone.stem[0].conv.weight)]
    first = scale[id(backbone.stages[0].blocks[0].mlp.fc1.weight)]
    last = scale[id(backbone.stages[3].blocks[0].mlp.fc1.weight)]
    head = scale[id(model.head.classification_head.cls_logits.weight)]
    assert stem < first < last <= head == 1


def test_layer_decay_of_a_backbone_that_does_not_tell_its_layers_is_refused():
    with pytest.raises(ValueError, match="`layer_decay` needs a backbone that defines its layers"):
        parameter_groups(
            torch.nn.Linear(2, 2), OptimSettings(layer_decay=0.5), torch.nn.Linear(2, 2)
        )


def test_backbone_arguments_are_typed_as_for_classification():
    settings = BackboneSettings(model_kwargs=("depths=1,1,2,1", "landmarks=conv"))
    assert settings.arguments() == {"landmarks": "conv", "depths": (1, 1, 2, 1)}


def test_landmarks_and_arguments_that_no_backbone_takes_are_refused_by_their_flag():
    with pytest.raises(ValueError, match="`landmarks`: landmarks: sampler must be one of"):
        BackboneSettings(landmarks="cnv").arguments()
    with pytest.raises(ValueError, match="`model_kwargs`: embed_dims must have 4 values"):
        retinanet("softpp_tiny", backbone_kwargs=dict(embed_dims=(32, 64)))


def test_shapes_are_learned_with_few_channels_by_our_pyramids_alone():
    def model_kwargs(*argv):
        return resolve(argv, Detection).backbone.model_kwargs

    assert "embed_dims=32,64,128,192" in SMALL_BACKBONE
    assert model_kwargs() == model_kwargs("--steps", "3", "--model=soft_tiny") == SMALL_BACKBONE
    assert model_kwargs("--model", "resnet18") == ()
    assert model_kwargs("--model", "resnet18", "--model-kwargs", "a=1") == ("a=1",)


def test_a_shorter_run_has_a_shorter_warm_up_and_earlier_drops():
    usual, steps, epochs = (
        resolve(["--recipe", "1x", *argv], Detection).optim
        for argv in ([], ["--steps=600"], ["--epochs", "6"])
    )
    assert (usual.epochs, usual.steps, usual.warmup_steps) == (12, 0, 500)
    assert usual.decay_milestones == (8, 11)
    # With --steps, milestones are steps.
    assert (steps.steps, steps.warmup_steps) == (600, 60)
    assert steps.decay_milestones == (400, 550)
    assert (epochs.epochs, epochs.steps, epochs.decay_milestones) == (6, 0, (4, 6))
    segmenter = resolve(["--recipe", "ade20k", "--steps", "3000"], Segmentation).optim
    assert (segmenter.steps, segmenter.warmup_steps) == (3000, 300)
    # Recipes that count in steps give way to --epochs.
    optim = resolve(["--recipe", "ade20k", "--epochs", "3"], Segmentation).optim
    assert (optim.steps, optim.warmup_steps) == (0, 0)


def test_flags_win_over_what_the_length_of_the_run_would_make_of_warm_up_and_drops():
    argv = ["--recipe", "1x", "--epochs", "6", "--decay-milestones", "8", "11"]
    assert resolve(argv, Detection).optim.decay_milestones == (8, 11)
    argv = ["--detector", "mask-rcnn", "--warmup-steps", "100"]
    optim = resolve(argv, Detection).optim
    assert (optim.steps, optim.warmup_steps) == (800, 100)
    assert resolve(argv[:2], Detection).optim.warmup_steps == 80


def test_cudnn_does_not_time_its_algorithms_for_every_size(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    with any_sizes():
        assert not torch.backends.cudnn.benchmark
    assert torch.backends.cudnn.benchmark


@pytest.mark.parametrize("task, recipes", [(Detection, DETECTION), (Segmentation, SEGMENTATION)])
def test_a_backbone_starts_from_the_weights_that_timm_fetches(task, recipes, tmp_path, monkeypatch):
    source = timm.create_model("resnet10t")
    path = tmp_path / "resnet10t.pth"
    torch.save(source.state_dict(), path)
    create, fetched = timm.create_model, []

    def fetch(name, pretrained=False, **kwargs):
        fetched.append(bool(pretrained))
        overlay = {"pretrained_cfg_overlay": {"file": str(path)}} if pretrained else {}
        return create(name, pretrained=pretrained, **overlay, **kwargs)

    monkeypatch.setattr(timm, "create_model", fetch)
    given = BackboneSettings(model="resnet10t", pretrained=True)
    made = task(dataclasses.replace(recipes["shapes"], backbone=given))
    weights = made.build_model().state_dict()
    first = next(value for name, value in weights.items() if name.endswith("conv1.0.weight"))
    assert torch.equal(first, source.conv1[0].weight) and fetched.count(True) == 1
    assert "pretrained" not in str(made.metadata())
    made.resumes = True
    made.build_model()
    assert fetched.count(True) == 1
    given = dataclasses.replace(given, backbone_checkpoint="a.pth")
    with pytest.raises(ValueError, match="can't be used together"):
        task(dataclasses.replace(recipes["shapes"], backbone=given)).build_model()


def write_set(task, root):
    return str(write_coco(root) if task is Detection else folders(root, ((0, 1), (1, 0))))


@pytest.mark.parametrize("task, usual", [(Detection, "1x"), (Segmentation, "ade20k")])
def test_few_pictures_are_learned_with_a_recipe_of_their_own_and_a_line_says_so(
    task, usual, tmp_path, caplog, monkeypatch
):
    given = ["--data-dir", write_set(task, tmp_path)]
    with caplog.at_level("INFO"):
        settings = resolve(given, task)
    assert settings.recipe == "small" and settings.data.color_jitter and settings.data.scales[0] < 1
    assert caplog.messages[0] == "`recipe` small, for fewer than 5,000 training pictures"
    assert caplog.messages[1].startswith("`batch_size` 2 instead of 8, for")
    assert settings.optim.batch_size == 2
    caplog.clear()
    assert resolve([*given, "--recipe", usual], task).recipe == usual and not caplog.messages
    assert resolve([*given, "--batch-size", "3"], task).optim.batch_size == 3
    monkeypatch.setattr("softfree.training.dense.FEW_PICTURES", 1)
    assert task.usual_recipe({"data_dir": given[1]}) == usual


@pytest.mark.parametrize("task, recipes", [(Detection, DETECTION), (Segmentation, SEGMENTATION)])
@pytest.mark.parametrize(
    "given, message",
    [
        (dict(color_jitter=2.0), "`color_jitter` must be from 0 to 1, got 2"),
        (dict(scales=(2.0, 1.0)), "`scales` must be above 0 and in order, got 2 1"),
    ],
)
def test_variations_that_no_picture_can_have_are_refused(task, recipes, given, message):
    with pytest.raises(ValueError, match=message):
        task(override(recipes["small"], {"data": given}))


@pytest.mark.parametrize("task", [Detection, Segmentation])
def test_a_bad_annotation_changes_neither_recipe_nor_batch(task, tmp_path):
    bad = "1 0.1 0.1 0.1 0.1 0.1 0.1"  # a polygon without area, which may be left out
    root = write_yolo(tmp_path, ["0 0.1 0.1 0.5 0.1 0.5 0.5", bad])
    settings = resolve(["--data-dir", str(root), "--skip-bad-annotations"], task)
    assert settings.recipe == "small"
    assert settings.optim.batch_size == 2
