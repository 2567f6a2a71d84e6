"""Every command of docs/examples.md runs as printed, on small data in the layout that the page shows."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("faster_coco_eval")
pytest.importorskip("segmentation_models_pytorch")
pytest.importorskip("torchmetrics")
pytest.importorskip("onnxscript")

import softfree_cli
from tests.commands.test_export import run_example
from tests.data.test_layouts import write_voc_maps, write_yolo
from tests.data.test_longrange import write_lra_listops
from tests.photos import photo, write_photos
from tests.shell import SMALL_PYRAMID, commands, run_commands

onnxruntime = pytest.importorskip("onnxruntime")
PAGE = (Path(__file__).parent.parent / "docs" / "examples.md").read_text(encoding="utf-8")
SECTIONS = {text.partition(":")[0]: text for text in re.split(r"^## ", PAGE, flags=re.M)[1:]}
# Exporters take a multiple of the time for softfree's own backbones, which have tests of their own.
BACKBONE = "--model resnet10t"
FIRST_STEPS = "--epochs 1 --img-size 32 --device cpu --workers 0"
FEW_STEPS = "--steps 2 --warmup-steps 1 --device cpu --workers 0"
DENSE = f"{BACKBONE} {FEW_STEPS} --batch-size 2 --crop 64 --width 16 --short-side 64"
FURTHER = {
    "check-data": "--workers 0",
    "train classification": f"{FIRST_STEPS} --model-kwargs {SMALL_PYRAMID} attention=softmax",
    "train detection": DENSE,
    "train segmentation": DENSE,
    "train longrange": f"{FEW_STEPS} --batch-size 1 --attention softmax --dim 16 --depth 1 --mlp-dim 16",
    "validate": "--workers 0 --device cpu",
    "predict": "--device cpu",
    "inspect": "--device cpu",
    "export --checkpoint detector": "--img-size 96",
    "export --checkpoint segmenter": "--img-size 64",
}


def further(line: str) -> str:
    """Flags that make a command of the page small."""
    return next((f for name, f in FURTHER.items() if line.startswith(f"softfree {name}")), "")


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs a section of the page among the files that it begins with, and gives what is printed."""
    monkeypatch.chdir(tmp_path)
    write_photos(tmp_path / "photos", 24)
    write_yolo(tmp_path / "boxes", ["0 0.5 0.5 0.5 0.2", "1 0.2 0.3 0.3 0.4"])
    write_voc_maps(tmp_path / "VOCdevkit" / "VOC2012")
    write_lra_listops(tmp_path / "listops", "train", "val", "test")
    for name in ("photo.jpg", "street.jpg"):
        photo("discs", 99).save(name)

    def run_section(section: str) -> str:
        lines = commands(SECTIONS[section])
        assert 6 <= len(lines) <= 8
        if "--backbone-checkpoint classifier/best" in SECTIONS[section]:
            start = next(line for line in commands(PAGE) if " train classification" in line)
            run_commands([f"{start} {BACKBONE}"], lambda _: FIRST_STEPS, capsys)
        return run_commands(lines, further, capsys)

    return run_section


def inputs_and_metadata(file: str) -> tuple[dict[str, list], dict]:
    """Names and sizes of an ONNX file's inputs, and its metadata."""
    session = onnxruntime.InferenceSession(file)
    properties = session.get_modelmeta().custom_metadata_map
    inputs = {given.name: given.shape for given in session.get_inputs()}
    return inputs, {key: json.loads(value) for key, value in properties.items()}


def test_the_page_has_one_section_for_each_task():
    assert list(SECTIONS) == ["Classification", "Detection", "Segmentation", "Long range"]


@pytest.mark.full
def test_photos_become_a_classifier_and_a_file_of_it(run):
    printed = run("Classification")
    assert Image.open("seen.png").width > 100 and Image.open("classes.png").width > 100
    assert Path("classes.csv").is_file()
    assert "differs from PyTorch by at most" in printed
    _, metadata = inputs_and_metadata("classifier.onnx")
    assert metadata["class_names"] == ["discs", "stripes", "tiles"]


@pytest.mark.full
def test_a_yolo_set_becomes_a_detector_and_a_file_that_gives_boxes(run):
    printed = run("Detection")
    assert "image to boxes, scores, labels" in printed
    for file in ("found.json", "street.json"):
        assert isinstance(json.loads(Path(file).read_text()), list)
    (drawn,) = Path("drawn-onnx").iterdir()
    assert Image.open(drawn).size == Image.open(Path("drawn", drawn.name)).size
    assert inputs_and_metadata("detector.onnx")[1]["class_names"] == ["no", "on"]


@pytest.mark.full
def test_a_voc_set_becomes_a_segmenter_and_a_file_with_the_same_class_maps(run):
    run("Segmentation")
    (seen,), (found,) = Path("maps").iterdir(), Path("maps-onnx").iterdir()
    assert seen.name == found.name
    assert Image.open(seen).size == Image.open(found).size == Image.open("street.jpg").size
    assert np.asarray(Image.open(found)).max() <= 20


def test_lras_listops_become_an_encoder_and_a_file_of_tokens(run, monkeypatch, capsys):
    printed = run("Long range")
    assert "tokens, mask to logits" in printed
    assert Path("sequences.pt2").is_file()
    inputs, metadata = inputs_and_metadata("sequences.onnx")
    assert list(inputs) == ["tokens", "mask"]
    assert metadata["length"] == 2000 and metadata["longrange_task"] == "listops"
    assert metadata["class_names"] == list("0123456789")
    answer = run_example(monkeypatch, Path.cwd(), "sequences.onnx")
    assert answer["logits"].shape == (1, 10)
    wrong = "export --checkpoint sequences/best --img-size 64 other.onnx"
    assert softfree_cli.main(wrong.split()) == 2
    assert "sequences/best is a sequence model" in capsys.readouterr().err
