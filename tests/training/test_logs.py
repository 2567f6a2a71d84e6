"""Logs: rows reach their files once, on request TensorBoard's too; other processes stay silent."""

import csv

import pytest
import torch
from PIL import Image

from softfree.data.images import Unreadable
from softfree.training import logs
from softfree.training.logs import RunLog, TimeLeft, Timer, peak_memory_gib


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_rows_are_appended_under_one_header(tmp_path):
    with RunLog(tmp_path, 0, 10, active=True) as log:
        log.record("train.csv", 1, {"loss": 0.5})
        log.record("train.csv", 2, {"loss": 0.25})
    assert rows(tmp_path / "train.csv") == [
        {"step": "1", "loss": "0.5"},
        {"step": "2", "loss": "0.25"},
    ]


def test_a_run_that_goes_on_drops_later_and_torn_rows(tmp_path):
    (tmp_path / "train.csv").write_text("step,loss\n1,0.5\n2,0.25\n3,0.1\n4,0.")
    RunLog(tmp_path, 2, 10, active=True)
    assert [row["step"] for row in rows(tmp_path / "train.csv")] == ["1", "2"]
    RunLog(tmp_path, 0, 10, active=True)
    assert not (tmp_path / "train.csv").exists()


def test_other_processes_write_and_say_nothing_but_what_they_alone_know(tmp_path, capsys):
    with RunLog(tmp_path, 0, 10, active=False) as log:
        log.record("train.csv", 1, {"loss": 0.5})
        log.say("hello")
        log.unreadable(Unreadable("a.jpg", "empty"))
        log.picture("a.png", 1, Image.new("RGB", (4, 4)))
    assert not list(tmp_path.iterdir())
    out, err = capsys.readouterr()
    assert out == "" and err == "skipped a.jpg: empty\n"


def test_tensorboard_gets_the_same_numbers(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with RunLog(tmp_path, 0, 10, active=True) as log:
        log.open_tensorboard()
        log.record("eval.csv", 3, {"top1": 97.5})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (event,) = events.Scalars("eval/top1")
    assert (event.step, event.value) == (3, 97.5)


def test_the_last_picture_is_in_the_folder_and_all_are_in_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with RunLog(tmp_path, 0, 10, active=True) as log:
        log.open_tensorboard()
        for step, grey in ((3, 10), (6, 200)):
            log.picture("predictions.png", step, Image.new("RGB", (4, 5), (grey,) * 3))
    with Image.open(tmp_path / "predictions.png") as page:
        assert page.size == (4, 5) and page.getpixel((0, 0)) == (200, 200, 200)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(image.step, image.height) for image in events.Images("predictions")] == [
        (3, 5),
        (6, 5),
    ]


@pytest.mark.parametrize("package", ["wandb", "torch.utils.tensorboard"])
def test_a_missing_package_is_named(tmp_path, monkeypatch, package):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    log = RunLog(tmp_path, 0, 10, active=True)
    with pytest.raises(ValueError, match="needs a package: pip install"):
        if package == "wandb":
            log.open_wandb("{}")
        else:
            log.open_tensorboard()


def test_time_spent_elsewhere_does_not_count(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(logs.time, "perf_counter", lambda: now[0])
    timer = Timer(torch.device("cpu"))
    timer.samples += 30
    now[0] += 2
    with timer.paused():
        now[0] += 100
    now[0] += 1
    assert timer.read() == 10


def test_the_time_left_counts_evaluations_and_forgets_a_slow_start():
    left = TimeLeft()
    assert left(10, 3) == 0
    left.note_step(50.0)
    for _ in range(40):
        left.note_step(1.0)
    assert left(100, 0) == pytest.approx(100, rel=0.01)
    left.note_evaluation(30.0)
    assert left(100, 2) == pytest.approx(160, rel=0.01)


@pytest.mark.parametrize("step, expected", [(9, "0:00 left"), (5, "1:10 left")])
def test_a_line_says_how_long_the_run_will_take(tmp_path, capsys, step, expected):
    with RunLog(tmp_path, 0, 10, active=True) as log:
        numbers = dict(loss=0.5, lr=1e-3, samples_per_s=20.0, peak_gib=1.0)
        log.steps_done(step, numbers, 0, 70.0 if step == 5 else 0.0)
    assert capsys.readouterr().out.strip().endswith(f"20/s  1.00 GiB  {expected}")


def test_a_system_that_does_not_tell_its_memory_has_lines_without_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(logs.sys, "platform", "win32")
    # As there: a module that does not exist.
    monkeypatch.setitem(logs.sys.modules, "resource", None)
    numbers = dict(loss=0.5, lr=1e-3, samples_per_s=20.0)
    with RunLog(tmp_path, 0, 10, active=True) as log:
        log.steps_done(5, {**numbers, "peak_gib": peak_memory_gib(torch.device("cpu"))}, 0, 9.0)
    assert capsys.readouterr().out.strip().endswith("lr 1.00e-03  20/s  0:09 left")


def test_peak_memory_of_this_process_is_plausible():
    assert 0.01 < peak_memory_gib(torch.device("cpu")) < 1000
