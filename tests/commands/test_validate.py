"""`softfree validate`: the scores of the run, at several sizes, in a table and a file; errors are clear."""

import csv
import json
import shutil

import pytest
import timm
import torch
from PIL import Image

import softfree_cli
from softfree.training.checkpoint import write_checkpoint

SMALL = ["--img-size", "32", "--workers", "0", "--device", "cpu", "--batch-size", "32"]
KWARGS = ["embed_dims=16,16,16,16", "num_heads=1,1,1,1", "depths=1,1,1,1"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    output = tmp_path_factory.mktemp("trained")
    argv = ["train", "classification", "--output", str(output), *SMALL, "--steps", "3"]
    assert softfree_cli.main([*argv, "--warmup-epochs", "0", "--model-kwargs", *KWARGS]) == 0
    return output


def run(*argv):
    argv = ("validate", "classification", *argv, "--device", "cpu", "--workers", "0")
    return softfree_cli.main([str(argument) for argument in argv])


def test_scores_are_those_of_the_run_and_reach_the_file(trained, tmp_path, capsys):
    file = tmp_path / "new" / "r.csv"
    argv = ["--checkpoint", trained / "best", "--img-size", 32, 64, "--csv", file]
    assert run(*argv, "--batch-size", 50) == 0
    with file.open(newline="") as stream:
        first, second = csv.DictReader(stream)
    best = json.loads((trained / "best" / "metadata.json").read_text())["run"]["best"]
    assert float(first["top1"]) == pytest.approx(best)
    assert (first["img_size"], second["img_size"]) == ("32", "64")
    assert first["samples"] == second["samples"] == "360" and first["torch"] == torch.__version__
    assert float(first["top5"]) >= float(first["top1"]) and float(first["img_per_s"]) > 0
    out = capsys.readouterr().out
    assert "top-1 %" in out and f"{best:.2f}" in out


def test_mirrored_pictures_count_too_if_asked_for(trained, tmp_path, capsys):
    losses = []
    for views in ([], ["--tta"], ["--tta", "--tta-scales", 1, 2]):
        file = tmp_path / f"{len(losses)}.csv"
        assert run("--checkpoint", trained / "best", "--csv", file, *views) == 0
        [row] = csv.DictReader(file.open(newline=""))
        losses.append(float(row["loss"]))
    assert len(set(losses)) == 3
    assert (row["tta"], row["tta_scales"], row["samples"]) == ("True", "1.0 2.0", "360")
    assert "best, at 1 2, mirrored" in capsys.readouterr().out


def test_the_checkpoint_is_named_as_it_is(trained, tmp_path, capsys):
    path = tmp_path / "a folder [with brackets]" / ("x" * 80)
    shutil.copytree(trained / "best", path)
    assert run("--checkpoint", path) == 0
    assert f"softfree_tiny, {path}\n" in capsys.readouterr().out


def test_arguments_of_the_model_may_differ_from_the_training(trained, tmp_path):
    """At 96 pixels stage 1 has nine landmarks, or one."""
    losses = []
    for kwargs in ([], ["--model-kwargs", "landmarks=average:1"]):
        file = tmp_path / f"{len(losses)}.csv"
        argv = ["--checkpoint", trained / "best", "--img-size", 96, "--csv", file]
        assert run(*argv, *kwargs) == 0
        with file.open(newline="") as stream:
            losses.append(next(csv.DictReader(stream))["loss"])
    assert losses[0] != losses[1]


def test_the_split_is_chosen_and_one_that_is_not_there_is_named(trained, tmp_path, capsys):
    file = tmp_path / "r.csv"
    assert run("--checkpoint", trained / "best", "--split", "train", "--csv", file) == 0
    assert "softfree_tiny, " in (out := capsys.readouterr().out) and "/best, train\n" in out
    with file.open(newline="") as stream:
        [row] = csv.DictReader(stream)
    assert (row["split"], row["samples"]) == ("train", "1437")
    assert run("--checkpoint", trained / "best", "--split", "test") == 2
    assert "--split test: the embedded digits have only train and val" in capsys.readouterr().err


def test_classes_are_scored_listed_and_drawn(trained, tmp_path, capsys):
    file, plot = tmp_path / "r.csv", tmp_path / "r.png"
    argv = ["--checkpoint", trained / "best", "--per-class", "--csv", file, "--draw", plot]
    assert run(*argv) == 0
    out = capsys.readouterr().out
    assert "recall %" in out and "Confusion matrix" in out
    with file.open(newline="") as stream:
        whole, *rows = csv.DictReader(stream)
    assert whole["class"] == "all" and [row["class"] for row in rows] == list("0123456789")
    hits = sum(int(row[f"predicted {row['class']}"]) for row in rows)
    assert 100 * hits / 360 == pytest.approx(float(whole["top1"]))
    for row in rows:
        counts = [int(row[f"predicted {digit}"]) for digit in range(10)]
        assert sum(counts) == int(row["pictures"])
        own = 100 * counts[int(row["class"])] / sum(counts)
        assert float(row["recall"]) == pytest.approx(own)
    assert min(Image.open(plot).size) > 300
    assert run(*argv, "--img-size", 32, 64) == 2
    assert "--per-class and --draw take one --img-size, got 32 64" in capsys.readouterr().err
    assert run("--checkpoint", trained / "best", "--draw", tmp_path / "r.txt") == 2
    assert "--draw must end in .png" in capsys.readouterr().err


def test_the_pictures_of_a_test_folder_are_scored(tmp_path, capsys):
    path = tmp_path / "weights.pth"
    torch.save(timm.create_model("resnet10t", num_classes=2).state_dict(), path)
    data = pictures(tmp_path / "data")
    argv = ["--checkpoint", path, "--model", "resnet10t", "--img-size", 64, "--data-dir", data]
    assert run(*argv, "--split", "test") == 2
    assert "no folder test/" in capsys.readouterr().err
    pictures(tmp_path / "data", ("test",), count=3)
    file = tmp_path / "r.csv"
    assert run(*argv, "--split", "test", "--csv", file) == 0
    with file.open(newline="") as stream:
        assert next(csv.DictReader(stream))["samples"] == "6"


def pictures(folder, splits=("train", "val"), count=1):
    """Two classes of one picture each, or more."""
    for split in splits:
        for name in ("cat", "dog"):
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (32, 32)).save(folder / split / name / f"{number}.png")
    return folder


def test_a_weights_file_needs_its_model_and_data(tmp_path, capsys):
    path = tmp_path / "weights.pth"
    torch.save(timm.create_model("resnet10t", num_classes=2).state_dict(), path)
    assert run("--checkpoint", path, "--model", "resnet10t") == 2
    assert "--data-dir is needed" in capsys.readouterr().err
    argv = ["--checkpoint", path, "--data-dir", pictures(tmp_path / "data"), "--img-size", 64]
    assert run(*argv, "--model", "resnet10t") == 0
    assert "50.00" in capsys.readouterr().out
    assert run(*argv, "--model", "resnet18") == 2
    assert "another architecture than resnet18" in capsys.readouterr().err
    assert run(*argv) == 2
    assert "is a file: set the --model it belongs to" in capsys.readouterr().err


def test_a_checkpoint_of_other_classes_is_refused(trained, tmp_path, capsys):
    assert run("--checkpoint", trained / "best", "--data-dir", pictures(tmp_path / "data")) == 2
    assert (
        "has 10 classes (0, 1, 2, ...), but --data-dir has 2 (cat, dog" in capsys.readouterr().err
    )


def test_a_checkpoint_of_another_task_is_refused(tmp_path, capsys):
    metadata = {"task": "detection"}
    write_checkpoint(tmp_path / "best", {"w": torch.zeros(1)}, metadata, '{"data": {}}')
    assert run("--checkpoint", tmp_path / "best") == 2
    assert "is a checkpoint of detection, not of classification" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--checkpoint", "nowhere"], "nowhere"),
        (["--img-size", "0"], "--img-size must be above 0"),
        (["--batch-size", "0"], "--batch-size must be above 0"),
    ],
)
def test_invalid_arguments_give_one_clear_line(trained, capsys, argv, message):
    assert run("--checkpoint", trained / "best", *argv) == 2
    err = capsys.readouterr().err
    assert message in err and len(err.splitlines()) == 1


def test_the_checkpoint_says_of_which_task_it_is(trained, capsys):
    argv = ["--checkpoint", str(trained / "best"), "--device", "cpu", "--workers", "0"]
    assert softfree_cli.main(["validate", *argv]) == 0
    found = capsys.readouterr().out
    assert softfree_cli.main(["validate", "classification", *argv]) == 0
    named = capsys.readouterr().out
    assert found.split()[:-1] == named.split()[:-1]  # all but the speed
    assert softfree_cli.main(["validate", "detection", *argv]) == 2
    assert "is a checkpoint of classification, not of detection" in capsys.readouterr().err


def test_an_unknown_task_gets_advice(capsys):
    assert softfree_cli.main(["validate"]) == 2
    assert "validate what? One of classification" in capsys.readouterr().err
