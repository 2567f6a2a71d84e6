"""`softfree validate longrange`: a checkpoint is scored with nothing but its folder."""

import csv
import json
import subprocess
import sys

import pytest

from softfree.commands.settings import resolve
from softfree.commands.validate.longrange import ValidateLongRange
from softfree.training.longrange import LongRange


def validate(checkpoint, **options):
    return ValidateLongRange(checkpoint=checkpoint, device="cpu", **options).run()


@pytest.fixture
def output(tmp_path):
    options = ["--data-dir", str(tmp_path / "cache"), "--output", str(tmp_path / "out")]
    options += ["--device", "cpu", "--workers", "0", "--dim", "16", "--num-heads", "1"]
    options += ["--model-kwargs", "stride=100", "--listops-train", "8", "--listops-eval", "5"]
    LongRange.run(resolve([*options, "--steps", "2", "--batch-size", "4"], LongRange))
    return tmp_path / "out"


def test_the_score_is_that_of_the_training(output, capsys):
    expected = json.loads((output / "test.json").read_text())
    # Another batch is padded differently, and must not matter.
    assert validate(output / "best", batch_size=1, workers=0) == 0
    out = capsys.readouterr().out
    assert f"accuracy {expected['accuracy']:.2f}%" in out and "5 samples" in out
    assert f"loss {expected['loss']:.4f}" in out


def test_fewer_processes_than_none_are_refused_by_their_flag(tmp_path):
    with pytest.raises(ValueError, match="`workers` must be at least 0, got -1"):
        validate(tmp_path, workers=-1)


@pytest.mark.slow
def test_two_processes_share_the_samples_and_say_what_one_says(output, capsys):
    options = ["--checkpoint", str(output / "best"), "--batch-size", "2", "--workers", "0"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "softfree", "validate", "longrange", *options]
    result = subprocess.run(
        [*command, "--device", "cpu"], check=True, timeout=600, capture_output=True, text=True
    )
    capsys.readouterr()
    validate(output / "best", workers=0)
    expected = capsys.readouterr().out
    assert "5 samples" in expected
    assert result.stdout == expected


def test_dev_samples_are_other_samples(output, capsys):
    validate(output / "best", workers=0)
    validate(output / "best", split="dev", workers=0)
    test, dev = (line for line in capsys.readouterr().out.splitlines() if "accuracy" in line and "listops " in line)  # fmt: skip
    assert "listops test" in test and "listops dev" in dev
    assert test.partition("loss")[2] != dev.partition("loss")[2]


def test_val_is_another_word_for_dev_and_training_samples_can_be_scored(output, capsys):
    for split in ("dev", "val", "train"):
        validate(output / "best", split=split, workers=0)
    dev, val, train = capsys.readouterr().out.splitlines()
    assert val == dev.replace("listops dev", "listops val")
    assert "listops train" in train and "8 samples" in train


def test_a_part_of_the_samples_can_be_scored(output, capsys):
    validate(output / "best", workers=0, eval_samples=3)
    assert "3 samples" in capsys.readouterr().out
    with pytest.raises(ValueError, match="`eval_samples` must be at least 0, got -1"):
        validate(output / "best", workers=0, eval_samples=-1)


def test_classes_are_scored(output, tmp_path, capsys):
    validate(output / "best", per_class=True, csv=tmp_path / "r.csv", workers=0)
    out = capsys.readouterr().out
    assert "recall %" in out and "Confusion matrix" in out
    with (tmp_path / "r.csv").open(newline="") as stream:
        whole, *rows = csv.DictReader(stream)
    hits = sum(int(row[f"predicted {row['class']}"]) for row in rows)
    assert 100 * hits / 5 == pytest.approx(float(whole["accuracy"]))


def test_a_folder_without_a_checkpoint_is_named(output, tmp_path):
    with pytest.raises(ValueError, match="did you mean"):
        validate(output)
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        validate(tmp_path / "none")


def test_a_checkpoint_of_another_task_is_named(tmp_path):
    (tmp_path / "metadata.json").write_text('{"task": "detection"}')
    (tmp_path / "settings.json").write_text('{"detector": {}}')
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match="is a checkpoint of detection, not of longrange"):
        validate(tmp_path)
