"""`softfree figure`: each figure is drawn from a checkpoint or a fresh model, in each format."""

import numpy as np
import pytest
from PIL import Image

import softfree_cli
from softfree.commands.figure import sizes_around

from .checkpoints import classifier_checkpoint


@pytest.fixture
def checkpoint(tmp_path):
    return classifier_checkpoint(tmp_path / "run" / "best")


@pytest.fixture
def photo(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 255, (90, 160, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


def run(*arguments: object) -> int:
    return softfree_cli.main(["figure", *map(str, arguments)])


@pytest.mark.parametrize(
    ("ending", "begins"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")]
)
def test_a_heat_map_of_a_photo_is_drawn_in_each_format(
    ending, begins, checkpoint, photo, tmp_path, capsys
):
    output = tmp_path / "out" / f"map.{ending}"
    given = ("--checkpoint", checkpoint, "--query", "80,40", "--draw", output)
    assert run("heatmap", photo, *given) == 0
    assert output.read_bytes().startswith(begins)
    assert f"figure written to {output}" in capsys.readouterr().out


def test_a_heat_map_needs_neither_checkpoint_nor_photo(tmp_path):
    output = tmp_path / "map.png"
    assert run("heatmap", "--img-size", 64, "--draw", output) == 0
    with Image.open(output) as picture:
        # A row of pictures for each of four stages.
        assert picture.height > 1200


def test_several_attentions_stand_side_by_side(tmp_path):
    output = tmp_path / "map.png"
    names = ("softmax", "performer", "nystromformer", "softpp")
    attentions = [word for name in names for word in ("--attention", name)]
    given = ("--img-size", 64, "--heads", 2, "--draw", output)
    assert run("heatmap", "--model", "softpp_tiny", *attentions, *given) == 0
    with Image.open(output) as picture:
        assert picture.width > 2 * picture.height


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"landmarks": "average", "query_gain": 1e-3}, "attends to everything alike"),
        ({"landmark_gain": 30.0}, "attends to next to nothing"),
    ],
)
def test_a_heat_map_warns_of_layers_that_do_little(changes, words, photo, tmp_path, capsys):
    checkpoint = classifier_checkpoint(tmp_path / "dull" / "best", **changes)
    given = ("--checkpoint", checkpoint, "--draw", tmp_path / "map.png")
    assert run("heatmap", photo, *given) == 0
    out = capsys.readouterr().out
    assert "warning softpp_tiny, dull: stages." in out and words in out


def test_a_heat_map_of_the_own_family_has_nothing_to_warn_of(photo, tmp_path, capsys):
    given = ("--model", "softfree_tiny", "--img-size", 64, "--draw", tmp_path / "map.png")
    assert run("heatmap", photo, *given) == 0
    assert "warning" not in capsys.readouterr().out


def test_convergence_is_drawn_from_a_folder_of_photos(checkpoint, photo, tmp_path):
    output = tmp_path / "out" / "convergence.svg"
    given = ("--checkpoint", checkpoint, "--iterations", 6, "--draw", output)
    assert run("convergence", *given, "--data-dir", photo.parent) == 0
    text = output.read_text()
    assert text.startswith("<?xml")
    assert run("convergence", *given, "--images", 2) == 0
    assert output.read_text() != text


def test_for_a_model_that_solves_convergence_draws_what_it_inverts(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("softfree.commands.figure.save_figure", lambda *given: drawn.append(given))
    given = ("--img-size", 64, "--images", 1, "--draw", tmp_path / "shares.png")
    for model, words in (("softfree_tiny", "What the solve inverts"), ("softpp_tiny", "Newton")):
        assert run("convergence", "--model", model, *given) == 0
        assert words in drawn[-1][0].get_suptitle()


def test_the_spectrum_is_drawn(checkpoint, photo, tmp_path):
    output = tmp_path / "spectrum.png"
    given = ("--checkpoint", checkpoint, "--img-size", 64, 96, "--draw", output)
    assert run("spectrum", *given) == 0
    assert output.read_bytes().startswith(b"\x89PNG")


def test_accuracy_against_size_is_drawn_and_printed(checkpoint, tmp_path, capsys):
    output = tmp_path / "resolution.png"
    other = classifier_checkpoint(tmp_path / "other" / "best", landmarks="conv:4")
    given = ("--img-size", 32, 48, "--workers", 0, "--device", "cpu", "--draw", output)
    assert run("resolution", "--checkpoint", checkpoint, "--checkpoint", other, *given) == 0
    out = capsys.readouterr().out
    assert "softpp_tiny, run" in out and "softpp_tiny, other" in out
    assert "32²" in out and "48²" in out and output.is_file()


def test_all_checkpoints_are_checked_before_the_first_is_scored(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "softfree.training.classification.score_classifier", lambda *_, **__: pytest.fail("scored")
    )
    other = classifier_checkpoint(tmp_path / "other" / "best", classes=3)
    assert run("resolution", "--checkpoint", checkpoint, "--checkpoint", other) == 2


def test_sizes_are_those_around_the_training():
    assert sizes_around([64]) == [64, 96, 128]
    assert sizes_around([128, 224]) == [96, 128, 160, 192, 224, 256, 288, 320, 448]


def test_wrong_arguments_are_refused(tmp_path, photo, capsys):
    for arguments, message in (
        ([], "which figure? One of heatmap, convergence, spectrum, resolution"),
        (["heatmaps"], "got 'heatmaps'"),
        (["heatmap", "--draw", "map.bmp"], "--draw must end in .png, .svg, .pdf, got map.bmp"),
        (["heatmap", "--query", "12"], "--query must be X,Y in pixels of the photo, got '12'"),
        (["heatmap", photo, "--query", "3,9"], "--query 3,9: the model sees x from 40 to 118"),
        (["heatmap", "--stage", 7, "--img-size", 64], "stage must be one of 1, 2, 3, 4, got 7"),
        (["heatmap", "--heads", 0], "--heads must be above 0"),
        (["heatmap", "--attention", "sotfmax"], "attention must be one of"),
        (["convergence", "--data-dir", tmp_path / "none"], "is not a folder"),
        (["spectrum", "--img-size", 64], "--img-size needs two or more sizes"),
        (["resolution", "--checkpoint", tmp_path / "none"], "none"),
    ):
        assert run(*arguments) == 2, arguments
        assert message in capsys.readouterr().err
