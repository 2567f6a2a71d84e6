"""Several processes (gloo) give what one gives; a killed worker is restarted; flags are agreed on."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from softfree.training.checkpoint import read_state, read_weights
from softfree.training.distributed import (
    Agreement,
    Processes,
    gather,
    get_optimizer_state,
    join_processes,
    set_optimizer_state,
    total,
)

from .toy import EVAL_SAMPLES, SAMPLES, run_toy

PROGRAM = str(Path(__file__).with_name("toy.py"))
PLAIN = ["--norm", "False", "--dropout", "0.0"]


def torchrun(output, *flags, restarts=0, processes=2):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(processes), "--max-restarts", str(restarts)]
    return [*command, PROGRAM, str(output), "--batch_size", "4", *PLAIN, *flags]


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The same run in one process with the same global batch."""
    output = tmp_path_factory.mktemp("alone")
    run_toy(output, norm=False, dropout=0.0, batch_size=8, model_ema=True)
    return output


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", ["False", "True"])
def test_two_processes_give_the_losses_and_scores_of_one(tmp_path, alone, fsdp):
    command = torchrun(tmp_path, "--fsdp", fsdp, "--model_ema", "True")
    subprocess.run(command, check=True, timeout=600)
    for name, columns in (("train.csv", ["loss", "grad_norm"]), ("eval.csv", ["top1", "samples"])):
        ours, expected = read(tmp_path / name), read(alone / name)
        assert len(ours) == len(expected) >= 3
        for row, other in zip(ours, expected, strict=True):
            for column in columns:
                assert float(row[column]) == pytest.approx(float(other[column]), abs=1e-5)
    assert int(read(tmp_path / "eval.csv")[-1]["samples"]) == EVAL_SAMPLES
    for name in ("model.safetensors", "ema.safetensors"):
        ours, expected = read_weights(tmp_path / "last", name), read_weights(alone / "last", name)
        for key, tensor in expected.items():
            torch.testing.assert_close(ours[key], tensor, atol=1e-5, rtol=0)


@pytest.mark.full
def test_processes_lose_their_patience_together(tmp_path):
    # Without a learning rate no evaluation is better than the first.
    flags = ["--lr", "0.0", "--warmup_epochs", "0", "--eval_every", "2", "--patience", "2"]
    done = subprocess.run(
        torchrun(tmp_path, *flags), capture_output=True, text=True, timeout=600, check=True
    )
    assert done.stdout.count("step 6, stopped False") == 2
    assert done.stdout.count("ended early at step 6 of 18") == 1
    assert [row["step"] for row in read(tmp_path / "eval.csv")] == ["2", "4", "6"]


@pytest.mark.full
def test_a_sharded_run_continues_in_one_process_and_vice_versa(tmp_path, alone):
    flags = ["--model_ema", "True", "--fsdp", "True", "--epochs", "3"]
    subprocess.run(torchrun(tmp_path, *flags, "--stop_at", "8"), timeout=600)
    assert read_state(tmp_path / "last")["position"]["step"] < 3 * (SAMPLES // 8)
    whole = dict(norm=False, dropout=0.0, batch_size=8, model_ema=True, resume="auto")
    run_toy(tmp_path, stop_at=3, **whole)
    subprocess.run(torchrun(tmp_path, *flags, "--resume", "auto"), check=True, timeout=600)
    expected = read_weights(alone / "last")
    for key, tensor in read_weights(tmp_path / "last").items():
        torch.testing.assert_close(tensor, expected[key], atol=1e-5, rtol=0)


@pytest.mark.slow
def test_a_killed_worker_is_restarted_and_the_run_continues(tmp_path, alone):
    done = subprocess.run(
        torchrun(tmp_path, "--model_ema", "True", "--save_every", "'2'", "--kill_at", "9", restarts=1),
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "continuing from step" in done.stdout
    expected = read_weights(alone / "last")
    for key, tensor in read_weights(tmp_path / "last").items():
        torch.testing.assert_close(tensor, expected[key], atol=1e-5, rtol=0)


@pytest.mark.full
def test_an_output_that_has_a_run_is_refused_by_restarted_processes_too(tmp_path):
    run_toy(tmp_path, norm=False, dropout=0.0, batch_size=8, stop_at=2)
    done = subprocess.run(
        torchrun(tmp_path, restarts=1), capture_output=True, text=True, timeout=600
    )
    assert done.returncode != 0
    assert "already has a run" in done.stderr
    assert read_state(tmp_path / "last")["position"]["step"] == 2


@pytest.mark.full
def test_terminating_torchrun_saves_the_run(tmp_path):
    # So many epochs that the run does not end before torchrun has passed the signal on.
    command = torchrun(tmp_path, "--stop_at", "4", "--stop", "parent", "--epochs", "100000")
    assert subprocess.run(command, timeout=600).returncode != 0
    assert read_state(tmp_path / "last")["position"]["step"] > 0


def test_one_process_needs_no_partner():
    alone = Processes(0, 1, torch.device("cpu"))
    assert gather([1, 2], alone) == [1, 2]
    assert total(torch.tensor([3.0]), alone).tolist() == [3.0]
    assert Agreement(alone).exchange(True, False) == (True, False)


def test_a_missing_gpu_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="`device` cuda: PyTorch finds no such GPU here"):
        join_processes("cuda").__enter__()


def test_the_optimizer_s_state_survives_by_the_names_of_the_parameters():
    def trained(seed):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        return model, optimizer

    (model, optimizer), (other, other_optimizer) = trained(0), trained(1)
    state = get_optimizer_state(model, optimizer)
    assert set(state["state"]) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    set_optimizer_state(other, other_optimizer, state)
    for mine, others in zip(model.parameters(), other.parameters(), strict=True):
        for name, value in optimizer.state[mine].items():
            assert torch.equal(value, other_optimizer.state[others][name])


def test_a_parameter_that_no_step_has_used_has_no_state_after_a_resume_either():
    def make():
        model = torch.nn.ModuleList([torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)])
        return model, torch.optim.AdamW(model.parameters(), fused=True)

    model, optimizer = make()
    model[0](torch.randn(4, 3)).sum().backward()
    optimizer.step()
    other, other_optimizer = make()
    set_optimizer_state(other, other_optimizer, get_optimizer_state(model, optimizer))
    assert set(other_optimizer.state) == set(other[0].parameters())
