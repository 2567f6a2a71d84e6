"""Files from strangers name an architecture and its plain settings, and get nothing else."""

import copy
import json
import random
import re
import shutil

import pytest
import timm
import torch

from softfree.models.metadata import argument_names, check_arguments, check_buildable, parse_json
from softfree.training.checkpoint import read_metadata
from softfree.training.classification import Classification, create_network
from softfree.training.tasks import load_for_inference
from tests.commands.checkpoints import classifier_checkpoint

FORBIDDEN = {
    "pretrained": True,
    "pretrained_cfg": {"url": "http://example.org/weights.pth"},
    "pretrained_cfg_overlay": {"url": "http://example.org/weights.pth"},
    "checkpoint_path": "weights.pth",
    "cache_dir": "site-packages",
    "pruned": True,
    "features_only": True,
    "device": "cuda",
    "dtype": "float16",
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return classifier_checkpoint(tmp_path_factory.mktemp("saved") / "best")


@pytest.fixture
def checkpoint(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "best")


def change(checkpoint, **fields):
    file = checkpoint / "metadata.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def with_arguments(checkpoint, **arguments):
    kwargs = json.loads((checkpoint / "metadata.json").read_text())["model_kwargs"]
    change(checkpoint, model_kwargs={**kwargs, **arguments})


@pytest.mark.parametrize("name", FORBIDDEN)
def test_a_checkpoint_that_asks_timm_to_fetch_or_read_anything_is_refused_unbuilt(
    checkpoint, monkeypatch, name
):
    with_arguments(checkpoint, **{name: FORBIDDEN[name]})
    monkeypatch.setattr(timm, "create_model", pytest.fail)
    with pytest.raises(ValueError, match=f"metadata.json: softpp_tiny takes no argument '{name}'"):
        load_for_inference(checkpoint)


@pytest.mark.parametrize("name", FORBIDDEN)
def test_settings_of_a_run_can_t_ask_for_it_either(monkeypatch, name):
    monkeypatch.setattr(timm, "create_model", pytest.fail)
    with pytest.raises(ValueError, match=f"takes no argument '{name}'"):
        create_network("softpp_tiny", 10, 64, {name: FORBIDDEN[name]})


@pytest.mark.parametrize(
    "name", ["hf-hub:someone/model", "local-dir:folder", "../model", "nothing"]
)
def test_a_model_is_one_of_timm_s_registry(checkpoint, monkeypatch, name):
    change(checkpoint, model=name)
    monkeypatch.setattr(timm, "create_model", pytest.fail)
    with pytest.raises(ValueError, match="timm knows no model"):
        load_for_inference(checkpoint)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("depths", [1, 1, 1_000_000, 1]),
        ("depths", [400, 400, 400, 400]),
        ("embed_dims", [2**20] * 4),
        ("iterations", 10**6),
        ("mlp_ratio", float("inf")),
        ("landmarks", "http://example.org"),
        ("landmarks", "x" * 100),
        ("depths", [[[[1]]]]),
        ("depths", [1] * 1000),
    ],
)
def test_what_a_file_may_ask_for_is_bounded(checkpoint, monkeypatch, argument, value):
    with_arguments(checkpoint, **{argument: value})
    monkeypatch.setattr(timm, "create_model", pytest.fail)
    with pytest.raises(ValueError, match=f"softpp_tiny: {argument} must be"):
        load_for_inference(checkpoint)


def test_a_network_larger_than_its_weights_takes_no_memory(checkpoint, monkeypatch):
    with_arguments(checkpoint, embed_dims=[48_000] * 4)
    devices = []
    create = timm.create_model
    monkeypatch.setattr(
        timm,
        "create_model",
        lambda *a, **k: devices.append(torch.get_default_device().type) or create(*a, **k),
    )
    with pytest.raises(ValueError, match="holds weights of another architecture"):
        Classification.load(checkpoint)
    assert set(devices) == {"meta"}


def test_every_model_of_timm_s_can_be_told_its_usual_settings():
    for name in ("softpp_tiny", "soft_tiny_release", "swin_tiny_patch4_window7_224", "pvt_v2_b1"):
        assert {"img_size", "num_classes", "in_chans", "drop_path_rate", "depths"} <= (
            argument_names(name)
        )
    check_arguments("deit_tiny_distilled_patch16_224", {"embed_dim": 64, "depth": 2})
    check_arguments("softpp_tiny", {"landmarks": "conv:49", "landmark_gain": 0.25})


def test_no_model_of_timm_s_takes_weights_or_places_from_a_file():
    for name in timm.list_models():
        assert not argument_names(name) & (FORBIDDEN.keys() | {"url", "file", "hf_hub_id"})


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "3", "null", '"text"', "{"])
def test_json_that_is_no_mapping_is_an_error_of_one_line(text):
    with pytest.raises(ValueError) as caught:
        parse_json(text)
    assert "\n" not in str(caught.value)


def test_values_are_shown_short_and_without_control_characters(checkpoint):
    change(checkpoint, img_size="\x1b[31m" + "x" * 1000)
    with pytest.raises(ValueError, match="'img_size' must be a whole number") as caught:
        read_metadata(checkpoint)
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 300


VALUES = [
    None, True, 0, -1, 1e308, float("nan"), 2**70, "", "x", "../x", "http://example.org", [], {},
    [None], [[1]], ["a"], {"a": 1}, {"pretrained": True}, [float("inf")] * 3, "conv:49",
]  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_damaged_metadata_load_or_are_refused_in_one_line(checkpoint, seed):
    draw = random.Random(seed)
    original = json.loads((checkpoint / "metadata.json").read_text())
    for _ in range(60):
        metadata = copy.deepcopy(original)
        for _ in range(draw.randint(1, 2)):
            part = draw.choice([metadata, metadata, metadata.get("model_kwargs")])
            part = part if isinstance(part, dict) and part else metadata
            key = draw.choice(sorted(part))
            if draw.random() < 0.3:
                del part[key]
            else:
                part[key] = draw.choice(VALUES)
        (checkpoint / "metadata.json").write_text(json.dumps(metadata))
        try:
            load_for_inference(checkpoint)
        except ValueError as error:
            assert not re.search(r"[\n\x1b]", str(error)), metadata


def test_metadata_name_the_file_and_the_field_that_is_missing():
    with pytest.raises(ValueError, match="a/metadata.json: the field 'detector' is missing"):
        check_buildable("a/metadata.json", {"task": "detection", "model": "softpp_tiny"})


@pytest.mark.parametrize(
    ("task", "fields"),
    [
        ("detection", {"detector": "retinanet"}),
        ("segmentation", {"short_side": 0, "window": 0, "mean": [0.5] * 3, "std": [0.5] * 3}),
    ],
)
def test_dense_checkpoints_are_held_to_the_same(task, fields):
    def check(**arguments):
        check_buildable(
            "here",
            {
                "task": task,
                "model": "resnet18",
                "class_names": ["a"],
                "arguments": arguments,
                **fields,
            },
        )

    check(width=64, backbone_kwargs={"drop_path_rate": 0.1})
    with pytest.raises(ValueError, match="'arguments' takes no argument 'backbone_checkpoint'"):
        check(backbone_checkpoint="file")
    with pytest.raises(ValueError, match="resnet18 takes no argument 'pretrained'"):
        check(backbone_kwargs={"pretrained": True})


def test_dense_checkpoints_of_backbones_without_landmarks_may_name_some():
    fields = {"model": "resnet10t", "detector": "retinanet", "class_names": ["a"]}
    arguments = {"backbone_kwargs": {"landmarks": "conv:49"}}
    check_buildable("here", {"task": "detection", **fields, "arguments": arguments})
    with pytest.raises(ValueError, match="resnet10t takes no argument 'landmarks'"):
        check_arguments("resnet10t", arguments["backbone_kwargs"])


def test_sequence_checkpoints_are_held_to_the_same():
    def check(**arguments):
        fields = {"longrange_task": "listops", "class_names": ["a"], "model_kwargs": arguments}
        check_buildable("here", {"task": "longrange", **fields})

    check(vocab_size=32, attention="softpp", attention_options={"stride": 32})
    with pytest.raises(ValueError, match="'model_kwargs' takes no argument 'cache_dir'"):
        check(cache_dir="x")
    with pytest.raises(ValueError, match="'attention_options': iterations must be at most 1,000"):
        check(attention_options={"iterations": 60_000})
