"""Exported files compute what the model does, at sizes and batches other than the example's."""

import json
import resource
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

from softfree.models import export
from softfree.models.export import ExportError, MatrixPool, export_onnx, export_pt2, load_onnx
from softfree.models.sequence import SequenceClassifier

from .small import PYRAMID, small

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

METADATA = dict(task="classification", class_names=["a", "b"], mean=[0.5, 0.4, 0.3], img_size=64)
# Each Newton step is unrolled in the exported graph, so few of them.
FEW_STEPS = dict(iterations=2)
# Exporters take most of their time for SOFT's sizes, which one test for each format holds.
EASY = PYRAMID | dict(attention="softmax")


def plain() -> nn.Module:
    """A model that exports at once."""
    return nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def encoder(attention: str, **options: Any) -> SequenceClassifier:
    sizes = dict(vocab_size=12, length=60, num_classes=4, dim=16, depth=1, mlp_dim=16)
    return SequenceClassifier(attention=attention, **sizes, **options).eval()


def assert_same(given: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(given, expected, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_one_onnx_file_serves_any_batch_and_size(tmp_path):
    model = small("softfree_tiny", landmarks="average:4").eval()
    error = export_onnx(model, tmp_path / "m.onnx", img_size=64, metadata=METADATA)
    assert 0 < error < 1e-4
    loaded, metadata = load_onnx(tmp_path / "m.onnx")
    assert metadata == METADATA
    with torch.no_grad():
        for shape in ((1, 3, 33, 33), (5, 3, 70, 91), (2, 3, 160, 64)):
            image = torch.randn(shape)
            assert_same(loaded(image), model(image))
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]


@pytest.mark.full
def test_pytorchs_exporter_alone_is_right_at_sizes_that_32_does_not_divide(tmp_path):
    model = small("softpp_tiny", **FEW_STEPS).eval()
    sizes = {0: Dim("batch", max=64), 2: Dim("height", min=33), 3: Dim("width", min=33)}
    example = (torch.randn(2, 3, 64, 96),)
    program = torch.onnx.export(model, example, dynamo=True, dynamic_shapes=(sizes,), verbose=False)
    program.save(tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    for shape in ((1, 3, 77, 41), (3, 3, 33, 131), (1, 3, 225, 60)):
        image = torch.randn(shape)
        (given,) = session.run(None, {session.get_inputs()[0].name: image.numpy()})
        with torch.no_grad():
            assert_same(torch.from_numpy(given), model(image))


@pytest.mark.full
def test_upernet_is_exported(tmp_path):
    from softfree.models.segmentation import upernet

    model = upernet("softpp_tiny", 5, width=16, backbone_kwargs=EASY).eval()
    export_onnx(model, tmp_path / "u.onnx", img_size=64, metadata=dict(task="segmentation"))
    loaded, _ = load_onnx(tmp_path / "u.onnx")
    # Neither a multiple of 32, as the example was, nor of 4.
    image = torch.randn(2, 3, 150, 230)
    with torch.no_grad():
        assert_same(loaded(image), model(image))


@pytest.mark.full
def test_the_backbone_of_a_detector_is_exported_with_its_pyramid(tmp_path):
    from softfree.models.detection import retinanet

    detector = retinanet("softpp_tiny", 5, width=16, backbone_kwargs=EASY).eval()
    names = ["p3", "p4", "p5", "p6", "p7"]
    path = tmp_path / "d.onnx"
    export_onnx(
        detector.backbone, path, img_size=64, output_names=names, metadata=dict(task="features")
    )
    loaded, _ = load_onnx(path)
    image = torch.randn(1, 3, 128, 192)
    with torch.no_grad():
        for given, expected in zip(loaded(image), detector.backbone(image).values(), strict=True):
            assert_same(given, expected)


@pytest.mark.slow
def test_an_exported_program_is_reloaded_and_needs_no_operator_of_ours(tmp_path):
    model = small(
        "soft_vit_small", features_only=True, depth=1, out_indices=(0,), **FEW_STEPS
    ).eval()
    assert export_pt2(model, tmp_path / "m.pt2", img_size=64, metadata=METADATA) < 1e-4
    program = torch.export.load(tmp_path / "m.pt2")
    assert not any("softfree" in str(node.target) for node in program.graph.nodes)
    image = torch.randn(3, 3, 97, 130)
    with torch.no_grad():
        for given, expected in zip(program.module()(image), model(image), strict=True):
            assert_same(given, expected)


@pytest.mark.full
@pytest.mark.parametrize(
    ("attention", "options"),
    [
        ("softmax", dict(channels=3, pooling="none")),
        ("softmax", dict(pooling="cls")),
        # More windows than landmarks at some lengths, fewer at others.
        pytest.param("softfree", dict(landmarks="average:6"), marks=pytest.mark.slow),
    ],
)
def test_one_file_of_an_encoder_serves_any_batch_length_and_mask(attention, options, tmp_path):
    torch.manual_seed(0)
    model = encoder(attention, **options)
    file = tmp_path / "m.onnx"
    assert export_onnx(model, file, metadata=dict(task="longrange", length=60)) < 1e-4
    session = onnxruntime.InferenceSession(file)
    assert [given.name for given in session.get_inputs()] == ["tokens", "mask"]
    loaded, metadata = load_onnx(file)
    assert metadata["length"] == 60
    for batch, length, real in ((1, 5, 5), (4, 60, 1), (2, 23, 20), (3, 37, 0)):
        tokens = torch.randint(12, (batch, length))
        if model.channels:
            tokens = torch.randn(batch, length, model.channels)
        mask = torch.rand(batch, length) < 0.8
        mask[0] = torch.arange(length) < real
        with torch.no_grad():
            assert_same(loaded(tokens, mask), model(tokens, mask))


@pytest.mark.full
@pytest.mark.parametrize("landmarks", ["average:6", "spread:4"])
def test_a_program_of_an_encoder_serves_any_batch_and_length(landmarks, tmp_path):
    model = encoder("softfree", landmarks=landmarks, iterations=2, inverse="newton")
    assert export_pt2(model, tmp_path / "m.pt2") < 1e-4
    run = torch.export.load(tmp_path / "m.pt2").module()
    for batch, length in ((1, 6), (5, 41)):
        tokens, mask = torch.randint(12, (batch, length)), torch.rand(batch, length) < 0.5
        with torch.no_grad():
            assert_same(run(tokens, mask)[0], model(tokens, mask))


def test_encoders_of_pairs_and_those_that_sort_are_refused(tmp_path):
    for write in (export_onnx, export_pt2):
        with pytest.raises(ValueError, match=r"pairs of sequences .task retrieval. can't be"):
            write(encoder("softmax", pair=True), tmp_path / "m.onnx")
        with pytest.raises(ValueError, match="`attention` reformer can't be exported"):
            write(encoder("reformer"), tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.full
def test_a_pyramid_without_overlap_is_exported(tmp_path):
    # Sizes that windows do not divide are filled up at their end, stage after stage.
    model = small("softpp_tiny", **EASY, overlap=False).eval()
    assert export_pt2(model, tmp_path / "m.pt2", img_size=64) < 1e-4


def test_metadata_travel_with_a_program(tmp_path):
    export_pt2(plain(), tmp_path / "m.pt2", img_size=64, metadata=METADATA)
    extra = {"metadata.json": ""}
    torch.export.load(tmp_path / "m.pt2", extra_files=extra)
    assert json.loads(extra["metadata.json"]) == METADATA


def test_below_33_pixels_the_size_is_fixed_and_the_batch_is_not(tmp_path):
    model = plain()
    export_onnx(model, tmp_path / "m.onnx", img_size=32, metadata=METADATA)
    loaded, _ = load_onnx(tmp_path / "m.onnx")
    image = torch.randn(7, 3, 32, 32)
    with torch.no_grad():
        assert_same(loaded(image), model(image))


@pytest.mark.full
def test_a_model_with_one_landmark_is_exported_at_its_fixed_size(tmp_path):
    model = small("softpp_tiny", img_size=32, **FEW_STEPS).eval()
    assert export_pt2(model, tmp_path / "m.pt2", img_size=32) < 1e-4


@pytest.mark.parametrize("write", [export_onnx, export_pt2])
def test_a_file_that_is_off_is_not_written(write, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "TOLERANCE", -1.0)
    target = tmp_path / "m.onnx"
    target.write_text("the file before")
    with pytest.raises(ExportError, match=r"on 1 images of 64 x 64 pixels .* nothing was written"):
        write(plain(), target, img_size=64)
    assert target.read_text() == "the file before"
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]


@pytest.mark.parametrize("size", [(1, 1), (3, 2), (6, 6)])
@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (1, 1, 12, 6), (1, 2, 2, 1)])
def test_matrix_pooling_is_adaptive_average_pooling(size, shape):
    image = torch.randn(shape)
    torch.testing.assert_close(MatrixPool(size)(image), nn.AdaptiveAvgPool2d(size)(image))


def test_the_model_stays_as_it_was(tmp_path):
    model = plain().double().train()
    export_pt2(model, tmp_path / "m.pt2", img_size=64)
    assert model.training and isinstance(model[1], nn.AdaptiveAvgPool2d)
    assert model[0].weight.dtype == torch.float64


def test_a_full_disk_is_an_error_and_leaves_no_file(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        for write, name in ((export_pt2, "m.pt2"), (export_onnx, "m.onnx")):
            with pytest.raises(OSError, match="File too large"):
                write(plain(), tmp_path / name, img_size=64)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


def test_files_of_others_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no ONNX file at"):
        load_onnx(tmp_path / "none.onnx")
    (tmp_path / "text.onnx").write_text("no model")
    with pytest.raises(ValueError, match="no readable ONNX file"):
        load_onnx(tmp_path / "text.onnx")
    export_onnx(plain(), tmp_path / "bare.onnx", img_size=64)
    with pytest.raises(ValueError, match="does not say what it is for"):
        load_onnx(tmp_path / "bare.onnx")
