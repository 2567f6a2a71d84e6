"""`softfree check-data`: what is there, and what can't be used, before a training."""

import json

import pytest
from PIL import Image

import softfree_cli
from softfree.data.longrange import CIFAR10
from tests.data.test_cifar import write_batches
from tests.data.test_layouts import write_voc, write_yolo
from tests.photos import write_photos


def check(*argv, task="classification"):
    return softfree_cli.main(["check-data", task, *map(str, argv), "--workers", "0"])


def rows(text):
    """The words of each line by its first."""
    return {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.split()}


def test_class_folders_are_counted_as_training_takes_them(tmp_path, capsys):
    photos = write_photos(tmp_path / "photos", 30)
    assert check("--data-dir", photos) == 0
    out = capsys.readouterr().out
    assert "validates on 20% of each class" in out and "no faults found" in out
    assert "3 classes, for each: pictures" in out
    assert rows(out)["pictures"] == ["24", "6"]
    assert rows(out)["width"] == ["120", "120"]
    assert rows(out)["discs"] == ["8", "33.3", "2", "33.3"]
    assert max(map(len, out.splitlines()[1:])) <= 80  # but for the path


def test_damaged_pictures_are_named(tmp_path, capsys):
    photos = write_photos(tmp_path / "photos", 30)
    (photos / "discs" / "IMG_0003.jpg").write_bytes(b"no picture")
    assert check("--data-dir", photos) == 2
    captured = capsys.readouterr()
    assert "IMG_0003.jpg: not a picture" in captured.out
    assert "1 of 30 pictures can't be used" in captured.err
    assert check("--data-dir", photos, "--no-decode") == 0


def test_uneven_classes_are_worth_a_word(tmp_path, capsys):
    photos = write_photos(tmp_path / "photos", 60)
    for number in range(6, 60, 3):
        (photos / "discs" / f"IMG_{number:04d}.jpg").unlink()
    assert check("--data-dir", photos) == 0
    assert "unbalanced: 1 to 16 pictures per class" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["--no-decode"]])
def test_the_embedded_digits_are_fine(argv, capsys):
    assert check(*argv) == 0
    out = capsys.readouterr().out
    assert rows(out)["pictures"] == ["1,437", "360"]
    assert rows(out)["0"][:1] == ["142"]
    assert ("width" in rows(out)) == (not argv)


def test_previews_that_can_not_be_written_are_refused_before_the_check(tmp_path, capsys):
    assert check("--preview", tmp_path / "a.svg") == 2
    assert "--preview must end in .png, .jpg, .jpeg" in capsys.readouterr().err
    assert check("--preview", tmp_path / "a.png", "--recipe", "none") == 2
    assert "--recipe must be one of digits" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_sizes_boxes_and_classes_of_objects_are_said_and_written(tmp_path, capsys):
    pytest.importorskip("faster_coco_eval")
    file = tmp_path / "figures" / "voc.json"
    data = write_voc(tmp_path / "voc")
    Image.new("RGB", (20, 30)).save(data / "JPEGImages" / "2008_2.jpg")
    (data / "Annotations" / "2008_2.xml").write_text(
        "<annotation><size><width>20</width><height>30</height></size></annotation>"
    )
    assert check("--data-dir", data, "--json", file, task="detection") == 0
    out = capsys.readouterr().out
    assert rows(out)["width"] == ["20", "/", "30", "/", "40", "40"]
    assert rows(out)["empty"] == ["pictures", "1", "0"]
    assert rows(out)["crowds"][-2:] == ["1", "1"]
    assert rows(out)["cat"] == ["1", "100.0", "1", "100.0"]
    assert "train: no objects of aeroplane, bicycle, bird, boat, bottle and 14 more" in out
    assert "only boxes, no masks" in out
    train = json.loads(file.read_text())["splits"]["train"]
    assert (train["objects"], train["small"], train["large"], train["crowds"]) == (1, 1, 0, 1)
    assert train["width"] == {"min": 20, "median": 30, "max": 40}
    assert train["classes"][7] == {"name": "cat", "count": 1, "share": 1.0}


def test_class_maps_are_counted_in_pictures_and_pixels(tmp_path, capsys):
    pytest.importorskip("faster_coco_eval")
    data = write_yolo(tmp_path, ["1 0 0 0.5 0 0.5 0.5 0 0.5"])
    assert check("--data-dir", data, task="segmentation") == 0
    out = capsys.readouterr().out
    assert "for each: pictures with it, share of the pixels" in out
    assert rows(out)["background"] == ["2", "87.5", "2", "87.5"]
    assert rows(out)["on"] == ["1", "12.5", "1", "12.5"]
    assert rows(out)["empty"] == ["pictures", "1", "1"]
    assert "train: no pictures of no\n" in out
    assert check("--data-dir", data, "--no-decode", task="segmentation") == 0
    assert "3 classes: background, no, on" in capsys.readouterr().out


def test_of_many_classes_the_largest_and_the_smallest_are_shown(tmp_path, capsys):
    for number in range(50):
        for split, count in (("train", 60 - number), ("val", 1)):
            folder = tmp_path / split / f"class-{number:02d}"
            folder.mkdir(parents=True)
            for place in range(count):
                Image.new("RGB", (4, 4)).save(folder / f"{place}.png")
    assert check("--data-dir", tmp_path, "--no-decode") == 0
    out = capsys.readouterr().out
    shown = [line.split()[0] for line in out.splitlines() if line.startswith(" class-")]
    assert shown == [f"class-{n:02d}" for n in [*range(20), *range(30, 50)]]
    assert "... 10 more" in out


def test_long_range_samples_are_counted_too(tmp_path, capsys):
    write_batches(tmp_path / "cifar")
    file = tmp_path / "figures.json"
    given = ["--task", "image", "--data-dir", tmp_path / "cifar", "--json", file]
    assert check(*given, task="longrange") == 0
    out = capsys.readouterr().out
    assert rows(out)["samples"] == ["18", "2", "10"]
    assert rows(out)["tokens"] == ["1,024"] * 3
    assert rows(out)["frog"][-2:] == ["1", "10.0"]
    content = json.loads(file.read_text())
    assert content["task"] == "image"
    assert [own["name"] for own in content["splits"]["test"]["classes"]] == list(CIFAR10)


def test_texts_that_test_and_dev_share_are_counted_once(tmp_path, capsys):
    lines = [{"text": "good" * 3, "label": 1}, {"text": "bad", "label": 0}]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert check("--task", "text", "--data-dir", tmp_path, task="longrange") == 0
    out = capsys.readouterr().out
    assert "test has the same samples as dev" in out
    assert rows(out)["tokens"] == ["3", "/", "7", "/", "12"] * 2
    assert rows(out)["negative"] == ["1", "50.0"] * 2


def test_faults_of_long_range_files_and_unknown_tasks_are_named(tmp_path, capsys):
    (tmp_path / "train.jsonl").write_text('{"text": "x"}')
    assert check("--task", "text", "--data-dir", tmp_path, task="longrange") == 2
    assert "train.jsonl, line 1 must be" in capsys.readouterr().err
    assert check("--task", "chess", task="longrange") == 2
    assert "--task must be one of listops, text" in capsys.readouterr().err
    assert check("--preview", tmp_path / "a.png", task="longrange") == 2
    assert "--preview draws pictures" in capsys.readouterr().err
