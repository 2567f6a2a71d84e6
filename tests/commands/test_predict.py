"""`softfree predict`: files, folders and patterns in; a table, JSON lines and drawings out."""

import json
import os
import re
import shutil
import sys

import pytest
import safetensors.torch
import torch
from PIL import Image

import softfree_cli
from softfree.analysis.pictures import landscape
from softfree.analysis.predictions import draw_classes
from softfree.commands import predict, train
from softfree.commands.predict import video
from softfree.commands.predict.classifier import Classifier
from softfree.data import load_images, open_image
from softfree.data.images import UnreadableImageError
from softfree.data.videos import Frame, VideoWriter, read_frames
from softfree.training.classification import Classification, Normalize, eval_transform

TINY = ["embed_dims=32,32,32,32", "num_heads=1,1,1,1", "depths=1,1,1,1"]


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Of a model that has learned nearly nothing: what it says is compared with its own logits."""
    output = tmp_path_factory.mktemp("run")
    short = ["--steps", "2", "--warmup-steps", "1", "--device", "cpu", "--output", str(output)]
    assert train.main(["classification", *short, "--model-kwargs", *TINY]) == 0
    return str(output / "best")


@pytest.fixture
def pictures(tmp_path):
    """Three digits and a landscape, two of them deeper."""
    folder = tmp_path / "pictures"
    (folder / "deeper").mkdir(parents=True)
    digits = load_images(None).val
    digits.read(0)[0].save(folder / "a.png")
    digits.read(1)[0].save(folder / "b [1].png")
    digits.read(2)[0].save(folder / "deeper" / "a.png")
    landscape(90, 60).save(folder / "deeper" / "wide.jpg")
    return folder


def run(checkpoint: str, *arguments: object) -> int:
    words = [str(a) for a in arguments]
    return predict.main([*words, "--checkpoint", checkpoint, "--device", "cpu"])


def json_lines(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_json_lines_hold_the_likeliest_classes_of_the_models_own_logits(
    checkpoint, pictures, capsys
):
    assert run(checkpoint, pictures, "--topk", 3, "--batch-size", 2, "--json") == 0
    results = json_lines(capsys.readouterr().out)
    paths = [pictures / "a.png", pictures / "b [1].png"]
    paths += [pictures / "deeper" / "a.png", pictures / "deeper" / "wide.jpg"]
    assert [result["path"] for result in results] == list(map(str, paths))
    model, metadata = Classification.load(checkpoint)
    prepare, normalize = eval_transform(metadata), Normalize(metadata["mean"], metadata["std"])
    for path, result in zip(paths, results, strict=True):
        with torch.no_grad():
            logits = model(normalize(prepare(open_image(path))[None]))[0]
        expected = logits.softmax(-1).topk(3)
        found = result["predictions"]
        assert [p["index"] for p in found] == expected.indices.tolist()
        assert [p["label"] for p in found] == [str(i) for i in expected.indices.tolist()]
        chances = torch.tensor([p["probability"] for p in found])
        torch.testing.assert_close(chances, expected.values, atol=1e-4, rtol=1e-4)


def test_table_names_every_picture_once(checkpoint, pictures, capsys):
    assert run(checkpoint, pictures / "a.png", pictures, pictures / "b [1].png") == 0
    out = capsys.readouterr().out
    assert out.count("pictures/a.png") == out.count("b [1].png") == 1
    assert "likeliest" in out and out.count("%") == 4 * 5


def test_a_class_and_its_probability_stand_in_one_row(checkpoint, pictures, monkeypatch, capsys):
    monkeypatch.chdir(pictures)
    broken = 0
    for columns in range(50, 80, 3):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert run(checkpoint, "a.png", "--topk", 10) == 0
        _, head, _, *rows, _ = capsys.readouterr().out.splitlines()
        then = [row[head.index("then") :] for row in rows]
        broken += len(then) > 1
        # All but the likeliest; none of the table's columns is cut.
        assert sum(len(re.findall(r"\b\d \d+\.\d%(?:,| )", row)) for row in then) == 9
        assert max(map(len, rows)) <= columns
    assert broken


def test_names_of_files_stay_whole(checkpoint, pictures, capsys):
    name = "Photo of the third of November, seen from the bridge over the river, " + "a" * 40
    (pictures / "a.png").rename(pictures / f"{name}.png")
    assert run(checkpoint, pictures) == 0
    assert f"{pictures}/{name}.png" in capsys.readouterr().out


def test_classes_of_no_chance_are_left_out():
    chances = {"cat": 0.9991, "dog": 0.0006, "emu": 0.0003}
    result = {"predictions": [{"label": k, "probability": v} for k, v in chances.items()]}
    best, share, then = Classifier.cells(None, result)
    assert (best, share, then.entries) == ("[bold]cat[/]", "99.9%", ["dog 0.1%"])


def test_patterns_are_expanded_and_other_sizes_taken(checkpoint, pictures, capsys):
    pattern = str(pictures / "**" / "a.png")
    assert run(checkpoint, pattern, "--json", "--img-size", 64) == 0
    found = [line["path"] for line in json_lines(capsys.readouterr().out)]
    assert found == [str(pictures / "a.png"), str(pictures / "deeper" / "a.png")]


def test_more_classes_than_there_are_gives_all_and_chances_sum_to_one(checkpoint, pictures, capsys):
    assert run(checkpoint, pictures / "a.png", "--topk", 99, "--json") == 0
    [result] = json_lines(capsys.readouterr().out)
    assert len(result["predictions"]) == 10
    assert sum(p["probability"] for p in result["predictions"]) == pytest.approx(1, abs=1e-5)


def test_unreadable_files_are_named_and_counted_and_the_others_predicted(
    checkpoint, pictures, tmp_path, capsys
):
    (pictures / "aa_empty.png").write_bytes(b"")
    output = tmp_path / "new" / "results.jsonl"
    assert run(checkpoint, pictures, "--output", output) == 0
    captured = capsys.readouterr()
    assert "1 of 5 pictures could not be read" in captured.err
    assert "aa_empty.png: the file is empty" in captured.err
    assert "pictures/a.png" in captured.out and f"results written to {output}" in captured.out
    lines = json_lines(output.read_text())
    assert [line.get("error") for line in lines] == [None, "the file is empty", None, None, None]
    assert all("predictions" in line for line in lines if "error" not in line)


def test_exit_code_is_1_if_nothing_could_be_read(checkpoint, tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("no picture")
    assert run(checkpoint, tmp_path / "notes.txt", "--json") == 1
    [line] = json_lines(capsys.readouterr().out)
    assert line == {"path": str(tmp_path / "notes.txt"), "error": line["error"]}


def test_no_drawing_is_announced_where_none_could_be_made(checkpoint, tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("no picture")
    assert run(checkpoint, tmp_path / "notes.txt", "--draw", tmp_path / "drawn") == 1
    assert "drawings written" not in capsys.readouterr().out
    assert not (tmp_path / "drawn").exists()


def test_drawings_have_a_name_of_their_own_each(checkpoint, pictures, tmp_path, capsys):
    assert run(checkpoint, pictures, "--draw", tmp_path / "drawn") == 0
    names = sorted(path.name for path in (tmp_path / "drawn").iterdir())
    assert names == ["1_a.png", "2_b [1].png", "3_a.png", "4_wide.png"]
    with Image.open(tmp_path / "drawn" / "1_a.png") as drawing:
        assert drawing.size == (1080, 480)


def test_longest_bar_belongs_to_the_likeliest_class():
    drawing = draw_classes(landscape(40, 30), ["$lake_1", "b" * 99], [0.9, 0.1])
    pixels = torch.frombuffer(bytearray(drawing.tobytes()), dtype=torch.uint8)
    right_half = pixels.view(480, 1080, 3)[:, 540:].int()
    blue = (right_half[..., 2] - right_half[..., 0] > 120).sum(1)
    grey = ((right_half - torch.tensor([0x8C, 0x95, 0x9F])).abs().sum(-1) < 10).sum(1)
    assert blue.max() > 5 * grey.max() > 0


def test_names_that_lead_nowhere_are_refused(checkpoint, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no picture at .*nowhere\.png"):
        run(checkpoint, tmp_path / "nowhere.png")
    with pytest.raises(FileNotFoundError, match=r"no picture at .*\*\.png"):
        run(checkpoint, tmp_path / "*.png")
    with pytest.raises(FileNotFoundError, match=r"no picture in the folder .*\.jpg"):
        run(checkpoint, tmp_path)
    with pytest.raises(ValueError, match=r"no picture given"):
        run(checkpoint)


def test_wrong_options_are_refused(checkpoint, pictures, tmp_path):
    for option in ("--topk", "--batch-size", "--img-size"):
        with pytest.raises(ValueError, match=rf"{option} must be above 0, got 0"):
            run(checkpoint, pictures, option, 0)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"--draw must name a folder"):
        run(checkpoint, pictures, "--draw", tmp_path / "file")
    with pytest.raises(ValueError, match=r"--output must name a file"):
        run(checkpoint, pictures, "--output", tmp_path)


@pytest.mark.parametrize("task", predict.PREDICTORS)
def test_every_task_has_a_predictor(task):
    offered = dir(predict.PREDICTORS[task])
    assert {"titles", "predict", "cells", "drawing"} <= set(offered)


def test_folder_that_is_no_checkpoint_and_task_without_a_predictor_are_refused(pictures, tmp_path):
    with pytest.raises(ValueError, match="is not a checkpoint folder"):
        run(str(tmp_path), pictures)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "metadata.json").write_text('{"task": "juggling"}')
    with pytest.raises(
        ValueError, match=r"is for the task 'juggling'; predict supports classification"
    ):
        run(str(tmp_path / "other"), pictures)


def test_results_for_a_full_disk_are_one_line(checkpoint, pictures, capsys):
    words = [str(pictures), "--checkpoint", checkpoint, "--output", "/dev/full"]
    assert softfree_cli.main(["predict", *words]) == 1
    assert capsys.readouterr().err == "softfree: error: No space left on device\n"


def test_a_name_that_is_no_utf_8_and_scores_that_are_no_numbers_are_sound_json(
    checkpoint, tmp_path, capsys
):
    spoiled = tmp_path / "spoiled"
    shutil.copytree(checkpoint, spoiled)
    file = spoiled / "model.safetensors"
    weights = safetensors.torch.load_file(file)
    safetensors.torch.save_file(
        {
            name: torch.full_like(w, float("nan"))
            for name, w in weights.items()
            if w.is_floating_point()
        }
        | {name: w for name, w in weights.items() if not w.is_floating_point()},
        file,
    )
    metadata = json.loads((spoiled / "metadata.json").read_text())
    del metadata["crc32"]
    (spoiled / "metadata.json").write_text(json.dumps(metadata))
    (tmp_path / "in").mkdir()
    landscape(40, 30).save(os.fsdecode(os.fsencode(tmp_path / "in") + b"/caf\xe9.png"))
    written = tmp_path / "out.jsonl"
    words = ["--json", "--output", str(written), "--checkpoint", str(spoiled)]
    assert softfree_cli.main(["predict", str(tmp_path / "in"), *words]) == 0

    def refuse(word):
        raise AssertionError(word)

    found = json.loads(written.read_text(), parse_constant=refuse)
    assert found["path"].endswith("caf\\xe9.png")
    assert capsys.readouterr().out == written.read_text()


@pytest.fixture
def film(tmp_path):
    pytest.importorskip("av", reason="needs the extra video (PyAV)")
    path = tmp_path / "film [1].mp4"
    with VideoWriter(path) as written:
        for number in range(5):
            written.write(landscape(90 + 2 * number, 60), number / 4)
    return path


def test_the_frames_of_a_video_have_a_line_each_with_number_and_time(
    checkpoint, film, pictures, tmp_path, capsys
):
    lines, drawn = tmp_path / "lines.jsonl", tmp_path / "drawn"
    given = [film, pictures / "a.png", "--output", lines, "--draw", drawn, "--batch-size", 2]
    assert run(checkpoint, *given) == 0
    still, *frames = json_lines(lines.read_text())
    assert still["path"].endswith("a.png") and "frame" not in still
    assert [(row["frame"], row["time"]) for row in frames] == [(i, i / 4) for i in range(5)]
    assert all(row["path"] == str(film) and len(row["predictions"]) == 5 for row in frames)
    # A frame is a picture like any other.
    frame = tmp_path / "frame.png"
    list(read_frames(film))[3].picture.save(frame)
    capsys.readouterr()
    assert run(checkpoint, frame, "--json") == 0
    [expected] = json_lines(capsys.readouterr().out)
    for mine, other in zip(frames[3]["predictions"], expected["predictions"], strict=True):
        assert mine["label"] == other["label"]
        assert mine["probability"] == pytest.approx(other["probability"], abs=1e-5)
    assert sorted(path.name for path in drawn.iterdir()) == ["1_film [1].mp4", "2_a.png"]
    shown = list(read_frames(drawn / "1_film [1].mp4"))
    assert [frame.seconds for frame in shown] == pytest.approx([i / 4 for i in range(5)], abs=1e-3)


def test_a_video_is_summed_up_in_a_line(checkpoint, film, capsys):
    assert run(checkpoint, film) == 0
    assert f"{film}: 5 frames, the last at 1.00 s" in capsys.readouterr().out


def test_a_video_that_breaks_off_is_named_and_what_came_before_counts(
    checkpoint, film, monkeypatch, capsys
):
    def breaking(path):
        yield from list(read_frames(path))[:3]
        raise UnreadableImageError("can't be decoded after 3 frames: Invalid data")

    monkeypatch.setattr(video, "read_frames", breaking)
    assert run(checkpoint, film, "--json") == 0
    out, err = capsys.readouterr()
    assert [row.get("frame") for row in json_lines(out)] == [0, 1, 2, None]
    assert "1 of 1 pictures could not be read" in err and "after 3 frames: Invalid data" in err


def test_a_file_that_is_no_video_is_named(checkpoint, tmp_path, capsys):
    pytest.importorskip("av", reason="needs the extra video (PyAV)")
    (tmp_path / "a.mp4").write_text("no video")
    assert run(checkpoint, tmp_path / "a.mp4", "--draw", tmp_path / "drawn") == 1
    assert "can't be decoded" in capsys.readouterr().err
    assert not (tmp_path / "drawn").exists()


def test_videos_need_their_package(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    (tmp_path / "a.mp4").touch()
    with pytest.raises(ValueError, match="videos need a package: pip install"):
        run(checkpoint, tmp_path / "a.mp4")


def test_no_more_frames_than_a_batch_are_held():
    class Counting:
        prepare = staticmethod(lambda picture: picture)

        def predict(self, inputs):
            return [{"held": len(inputs)} for _ in inputs]

    read = []

    def frames():
        for number in range(5):
            read.append(number)
            yield Frame(number, 0.0, None)

    results = video.predict_frames(Counting(), frames(), 2)
    assert next(results)[1] == {"held": 2} and read == [0, 1]
    assert [frame.number for frame, _ in results] == [1, 2, 3, 4]
