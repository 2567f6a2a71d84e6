"""`softfree train`: a folder of pictures, or none, to a checkpoint; bad files are left out; errors are clear."""

import csv
import errno
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

import softfree_cli
from softfree.commands import train
from softfree.training.classification import Classification
from softfree.training.guard import NonFiniteError
from softfree.training.tasks import load_for_inference
from tests.photos import write_photos

SMALL = ["--img-size", "32", "--workers", "0", "--device", "cpu", "--batch-size", "4"]
SMALL += ["--model-kwargs", "embed_dims=16,16,16,16", "num_heads=1,1,1,1", "depths=1,1,1,1"]
SHORT = [*SMALL, "--epochs", "1", "--warmup-epochs", "0", "--log-interval", "1"]


@pytest.fixture
def folders(tmp_path):
    """Two classes, dark and bright, of eight and three pictures."""
    generator = np.random.default_rng(0)
    for split, count in (("train", 8), ("val", 3)):
        for name, level in (("dark", 30), ("bright", 200)):
            folder = tmp_path / "data" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = generator.integers(level, level + 50, (40, 48, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return tmp_path / "data"


def run(*argv):
    return softfree_cli.main(["train", "classification", *map(str, argv)])


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_folders_of_pictures_give_a_checkpoint_that_knows_its_classes(folders, tmp_path, capsys):
    output = tmp_path / "out"
    assert run("--data-dir", folders, "--output", output, *SHORT) == 0
    metadata = json.loads((output / "best" / "metadata.json").read_text())
    assert metadata["class_names"] == ["bright", "dark"] and metadata["img_size"] == 32
    assert len(rows(output / "train.csv")) == 4
    (score,) = rows(output / "eval.csv")
    assert score["samples"] == "6"
    out = capsys.readouterr().out
    assert "16 training and 6 validation samples" in out and "in " in out
    assert f"{output}/best" in out


def test_a_rival_takes_the_place_of_the_attention(folders, tmp_path):
    output = tmp_path / "out"
    assert run("--data-dir", folders, "--output", output, *SHORT, "--attention", "performer") == 0
    model, _ = load_for_inference(output / "best")
    kinds = {type(module).__name__ for module in model.modules()}
    assert "PerformerAttention" in kinds and "SoftAttention" not in kinds


@pytest.mark.parametrize(
    ("attention", "kwargs", "words"),
    [
        ("softpp", ["query_gain=0.01"], "attends to everything alike"),
        ("softpp", ["landmarks=conv", "query_gain=9"], "attends to next to nothing"),
        ("softfree", [], None),
    ],
)
def test_the_end_names_layers_that_do_little(tmp_path, capsys, attention, kwargs, words):
    options = ["--task", "twins", "--attention", attention, "--steps", "1", "--batch-size", "2"]
    options += ["--device", "cpu", "--lr", "1e-9", "--output", str(tmp_path)]
    options += ["--model-kwargs", "stride=1", *kwargs]
    assert softfree_cli.main(["train", "longrange", *options]) == 0
    out = capsys.readouterr().out
    assert ("warning blocks.0.attn" in out) == bool(words)
    seen = "2 of 2 attention layers do little, seen on a sample of its task"
    assert (seen in " ".join(out.split())) == bool(words)
    assert words is None or words in out


def test_weights_that_can_not_be_looked_at_are_told_and_the_training_is_done(
    folders, tmp_path, monkeypatch, capsys
):
    def fail(subject):
        raise ValueError("stages.0: its queries are not [finite]")

    monkeypatch.setattr("softfree.commands.train.look", fail)
    assert run("--data-dir", folders, "--output", tmp_path / "out", *SHORT) == 0
    out = capsys.readouterr().out
    assert "warning stages.0: its queries are not [finite]\n" in out and "done: best" in out


def test_the_output_is_named_as_it_is(folders, tmp_path, capsys):
    output = tmp_path / "out [a]"
    assert run("--data-dir", folders, "--output", output, *SHORT) == 0
    out = capsys.readouterr().out
    assert f", in {output}/best\n" in out
    assert f"what it sees:\n  softfree predict photo.jpg --checkpoint '{output}/best'\n" in out


def test_the_written_settings_repeat_the_run(folders, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    assert run("--data-dir", folders, "--output", first, *SHORT, "--mixup", "0.2") == 0
    assert run("--config", first / "settings.json", "--output", second) == 0
    weights = [(o / "last" / "model.safetensors").read_bytes() for o in (first, second)]
    assert weights[0] == weights[1]


def test_bad_files_are_named_and_left_out_or_stop_the_run(folders, tmp_path, capsys):
    bad = folders / "train" / "dark" / "0.png"
    bad.write_bytes(bad.read_bytes()[:60])
    (folders / "val" / "dark" / "1.png").write_bytes(b"")
    assert run("--data-dir", folders, "--output", tmp_path / "out", *SHORT, "--epochs", "2") == 0
    out = capsys.readouterr().out
    assert out.count(f"skipped {bad}") == 1
    assert "dark/1.png: the file is empty" in out
    score = rows(tmp_path / "out" / "eval.csv")[0]
    assert score["samples"] == "5" and score["unreadable_files"] == "2"
    strict = run("--data-dir", folders, "--output", tmp_path / "2", *SHORT, "--strict-data")
    assert strict == 2 and "can't be read" in capsys.readouterr().err


def test_pictures_without_val_are_split_and_scored_on_the_same_ones_later(tmp_path, caplog):
    photos, output = write_photos(tmp_path / "photos", 30), tmp_path / "out"
    small = [*SMALL, "--epochs", "1", "--aa", ""]
    assert run("--data-dir", photos, "--output", output, *small) == 0
    assert "`recipe` small" in caplog.text and "`val_split` 0.2" in caplog.text
    (trained,) = rows(output / "eval.csv")
    for extra in ((), ("--data-dir", str(photos))):
        csv = tmp_path / "scores.csv"
        argv = ["validate", "--checkpoint", str(output / "best"), "--csv", str(csv), *extra]
        assert softfree_cli.main([*argv, "--device", "cpu", "--workers", "0"]) == 0
        (scored,) = rows(csv)
        assert scored["samples"] == trained["samples"] == "6"
        assert float(scored["loss"]) == pytest.approx(float(trained["loss"]), rel=1e-4)
    caplog.clear()
    fine = "--pretrained-checkpoint", output / "best", "--epochs", "1", "--workers", "0", "--aa="
    assert run("--data-dir", photos, "--output", tmp_path / "fine", *fine, "--device", "cpu") == 0
    said = caplog.text
    assert f"`model` softfree_tiny, `img_size` 32: taken from the weights of {output}/best" in said
    assert "tensors loaded" in said and "replaced" not in said


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda d: shutil.rmtree(d / "val" / "dark"), "only in"),
        (
            lambda d: [p.unlink() for p in (d / "train" / "dark").iterdir()],
            "without a picture: dark/",
        ),
    ],
)
def test_folders_that_are_wrong_give_one_clear_line(folders, tmp_path, capsys, spoil, message):
    spoil(folders)
    assert run("--data-dir", folders, "--output", tmp_path / "out", *SHORT) == 2
    err = capsys.readouterr().err
    assert message in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--model", "softpp_tinny"], "did you mean 'softpp_tiny'?"),
        (["--recipe", "long"], "--recipe must be one of"),
        (
            ["--recipe", "finetune"],
            "--recipe finetune needs weights to start from: --pretrained-checkpoint",
        ),
        (["--epochs", "0"], "--epochs must be at least 1"),
        (["--fsdp"], "--fsdp needs several processes"),
        (["--pretrained-checkpoint", "nowhere.pth"], "no checkpoint at nowhere.pth"),
        (["--resume", "nowhere"], "no checkpoint at nowhere"),
        (["--freeze", "*"], "--freeze leaves no parameter"),
    ],
)
def test_invalid_arguments_give_one_clear_line(tmp_path, capsys, argv, message):
    assert run("--output", tmp_path / "out", *SHORT, *argv) == 2
    err = capsys.readouterr().err
    assert message in err and len(err.splitlines()) == 1


def test_failures_on_the_way_have_their_own_exit_code(monkeypatch, capsys):
    def fails(*_):
        raise error

    monkeypatch.setattr(Classification, "run", fails)
    error: Exception = NonFiniteError("stopped at step 3")
    assert run() == train.FAILED == 1
    error = OSError(errno.ENOSPC, "No space left on device")
    assert run() == 1
    err = capsys.readouterr().err
    assert "stopped at step 3" in err and "no space left" in err and "--resume auto" in err


def test_a_disk_that_may_not_be_written_to_is_one_line(tmp_path, monkeypatch, capsys):
    def refuse(path, content):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr("softfree.training.engine.write_durably", refuse)
    assert run("--output", tmp_path / "out", *SHORT) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("out/settings.json: Read-only file system")
    assert not (tmp_path / "out").exists()


def test_a_stopped_run_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    from softfree.training.signals import StopRequest

    def asked(self):
        self.signal = 15
        return self

    monkeypatch.setattr(StopRequest, "__enter__", asked)
    monkeypatch.setattr(StopRequest, "__exit__", lambda *_: None)
    assert run("--output", tmp_path / "out", *SHORT) == train.STOPPED == 75
    assert "continue with --resume auto" in capsys.readouterr().out
    assert (tmp_path / "out" / "last").is_dir()


def test_an_unknown_task_gets_advice(capsys):
    assert softfree_cli.main(["train"]) == 2
    assert softfree_cli.main(["train", "poetry"]) == 2
    assert "train what? One of classification" in capsys.readouterr().err
    assert softfree_cli.main(["train", "--help"]) == 0
    assert "75" in capsys.readouterr().out


@pytest.mark.full
def test_torchrun_starts_the_command(folders, tmp_path):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    command += ["-m", "softfree", "train", "classification", "--data-dir", str(folders)]
    output = tmp_path / "out"
    subprocess.run([*command, "--output", str(output), *SHORT], check=True, timeout=600)
    assert len(rows(output / "train.csv")) == 2  # 16 pictures in steps of 2 x 4
    assert rows(output / "eval.csv")[0]["samples"] == "6"


@pytest.mark.full
def test_the_digits_are_learned_with_what_the_recipe_sets(tmp_path):
    assert run("--output", tmp_path, "--device", "cpu", "--epochs", "4") == 0
    assert max(float(row["top1"]) for row in rows(tmp_path / "eval.csv")) > 93
