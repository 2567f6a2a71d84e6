"""`softfree export`: a file, checked, from a checkpoint or a fresh model."""

import json
import re
import textwrap
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn

import softfree_cli
from softfree.commands import common
from softfree.data.drawing import colour
from softfree.data.shapes import draw_shapes
from softfree.models import export
from softfree.training.checkpoint import write_checkpoint
from softfree.training.detection import Detection
from softfree.training.tasks import load_for_inference

from .checkpoints import classifier_checkpoint

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


@pytest.mark.full
def test_a_checkpoint_becomes_an_onnx_file_that_knows_its_classes(tmp_path, capsys):
    # Exporters take a fraction of the time for a model without a pyramid.
    small = dict(name="softpp_vit_small", embed_dim=32, num_heads=2, depth=1, iterations=1)
    folder = classifier_checkpoint(tmp_path / "run" / "best", **small)
    target = tmp_path / "model.onnx"
    arguments = ["export", "--checkpoint", str(folder), "--format", "onnx", str(target)]
    assert softfree_cli.main(arguments) == 0
    assert "differs from PyTorch by at most" in capsys.readouterr().out
    loaded, metadata = export.load_onnx(target)
    model, expected = load_for_inference(folder)
    assert metadata["class_names"] == expected["class_names"] and metadata["mean"] == [0.5] * 3
    image = torch.randn(2, 3, 80, 64)
    with torch.no_grad():
        torch.testing.assert_close(loaded(image), model(image), atol=1e-4, rtol=0)
    Image.linear_gradient("L").save(tmp_path / "photo.png")
    capsys.readouterr()
    tops = []
    for source in (["--onnx", str(target)], ["--checkpoint", str(folder)]):
        assert softfree_cli.main(["predict", str(tmp_path / "photo.png"), *source, "--json"]) == 0
        tops.append(json.loads(capsys.readouterr().out)["predictions"])
    for ours, theirs in zip(*tops, strict=True):
        assert ours["label"] == theirs["label"]
        assert ours["probability"] == pytest.approx(theirs["probability"], abs=1e-4)


@pytest.fixture
def photo(tmp_path):
    path = tmp_path / "street.png"
    Image.fromarray(draw_shapes(0).image).resize((130, 90)).save(path)
    return path


def predictions(capsys, photo, *arguments: object) -> dict:
    capsys.readouterr()
    assert softfree_cli.main(["predict", str(photo), "--json", *map(str, arguments)]) == 0
    return json.loads(capsys.readouterr().out)


def detector_checkpoint(folder):
    """A RetinaNet that is certain of much, on a backbone that exporters take at once."""
    arguments = dict(min_size=96, max_size=160, width=16, anchor_size=16, backbone_kwargs={})
    metadata = dict(
        task="detection",
        model="resnet10t",
        detector="retinanet",
        arguments=arguments,
        class_names=["circle", "square", "star"],
    )
    torch.manual_seed(0)
    model = Detection.build(metadata)
    with torch.no_grad():
        for module in model.head.modules():
            if isinstance(module, nn.Conv2d):
                module.weight.mul_(12)
        model.head.classification_head.cls_logits.bias.fill_(-2)
    write_checkpoint(folder, model.state_dict(), metadata, "{}")
    return folder


def run_example(monkeypatch, folder, file: str) -> dict:
    """The code of docs/export.md that opens ``file``, run in ``folder``; its names."""
    monkeypatch.chdir(folder)
    page = (Path(__file__).parents[2] / "docs" / "export.md").read_text()
    [code] = [
        block
        for block in re.findall(r"^    import json\n(?:    .*\n|\n)+", page, re.M)
        if file in block
    ]
    names: dict = {}
    exec(compile(textwrap.dedent(code), "example", "exec"), names)
    return names


@pytest.mark.full
def test_a_detectors_file_finds_the_boxes_that_the_detector_finds(
    tmp_path, capsys, photo, monkeypatch
):
    folder = detector_checkpoint(tmp_path / "best")
    target = tmp_path / "detector.onnx"
    arguments = ["export", "--checkpoint", str(folder), "--img-size", "96", str(target)]
    assert softfree_cli.main(arguments) == 0
    assert "image to boxes, scores, labels" in capsys.readouterr().out
    ours, theirs = (
        predictions(capsys, photo, *source, "--min-score", 0)["objects"]
        for source in (("--checkpoint", folder), ("--onnx", target))
    )
    assert len(ours) == len(theirs) > 20
    assert len({entry["label"] for entry in ours}) > 1
    for own, other in zip(ours, theirs, strict=True):
        assert own["label"] == other["label"]
        assert own["score"] == pytest.approx(other["score"], abs=1e-4)
        assert own["box"] == pytest.approx(other["box"], abs=1e-4 * 130)
    # Pillow's bilinear resizing is not quite PyTorch's: the documented example has nearly the same scores.
    names = run_example(monkeypatch, tmp_path, target.name)
    expected = [entry["score"] for entry in ours[:5]]
    sure = names["labels"] > 0
    assert names["scores"][sure][:5].tolist() == pytest.approx(expected, abs=0.05)


def test_class_maps_have_the_picture_s_size_and_the_numbers_of_the_classes(
    tmp_path, capsys, photo, monkeypatch
):
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 4, stride=4, padding=2)
    metadata = dict(
        task="segmentation", model="none", arguments={}, class_names=list("abcd"), short_side=64,
        window=0, mean=[0.5] * 3, std=[0.2] * 3,
    )  # fmt: skip
    file, maps = tmp_path / "segmenter.onnx", tmp_path / "maps"
    export.export_onnx(model, file, img_size=64, metadata=metadata)
    result = predictions(capsys, photo, "--onnx", file, "--class-maps", maps)
    [path] = maps.iterdir()
    page = Image.open(path)
    assert page.mode == "P" and page.size == Image.open(photo).size and path.name == "1_street.png"
    classes = np.asarray(page)
    for entry in result["classes"]:
        share = (classes == "abcd".index(entry["label"])).mean()
        assert share == pytest.approx(entry["share"])
    assert page.getpalette()[3:6] == list(colour(1)) and len(result["classes"]) > 1
    run_example(monkeypatch, tmp_path, file.name)
    assert (np.asarray(Image.open("classes.png")) == classes).mean() > 0.98
    refused = ["predict", str(photo), "--onnx", str(file), "--class-maps", str(maps), "--topk", "1"]
    assert softfree_cli.main(refused) == 2
    assert "without --topk" in capsys.readouterr().err


def test_a_file_that_is_off_is_refused_with_exit_code_1(tmp_path, capsys, monkeypatch):
    folder = classifier_checkpoint(tmp_path / "best", iterations=1)

    def refuse(*_: object, **__: object) -> float:
        raise export.ExportError("the exported program differs from the model by 3.0e-02")

    monkeypatch.setattr("softfree.commands.export.export_pt2", refuse)
    target = tmp_path / "model.pt2"
    arguments = ["export", "--checkpoint", str(folder), "--format", "pt2", str(target)]
    assert softfree_cli.main(arguments) == 1
    assert "differs from the model by 3.0e-02" in capsys.readouterr().err


def test_wrong_arguments_are_refused(tmp_path, capsys):
    folder = str(classifier_checkpoint(tmp_path / "best", iterations=1))
    target = str(tmp_path / "model.onnx")
    for arguments, message in (
        ([target], "export what? Use --checkpoint OUT/best, or --model"),
        ([str(tmp_path / "model.pt2"), "--model", "soft_tiny"], "PATH must end in .onnx"),
        ([target, "--model", "no_such"], "timm knows no model 'no_such'"),
        ([target, "--checkpoint", folder, "--features"], "--features is for --model and detectors"),
        ([target, "--model", "soft_tiny", "--img-size", "8"], "--img-size must be at least 32"),
    ):
        assert softfree_cli.main(["export", *arguments]) == 2
        assert message in capsys.readouterr().err


def test_a_checkpoint_becomes_a_folder_of_timm_s_with_its_score_in_the_card(tmp_path, capsys):
    folder = classifier_checkpoint(tmp_path / "run" / "best", iterations=1)
    file = folder / "metadata.json"
    metadata = {**json.loads(file.read_text()), "run": {"best": 91.25, "best_step": 1200}}
    file.write_text(json.dumps(metadata))
    target = tmp_path / "digits"
    arguments = ["export", "--checkpoint", str(folder), "--format", "timm", str(target)]
    assert softfree_cli.main(arguments) == 0
    assert 'timm.create_model("local-dir:' in capsys.readouterr().out
    loaded = timm.create_model(f"local-dir:{target}", pretrained=True).eval()
    model, _ = load_for_inference(folder)
    image = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(loaded(image), model(image))
    assert "| top-1 on the validation pictures (%) | 91.25 |" in (target / "README.md").read_text()
    (tmp_path / "taken").touch()
    arguments[-1] = str(tmp_path / "taken")
    assert softfree_cli.main(arguments) == 2
    assert "must name a folder" in capsys.readouterr().err


def test_a_terminal_sees_what_is_done_and_for_how_long(capsys, monkeypatch):
    with common.elapsing() as report:
        report("exporting")
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    with common.elapsing() as report:
        report("exporting")
    shown = capsys.readouterr().err
    assert "exporting" in shown and "0:00:00" in shown
