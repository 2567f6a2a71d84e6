"""The training loop, for every task.

    train(task, optim, run, settings_json)     trains until the last step or until a signal asks to stop

A task (:class:`Task`) knows its data, its model, its loss and its score. The loop knows the rest: precision,
accumulation, schedule, moving average, evaluation, checkpoints, resuming, logs, signals, several processes.

Everything random in a step is seeded by (seed, step), and the order of the data is a function of the two. So
a checkpoint needs no generator states: a resumed run does exactly what it would have done without the break.
"""

import contextlib
import copy
import dataclasses
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from PIL import Image
from timm.layers import convert_sync_batchnorm
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from softfree import __version__
from softfree.data.drawing import COLUMNS, Tile, sheet
from softfree.data.files import write_durably
from softfree.data.images import MapData, Unreadable, collate_training
from softfree.models.metadata import check_buildable, check_fields
from softfree.training import checkpoint, distributed
from softfree.training.devices import autocast
from softfree.training.distributed import Agreement, Processes
from softfree.training.guard import GuardedOptimizer, NonFiniteError, find_nonfinite
from softfree.training.loading import evaluation_batches, read_batches
from softfree.training.lock import locked
from softfree.training.logs import (
    EVAL_CSV,
    PREDICTIONS,
    PREVIEW,
    TEST_RESULT,
    TRAIN_CSV,
    RunLog,
    TimeLeft,
    Timer,
    peak_memory_gib,
)
from softfree.training.parameters import parameter_groups
from softfree.training.sampling import Augmented, StepSampler, seed_all, shuffle
from softfree.training.schedule import Schedule
from softfree.training.settings import (
    Given,
    OptimSettings,
    RunSettings,
    check_settings,
    parse_interval,
    settings_to_json,
)
from softfree.training.signals import StopRequest
from softfree.training.step import check_graph, create_step

# Files that show that a folder has a run; `overwrite` removes them.
RUN_FILES = ("last", "best", TRAIN_CSV, EVAL_CSV, TEST_RESULT, "tensorboard")


# Number of samples on the page that is drawn at the start of a run.
PREVIEWED = 4 * COLUMNS


class Task(ABC):
    """What the loop and the commands need to know about a task.

    Attributes:
        name: e.g. "classification".
        recipes: settings to start from, by name. An instance is created from such settings.
        metric: the result of :meth:`evaluate` that decides which checkpoint is the best.
        higher_is_better: whether a higher metric is better.
        headline: the results of :meth:`evaluate` to print if not all fit on a line; ``eval.csv`` has all.
        sizes_vary: whether sizes change from step to step, so that cuDNN would benchmark its algorithms for
            each.
        capturable: whether :meth:`train_step` never reads a number from the device, so that a CUDA graph can
            hold it.
        resumes: whether the run continues from a checkpoint, so that weights to start from are not needed.
        train_data, eval_data: map-style data sets. If a data set is a ``range``, the task keeps its samples
            on the device and a batch is a tensor of indices there; in training, a slice of what
            :meth:`plan_epoch` returns.
    """

    name: str
    recipes: ClassVar[Mapping[str, Any]]
    metric: str
    higher_is_better: bool = True
    headline: tuple[str, ...] = ()
    sizes_vary: bool = False
    capturable: bool = False
    resumes: bool = False
    train_data: MapData
    eval_data: MapData

    @classmethod
    def usual_recipe(cls, given: Given) -> str:
        """The recipe to use if none is named; it may depend on what the user gave."""
        raise NotImplementedError

    @classmethod
    def adapt(cls, settings: Any, given: Given) -> Any:
        """Adjust the recipe's own values to those the user gave."""
        return settings

    @classmethod
    def run(cls, settings: Any, data: Any = None) -> "Outcome":
        """Train with these settings; ``data`` replaces the data that they name."""
        task = cls(settings, data)  # type: ignore[call-arg]
        outcome = train(task, settings.optim, settings.run, settings_to_json(settings))
        if outcome.stopped or int(os.environ.get("RANK", 0)):
            return outcome
        return dataclasses.replace(outcome, note=task.finish(outcome))

    @classmethod
    def build(cls, metadata: dict[str, Any]) -> nn.Module:
        """Build the model that a checkpoint's metadata describes, with new weights."""
        raise NotImplementedError

    @classmethod
    def load(
        cls,
        path: str | Path,
        device: torch.device | str = "cpu",
        changes: Mapping[str, Any] | None = None,
    ) -> tuple[nn.Module, dict[str, Any]]:
        """Load the model of a checkpoint folder, ready to use, and its metadata.

        ``changes`` are model arguments that differ from training, such as ``{"landmarks": "conv:49"}``; the
        weights must still fit.
        """
        saved = checkpoint.read_checkpoint(path)
        checkpoint.check_task(path, saved.metadata, cls.name)
        file, described = saved.path / checkpoint.METADATA, saved.metadata
        check_buildable(file, described)
        if changes:
            described = {**described, "model_kwargs": {**described["model_kwargs"], **changes}}
        try:
            # This takes no memory, whatever size the file asks for. The real model is built only if its size
            # fits the weights.
            with torch.device("meta"):
                expected = cls.build(described).state_dict()
        except Exception as error:  # an architecture given nonsense may raise anything
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise ValueError(f"{file}: it does not describe a valid model: {reason}") from error
        checkpoint.check_fits(saved.path, saved.weights, expected, saved.metadata["model"])
        model = cls.build(described)
        model.load_state_dict(saved.weights)
        return model.eval().to(device), saved.metadata

    def finish(self, outcome: "Outcome") -> str:
        """Finish after the last step, only in the main process; return the result as a line of text."""
        return ""

    @abstractmethod
    def build_model(self) -> nn.Module:
        """Build the model on the CPU with the weights it starts from; frozen parameters need no gradient."""

    def prepare(self, batch: Any) -> Any:
        """Turn a batch on the device into the input of :meth:`train_step`: tensors in tuples, lists or dicts.

        Random numbers are drawn on the host here, since a CUDA graph holds everything that follows.
        """
        return batch

    @abstractmethod
    def train_step(self, model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a batch on the device, and other numbers for the log, all 0-dim tensors.

        They are read only when the log is written, so nothing may modify them.
        """

    @abstractmethod
    def evaluate(
        self, model: nn.Module, batches: Iterable[Any], processes: Processes
    ) -> dict[str, float]:
        """Return the scores. ``batches`` are this process's share; sum up with :func:`distributed.total`."""

    @abstractmethod
    def metadata(self) -> dict[str, Any]:
        """Everything needed to build and use the model of a checkpoint again, as plain JSON values."""

    def collate(self, samples: list[Any]) -> Any:
        """Turn items of ``train_data`` into a batch: tensors in tuples, lists or dicts."""
        return torch.utils.data.default_collate(samples)

    def collate_eval(self, samples: list[Any]) -> Any:
        """Turn items of ``eval_data`` into a batch."""
        return self.collate(samples)

    def order(self, samples: int, batch_size: int, generator: torch.Generator) -> Tensor:
        """The order of an epoch's samples; each run of ``batch_size`` samples forms one process's batch."""
        return shuffle(samples, batch_size, generator)

    def plan_epoch(self, order: Tensor) -> Tensor:
        """Turn an epoch's indices on the device (n,) into (..., n), which batches are slices of.

        The generators are seeded for the epoch, identically in all processes.
        """
        return order

    def parameter_groups(self, model: nn.Module, optim: OptimSettings) -> list[dict[str, Any]]:
        """Groups for AdamW: no weight decay for biases, norms and parameters that the model exempts."""
        return parameter_groups(model, optim)


class PictureTask(Task):
    """A task whose pictures are in files, some of which may be unreadable.

    ``make_batch(samples, refill=False)`` makes a batch with a field ``unreadable``; with ``refill``, other
    items are repeated in place of those. ``predicted`` is the number of validation samples drawn at an
    evaluation.
    """

    make_batch: Callable[..., Any]
    predicted: int = 2 * COLUMNS

    def collate(self, samples: list[Any]) -> Any:
        return collate_training(self.make_batch, samples, self.train_data)

    def collate_eval(self, samples: list[Any]) -> Any:
        return self.make_batch(samples)

    @abstractmethod
    def draw_batch(self, batch: Any) -> list[Tile]:
        """Draw the samples of a training batch as the model sees them, with their ground truth."""

    @abstractmethod
    def draw_predictions(
        self, model: nn.Module, indices: Sequence[int], device: torch.device
    ) -> list[Tile]:
        """Draw validation samples with the ground truth and the model's predictions."""

    def preview(self, seed: int, device: torch.device) -> Image.Image:
        """Draw a page of a run's first training samples as the model sees them, with their ground truth."""
        samples = len(self.train_data)
        # An even number, because mixup and cutmix need pairs.
        count = min(PREVIEWED, max(1, samples // 2 * 2))
        sampler = StepSampler(samples, count, 1, 0, 1, seed, 0, 1, self.order)
        with contextlib.closing(training_batches(self, sampler, seed, device)) as batches:
            batch = next(batches)
        seed_all(seed, 1)
        return sheet(
            self.draw_batch(batch), f"{self.name}: training samples as the model sees them"
        )

    def predictions(self, model: nn.Module, step: int, device: torch.device) -> Image.Image:
        """Draw a page of validation samples, always the same ones, with the model's predictions."""
        count = min(self.predicted, len(self.eval_data))
        indices = [len(self.eval_data) * number // count for number in range(count)]
        tiles = self.draw_predictions(model, indices, device)
        return sheet(tiles, f"{self.name}: validation samples at step {step:,}")


def training_batches(
    task: Task, sampler: StepSampler, seed: int, device: torch.device, *reading: Any
) -> Generator[Any]:
    """The batches to train on; ``reading`` are the last arguments of :func:`read_batches`."""
    if isinstance(task.train_data, range):
        # There are no files to read, and loading processes would cost more than the indices.
        return sampler.on_device(device, task.plan_epoch)
    data = Augmented(task.train_data, seed)
    return read_batches(data, sampler, task.collate, device, *(reading or (_no_report,)))


def _no_report(file: Unreadable) -> None:
    """Ignore unreadable pictures, which the run itself will report."""


@dataclasses.dataclass
class Position:
    """How far a run is; saved with every checkpoint."""

    step: int = 0
    evaluated: int = 0
    """the step of the last evaluation"""
    best: float | None = None
    best_step: int = 0
    skipped: int = 0
    """steps skipped so far because their gradient was not finite"""
    unimproved: int = 0
    """evaluations since the best one"""

    @classmethod
    def read(cls, file: Path, values: Any) -> "Position":
        """Read a position from the ``values`` of an untrusted file."""
        if not isinstance(values, dict):
            raise ValueError(f"{file}: 'position' must be a mapping, got {values!a:.60}")
        # Older files do not count evaluations.
        values = {"unimproved": 0, **values}
        found: dict[str, Any] = {f.name: values.get(f.name) for f in dataclasses.fields(cls)}
        best = found.pop("best")
        for name, value in found.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(
                    f"{file}: {name!r} of the position must be a whole number, got {value!a:.60}"
                )
        if best is not None and not isinstance(best, (int, float)):
            raise ValueError(f"{file}: 'best' of the position must be a number, got {best!a:.60}")
        # Runs from before 0.2 may have started with a NaN score.
        return cls(**found, best=None if best != best else best)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended: its position, its last scores, whether a signal stopped it, and its task's result."""

    position: Position
    scores: dict[str, float]
    stopped: bool
    note: str = ""


def train(task: Task, optim: OptimSettings, run: RunSettings, settings_json: str) -> Outcome:
    """Train ``task``; write checkpoints and logs into ``run.output``."""
    check_settings(optim, run)
    with distributed.join_processes(run.device) as processes, StopRequest() as stop_request:
        if run.cuda_graph:
            check_graph(task.capturable, task.name, run, processes)
        with locked(run.output) if processes.main else contextlib.nullcontext():
            return _Training(task, optim, run, settings_json, processes).run_loop(stop_request)


def check_scaler(file: Path, found: Any, wanted: dict[str, Any]) -> None:
    """Raise unless ``found`` has the numbers of the gradient scaler's state ``wanted``."""
    for name in wanted:
        value = found.get(name) if isinstance(found, dict) else None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{file}: {name!r} of the scaler must be a number, got {value!a:.60}")


class _EvaluationStoppedError(Exception):
    """A signal came during an evaluation."""


class _Training:
    """One run: its parts, assembled in ``__init__``, and the training loop."""

    def __init__(
        self,
        task: Task,
        optim: OptimSettings,
        run: RunSettings,
        settings_json: str,
        processes: Processes,
    ):
        self.task, self.optim, self.run = task, optim, run
        self.settings_json = settings_json
        self.processes = processes
        self.device = processes.device
        self.last, self.best = run.output / "last", run.output / "best"
        self.restarted = distributed.restarted(processes)
        resume_from = self._find_resume()
        task.resumes = resume_from is not None

        sizes = len(task.train_data), optim.batch_size, optim.grad_accum_steps
        place = processes.rank, processes.count
        self.sampler = StepSampler(*sizes, *place, run.seed, permute=task.order)
        self.steps_per_epoch = self.sampler.steps_per_epoch
        self.schedule = Schedule.of(optim, self.steps_per_epoch)
        if optim.amp_dtype == "float16" and run.fsdp:
            raise ValueError("`fsdp` needs `amp_dtype` bfloat16 or none, got float16")

        seed_all(run.seed)
        self.plain = self._build_model()
        self.ema: ModelEmaV3 | None = None
        if optim.model_ema:
            self.ema = ModelEmaV3(
                self.plain, optim.model_ema_decay, use_warmup=True, exclude_buffers=True
            )
        self.model = self._spread_model()
        groups = task.parameter_groups(self.plain, optim)
        self.optimizer = GuardedOptimizer(self.plain, groups, optim, processes)
        self.step = create_step(
            run.cuda_graph, self.device, self.model, task.prepare, task.train_step, self.optimizer,
            optim, self._seed,
        )  # fmt: skip
        self.position = Position()
        self.time_left = TimeLeft()
        self.eval_every = run.eval_every or self.steps_per_epoch
        self.save_every, self.save_unit = parse_interval(run.save_every)
        self.saved_at, self.saved_step = time.monotonic(), -1
        if resume_from is not None:
            self._resume(resume_from)
        if run.overwrite and processes.main and not self.restarted:
            self._remove_earlier_run()
        distributed.note_begun(processes)
        self.log = RunLog(run.output, self.position.step, self.schedule.total, processes.main)
        self.unreadable: dict[str, str] = {}
        self.reading = self._note_unreadable, run.workers, run.channels_last

    # Setting up

    def _find_resume(self) -> Path | None:
        """Find the checkpoint to continue from; raise if files of an earlier run would be overwritten."""
        again = self.restarted
        if self.processes.main:
            checkpoint.recover(self.last)
            checkpoint.recover(self.best)
        # The other processes look only after the main process has cleaned up.
        distributed.gather([], self.processes)
        output, resume = self.run.output, self.run.resume
        if self.last.exists() and (resume == "auto" or again):
            return self.last
        given = None
        if resume not in ("", "auto") and not again:
            given = checkpoint.locate(Path(resume))
            if given.resolve() == self.last.resolve():
                return given
        found = [name for name in RUN_FILES if (output / name).exists()]
        # A run that ended before its first checkpoint has only logs.
        lost = self.best.exists() or self.last.exists()
        if not found or self.run.overwrite or (not lost and (resume == "auto" or again)):
            return given
        if self.last.exists():
            advice = "continue it with `resume` auto, use another `output`"
        else:
            advice = "without its checkpoint last it can't continue; use another `output`"
        raise ValueError(
            f"`output` {output} already has a run ({', '.join(found)}); {advice}, or start a new run "
            "with `overwrite`"
        )

    def _remove_earlier_run(self) -> None:
        for name in (*RUN_FILES, PREVIEW, PREDICTIONS):
            checkpoint.remove(self.run.output / name)

    def _build_model(self) -> nn.Module:
        model = self.task.build_model()
        if not any(p.requires_grad for p in model.parameters()):
            raise ValueError("`freeze` leaves no parameter to train")
        if self.run.grad_checkpointing:
            enable = getattr(model, "set_grad_checkpointing", None)
            if enable is None:
                raise ValueError(
                    f"`grad_checkpointing`: {type(model).__name__} does not support it"
                )
            enable(True)
        if self.run.sync_bn:
            if self.device.type != "cuda" or self.processes.count == 1:
                raise ValueError("`sync_bn` needs several processes on GPUs (torchrun)")
            model = convert_sync_batchnorm(model)  # timm's keeps its norms' activations
        layout = torch.channels_last if self.run.channels_last else torch.preserve_format
        return model.to(self.device, memory_format=layout)  # type: ignore[call-overload]

    def _spread_model(self) -> nn.Module:
        """Return the model to call in training; ``self.plain`` stays the one that has the weights."""
        if self.device.type == "cuda":
            torch.set_float32_matmul_precision("high")
            torch.backends.cudnn.benchmark = not self.task.sizes_vary
        if self.run.fsdp and self.processes.count == 1:
            raise ValueError("`fsdp` needs several processes: start with torchrun")
        self.whole_model: nn.Module | None = None
        if self.run.fsdp:
            # For evaluation, whose passes must not need other processes: the numbers of batches may differ.
            self.whole_model = copy.deepcopy(self.plain)
            distributed.shard(self.plain)
            if self.ema is not None:
                distributed.shard(self.ema.module)
        if self.run.torchcompile:
            self.plain.compile()
        if self.processes.count > 1 and not self.run.fsdp:
            return distributed.replicate(self.plain, self.processes)
        return self.plain

    def _resume(self, path: Path) -> None:
        """Continue from a checkpoint; all of it is checked before anything is changed."""
        saved = checkpoint.read_run(path)
        file = saved.path / checkpoint.STATE
        checkpoint.check_same_run(saved.path, self.settings_json)
        model = self.task.metadata().get("model", "this")
        expected = distributed.get_weights(self.plain)
        checkpoint.check_fits(path, saved.weights, expected, model, exactly=True)
        told = checkpoint.read_run_settings(saved.path).get("optim", {})
        if self.ema is not None and saved.ema is None and told.get("model_ema"):
            raise ValueError(
                f"{path} has no {checkpoint.EMA}, although its run kept one; use another checkpoint"
            )
        if saved.ema is not None:
            ema_file = saved.path / checkpoint.EMA
            checkpoint.check_fits(ema_file, saved.ema, expected, model, exactly=True)
        check_fields(saved.path / checkpoint.METADATA, saved.metadata, ("run",))
        for name, value in self._data_facts().items():
            if saved.metadata["run"].get(name) != value:
                raise ValueError(
                    f"{path} was written with {name} {saved.metadata['run'].get(name)!a:.60}, but this "
                    f"run has {value}, which would change the order of the data. Use the same data, the same "
                    "`seed`, and the same product of `batch_size`, `grad_accum_steps` and processes"
                )
        position = Position.read(file, saved.state.get("position"))
        if position.step > self.schedule.total:
            raise ValueError(
                f"{path} is at step {position.step:,}, beyond this run's end at "
                f"{self.schedule.total:,} (`epochs`, `steps`)"
            )
        trainable = {n: p for n, p in self.plain.named_parameters() if p.requires_grad}
        moments: Any = saved.state.get("optimizer")
        if position.step:
            # Older files do not record which parameters no step had used.
            without = saved.state.get("without_state", [*trainable])
            if not isinstance(without, list):
                raise ValueError(f"{file}: 'without_state' must be a list, got {without!a:.60}")
            checkpoint.check_optimizer(file, moments, trainable, without)
        scaler, kept = self.optimizer.scaler, saved.state.get("scaler") or {}
        if scaler.is_enabled() and kept:
            check_scaler(file, kept, scaler.state_dict())

        distributed.set_weights(self.plain, saved.weights)
        if position.step:
            distributed.set_optimizer_state(self.plain, self.optimizer.optimizer, moments)
        if scaler.is_enabled() and kept:
            scaler.load_state_dict(kept)
        if self.ema is not None:
            # If there was no moving average until now, it starts from the weights.
            distributed.set_weights(self.ema.module, saved.ema or saved.weights)
        self.position = position
        self.saved_step = position.step
        self.optimizer.settle_buffers()

    def _data_facts(self) -> dict[str, int]:
        """What must be the same for the order of the data to be the same."""
        return {
            "training samples": len(self.task.train_data),
            "global batch": self.sampler.global_batch,
            "seed": self.run.seed,
        }

    # The loop

    def run_loop(self, stop_request: StopRequest) -> Outcome:
        position, total = self.position, self.schedule.total
        agreement = Agreement(self.processes)
        scores: dict[str, float] = {}
        with self.log as log, contextlib.closing(self._training_batches()) as batches:
            self._open_logs()
            timer = Timer(self.device)
            while True:
                # Any process may be asked to stop, and clocks differ, so all act on what they agreed on.
                stopped, save_now = agreement.exchange(
                    stop_request.signal is not None, self._saving_is_due_by_the_clock()
                )
                if self._evaluation_is_due() and not stopped:
                    with timer.paused():
                        try:
                            scores = self._evaluate_and_keep_best(stop_request)
                        except _EvaluationStoppedError:
                            stopped = True
                finished = position.step == total or self._patience_is_over()
                if save_now or stopped or finished or self._saving_is_due():
                    with timer.paused():
                        self._save_last()
                if stopped or finished:
                    break
                batch = self._step(batches)
                position.step += 1
                timer.samples += self.sampler.global_batch
                log.tick(position.step)
                if position.step % self.run.log_interval == 0 or position.step == total:
                    self._read_and_log(timer, batch)
            agreement.finish()
            if finished and position.step < total:
                self._say_why_it_ends()
        return Outcome(position, scores, stopped)

    def _step(self, batches: Iterator[Any]) -> Any:
        """One step of the optimizer; returns the last batch."""
        step = self.position.step
        batch = self.step(batches, step, self.schedule(step))
        if self.ema is not None:
            self.ema.update(self.plain, step=step)
        return batch

    def _seed(self, step: int, pass_: int) -> None:
        seed_all(self.run.seed, 1 + step, pass_, self.processes.rank)

    def _training_batches(self) -> Generator[Any]:
        self.sampler.start, self.sampler.stop = self.position.step, self.schedule.total
        return training_batches(self.task, self.sampler, self.run.seed, self.device, *self.reading)

    def _note_unreadable(self, file: Unreadable) -> None:
        if file.path not in self.unreadable:
            self.unreadable[file.path] = file.reason
            self.log.unreadable(file)

    def _autocast(self) -> torch.autocast:
        return autocast(self.optim.amp_dtype, self.device)

    def _read_and_log(self, timer: Timer, last_batch: Any) -> None:
        position = self.position
        means, skipped, in_a_row = self.optimizer.read()
        position.skipped += skipped
        samples_per_s = timer.read()
        self.time_left.note_step(self.sampler.global_batch / samples_per_s)
        numbers = {
            "epoch": position.step / self.steps_per_epoch,
            **means,
            "lr": self.schedule(position.step - 1),
            "samples_per_s": samples_per_s,
            "peak_gib": peak_memory_gib(self.device),
            "skipped_steps": position.skipped,
        }
        ahead = self.schedule.total - position.step, self._evaluations_ahead()
        self.log.steps_done(position.step, numbers, skipped, self.time_left(*ahead))
        if in_a_row >= self.run.max_skipped:
            self._seed(position.step - 1, self.optim.grad_accum_steps - 1)
            where = find_nonfinite(self.plain, lambda: self._loss(last_batch), self.processes)
            raise NonFiniteError(
                f"stopped at step {position.step:,}: {in_a_row} steps in a row gave numbers that are not "
                f"finite (limit: `max_skipped` {self.run.max_skipped}); {where}. A lower `lr`, "
                "`clip_grad` 1 or `amp_dtype` none may help"
            )

    def _loss(self, batch: Any) -> Tensor:
        with self._autocast():
            return self.task.train_step(self.plain, self.task.prepare(batch))[0]

    # Evaluation and checkpoints

    def _evaluation_is_due(self) -> bool:
        step = self.position.step
        return step > self.position.evaluated and (
            step % self.eval_every == 0 or step == self.schedule.total
        )

    def _evaluations_ahead(self) -> int:
        """The number of evaluations still to come, right after a step; one may be due now."""
        every, total = self.eval_every, self.schedule.total
        return total // every - (self.position.step - 1) // every + (total % every > 0)

    def _patience_is_over(self) -> bool:
        """Whether `patience` has run out; all processes agree, because they have the same scores."""
        return 0 < self.run.patience <= self.position.unimproved

    def _say_why_it_ends(self) -> None:
        position, total = self.position, self.schedule.total
        self.log.say(
            f"ended early at step {position.step:,} of {total:,}: no better {self.task.metric} in "
            f"{position.unimproved} evaluations (patience {self.run.patience})"
        )
        reached, last = self.schedule(position.step - 1), self.schedule(total - 1)
        if reached > last:
            self.log.say(
                f"the learning rate is still {reached:.2e}; the schedule would have ended at {last:.2e}"
            )

    def _evaluate_and_keep_best(self, stop_request: StopRequest) -> dict[str, float]:
        position, metric = self.position, self.task.metric
        began = time.monotonic()
        self._settle_buffers()
        if position.evaluated == 0 and self.saved_step < 0:
            # Saved first, so that a failing evaluation does not lose the run. Also, `best` must never exist
            # without `last`: a folder with only `best` counts as the remains of an earlier run.
            self._save(self.last, with_state=True)
        model = self.plain if self.ema is None else self.ema.module
        if self.whole_model is not None:
            distributed.set_weights(self.whole_model, distributed.get_weights(model))
            model = self.whole_model
        data, collate, size = self.task.eval_data, self.task.collate_eval, self.optim.batch_size
        batches = evaluation_batches(data, collate, size, self.processes, *self.reading)
        model.eval()
        with torch.no_grad(), self._autocast():
            scores = self.task.evaluate(
                model, self._until_stopped(batches, stop_request), self.processes
            )
            self._draw_predictions(model)
        self.plain.train()
        score = scores[metric]
        better = position.best is None or (
            score > position.best if self.task.higher_is_better else score < position.best
        )
        position.evaluated = position.step
        position.unimproved += 1
        if better:
            if not math.isnan(score):
                position.unimproved = 0
            # After None, any number counts as better.
            position.best = None if math.isnan(score) else score
            position.best_step = position.step
            self._save(self.best, with_state=False)
        unreadable = set(distributed.gather([*self.unreadable], self.processes))
        seconds = time.monotonic() - began
        self.time_left.note_evaluation(seconds)
        self.log.evaluated(
            position.step,
            {
                "epoch": position.step / self.steps_per_epoch,
                **scores,
                "unreadable_files": len(unreadable),
                "seconds": seconds,
            },
            shown=self.task.headline or tuple(scores),
            best=None if better else position.best,
        )
        return scores

    def _draw_predictions(self, model: nn.Module) -> None:
        if not isinstance(self.task, PictureTask) or not self.processes.main:
            return
        # Compiling again for a few pictures is not worth it.
        with torch.compiler.set_stance("force_eager"):
            page = self.task.predictions(model, self.position.step, self.device)
        self.log.picture(PREDICTIONS, self.position.step, page)

    def _until_stopped(self, batches: Generator[Any], stop_request: StopRequest) -> Generator[Any]:
        """Yield the batches; if a single process is asked to stop, break off the evaluation.

        The run then ends where it is, and evaluates again when it is resumed.
        """
        with contextlib.closing(batches):
            for batch in batches:
                if stop_request.signal is not None and self.processes.count == 1:
                    raise _EvaluationStoppedError
                yield batch

    def _saving_is_due(self) -> bool:
        every = self.save_every * (self.steps_per_epoch if self.save_unit == "e" else 1)
        return self.save_unit != "s" and self.position.step > 0 and self.position.step % every == 0

    def _saving_is_due_by_the_clock(self) -> bool:
        return self.save_unit == "s" and time.monotonic() - self.saved_at > self.save_every

    def _save_last(self) -> None:
        if self.saved_step != self.position.step:
            self._settle_buffers()
            self._save(self.last, with_state=True)
        self.saved_at, self.saved_step = time.monotonic(), self.position.step

    def _settle_buffers(self) -> None:
        """Make batch norm statistics finite, equal in all processes, and copy them to the moving average."""
        self.optimizer.settle_buffers()
        distributed.average_buffers(self.plain, self.processes)
        if self.ema is not None:
            for mine, other in zip(self.ema.module.buffers(), self.plain.buffers(), strict=True):
                mine.copy_(other)

    def _save(self, folder: Path, with_state: bool) -> None:
        weights = distributed.get_weights(self.plain)
        ema = None if self.ema is None else distributed.get_weights(self.ema.module)
        state = None
        if with_state:
            state = {
                "position": dataclasses.asdict(self.position),
                # Before the first step there is no state. Asking for it would create one with a step count of
                # one.
                "optimizer": self.position.step
                and distributed.get_optimizer_state(self.plain, self.optimizer.optimizer),
                "scaler": self.optimizer.scaler.state_dict(),
                "without_state": [
                    name
                    for name, parameter in self.plain.named_parameters()
                    if parameter.requires_grad and parameter not in self.optimizer.optimizer.state
                ],
            }
        if self.processes.main:
            metadata = {
                "task": self.task.name,
                **self.task.metadata(),
                "softfree": __version__,
                "run": {**dataclasses.asdict(self.position), **self._data_facts()},
            }
            checkpoint.write_checkpoint(folder, weights, metadata, self.settings_json, ema, state)

    def _open_logs(self) -> None:
        if self.run.log_tensorboard:
            self.log.open_tensorboard()
        if self.run.log_wandb:
            self.log.open_wandb(self.settings_json)
        if self.processes.main:
            settings = self.run.output / checkpoint.SETTINGS
            write_durably(settings, self.settings_json.encode())
        parameters = sum(p.numel() for p in self.plain.parameters() if p.requires_grad)
        self.log.say(
            f"{self.task.name}: {parameters / 1e6:.2f} M trainable parameters, {self.schedule.total:,} steps of "
            f"{self.sampler.global_batch} on {self.processes.count} x {self.device.type}"
        )
        samples = (len(data) for data in (self.task.train_data, self.task.eval_data))
        self.log.say("{:,} training and {:,} validation samples".format(*samples))
        if isinstance(self.task, PictureTask) and self.processes.main:
            page = self.task.preview(self.run.seed, self.device)
            self.log.picture(PREVIEW, self.position.step, page)
            self.log.say(f"{self.run.output / PREVIEW} shows some of them as the model sees them")
        if self.position.step:
            self.log.say(f"continuing from step {self.position.step:,}")
