"""The dense commands from end to end on a few small shapes: train, validate, predict, check the data."""

import csv
import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image, ImageFont

pytest.importorskip("faster_coco_eval")
pytest.importorskip("segmentation_models_pytorch")
pytest.importorskip("torchmetrics")

import softfree.data.detection
import softfree.data.segmentation
from softfree.commands import check_data, predict, train, validate
from softfree.commands.predict.detector import ObjectDetector
from softfree.commands.predict.segmenter import Segmenter
from softfree.data.coco import encode_mask, shape_annotations
from softfree.data.drawing import LETTERS, colour, place_labels, rows_of_pictures
from softfree.data.shapes import CLASSES, draw_shapes

FAST = [
    "--steps", "2", "--warmup-steps", "1", "--batch-size", "2", "--width", "16", "--eval-every", "0",
    "--model-kwargs", "embed_dims=16,32,48,64", "num_heads=1,2,3,4", "depths=1,1,1,1",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _few_shapes(monkeypatch):
    detection, segmentation = softfree.data.detection, softfree.data.segmentation
    for load in (detection.load_split, segmentation.load_split):
        monkeypatch.setitem(load.__kwdefaults__, "shapes", (4, 2))


@pytest.fixture
def picture(tmp_path):
    path = tmp_path / "street.png"
    Image.fromarray(draw_shapes(0).image).save(path)
    return path


@pytest.mark.parametrize("detector", ["retinanet", "mask-rcnn"])
def test_a_detector_is_trained_scored_and_drawn(tmp_path, capsys, picture, detector):
    out = tmp_path / "out"
    more = ["--detector", detector, "--proposals", "16"]
    assert train.main(["detection", "--output", str(out), *FAST, *more]) == 0
    table, found = tmp_path / "scores.csv", tmp_path / "found.json"
    best = ["--checkpoint", str(out / "best")]
    plot = tmp_path / "plot.png"
    files = ["--csv", str(table), "--results", str(found), "--draw", str(plot), "--per-class"]
    assert validate.main(["detection", *best, "--workers", "0", *files]) == 0
    assert min(Image.open(plot).size) > 300
    kinds = {"segmentation"} if detector == "mask-rcnn" else set()
    for entry in json.loads(found.read_text()):
        assert entry.keys() == {"image_id", "category_id", "bbox", "score"} | kinds
        assert entry["image_id"] in (0, 1) and 1 <= entry["category_id"] <= 5
    rows = list(csv.DictReader(table.open()))
    boxes = [row["class"] for row in rows if row["kind"] == "box"]
    assert boxes == ["all", *CLASSES, "background"]
    rows = [row for row in rows if row["class"] == "all"]
    assert [row["kind"] for row in rows] == (
        ["box", "mask"] if detector == "mask-rcnn" else ["box"]
    )
    assert {"AP", "AP50", "AP75", "APS", "APM", "APL"} <= rows[0].keys()
    printed = capsys.readouterr().out
    assert "AP50 %" in printed and "Confusion matrix" in printed
    with pytest.raises(
        ValueError, match="`split` test: the embedded shapes have only train and val"
    ):
        validate.main(["detection", *best, "--workers", "0", "--split", "test"])
    sizes = ["--short-side", "64", "--tta", "--tta-scales", "0.5", "1"]
    assert validate.main(["detection", *best, "--workers", "0", *sizes]) == 0
    assert f"{out / 'best'}, at 0.5 1, mirrored" in capsys.readouterr().out
    with pytest.raises(ValueError, match="`max_size` must be at least 1, got 0"):
        validate.main(["detection", *best, "--workers", "0", "--max-size", "0"])

    # So that a detector after two steps may have something to show.
    drawn, any_score = tmp_path / "drawn", ["--min-score", "0"]
    assert predict.main([str(picture), *best, "--draw", str(drawn), "--json", *any_score]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[0])
    for entry in result["objects"]:
        assert entry["label"] in ("circle", "square", "triangle", "star", "cross")
        assert len(entry["box"]) == 4
        assert ("mask" in entry) == (detector == "mask-rcnn")
    [path] = drawn.iterdir()
    assert min(Image.open(path).size) >= 384

    assert predict.main([str(picture), *best, "--json", "--tta", *any_score]) == 0
    assert "objects" in json.loads(capsys.readouterr().out)
    # Of the truth's ids, without boxes as corners.
    truth = shape_annotations(1, split="train")
    truth["images"][0].update(id=139, file_name="street.png")
    for category in truth["categories"]:
        category["id"] += 10
    truth["annotations"] = []
    (tmp_path / "truth.json").write_text(json.dumps(truth))
    given = [str(picture), *best, "--results", str(found), *any_score]
    assert predict.main([*given, "--annotations", str(tmp_path / "truth.json")]) == 0
    assert f"COCO results written to {found}" in capsys.readouterr().out
    entries = json.loads(found.read_text())
    assert len(entries) == len(result["objects"])
    for entry, seen in zip(entries, result["objects"], strict=True):
        left, top, right, bottom = seen["box"]
        assert entry["bbox"] == [left, top, right - left, bottom - top]
        assert entry["category_id"] == 11 + CLASSES.index(seen["label"])
        assert (entry["image_id"], entry["file_name"]) == (139, "street.png")
        assert entry.get("segmentation") == seen.get("mask")

    options = ["--json", "--topk", "2", *any_score]
    assert predict.main([str(picture), *best, *options]) == 0
    assert json.loads(capsys.readouterr().out)["objects"] == result["objects"][:2]

    assert predict.main([str(picture), *best, "--json", "--min-score", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["objects"] == []
    with pytest.raises(ValueError, match="--min-score must be from 0 to 1, got 7"):
        predict.main([str(picture), *best, "--min-score", "7"])

    # Beyond the longest side of the training, too.
    told = ObjectDetector(out / "best", torch.device("cpu"), 320, 5)
    seen, _ = told.model.transform([torch.zeros(3, 96, 96)])
    assert seen.image_sizes == [(320, 320)]


def test_a_label_at_the_right_edge_is_drawn_whole(tmp_path):
    detector = ObjectDetector.__new__(ObjectDetector)
    detector.class_names = ["background", "square"]
    [entry] = result = [{"label": "square", "score": 0.9, "box": [460.0, 100.0, 479.0, 140.0]}]
    detector.drawing(Image.new("RGB", (480, 480)), {"objects": result}).save(tmp_path / "a.png")
    # The line above the letters has the colour of the box, over the whole label.
    row = np.asarray(Image.open(tmp_path / "a.png"))[100 - LETTERS - 4]
    label = f"{entry['label']} {entry['score']:.0%}"
    width = ImageFont.load_default(LETTERS).getlength(label)
    assert (row == colour(1)).all(-1).sum() > width


def test_labels_do_not_hide_each_other_and_stay_in_the_picture():
    boxes = [(10.0, 50.0, 60.0, 90.0)] * 4 + [(0.0, 0.0, 30.0, 20.0), (90.0, 95.0, 100.0, 100.0)]
    places = place_labels(boxes, [40.0] * 6, (100, 200))
    height = LETTERS + 4
    for index, (left, top) in enumerate(places):
        assert left >= 0 and left + 40 <= 100 and top >= 0 and top + height <= 200
        for other_left, other_top in places[:index]:
            apart = abs(left - other_left) >= 40 or abs(top - other_top) >= height
            assert apart, (places, index)
    assert places[0] == (10.0, 50.0 - height)


def test_the_truth_has_no_score_and_classes_have_colours_of_their_own(tmp_path):
    colours = [colour(index) for index in range(21)]
    for index, one in enumerate(colours):
        for other in colours[:index]:
            assert sum(abs(a - b) for a, b in zip(one, other, strict=True)) > 40
    detector = ObjectDetector.__new__(ObjectDetector)
    detector.class_names = ["background", "cat"]
    drawn = []
    for scored in ({}, {"score": 1.0}):
        entry = {"label": "cat", "box": [100, 100, 200, 200], **scored}
        detector.drawing(Image.new("RGB", (480, 480)), {"objects": [entry]}).save(
            tmp_path / "a.png"
        )
        drawn.append(np.asarray(Image.open(tmp_path / "a.png")))
    label = np.argwhere((drawn[0] != drawn[1]).any(-1))
    assert label[:, 1].min() > 100 + 20  # what follows the name


def test_drawings_of_a_segmenter_are_as_wide_whatever_is_seen():
    segmenter = Segmenter.__new__(Segmenter)
    segmenter.class_names = ["sky", "a class of a longer name"]
    sizes = set()
    for name in segmenter.class_names:
        mask = encode_mask(np.ones((48, 64), bool))
        entry = {"label": name, "share": 1.0, "mask": mask}
        sizes.add(segmenter.drawing(Image.new("RGB", (64, 48)), {"classes": [entry]}).size)
    assert len(sizes) == 1


def test_rows_of_pictures_have_names():
    page = rows_of_pictures({"truth": [Image.new("RGB", (40, 20))], "a model": []}, height=40)
    assert page.height >= 80 and (np.asarray(page)[:40, :60] < 100).any()


def test_a_segmenter_is_trained_scored_and_drawn(tmp_path, capsys, picture):
    out = tmp_path / "out"
    assert train.main(["segmentation", "--output", str(out), *FAST]) == 0
    best = ["--checkpoint", str(out / "best")]
    table, plot = tmp_path / "scores.csv", tmp_path / "plot.png"
    given = ["segmentation", *best, "--workers", "0", "--window", "64"]
    assert validate.main(given) == 0
    printed = capsys.readouterr().out
    assert "mIoU" in printed and "triangle" in printed and "Confusion" not in printed
    assert validate.main([*given, "--per-class", "--csv", str(table), "--draw", str(plot)]) == 0
    assert "Confusion matrix" in capsys.readouterr().out
    whole, *rows = csv.DictReader(table.open())
    assert [row["class"] for row in rows] == ["ground", *CLASSES]
    counts = np.array([[int(row[f"predicted {other['class']}"]) for other in rows] for row in rows])
    assert counts.sum() == 2 * 96 * 96
    share = 100 * counts.diagonal().sum() / counts.sum()
    assert float(whole["accuracy"]) == pytest.approx(share)
    assert float(rows[0]["accuracy"]) == pytest.approx(100 * counts[0, 0] / counts[0].sum())
    assert min(Image.open(plot).size) > 300
    with pytest.raises(
        ValueError, match="`split` test: the embedded shapes have only train and val"
    ):
        validate.main(["segmentation", *best, "--workers", "0", "--split", "test"])
    views = ["--tta", "--tta-scales", "0.5", "1.5"]
    assert validate.main(["segmentation", *best, "--workers", "0", *views]) == 0
    assert predict.main([str(picture), *best, "--json", *views]) == 0
    assert "at 0.5 1.5, mirrored" in capsys.readouterr().out
    drawn = tmp_path / "drawn"
    assert predict.main([str(picture), *best, "--draw", str(drawn), "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[0])
    assert sum(entry["share"] for entry in result["classes"]) == pytest.approx(1)
    with pytest.raises(ValueError, match="--min-score is for detectors"):
        predict.main([str(picture), *best, "--min-score", "0.3"])
    with pytest.raises(ValueError, match="--results is for detectors"):
        predict.main([str(picture), *best, "--results", "found.json"])
    [path] = drawn.iterdir()
    width, height = Image.open(path).size
    # The list of classes stands beside the picture.
    assert width > height >= 384


def test_a_detector_drawn_shows_its_boxes_in_their_place(tmp_path, picture):
    detector = object.__new__(ObjectDetector)
    detector.class_names = ["background", "circle"]
    result = {"objects": [{"label": "circle", "score": 0.9, "box": [30.0, 40.0, 80.0, 90.0]}]}
    detector.drawing(Image.open(picture).convert("RGB"), result).save(tmp_path / "a.png")
    drawn = Image.open(tmp_path / "a.png")
    scale = drawn.width // 96
    assert drawn.getpixel((30 * scale + 1, 65 * scale)) == colour(1)
    assert drawn.getpixel((55 * scale, 90 * scale - 1)) == colour(1)


def test_data_of_other_classes_than_the_checkpoints_are_refused(tmp_path, capsys):
    out = tmp_path / "out"
    assert train.main(["segmentation", "--output", str(out), *FAST]) == 0
    for split in ("train", "val"):
        for folder, size in (("images", (8, 8)), ("masks", (8, 8))):
            path = tmp_path / "data" / folder / split / "a.png"
            path.parent.mkdir(parents=True)
            Image.new("L" if folder == "masks" else "RGB", size).save(path)
    (tmp_path / "data" / "classes.txt").write_text("road\n")
    with pytest.raises(ValueError, match=r"has 6 classes .*--data-dir has 1"):
        validate.main(
            [
                "segmentation",
                "--checkpoint",
                str(out / "best"),
                "--data-dir",
                str(tmp_path / "data"),
            ]
        )


def test_validation_needs_no_training_data_and_ignores_what_training_ignored(tmp_path, capsys):
    data = tmp_path / "data"
    for split in ("train", "val"):
        mask = Image.new("L", (64, 64), 1)
        mask.paste(7, (0, 0, 64, 40))
        for folder, picture in (("images", Image.new("RGB", (64, 64))), ("masks", mask)):
            (data / folder / split).mkdir(parents=True)
            for name in ("a.png", "b.png"):
                picture.save(data / folder / split / name)
    (data / "classes.txt").write_text("road\nsky\n")
    given = ["--data-dir", str(data), "--ignore-label", "7", "--crop", "64", "--short-side", "64"]
    out = tmp_path / "out"
    assert train.main(["segmentation", "--output", str(out), *FAST, *given, "--workers", "0"]) == 0
    shutil.rmtree(data / "images" / "train")
    shutil.rmtree(data / "masks" / "train")
    best = ["--checkpoint", str(out / "best"), "--workers", "0"]
    assert validate.main(["segmentation", *best, "--data-dir", str(data)]) == 0
    assert "mIoU" in capsys.readouterr().out

    test = ["segmentation", *best, "--data-dir", str(data), "--split", "test"]
    with pytest.raises(FileNotFoundError, match=r"images has no folder test/ \(or testing/\)"):
        validate.main(test)
    for folder in ("images", "masks"):
        (data / folder / "val").rename(data / folder / "test")
    assert validate.main(test) == 0
    assert "best, test\n" in capsys.readouterr().out


@pytest.mark.parametrize("task", ["classification", "detection", "segmentation"])
def test_a_preview_shows_the_varied_samples_that_training_begins_with(task, tmp_path, capsys):
    pages = []
    for recipe in ([], [], ["--recipe", "small"]):
        file = tmp_path / f"{len(pages)}.png"
        argv = [task, "--workers", "0", "--preview", str(file), *recipe]
        assert check_data.main(argv) == 0
        with Image.open(file) as page:
            pages.append(page.convert("RGB"))
    assert str(file) in capsys.readouterr().out
    # Four in a row, the same at every call, and varied as by the recipe.
    assert pages[0].width > 4 * 320 and pages[0].tobytes() == pages[1].tobytes()
    assert pages[0].tobytes() != pages[2].tobytes()


@pytest.mark.parametrize("task", ["detection", "segmentation"])
def test_the_embedded_shapes_have_no_faults(capsys, task):
    assert check_data.main([task]) == 0
    printed = capsys.readouterr().out
    assert ["pictures", "4", "2"] in [line.split() for line in printed.splitlines()]
    assert "no faults found" in printed


def test_faults_are_named(tmp_path):
    (tmp_path / "annotations").mkdir()
    (tmp_path / "annotations" / "instances_train.json").write_text("{}")
    with pytest.raises(ValueError, match="instances_train.json is not a COCO file"):
        check_data.main(["detection", "--data-dir", str(tmp_path)])


@pytest.mark.parametrize("task", ["detection", "segmentation"])
def test_fewer_processes_than_none_are_refused_by_their_flag(tmp_path, task):
    for command, given in ((check_data, "--data-dir"), (validate, "--checkpoint")):
        with pytest.raises(ValueError, match="`workers` must be at least 0, got -1"):
            command.main([task, given, str(tmp_path), "--workers", "-1"])


def write_shapes(root, task, suffix, train=3):
    """Shapes for training and one for validation, as files."""
    for split, count in (("train", train), ("val", 1)):
        for index in range(count):
            drawn = draw_shapes(index, split=split)
            folders = {"images": drawn.image}
            if task == "segmentation":
                folders["masks"] = drawn.class_map
            for folder, values in folders.items():
                path = root / folder / split / f"shapes {index}"
                path.parent.mkdir(parents=True, exist_ok=True)
                extension = ".png" if folder == "masks" else suffix
                Image.fromarray(values).save(path.with_suffix(extension))
        if task == "detection":
            annotations = shape_annotations(count, split=split)
            for image in annotations["images"]:
                image["file_name"] += suffix
            (root / "annotations").mkdir(exist_ok=True)
            (root / "annotations" / f"{split}.json").write_text(json.dumps(annotations))
    (root / "classes.txt").write_text("\n".join(("ground", *CLASSES)))


def test_a_set_of_boxes_alone_is_told_what_does_without_masks(tmp_path, capsys):
    write_shapes(tmp_path, "detection", ".png")
    for path in (tmp_path / "annotations").iterdir():
        content = json.loads(path.read_text())
        for annotation in content["annotations"]:
            del annotation["segmentation"]
        path.write_text(json.dumps(content))
    given = ["detection", "--data-dir", str(tmp_path), "--workers", "0"]
    assert check_data.main(given) == 0
    assert (
        "only boxes, no masks: usable for RetinaNet, not for Mask R-CNN" in capsys.readouterr().out
    )
    assert check_data.main([*given, "--no-masks"]) == 0
    out = ["--output", str(tmp_path / "out"), "--data-dir", str(tmp_path)]
    with pytest.raises(ValueError, match="boxes but no masks.*`detector` retinanet$"):
        train.main(["detection", "--detector", "mask-rcnn", *out])


def cut_in_half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize(
    ("task", "suffix"), [("detection", ".jpg"), ("detection", ".png"), ("segmentation", ".jpg")]
)
def test_every_half_written_picture_is_named(tmp_path, capsys, task, suffix, workers):
    write_shapes(tmp_path, task, suffix)
    given = [task, "--data-dir", str(tmp_path), "--workers", workers]
    assert check_data.main(given) == 0
    assert capsys.readouterr().err == ""  # no progress where nobody watches
    for split, index in (("train", 1), ("val", 0)):
        cut_in_half(tmp_path / "images" / split / f"shapes {index}{suffix}")
    with pytest.raises(ValueError, match="--data-dir .* 2 of 4 pictures can't be used"):
        check_data.main(given)
    faults = [line for line in capsys.readouterr().out.splitlines() if "truncated" in line]
    assert [line.split(":")[0] for line in faults] == ["train", "val"]
    assert f"shapes 1{suffix}: " in faults[0]
    assert f"shapes 0{suffix}: " in faults[1]
    assert check_data.main([*given, "--no-decode"]) == 0


@pytest.mark.parametrize("terminal", [False, True])
def test_names_of_many_classes_stay_whole(tmp_path, monkeypatch, capsys, terminal):
    write_shapes(tmp_path, "segmentation", ".png")
    names = [f"class-{number}" for number in range(60)]
    (tmp_path / "classes.txt").write_text("\n".join(names))
    monkeypatch.setenv("COLUMNS", "80")
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    assert check_data.main(["segmentation", "--data-dir", str(tmp_path), "--no-decode"]) == 0
    out = capsys.readouterr().out
    assert set(names) <= set(out.replace(",", "").split())
    assert ("60 classes: " + ", ".join(names) + "\n" in out) == (not terminal)
    if terminal:
        assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("task", ["detection", "segmentation"])
def test_a_half_written_picture_is_left_out_of_training_and_named(tmp_path, capsys, task):
    write_shapes(tmp_path / "data", task, ".jpg")
    bad = tmp_path / "data" / "images" / "train" / "shapes 1.jpg"
    cut_in_half(bad)
    given = ["--data-dir", str(tmp_path / "data"), "--recipe", "shapes", "--workers", "0"]
    out = tmp_path / "out"
    assert train.main([task, "--output", str(out), *FAST, "--batch-size", "3", *given]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "skipped" in said
    assert "shapes 1.jpg: image file is truncated" in said
    assert next(csv.DictReader((out / "eval.csv").open()))["unreadable_files"] == "1"

    for index in (0, 2):
        cut_in_half(bad.with_name(f"shapes {index}.jpg"))
    with pytest.raises(
        ValueError, match=r"none of the training pictures .*shapes \d.jpg: image file is"
    ):
        train.main([task, "--output", str(out / "2"), *FAST, "--batch-size", "3", *given])


@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize("task", ["detection", "segmentation"])
def test_a_batch_of_half_written_pictures_alone_does_not_stop_the_training(
    tmp_path, capsys, task, workers
):
    write_shapes(tmp_path / "data", task, ".jpg", train=6)
    # Two of an epoch's three batches have no other.
    for index in range(1, 6):
        cut_in_half(tmp_path / "data" / "images" / "train" / f"shapes {index}.jpg")
    given = ["--data-dir", str(tmp_path / "data"), "--recipe", "shapes", "--workers", workers]
    given += ["--steps", "3", "--log-interval", "1"]
    out = tmp_path / "out"
    assert train.main([task, "--output", str(out), *FAST, *given]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for index in range(1, 6):
        assert f"shapes {index}.jpg: image file is truncated" in said
    assert len(list(csv.DictReader((out / "train.csv").open()))) == 3
    assert next(csv.DictReader((out / "eval.csv").open()))["unreadable_files"] == "5"


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("task", ["detection --detector mask-rcnn --proposals 16", "segmentation"])
def test_the_lines_of_a_training_fit_in_80_columns(tmp_path, monkeypatch, capsys, task, terminal):
    monkeypatch.setenv("COLUMNS", "80")
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.chdir(tmp_path)
    assert train.main([*task.split(), "--output", "out", "--log-interval", "1", *FAST]) == 0
    said = capsys.readouterr().out.splitlines()
    assert any("done: best" in line for line in said)
    if terminal:
        assert any("training" in line and "loss" in line for line in said)
        assert not any("…" in line for line in said)  # as where the bar has no room
    else:
        assert any("/s" in line and line.endswith(" left") for line in said)
        assert max(map(len, said)) <= 80
    # The files have what the lines leave out.
    files = "".join((tmp_path / "out" / name).read_text() for name in ("train.csv", "eval.csv"))
    assert ",auxiliary," in files or (",rpn_box," in files and ",mask_AP50," in files)


def test_colours_differ_between_classes():
    assert len({colour(index) for index in range(21)}) == 21
    assert torch.tensor([colour(i) for i in range(150)]).max() <= 255
