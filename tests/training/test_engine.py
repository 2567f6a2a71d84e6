"""The loop: resume is exact, signals stop it after a step, bad numbers are left out, files are safe."""

import csv
import itertools
import json
import multiprocessing
import os
import pty
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import timm
import torch
from torch import nn

from softfree.data.images import Unreadable
from softfree.training import checkpoint, distributed, engine
from softfree.training.checkpoint import read_checkpoint, read_state, read_weights
from softfree.training.guard import NonFiniteError

from .toy import EVAL_SAMPLES, SAMPLES, Toy, run_toy

PROGRAM = str(Path(__file__).with_name("toy.py"))
STEPS = 3 * (SAMPLES // 8)


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def losses(output):
    return [float(row["loss"]) for row in read(output / "train.csv")]


def flatten(value, name=""):
    """Pairs of a name and a tensor or number, of nested dicts and lists."""
    if isinstance(value, dict):
        return [pair for key in value for pair in flatten(value[key], f"{name}.{key}")]
    if isinstance(value, (list, tuple)):
        return [pair for i, part in enumerate(value) for pair in flatten(part, f"{name}.{i}")]
    return [(name, value)]


def assert_same_run(one, other):
    """Weights, their average, optimizer, position and losses are the same, bit by bit."""
    for name in ("model.safetensors", "ema.safetensors"):
        first, second = one / "last" / name, other / "last" / name
        assert first.exists() == second.exists()
        assert not first.exists() or first.read_bytes() == second.read_bytes()
    states = [flatten(read_state(output / "last")) for output in (one, other)]
    assert len(states[0]) > 10
    for (name, value), (other_name, other_value) in zip(*states, strict=True):
        assert name == other_name
        same = torch.equal if isinstance(value, torch.Tensor) else lambda a, b: a == b
        assert same(value, other_value), name
    # As text: that of a step which float16 leaves out is nan.
    assert str(losses(one)) == str(losses(other))


@pytest.mark.full
def test_a_run_killed_again_and_again_ends_with_the_same_bits(tmp_path):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    done = subprocess.run(
        [sys.executable, PROGRAM, "--kill-often", str(killed)],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["status"] == 0
    assert result["lives"] > 50
    # Every state that a write goes through: begun with and without a checkpoint, between the two renames, after.
    for left in (
        [".last.new"],
        ["last", ".last.new"],
        [".last.new", ".last.old"],
        ["last", ".last.old"],
    ):
        assert left in result["left"]
    run_toy(whole, save_every="3", model_ema=True)
    assert_same_run(killed, whole)
    assert not [path for path in killed.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(workers=2),
        dict(grad_accum_steps=2, batch_size=4),
        dict(model_ema=True, amp_dtype="bfloat16"),
        dict(amp_dtype="float16"),
        dict(steps=13, sched="linear", warmup_epochs=0, warmup_steps=3),
    ],
    ids=str,
)
def test_a_run_stopped_within_an_epoch_continues_as_if_never_stopped(tmp_path, changes):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    run_toy(whole, **changes)
    passes = changes.get("grad_accum_steps", 1)
    first = run_toy(stopped, stop_at=8 * passes, **changes)
    assert first.stopped and first.position.step == 8
    second = run_toy(stopped, resume="auto", **changes)
    assert not second.stopped and second.position.step == changes.get("steps", STEPS)
    assert_same_run(whole, stopped)


def test_the_number_of_loading_processes_changes_nothing(tmp_path):
    run_toy(tmp_path / "none", workers=0)
    run_toy(tmp_path / "two", workers=2)
    assert_same_run(tmp_path / "none", tmp_path / "two")


def test_another_seed_changes_the_run(tmp_path):
    run_toy(tmp_path / "one", seed=1)
    run_toy(tmp_path / "two", seed=2)
    assert losses(tmp_path / "one") != losses(tmp_path / "two")


class Signalling(Toy):
    """Sends a signal to its own process in the middle of a step, some times."""

    def __init__(self, step, number, times=1):
        super().__init__()
        self.step, self.number, self.times = step, number, times

    def train_step(self, model, batch):
        if self.calls + 1 == self.step:
            for _ in range(self.times):
                os.kill(os.getpid(), self.number)
        return super().train_step(model, batch)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_run_after_the_step_with_a_checkpoint(tmp_path, number):
    before = signal.getsignal(number)
    outcome = run_toy(tmp_path, Signalling(4, number), save_every="100e")
    assert outcome.stopped
    assert read_state(tmp_path / "last")["position"]["step"] == 4
    assert signal.getsignal(number) is before


def test_a_stop_at_the_end_of_an_epoch_leaves_the_evaluation_to_the_resumed_run(tmp_path):
    run_toy(tmp_path, stop_at=SAMPLES // 8)
    assert not (tmp_path / "eval.csv").exists()
    run_toy(tmp_path, resume="auto")
    assert [int(row["step"]) for row in read(tmp_path / "eval.csv")] == [6, 12, 18]


def test_a_signal_during_an_evaluation_ends_it_and_the_resumed_run_repeats_it(tmp_path):
    class Impatient(Toy):
        def evaluate(self, model, batches, processes):
            os.kill(os.getpid(), signal.SIGTERM)
            return super().evaluate(model, batches, processes)

    run_toy(tmp_path / "whole")
    outcome = run_toy(tmp_path / "stopped", Impatient())
    assert outcome.stopped and outcome.position.evaluated == 0
    run_toy(tmp_path / "stopped", resume="auto")
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")
    assert [int(row["step"]) for row in read(tmp_path / "stopped" / "eval.csv")] == [6, 12, 18]


def test_an_evaluation_that_fails_does_not_lose_the_run(tmp_path):
    class Failing(Toy):
        def evaluate(self, model, batches, processes):
            raise TypeError("no score")

    run_toy(tmp_path / "whole", save_every="100")
    with pytest.raises(TypeError, match="no score"):
        run_toy(tmp_path / "failed", Failing(), save_every="100")
    assert read_state(tmp_path / "failed" / "last")["position"]["step"] == SAMPLES // 8
    run_toy(tmp_path / "failed", resume="auto", save_every="100")
    assert_same_run(tmp_path / "whole", tmp_path / "failed")


def test_a_run_stopped_before_its_first_step_continues_as_if_never_stopped(tmp_path):
    class StoppedWhileBuilding(Toy):
        def build_model(self):
            os.kill(os.getpid(), signal.SIGTERM)
            return super().build_model()

    run_toy(tmp_path / "whole")
    outcome = run_toy(tmp_path / "stopped", StoppedWhileBuilding())
    assert outcome.stopped and outcome.position.step == 0
    run_toy(tmp_path / "stopped", resume="auto")
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")


def test_an_error_in_a_loading_process_is_one_line_and_leaves_no_process(tmp_path):
    class Broken(Toy):
        def collate(self, samples):
            raise ValueError("a.jpg can't be read: the file is empty")

    with pytest.raises(ValueError) as caught:
        run_toy(tmp_path, Broken(), workers=2)
    assert str(caught.value) == "a.jpg can't be read: the file is empty"
    assert not multiprocessing.active_children()


def test_an_output_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="can't write to `output` .*file: File exists"):
        run_toy(tmp_path / "file")


def test_a_second_interrupt_does_not_wait_for_the_step(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run_toy(tmp_path, Signalling(2, signal.SIGINT, times=2))


def test_a_run_under_nohup_does_not_stop_with_its_terminal(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert not run_toy(tmp_path, Signalling(2, signal.SIGHUP)).stopped
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
def test_a_run_whose_terminal_closes_is_saved(tmp_path):
    child, terminal = pty.fork()
    if child == 0:
        # What it says goes to the terminal, also after that is gone.
        os.execv(sys.executable, [sys.executable, PROGRAM, str(tmp_path), "--epochs", "500"])
    said = b""
    while b"(best so far)" not in said:
        said += os.read(terminal, 1000)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 75
    assert read_state(tmp_path / "last")["position"]["step"] >= 6


def test_accumulated_passes_equal_one_large_batch(tmp_path):
    plain = dict(norm=False, dropout=0.0)
    run_toy(tmp_path / "one", batch_size=8, **plain)
    run_toy(tmp_path / "two", batch_size=2, grad_accum_steps=4, **plain)
    assert losses(tmp_path / "one") == pytest.approx(losses(tmp_path / "two"), abs=1e-5)


def test_every_validation_sample_counts_once_though_the_last_batch_is_short(tmp_path):
    outcome = run_toy(tmp_path, batch_size=4)
    assert outcome.scores["samples"] == EVAL_SAMPLES and EVAL_SAMPLES % 4


def test_steps_and_not_epochs_count_where_given(tmp_path):
    outcome = run_toy(tmp_path, steps=7, eval_every=3)
    assert outcome.position.step == 7
    assert [int(row["step"]) for row in read(tmp_path / "eval.csv")] == [3, 6, 7]


@pytest.fixture
def saved_steps(monkeypatch):
    """The steps after which OUTPUT/last was written."""
    steps, write = [], checkpoint.write_checkpoint

    def note(folder, weights, metadata, *rest):
        if folder.name == "last":
            steps.append(metadata["run"]["step"])
        write(folder, weights, metadata, *rest)

    monkeypatch.setattr(checkpoint, "write_checkpoint", note)
    return steps


@pytest.mark.parametrize(
    "save_every, expected", [("2", [2, 4, 6, 7]), ("1e", [6, 7]), ("900s", [6, 7])]
)
def test_checkpoints_come_as_often_as_asked(tmp_path, saved_steps, save_every, expected):
    run_toy(tmp_path, steps=7, save_every=save_every)
    # Also before the first evaluation's best.
    assert sorted(set(saved_steps)) == expected


def test_checkpoints_come_by_the_clock_too(tmp_path, monkeypatch, saved_steps):
    # Each look at the clock finds it 0.4 s on.
    ticks = itertools.count()
    monkeypatch.setattr(engine, "time", SimpleNamespace(monotonic=lambda: 0.4 * next(ticks)))
    run_toy(tmp_path, steps=6, warmup_epochs=0, save_every="1s", eval_every=6)
    assert len(saved_steps) >= 2 and saved_steps[0] < 6 == saved_steps[-1]


class Spoiled(Toy):
    """Some steps have a batch that is not a number."""

    def __init__(self, steps, **kwargs):
        super().__init__(**kwargs)
        self.steps, self.step = set(steps), 0

    def train_step(self, model, batch):
        self.step += 1
        x, y = batch
        return super().train_step(model, (x * float("nan") if self.step in self.steps else x, y))


@pytest.mark.parametrize("log_interval", [1, 5])
def test_a_step_without_a_finite_gradient_is_left_out_and_counted(tmp_path, log_interval):
    reference = run_toy(tmp_path / "short", steps=4, sched="multistep", warmup_epochs=0)
    spoiled = run_toy(
        tmp_path / "spoiled", Spoiled({5, 6}), steps=6, sched="multistep", warmup_epochs=0,
        log_interval=log_interval, save_every="1",
    )  # fmt: skip
    assert reference.position.skipped == 0 and spoiled.position.skipped == 2
    weights = read_weights(tmp_path / "spoiled" / "last")
    assert all(tensor.isfinite().all() for tensor in weights.values())
    for name, tensor in read_weights(tmp_path / "short" / "last").items():
        # Batch norms' count of batches goes on, for it is no number that could be spoiled.
        if not name.endswith("num_batches_tracked"):
            assert torch.equal(tensor, weights[name]), name


def test_too_many_bad_steps_in_a_row_stop_the_run_and_name_the_layer(tmp_path):
    class Broken(Toy):
        def build_model(self):
            model = super().build_model()
            nn.init.constant_(model.blocks[2].bias, float("inf"))
            return model

    with pytest.raises(NonFiniteError, match=r"3 steps in a row.*blocks\.2 \(Linear; its input is"):
        run_toy(tmp_path, Broken(), max_skipped=3)
    with pytest.raises(NonFiniteError, match="blocks.0 .*its input is not finite either"):
        run_toy(tmp_path / "data", Spoiled(range(2, 100)), max_skipped=3)
    assert not (tmp_path / "data" / "last").exists()


def test_bad_steps_that_are_not_in_a_row_do_not_stop_the_run(tmp_path):
    outcome = run_toy(tmp_path, Spoiled(range(1, 100, 2)), max_skipped=2)
    assert outcome.position.step == STEPS and outcome.position.skipped == STEPS // 2


def test_the_moving_average_is_evaluated_and_kept(tmp_path):
    run_toy(tmp_path, model_ema=True, model_ema_decay=0.9)
    last = tmp_path / "last"
    average, weights = read_weights(last, "ema.safetensors"), read_weights(last)
    assert average.keys() == weights.keys()
    assert not torch.equal(average["head.weight"], weights["head.weight"])
    assert torch.equal(read_checkpoint(last).weights["head.weight"], average["head.weight"])


def content(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_score_that_is_no_number_is_not_the_best_for_ever(tmp_path):
    class Lost(Toy):
        evaluations = 0

        def evaluate(self, model, batches, processes):
            self.evaluations += 1
            scores = super().evaluate(model, batches, processes)
            return {**scores, "top1": float("nan")} if self.evaluations == 1 else scores

    outcome = run_toy(tmp_path, Lost())
    assert outcome.position.best_step > 6
    assert "NaN" not in (tmp_path / "best" / "metadata.json").read_text()


class Scored(Toy):
    """Its evaluations give these scores, then the last of them again and again."""

    def __init__(self, *scores, **kwargs):
        super().__init__(**kwargs)
        self.scores = [*scores]

    def evaluate(self, model, batches, processes):
        score = self.scores.pop(0) if len(self.scores) > 1 else self.scores[0]
        return {**super().evaluate(model, batches, processes), "top1": score}


@pytest.mark.parametrize(
    "scores, patience, end",
    [
        ((1.0, 2.0, 2.0, 1.0), 2, 8),
        ((1.0, 2.0, 2.0, 3.0), 2, 12),
        ((float("nan"),), 3, 6),
        ((5.0, float("nan")), 2, 6),
        ((1.0,), 0, STEPS),
        ((1.0,), 100, STEPS),
    ],
)
def test_a_run_ends_after_evaluations_without_a_better_score(
    tmp_path, capsys, scores, patience, end
):
    outcome = run_toy(tmp_path, Scored(*scores), eval_every=2, patience=patience)
    assert outcome.position.step == end and not outcome.stopped
    assert read_state(tmp_path / "last")["position"]["step"] == end
    said = capsys.readouterr().out
    assert ("ended early" in said) == (end < STEPS)
    if end < STEPS:
        assert f"ended early at step {end} of 18: no better top1 in {patience} evaluations" in said
        assert "the learning rate is still" in said


def test_patience_counts_on_over_a_stop(tmp_path):
    settings = dict(eval_every=2, patience=3)
    whole = run_toy(tmp_path / "whole", Scored(1.0), **settings)
    assert whole.position.step == 8
    run_toy(tmp_path / "stopped", Scored(1.0, stop_at=5), **settings)
    # Had it forgotten the two evaluations before, it would go on beyond.
    outcome = run_toy(tmp_path / "stopped", Scored(0.5), resume="auto", **settings)
    assert outcome.position.step == 8
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")


def test_a_run_that_ended_early_stays_ended_unless_it_is_given_more_patience(tmp_path):
    run_toy(tmp_path, Scored(1.0), eval_every=2, patience=1)
    again = dict(eval_every=2, resume="auto")
    assert run_toy(tmp_path, Scored(1.0), patience=1, **again).position.step == 4
    assert run_toy(tmp_path, Scored(1.0), patience=2, **again).position.step == 6
    assert run_toy(tmp_path, Scored(1.0), **again).position.step == STEPS


def test_the_lines_reckon_with_the_evaluations_to_come(tmp_path, monkeypatch):
    ahead = []
    monkeypatch.setattr(
        engine.TimeLeft, "__call__", lambda self, *given: ahead.append(given) or 0.0
    )
    run_toy(tmp_path, steps=7, warmup_epochs=0, eval_every=3)
    assert ahead == [(6, 3), (5, 3), (4, 3), (3, 2), (2, 2), (1, 2), (0, 1)]


def test_an_earlier_run_is_not_overwritten(tmp_path):
    run_toy(tmp_path)
    before = content(tmp_path)
    with pytest.raises(
        ValueError, match=r"already has a run \(last, best, .*; continue it with `resume` auto"
    ):
        run_toy(tmp_path, seed=7)
    with pytest.raises(ValueError, match="already has a run"):
        run_toy(tmp_path, resume=str(tmp_path / "best"))
    assert content(tmp_path) == before


@pytest.mark.parametrize("resume", ["", "auto"])
def test_the_best_of_an_earlier_run_is_not_overwritten_when_its_last_is_gone(tmp_path, resume):
    run_toy(tmp_path)
    shutil.rmtree(tmp_path / "last")
    before = content(tmp_path)
    with pytest.raises(
        ValueError,
        match="without its checkpoint last it can't continue.*start a new run with `overwr",
    ):
        run_toy(tmp_path, seed=7, resume=resume)
    assert content(tmp_path) == before


def test_logs_alone_are_not_overwritten_either_but_a_run_killed_that_early_goes_on(tmp_path):
    (tmp_path / "train.csv").write_text("step,loss\n1,2.5\n")
    with pytest.raises(ValueError, match=r"already has a run \(train.csv\)"):
        run_toy(tmp_path)
    assert run_toy(tmp_path, resume="auto").position.step == STEPS
    assert [int(row["step"]) for row in read(tmp_path / "train.csv")] == list(range(1, STEPS + 1))


def test_overwriting_begins_anew_and_leaves_nothing_of_the_earlier_run(tmp_path):
    run_toy(tmp_path / "anew", seed=3)
    run_toy(tmp_path / "new", seed=7)
    (tmp_path / "anew" / "test.json").write_text("{}")
    (tmp_path / "anew" / "mine.txt").write_text("stays")
    run_toy(tmp_path / "anew", seed=7, overwrite=True)
    assert_same_run(tmp_path / "anew", tmp_path / "new")
    assert not (tmp_path / "anew" / "test.json").exists()
    assert (tmp_path / "anew" / "mine.txt").read_text() == "stays"


def test_a_refused_run_overwrites_nothing_and_leaves_no_folder(tmp_path):
    run_toy(tmp_path / "run")
    before = content(tmp_path)
    with pytest.raises(ValueError, match="one step takes 64 samples"):
        run_toy(tmp_path / "run", batch_size=64, overwrite=True)
    with pytest.raises(ValueError, match="one step takes 64 samples"):
        run_toy(tmp_path / "a" / "b", batch_size=64)
    with pytest.raises(
        ValueError, match="`overwrite` starts a new run and `resume` auto continues one"
    ):
        run_toy(tmp_path / "run", resume="auto", overwrite=True)
    assert content(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_second_run_in_the_same_folder_is_refused_by_the_name_of_the_first(tmp_path):
    class Busy(Toy):
        def evaluate(self, model, batches, processes):
            child = os.fork()
            if child == 0:
                try:
                    run_toy(tmp_path, resume="auto")
                except ValueError as error:
                    (tmp_path / "refused").write_text(str(error))
                os._exit(0)
            os.waitpid(child, 0)
            return super().evaluate(model, batches, processes)

    run_toy(tmp_path, Busy(), steps=7)
    refused = (tmp_path / "refused").read_text()
    assert f"is in use by process {os.getpid()} on " in refused
    assert not (tmp_path / ".lock").exists()


def test_a_process_that_torchrun_started_again_goes_on_by_itself(tmp_path, monkeypatch):
    run_toy(tmp_path, stop_at=8)
    monkeypatch.setattr(distributed, "restarted", lambda processes: True)
    assert run_toy(tmp_path, resume="where it once began").position.step == STEPS


def test_a_finished_run_can_be_resumed_and_does_nothing(tmp_path):
    run_toy(tmp_path)
    before = (tmp_path / "last" / "state.pt").read_bytes()
    assert run_toy(tmp_path, resume="auto").position.step == STEPS
    assert (tmp_path / "last" / "state.pt").read_bytes() == before


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(batch_size=10), "global batch 8, but this run has 10"),
        (dict(seed=3), "seed 42, but this run has 3"),
        (dict(norm=False), "another architecture than layers: norm.bias is not"),
        (dict(epochs=1), "step 8, beyond this run's end at 6"),
        (dict(resume="nowhere"), "no checkpoint at nowhere"),
    ],
)
def test_a_resume_that_does_not_fit_is_refused(tmp_path, changes, message):
    run_toy(tmp_path, stop_at=8, warmup_epochs=0)
    changes = {"resume": "auto", "warmup_epochs": 0, **changes}
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run_toy(tmp_path, **changes)


def spoil(folder, name, change):
    """Change what a checkpoint's file says, as a careless hand would: its checksum stays right or is missing."""
    file = folder / name
    if file.suffix == ".pt":
        value = torch.load(file, weights_only=True)
        change(value)
        torch.save(value, file)
    elif file.suffix == ".safetensors":
        value = safetensors.torch.load_file(file)
        change(value)
        safetensors.torch.save_file(value, file)
    else:
        value = json.loads(file.read_text())
        change(value)
        file.write_text(json.dumps(value))
    metadata = json.loads((folder / "metadata.json").read_text())
    metadata.pop("crc32", None)
    (folder / "metadata.json").write_text(json.dumps(metadata))


def cut(tensor):
    return tensor.flatten()[:-1].clone()


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("state.pt", lambda s: s.pop("optimizer"), "the optimizer's state is missing"),
        ("state.pt", lambda s: s["optimizer"]["state"].pop("head.bias"), "head.bias is missing"),
        (
            "state.pt",
            lambda s: s["optimizer"]["state"]["head.bias"].update(
                exp_avg=cut(s["optimizer"]["state"]["head.bias"]["exp_avg"])
            ),
            r"exp_avg of head.bias must be torch.float32 \(3,\), got torch.float32 \(2,\)",
        ),
        (
            "state.pt",
            lambda s: s["optimizer"]["state"]["head.bias"].update(step=3),
            "step of head.bias must be torch.float32",
        ),
        (
            "state.pt",
            lambda s: s["optimizer"]["state"]["head.bias"].pop("exp_avg_sq"),
            "head.bias must have step, exp_avg, exp_avg_sq",
        ),
        ("state.pt", lambda s: s["position"].update(step="8"), "'step' of the position must be"),
        ("state.pt", lambda s: s["position"].update(best="8"), "'best' of the position must be"),
        ("state.pt", lambda s: s["position"].pop("evaluated"), "'evaluated' of the position must"),
        ("state.pt", lambda s: s.pop("position"), "'position' must be a mapping, got None"),
        ("ema.safetensors", lambda w: w.pop("head.bias"), "ema.safetensors .*head.bias is missing"),
        (
            "ema.safetensors",
            lambda w: w.update(other=cut(w["head.bias"])),
            "other is not in the model",
        ),
        (
            "model.safetensors",
            lambda w: w.update({"head.bias": w["head.bias"].half()}),
            "head.bias has dtype torch.float16",
        ),
        (
            "model.safetensors",
            lambda w: w["head.bias"].fill_(float("nan")),
            "head.bias is not finite",
        ),
        ("metadata.json", lambda m: m.pop("run"), "the field 'run' is missing"),
        ("settings.json", lambda s: s.update(data=3), "settings.json: 'data' must be a mapping"),
    ],
)
def test_a_resume_from_a_checkpoint_that_lacks_something_changes_nothing(
    tmp_path, monkeypatch, name, change, message
):
    run_toy(tmp_path, stop_at=8, model_ema=True)
    spoil(tmp_path / "last", name, change)
    before = content(tmp_path)
    monkeypatch.setattr(distributed, "set_weights", None)
    with pytest.raises(ValueError, match=message):
        run_toy(tmp_path, resume="auto", model_ema=True)
    assert content(tmp_path) == before


def test_a_lost_moving_average_is_missed(tmp_path):
    run_toy(tmp_path, stop_at=8, model_ema=True)
    (tmp_path / "last" / "ema.safetensors").unlink()
    with pytest.raises(ValueError, match="ema.safetensors is unreadable"):
        run_toy(tmp_path, resume="auto", model_ema=True)
    with pytest.raises(ValueError, match="ema.safetensors is unreadable"):
        read_checkpoint(tmp_path / "last")


def test_a_resumed_run_takes_the_weight_decay_that_it_is_given(tmp_path):
    run_toy(tmp_path, stop_at=8)
    spoil(
        tmp_path / "last",
        "state.pt",
        lambda s: [g.update(weight_decay="x") for g in s["optimizer"]["param_groups"]],
    )
    assert run_toy(tmp_path, resume="auto").position.step == STEPS


@pytest.mark.parametrize("name", ["model.safetensors", "state.pt", "metadata.json"])
def test_a_truncated_checkpoint_is_refused(tmp_path, name):
    run_toy(tmp_path, stop_at=8)
    file = tmp_path / "last" / name
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ValueError, match=f"{name} is unreadable, perhaps truncated"):
        run_toy(tmp_path, resume="auto")


def test_the_best_checkpoint_is_no_point_to_resume_from(tmp_path):
    run_toy(tmp_path)
    with pytest.raises(ValueError, match="no state.pt.*use OUTPUT/last"):
        run_toy(tmp_path / "other", resume=str(tmp_path / "best"))


def test_logs_of_a_resumed_run_have_each_step_once(tmp_path):
    run_toy(tmp_path, stop_at=9, save_every="2")
    with (tmp_path / "train.csv").open("a") as file:
        file.write("10,1.5,0.1,0.2,0.3,0.1,1,1,0\n11,1.8,0.")
    run_toy(tmp_path, resume="auto")
    assert [int(row["step"]) for row in read(tmp_path / "train.csv")] == list(range(1, STEPS + 1))


def test_files_that_could_not_be_read_are_named_once(tmp_path, capsys):
    class WithBadFiles(Toy):
        def collate(self, samples):
            batch = super().collate(samples)
            return _Batch(*batch, [Unreadable("a/b.jpg", "the file is empty")])

        def train_step(self, model, batch):
            return super().train_step(model, (batch.x, batch.y))

        def collate_eval(self, samples):
            return super().collate(samples)

    run_toy(tmp_path, WithBadFiles())
    assert capsys.readouterr().out.count("skipped a/b.jpg: the file is empty") == 1


def test_counts_of_an_evaluation_are_written_out(tmp_path, capsys):
    class Large(Toy):
        def evaluate(self, model, batches, processes):
            return {"top1": 12.345, "samples": 50_000}

    run_toy(tmp_path, Large())
    assert "top1 12.35  samples 50,000  (best" in capsys.readouterr().out


class _Batch(tuple):
    """A named tuple with a list of unreadable files, as pictures have."""

    _fields = ("x", "y", "unreadable")
    x = property(lambda self: self[0])
    y = property(lambda self: self[1])
    unreadable = property(lambda self: self[2])

    def __new__(cls, *parts):
        return super().__new__(cls, parts)


def test_a_batch_larger_than_the_data_is_refused(tmp_path):
    with pytest.raises(ValueError, match="one step takes 64 samples .* only 50 to train on"):
        run_toy(tmp_path, batch_size=64)


@pytest.mark.slow
def test_a_terminated_program_has_its_own_exit_code_and_goes_on(tmp_path):
    command = [sys.executable, PROGRAM, str(tmp_path), "--workers", "1"]
    # To the whole group, loading processes too, as schedulers and terminals do.
    stopped = subprocess.run(
        [*command, "--stop_at", "8", "--stop", "group"], start_new_session=True, timeout=600
    )
    assert stopped.returncode == 75
    assert subprocess.run([*command, "--resume", "auto"], timeout=600).returncode == 0
    run_toy(tmp_path / "whole")
    assert_same_run(tmp_path, tmp_path / "whole")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_host_does_not_wait_for_the_device_between_logs(tmp_path):
    class Watched(Toy):
        step = 0

        def train_step(self, model, batch):
            self.step += 1
            torch.cuda.set_sync_debug_mode("error" if 2 < self.step < 6 else "default")
            return super().train_step(model, batch)

    try:
        changes = dict(steps=6, warmup_epochs=0, log_interval=100, model_ema=True)
        run_toy(tmp_path, Watched(), device="cuda", **changes)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_batch_norms_over_processes_keep_the_activations_of_the_norms_they_replace():
    torch.manual_seed(0)
    stem = nn.Sequential(timm.layers.ConvNormAct(3, 4, 3)).eval()
    x = torch.randn(2, 3, 8, 8)
    expected = stem(x)
    assert (expected == 0).any()  # by the ReLU
    assert torch.equal(engine.convert_sync_batchnorm(stem)(x), expected)
