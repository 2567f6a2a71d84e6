"""Logs: rows reach their files once, on request TensorBoard's too; other processes stay silent."""

import csv

import pytest
import torch

from softfree.data.images import Unreadable
from softfree.training import logs
from softfree.training.logs import RunLog, Timer, peak_memory_gib


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


def test_peak_memory_of_this_process_is_plausible():
    assert 0.01 < peak_memory_gib(torch.device("cpu")) < 1000
