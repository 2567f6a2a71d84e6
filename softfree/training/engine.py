"""The training loop, for every task.

    train(task, optim, run, settings_json)     until the last step, or until a signal asks to stop

A task (:class:`Task`) knows its data, its model, its loss and its score. The loop knows the rest: precision,
accumulation, schedule, moving average, evaluation, checkpoints, resume, logs, signals, several processes.

Everything random in a step is seeded by (seed, step), and the order of the data is a function of the two, so
a checkpoint needs no state of any generator: a run that goes on from one does what it would have done.
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

# What tells that a folder has a run, and what `overwrite` removes.
RUN_FILES = ("last", "best", TRAIN_CSV, EVAL_CSV, TEST_RESULT, "tensorboard")


# Samples on the page that is drawn at a run's start.
PREVIEWED = 4 * COLUMNS


class Task(ABC):
    """What the loop, and the commands, must be told of a task.

    Attributes:
        name: e.g. "classification".
        recipes: settings by name, to start from. An instance is made of such settings.
        metric: the number of :meth:`evaluate` that decides which checkpoint is the best.
        higher_is_better: whether more of it is better.
        headline: the numbers of :meth:`evaluate` that its line shows, where not all fit in a row; ``eval.csv``
            has all.
        sizes_vary: whether sizes change from step to step. cuDNN would time its algorithms anew for each.
        capturable: whether :meth:`train_step` asks the device for no number, so that a CUDA graph can hold it.
        resumes: whether the run goes on from a checkpoint, so that weights to start from are not needed.
        train_data, eval_data: map-style data sets. With a ``range``, whose samples the task keeps on the
            device, a batch is a tensor of indices there, in training a part of what :meth:`plan_epoch` gives.
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
        """The recipe to take if none is named: it may depend on what the user gave."""
        raise NotImplementedError

    @classmethod
    def adapt(cls, settings: Any, given: Given) -> Any:
        """Settings in which what a recipe set, and nobody gave, fits what was given."""
        return settings

    @classmethod
    def run(cls, settings: Any, data: Any = None) -> "Outcome":
        """Train as the settings say; ``data`` instead of what they name."""
        task = cls(settings, data)  # type: ignore[call-arg]
        outcome = train(task, settings.optim, settings.run, settings_to_json(settings))
        if outcome.stopped or int(os.environ.get("RANK", 0)):
            return outcome
        return dataclasses.replace(outcome, note=task.finish(outcome))

    @classmethod
    def build(cls, metadata: dict[str, Any]) -> nn.Module:
        """The model that a checkpoint's metadata describe, with new weights."""
        raise NotImplementedError

    @classmethod
    def load(
        cls,
        path: str | Path,
        device: torch.device | str = "cpu",
        changes: Mapping[str, Any] | None = None,
    ) -> tuple[nn.Module, dict[str, Any]]:
        """The model of a checkpoint folder, ready to use, and its metadata.

        ``changes`` are arguments of the model other than in training, such as ``{"landmarks": "conv:49"}``; the
        weights must fit all the same.
        """
        saved = checkpoint.read_checkpoint(path)
        checkpoint.check_task(path, saved.metadata, cls.name)
        file, described = saved.path / checkpoint.METADATA, saved.metadata
        check_buildable(file, described)
        if changes:
            described = {**described, "model_kwargs": {**described["model_kwargs"], **changes}}
        try:
            # Takes no memory, whatever size the file asks for; one of its own weights' size is then built.
            with torch.device("meta"):
                expected = cls.build(described).state_dict()
        except Exception as error:  # whatever an architecture raises that is given nonsense
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise ValueError(f"{file}: no model is like this: {reason}") from error
        checkpoint.check_fits(saved.path, saved.weights, expected, saved.metadata["model"])
        model = cls.build(described)
        model.load_state_dict(saved.weights)
        return model.eval().to(device), saved.metadata

    def finish(self, outcome: "Outcome") -> str:
        """Do what is left after the last step, in the main process alone; say in a line what came of it."""
        return ""

    @abstractmethod
    def build_model(self) -> nn.Module:
        """The model on the CPU, with the weights it starts from; frozen parameters need no gradient."""

    def prepare(self, batch: Any) -> Any:
        """What :meth:`train_step` takes, of a batch on the device; the host draws its random numbers here.

        Tensors in tuples, lists or dicts. A CUDA graph holds what comes after it.
        """
        return batch

    @abstractmethod
    def train_step(self, model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of a batch on the device, and other numbers for the log: 0-dim tensors.

        They are read when the log is written, so nothing may change them afterwards.
        """

    @abstractmethod
    def evaluate(
        self, model: nn.Module, batches: Iterable[Any], processes: Processes
    ) -> dict[str, float]:
        """Scores. ``batches`` are this process's part; sum over all with :func:`distributed.total`."""

    @abstractmethod
    def metadata(self) -> dict[str, Any]:
        """What a checkpoint must say so that its model can be built and used again; plain JSON."""

    def collate(self, samples: list[Any]) -> Any:
        """Items of ``train_data`` as a batch: tensors in tuples, lists or dicts."""
        return torch.utils.data.default_collate(samples)

    def collate_eval(self, samples: list[Any]) -> Any:
        """Items of ``eval_data`` as a batch."""
        return self.collate(samples)

    def order(self, samples: int, batch_size: int, generator: torch.Generator) -> Tensor:
        """The order of an epoch's samples; stretches of ``batch_size`` meet in one process's batch."""
        return shuffle(samples, batch_size, generator)

    def plan_epoch(self, order: Tensor) -> Tensor:
        """With indices on the device (n,): what the batches of an epoch are parts of, (..., n).

        The generators are seeded for the epoch, in all processes alike.
        """
        return order

    def parameter_groups(self, model: nn.Module, optim: OptimSettings) -> list[dict[str, Any]]:
        """Groups for AdamW: no weight decay for biases, norms and what the model itself names."""
        return parameter_groups(model, optim)


class PictureTask(Task):
    """A task whose pictures lie in files, some of which may be unreadable.

    ``make_batch(samples, refill=False)`` makes a batch with a field ``unreadable``; ``refill`` repeats items in
    place of those. ``predicted`` is the number of validation samples that are drawn at an evaluation.
    """

    make_batch: Callable[..., Any]
    predicted: int = 2 * COLUMNS

    def collate(self, samples: list[Any]) -> Any:
        return collate_training(self.make_batch, samples, self.train_data)

    def collate_eval(self, samples: list[Any]) -> Any:
        return self.make_batch(samples)

    @abstractmethod
    def draw_batch(self, batch: Any) -> list[Tile]:
        """The samples of a training batch as the model sees them, with their truth."""

    @abstractmethod
    def draw_predictions(
        self, model: nn.Module, indices: Sequence[int], device: torch.device
    ) -> list[Tile]:
        """Validation samples with the truth and what the model makes of them."""

    def preview(self, seed: int, device: torch.device) -> Image.Image:
        """The first training samples of a run as its model sees them, with their truth: a page."""
        samples = len(self.train_data)
        # Mixing pictures takes pairs.
        count = min(PREVIEWED, max(1, samples // 2 * 2))
        sampler = StepSampler(samples, count, 1, 0, 1, seed, 0, 1, self.order)
        with contextlib.closing(training_batches(self, sampler, seed, device)) as batches:
            batch = next(batches)
        seed_all(seed, 1)
        return sheet(
            self.draw_batch(batch), f"{self.name}: training samples as the model sees them"
        )

    def predictions(self, model: nn.Module, step: int, device: torch.device) -> Image.Image:
        """Some validation samples, always the same, with what the model makes of them: a page."""
        count = min(self.predicted, len(self.eval_data))
        indices = [len(self.eval_data) * number // count for number in range(count)]
        tiles = self.draw_predictions(model, indices, device)
        return sheet(tiles, f"{self.name}: validation samples at step {step:,}")


def training_batches(
    task: Task, sampler: StepSampler, seed: int, device: torch.device, *reading: Any
) -> Generator[Any]:
    """What the model is trained on; ``reading`` is what :func:`read_batches` takes at its end."""
    if isinstance(task.train_data, range):
        # Nothing to read: processes and queues would cost more than the indices.
        return sampler.on_device(device, task.plan_epoch)
    data = Augmented(task.train_data, seed)
    return read_batches(data, sampler, task.collate, device, *(reading or (_no_report,)))


def _no_report(file: Unreadable) -> None:
    """For pictures that the run itself will tell of."""


@dataclasses.dataclass
class Position:
    """How far a run is; saved with every checkpoint."""

    step: int = 0
    evaluated: int = 0
    """the last step after which there was an evaluation"""
    best: float | None = None
    best_step: int = 0
    skipped: int = 0
    """steps left out so far since their gradient was not finite"""
    unimproved: int = 0
    """evaluations since the best one"""

    @classmethod
    def read(cls, file: Path, values: Any) -> "Position":
        """The position that ``values``, of a file from outside, give."""
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
        # Runs of before 0.2 may have begun with a score that was no number.
        return cls(**found, best=None if best != best else best)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended: where it was, its last scores, whether a signal stopped it early, and what its task says."""

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
    """Raise unless ``found`` has the numbers of a gradient scaler's state."""
    for name in wanted:
        value = found.get(name) if isinstance(found, dict) else None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{file}: {name!r} of the scaler must be a number, got {value!a:.60}")


class _EvaluationStoppedError(Exception):
    """A signal came during an evaluation."""


class _Training:
    """One run: its parts, put together in ``__init__``, and the loop over them."""

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
        """The checkpoint to go on from. Files of an earlier run are not overwritten by mistake."""
        again = self.restarted
        if self.processes.main:
            checkpoint.recover(self.last)
            checkpoint.recover(self.best)
        # The others look only after the main process has cleared up.
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
        # A run that ended before its first checkpoint has logs alone.
        lost = self.best.exists() or self.last.exists()
        if not found or self.run.overwrite or (not lost and (resume == "auto" or again)):
            return given
        if self.last.exists():
            advice = "go on with `resume` auto, give another `output`"
        else:
            advice = "without `last` it can't go on; give another `output`"
        raise ValueError(
            f"`output` {output} already has a run ({', '.join(found)}); {advice}, or begin anew with "
            "`overwrite`"
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
                raise ValueError(f"`grad_checkpointing`: {type(model).__name__} does not offer it")
            enable(True)
        if self.run.sync_bn:
            if self.device.type != "cuda" or self.processes.count == 1:
                raise ValueError("`sync_bn` needs several processes on GPUs (torchrun)")
            model = convert_sync_batchnorm(model)  # timm's keeps the activations of its norms
        layout = torch.channels_last if self.run.channels_last else torch.preserve_format
        return model.to(self.device, memory_format=layout)  # type: ignore[call-overload]

    def _spread_model(self) -> nn.Module:
        """The model to call in training; ``self.plain`` stays the one to ask for weights."""
        if self.device.type == "cuda":
            torch.set_float32_matmul_precision("high")
            torch.backends.cudnn.benchmark = not self.task.sizes_vary
        if self.run.fsdp and self.processes.count == 1:
            raise ValueError("`fsdp` needs several processes: start with torchrun")
        self.whole_model: nn.Module | None = None
        if self.run.fsdp:
            # For evaluation: its passes need no other process, and the processes' counts may differ.
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
        """Go on from a checkpoint: all of it is checked before anything changes."""
        saved = checkpoint.read_run(path)
        file = saved.path / checkpoint.STATE
        checkpoint.check_same_run(saved.path, self.settings_json)
        model = self.task.metadata().get("model", "this")
        expected = distributed.get_weights(self.plain)
        checkpoint.check_fits(path, saved.weights, expected, model, exactly=True)
        told = checkpoint.read_run_settings(saved.path).get("optim", {})
        if self.ema is not None and saved.ema is None and told.get("model_ema"):
            raise ValueError(f"{path} has lost its {checkpoint.EMA}; use another checkpoint")
        if saved.ema is not None:
            ema_file = saved.path / checkpoint.EMA
            checkpoint.check_fits(ema_file, saved.ema, expected, model, exactly=True)
        check_fields(saved.path / checkpoint.METADATA, saved.metadata, ("run",))
        for name, value in self._data_facts().items():
            if saved.metadata["run"].get(name) != value:
                raise ValueError(
                    f"{path} was written with {name} {saved.metadata['run'].get(name)!a:.60}, this run "
                    f"has {value}: the order of the data would change. Use the same data, `seed`, and "
                    "product of `batch_size`, `grad_accum_steps` and processes"
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
            # Older files do not tell which parameters no step had used.
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
            # A run that kept none until now begins with the weights.
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
                # Any process may be asked to stop, and clocks differ: all act on what they agree on.
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
        """How many will come, right after a step: one may be due now."""
        every, total = self.eval_every, self.schedule.total
        return total // every - (self.position.step - 1) // every + (total % every > 0)

    def _patience_is_over(self) -> bool:
        """The same in all processes, since the scores are."""
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
            # An evaluation that fails does not lose the run. And never `best` without `last`: an earlier run's, left
            # alone, is told by that.
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
            # None is a number that the next may be better than.
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
        # For a few pictures alone nothing is compiled anew.
        with torch.compiler.set_stance("force_eager"):
            page = self.task.predictions(model, self.position.step, self.device)
        self.log.picture(PREDICTIONS, self.position.step, page)

    def _until_stopped(self, batches: Generator[Any], stop_request: StopRequest) -> Generator[Any]:
        """The batches; a process alone need not see an evaluation through when it is asked to stop.

        The run then ends where it is, and evaluates again when it goes on.
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
        """Sound statistics of batch norms, the same in all processes, and in the moving average."""
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
                # Before the first step there is none. Asking for it would make one, a step old.
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
            self.log.say(f"going on from step {self.position.step:,}")
