"""A captured step: what is replayed is the step itself, and Python has no part in it.

On a CPU a tape stands for the CUDA graph, see tape.py; on a GPU there are true graphs as well.
"""

import dataclasses
import os
import signal

import pytest
import torch

from softfree.data.images import Batch
from softfree.training import engine, step
from softfree.training.checkpoint import read_weights
from softfree.training.classification import Classification, DataSettings
from softfree.training.distributed import Processes
from softfree.training.guard import NonFiniteError
from softfree.training.settings import RunSettings
from softfree.training.step import WARM_UP, check_graph

from .tape import Tape
from .test_classification import settings
from .test_engine import assert_same_run, losses
from .toy import Toy, run_toy

STEPS = 18
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def tape(monkeypatch):
    """Runs with ``cuda_graph`` on the CPU, their graphs on this tape."""
    tape = Tape()
    monkeypatch.setattr(engine, "check_graph", lambda *given: None)
    monkeypatch.setattr(step, "CudaGraphs", lambda device: tape)
    return tape


class Prepared(Toy):
    """Stops or spoils a step in ``prepare``, the part of it that Python runs each time."""

    capturable = True

    def __init__(self, stop_before=0, spoiled=(), **kwargs):
        super().__init__(**kwargs)
        self.stop_before, self.spoiled, self.prepared = stop_before, spoiled, 0

    def prepare(self, batch):
        self.prepared += 1
        if self.prepared == self.stop_before:
            os.kill(os.getpid(), signal.SIGTERM)
        x, y = batch
        return (x * float("nan") if self.prepared in self.spoiled else x), y


def run_graphed(output, task=None, **changes):
    return run_toy(output, task or Prepared(), cuda_graph=True, **changes)


def assert_close_runs(one, other):
    """The same losses and weights, but for what the learning rate loses in float32."""
    torch.testing.assert_close(losses(one), losses(other), rtol=1e-4, atol=1e-5, equal_nan=True)
    for name in ("model.safetensors", "ema.safetensors"):
        if not (one / "last" / name).exists():
            continue
        first, second = (read_weights(run / "last", name) for run in (one, other))
        for key in first:
            # The gradient of a bias in front of a batch norm is rounding alone, which AdamW enlarges.
            if key not in ("blocks.2.bias", "norm.running_mean"):
                torch.testing.assert_close(first[key], second[key], rtol=1e-4, atol=1e-5)


CHANGES = [
    {},
    dict(grad_accum_steps=3, batch_size=4, model_ema=True),
    dict(amp_dtype="float16"),
    dict(steps=13, sched="linear", warmup_epochs=0, warmup_steps=3, clip_grad=0.0, workers=1),
]


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_a_captured_run_is_the_ordinary_run_and_python_runs_its_first_passes_alone(
    tmp_path, tape, changes
):
    ordinary = run_toy(tmp_path / "ordinary", **changes)
    task = Prepared()
    captured = run_graphed(tmp_path / "captured", task, **changes)
    passes, steps = changes.get("grad_accum_steps", 1), ordinary.position.step
    # One graph for the last pass of a step, one for those before it.
    assert tape.recorded == min(passes, 2)
    assert task.calls == min(passes, 2) * (WARM_UP + 1)
    assert tape.replayed == passes * steps - min(passes, 2) * WARM_UP
    assert captured.position.step == steps and captured.scores == ordinary.scores
    assert_close_runs(tmp_path / "captured", tmp_path / "ordinary")


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_a_captured_run_that_is_stopped_goes_on_as_if_never_stopped(tmp_path, tape, changes):
    passes = changes.get("grad_accum_steps", 1)
    run_graphed(tmp_path / "whole", **changes)
    first = run_graphed(tmp_path / "stopped", Prepared(stop_before=8 * passes), **changes)
    assert first.stopped and first.position.step == 8
    assert not run_graphed(tmp_path / "stopped", resume="auto", **changes).stopped
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")


def test_a_run_may_go_on_with_a_graph_or_without(tmp_path, tape):
    run_graphed(tmp_path, Prepared(stop_before=8))
    assert tape.recorded
    assert run_toy(tmp_path, Prepared(stop_before=4), resume="auto").position.step == 12
    assert run_graphed(tmp_path, resume="auto").position.step == STEPS
    run_toy(tmp_path / "ordinary")
    assert_close_runs(tmp_path, tmp_path / "ordinary")


@pytest.mark.parametrize("passes", [1, 2])
def test_a_captured_step_without_a_finite_gradient_is_left_out_and_counted(tmp_path, tape, passes):
    changes = dict(sched="multistep", warmup_epochs=0, grad_accum_steps=passes, batch_size=4)
    run_graphed(tmp_path / "short", steps=6, **changes)
    spoiled = [7 * passes, 8 * passes]
    outcome = run_graphed(
        tmp_path / "spoiled", Prepared(spoiled=spoiled), steps=8, log_interval=5, **changes
    )
    assert outcome.position.skipped == 2
    weights = read_weights(tmp_path / "spoiled" / "last")
    for name, tensor in read_weights(tmp_path / "short" / "last").items():
        if "norm" not in name:
            assert torch.equal(tensor, weights[name]), name
    with pytest.raises(NonFiniteError, match="blocks.0 .*its input is not finite either"):
        run_graphed(
            tmp_path / "bad", Prepared(spoiled=range(6, 99)), max_skipped=3, **changes
        )  # fmt: skip


def test_each_shape_of_a_batch_has_a_graph_until_there_are_too_many(tmp_path, tape, monkeypatch):
    class Growing(Prepared):
        """Batches of 8, then 7, then 6 samples."""

        def prepare(self, batch):
            x, y = super().prepare(batch)
            keep = 8 - (self.prepared - 1) // 6
            return x[:keep], y[:keep]

    run_toy(tmp_path / "ordinary", Growing())
    run_graphed(tmp_path / "captured", Growing())
    assert (tape.recorded, tape.replayed) == (3, 3 * (6 - WARM_UP))
    assert_close_runs(tmp_path / "captured", tmp_path / "ordinary")
    monkeypatch.setattr(step, "MOST_GRAPHS", 2)
    run_graphed(tmp_path / "few", Growing())
    assert tape.recorded == 3 + 2
    assert_same_run(tmp_path / "captured", tmp_path / "few")


def test_a_step_that_asks_for_a_number_is_refused_in_a_sentence(tmp_path, tape):
    class Asking(Prepared):
        def train_step(self, model, batch):
            loss, others = super().train_step(model, batch)
            return loss * float(loss.detach() > 0), others

    with pytest.raises(ValueError, match="`cuda_graph`: the step of this model can't be captured"):
        run_graphed(tmp_path, Asking())


def test_a_parameter_that_comes_into_play_late_is_refused(tmp_path, tape):
    class Late(Prepared):
        def build_model(self):
            model = super().build_model()
            model.late = torch.nn.Parameter(torch.ones(()))
            return model

        def train_step(self, model, batch):
            loss, others = super().train_step(model, batch)
            return loss * model.late if self.calls > WARM_UP else loss, others

    with pytest.raises(ValueError, match="a parameter got its first gradient only after 3 passes"):
        run_graphed(tmp_path, Late())


ALONE = RunSettings(cuda_graph=True)


@pytest.mark.parametrize(
    "capturable, device, processes, run, message",
    [
        (True, "cpu", 1, ALONE, "`cuda_graph` needs a GPU, got `device` cpu"),
        (False, "cuda", 1, ALONE, "a step of detection reads numbers from the GPU"),
        (True, "cuda", 2, ALONE, "`cuda_graph` is for one process, got 2"),
        (
            True,
            "cuda",
            1,
            dataclasses.replace(ALONE, grad_checkpointing=True),
            "can't be combined with",
        ),
    ],
)
def test_what_no_graph_can_hold_is_refused(capturable, device, processes, run, message):
    with pytest.raises(ValueError, match=message):
        check_graph(capturable, "detection", run, Processes(0, processes, torch.device(device)))


def test_a_run_that_is_refused_leaves_no_folder(tmp_path):
    with pytest.raises(ValueError, match="`cuda_graph` needs a GPU, got `device` cpu"):
        run_graphed(tmp_path / "new")
    with pytest.raises(ValueError, match="a step of toy reads numbers from the GPU"):
        run_toy(tmp_path / "new", Toy(), cuda_graph=True)
    assert not (tmp_path / "new").exists()


def pictures(output, on_device, **augment):
    """The settings of a small classifier's run."""
    given = settings(output, augment={"color_jitter": 0.0, **augment}, optim={"steps": 8})
    data = DataSettings(data_on_device=on_device)
    return dataclasses.replace(given, data=data, run=dataclasses.replace(given.run, log_interval=1))


@pytest.mark.parametrize(
    "on_device, augment",
    [(True, {}), (True, {"mixup": 0.8, "cutmix": 1.0}), (False, {"reprob": 0.5})],
    ids=str,
)
def test_pictures_are_varied_in_a_captured_run_as_in_an_ordinary_one(
    tmp_path, tape, on_device, augment
):
    ordinary = pictures(tmp_path / "ordinary", on_device, **augment)
    Classification.run(ordinary)
    captured = pictures(tmp_path / "captured", on_device, **augment)
    run = dataclasses.replace(captured.run, cuda_graph=True)
    Classification.run(dataclasses.replace(captured, run=run))
    assert (tape.recorded, tape.replayed) == (1, 8 - WARM_UP)
    torch.testing.assert_close(
        losses(tmp_path / "captured"), losses(tmp_path / "ordinary"), rtol=1e-3, atol=0
    )


def test_crops_are_made_in_the_graph_unless_the_host_varies_them_further():
    plan = torch.zeros(6, 4, dtype=torch.long)
    assert Classification(pictures(None, True)).prepare(plan) is plan
    batch = Batch(torch.zeros(4, 3, 32, 32, dtype=torch.uint8), torch.arange(4), [])
    assert Classification(pictures(None, False, mixup=0.8)).prepare(batch).labels.shape == (4, 10)


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("torchcompile", [False, True])
@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_on_a_gpu_a_captured_run_is_the_ordinary_run(tmp_path, changes, torchcompile):
    changes = {**changes, "device": "cuda", "torchcompile": torchcompile}
    run_toy(tmp_path / "ordinary", **changes)
    run_graphed(tmp_path / "captured", **changes)
    assert_close_runs(tmp_path / "captured", tmp_path / "ordinary")


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_on_a_gpu_a_captured_run_that_is_stopped_goes_on_as_if_never_stopped(tmp_path, changes):
    changes, passes = {**changes, "device": "cuda"}, changes.get("grad_accum_steps", 1)
    run_graphed(tmp_path / "whole", **changes)
    first = run_graphed(tmp_path / "stopped", Prepared(stop_before=8 * passes), **changes)
    assert first.stopped and first.position.step == 8
    assert not run_graphed(tmp_path / "stopped", resume="auto", **changes).stopped
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("torchcompile", [False, True])
@pytest.mark.parametrize("on_device, augment", [(True, {}), (True, {"mixup": 0.8}), (False, {})])
def test_on_a_gpu_a_captured_classifier_learns_as_an_ordinary_one(
    tmp_path, on_device, augment, torchcompile
):
    for name, graphed in (("ordinary", False), ("captured", True)):
        given = pictures(tmp_path / name, on_device, **augment)
        run = dataclasses.replace(
            given.run, cuda_graph=graphed, torchcompile=torchcompile, device="cuda"
        )
        model = dataclasses.replace(given.model, drop_path=0.2)
        Classification.run(dataclasses.replace(given, run=run, model=model))
    torch.testing.assert_close(
        losses(tmp_path / "captured"), losses(tmp_path / "ordinary"), rtol=3e-2, atol=0
    )


@pytest.mark.gpu
@NEEDS_GPU
def test_on_a_gpu_the_host_does_not_wait_for_a_captured_step(tmp_path):
    class Watched(Prepared):
        def prepare(self, batch):
            result = super().prepare(batch)
            watched = WARM_UP + 1 < self.prepared < 9
            torch.cuda.set_sync_debug_mode("error" if watched else "default")
            return result

    try:
        rarely = dict(log_interval=100, eval_every=12, save_every="12")
        run_graphed(tmp_path, Watched(), device="cuda", steps=12, **rarely)
    finally:
        torch.cuda.set_sync_debug_mode("default")
