"""`softfree export`: a file, checked, from a checkpoint or a fresh model."""

import json

import pytest
import timm
import torch
from PIL import Image

import softfree_cli
from softfree.commands import common
from softfree.models import export
from softfree.training.tasks import load_for_inference

from .checkpoints import classifier_checkpoint

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


@pytest.mark.slow
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
    target = str(tmp_path / "model.onnx")
    for arguments, message in (
        ([target], "export what? Give --checkpoint OUT/best, or --model"),
        ([str(tmp_path / "model.pt2"), "--model", "soft_tiny"], "PATH must end in .onnx"),
        ([target, "--model", "no_such"], "timm knows no model 'no_such'"),
        ([target, "--checkpoint", "x", "--features"], "--features is for --model"),
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
