"""Commands that look at a model take the newest run if nothing is said, and say which."""

import os

import pytest

import softfree_cli
from softfree.commands import common
from tests.commands.checkpoints import classifier_checkpoint
from tests.photos import photo


def checkpoints(runs):
    """An older and a newer run, and what is no checkpoint of pictures."""
    old = classifier_checkpoint(runs / "best", classes=3)
    new = classifier_checkpoint(runs / "cats" / "best", classes=7)
    (runs / "broken" / "best").mkdir(parents=True)
    os.utime(old, (1, 1))
    return old, new


def test_the_newest_run_is_taken_and_named(runs, tmp_path, capsys):
    assert common.newest_run() is None and capsys.readouterr().err == ""
    old, new = checkpoints(runs)
    assert common.newest_run() == new
    assert capsys.readouterr().err == f"--checkpoint {new}, the newest run under {runs}/\n"
    assert common.newest_run(("detection",)) is None
    os.utime(new, (0, 0))
    assert common.newest_run() == old


@pytest.mark.parametrize(
    "argv", [["inspect"], ["predict"], ["figure", "heatmap"]], ids=lambda argv: argv[0]
)
def test_commands_without_a_checkpoint_take_it(argv, runs, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, new = checkpoints(runs)
    photo("discs", 0).save("photo.png")
    assert softfree_cli.main([*argv, "photo.png", "--device", "cpu"]) == 0
    assert f"--checkpoint {new}" in capsys.readouterr().err


def test_a_model_that_is_named_stays_the_one(runs, capsys):
    checkpoints(runs)
    subject = common.OneSubject(model="softpp_tiny", device="cpu").load()
    assert subject.title == "softpp_tiny (untrained)" and capsys.readouterr().err == ""
