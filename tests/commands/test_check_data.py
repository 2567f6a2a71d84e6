"""`softfree check-data classification`: what is there, and what can't be used, before a training."""

import pytest

import softfree_cli
from tests.photos import write_photos


def check(*argv):
    return softfree_cli.main(["check-data", "classification", *map(str, argv), "--workers", "0"])


def test_class_folders_are_counted_as_training_takes_them(tmp_path, capsys):
    photos = write_photos(tmp_path / "photos", 30)
    assert check("--data-dir", photos) == 0
    out = capsys.readouterr().out
    assert "sets 20% of each class aside" in out and "no faults found" in out
    assert "3 classes, 24 pictures in train, 6 pictures in val" in out
    assert [line.split() for line in out.splitlines() if "discs" in line] == [["discs", "8", "2"]]


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
    assert "uneven: 1 to 16 pictures of a class" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["--no-decode"]])
def test_the_embedded_digits_are_fine(argv, capsys):
    assert check(*argv) == 0
    assert "10 classes, 1,437 pictures in train, 360" in capsys.readouterr().out


def test_previews_that_can_not_be_written_are_refused_before_the_check(tmp_path, capsys):
    assert check("--preview", tmp_path / "a.svg") == 2
    assert "--preview must end in .png, .jpg, .jpeg" in capsys.readouterr().err
    assert check("--preview", tmp_path / "a.png", "--recipe", "none") == 2
    assert "--recipe must be one of digits" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]
