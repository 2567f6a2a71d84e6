"""Settings that every task shares; how they are changed, checked, written and read."""

import dataclasses
import json
import logging
import math
import os
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from softfree.models.checks import check_at_least
from softfree.models.metadata import read_json
from softfree.training.devices import AmpDtype

logger = logging.getLogger(__name__)
Settings = TypeVar("Settings")
# Arguments that the user gave, by name, each with its first value as it was typed.
Given = Mapping[str, str]
# Where a run writes is for its user to say.
NOT_FROM_FILES = ("output", "resume", "overwrite")
# torch warns of more loading processes than there are cores.
WORKERS = min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 4)


@dataclasses.dataclass(frozen=True)
class OptimSettings:
    """The optimizer (AdamW), its schedule, and the precision."""

    batch_size: int = 128
    """samples of one process in one forward pass"""
    grad_accum_steps: int = 1
    """forward passes summed up in one step of the optimizer"""
    epochs: int = 300
    """passes over the training data"""
    steps: int = 0
    """steps of the optimizer; above 0, this counts and not --epochs"""
    lr: float = 1e-3
    """highest learning rate"""
    min_lr: float = 5e-5
    """learning rate at the end (cosine, linear)"""
    sched: Literal["cosine", "linear", "multistep"] = "cosine"
    """from the highest learning rate to the lowest: cosine, a straight line, or drops"""
    warmup_epochs: float = 0.0
    """epochs in which the learning rate rises in a straight line"""
    warmup_steps: int = 0
    """the same in steps; above 0, this counts and not --warmup-epochs"""
    warmup_lr: float = 0.0
    """where the rise begins"""
    decay_milestones: tuple[int, ...] = ()
    """with --sched multistep: epochs (steps, with --steps) after which the learning rate drops"""
    decay_rate: float = 0.1
    """with --sched multistep: factor of a drop"""
    weight_decay: float = 0.05
    """AdamW's weight decay; biases, norms and position embeddings have none"""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's betas"""
    layer_decay: float = 1.0
    """learning rate of a layer over that of the layer after it; 1: the same for all"""
    clip_grad: float = 0.0
    """largest norm of the gradient, larger ones are scaled down; 0: no limit"""
    amp_dtype: AmpDtype = "auto"
    """autocast; auto: bfloat16 on a GPU, none on a CPU"""
    model_ema: bool = False
    """keep a moving average of the weights, and evaluate that"""
    model_ema_decay: float = 0.9998
    """share of the old average in the new one"""


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """Where a run goes, how it is saved, logged and spread over devices."""

    output: Path = Path("output")
    """folder for checkpoints, logs and settings"""
    resume: str = ""
    """continue from this checkpoint folder; 'auto': from OUTPUT/last if there is one"""
    overwrite: bool = False
    """begin anew where --output has a run, whose checkpoints and logs are removed"""
    save_every: str = "1e"
    """save OUTPUT/last every so many epochs (2e), steps (500) or seconds (600s)"""
    eval_every: int = 0
    """evaluate every so many steps; 0: after each epoch (and at the end)"""
    patience: int = 0
    """end the run after so many evaluations in a row without a better score; 0: never"""
    seed: int = 42
    """of weights, order and augmentation of the data, dropout"""
    device: str = "auto"
    """cuda, cpu, or auto: a GPU if there is one"""
    workers: int = WORKERS
    """processes that load data, for each training process; 0: none beside it"""
    log_interval: int = 50
    """steps between two lines of the log"""
    log_tensorboard: bool = False
    """also write TensorBoard's files into OUTPUT/tensorboard"""
    log_wandb: bool = False
    """also log to Weights & Biases"""
    max_skipped: int = 20
    """stop after so many steps in a row without a finite gradient"""
    channels_last: bool = False
    """keep weights and images with the channels last in memory"""
    torchcompile: bool = False
    """compile the model with torch.compile"""
    cuda_graph: bool = False
    """classification and longrange, one GPU: replay steps from a CUDA graph, however slow the host"""
    grad_checkpointing: bool = False
    """recompute activations in the backward pass: less memory, more time"""
    sync_bn: bool = False
    """batch norms count the samples of all processes (GPU only)"""
    fsdp: bool = False
    """share out weights and optimizer among the processes (FSDP2) instead of copying them (DDP)"""


def parse_interval(text: str) -> tuple[int, Literal["e", "s", ""]]:
    """A number of epochs ("e"), seconds ("s") or steps ("").

    Example:
        >>> parse_interval("2e"), parse_interval("600s"), parse_interval("500")
        ((2, 'e'), (600, 's'), (500, ''))
    """
    unit = next((unit for unit in ("e", "s") if text.endswith(unit)), "")
    number = text.removesuffix(unit)
    if not number.isdecimal() or int(number) < 1:
        raise ValueError(
            f"`save_every` must be a number of epochs (2e), steps (500) or seconds (600s), got {text!r}"
        )
    return int(number), unit  # type: ignore[return-value]


def check_settings(optim: OptimSettings, run: RunSettings) -> None:
    """Refuse values that can't be meant."""
    parse_interval(run.save_every)
    for part, least, names in (
        (optim, 1, ("batch_size", "grad_accum_steps", "epochs")),
        (optim, 0, ("steps", "lr", "warmup_epochs", "warmup_steps", "weight_decay", "clip_grad")),
        (run, 1, ("log_interval", "max_skipped")),
        (run, 0, ("workers", "eval_every", "patience")),
    ):
        check_at_least(least, **{name: getattr(part, name) for name in names})
    if run.overwrite and run.resume:
        raise ValueError(
            f"`overwrite` begins anew and `resume` {run.resume} goes on: give one of them"
        )
    if not all(0 <= beta < 1 for beta in optim.betas):
        first, second = optim.betas
        raise ValueError(f"`betas` must lie in [0, 1), got {first:g} {second:g}")
    if not 0 < optim.layer_decay <= 1:
        raise ValueError(f"`layer_decay` must lie in (0, 1], got {optim.layer_decay}")
    if not 0 <= optim.model_ema_decay < 1:
        raise ValueError(f"`model_ema_decay` must lie in [0, 1), got {optim.model_ema_decay}")


def fit_length(optim: OptimSettings, recipe: OptimSettings, given: Given) -> OptimSettings:
    """``optim``, made of ``recipe`` and what was given, with warm-up and drops that fit the run's length.

    A recipe that counts in steps gives way to ``epochs``. The warm-up takes a tenth of the run at most, and drops
    come at the same share of the run. What was given stays.
    """
    steps = optim.steps if "steps" in given else recipe.steps
    if "epochs" in given and "steps" not in given:
        steps = 0
    warmup, warmup_epochs = recipe.warmup_steps, recipe.warmup_epochs
    if steps:
        # Of a recipe that counts in epochs the same share of the run.
        warmup = round(steps * warmup_epochs / recipe.epochs) if warmup_epochs else warmup
        warmup = min(warmup, steps // 10)
        warmup_epochs = 0.0
    elif recipe.steps:
        warmup = 0
    else:
        warmup_epochs = min(warmup_epochs, optim.epochs / 10)
    # Given in one unit, it is not the recipe's in the other.
    warmup = 0 if "warmup_epochs" in given else warmup
    warmup_epochs = 0.0 if "warmup_steps" in given else warmup_epochs
    share = (steps or optim.epochs) / (recipe.steps or recipe.epochs)
    fitted: dict[str, Any] = dict(
        steps=steps,
        warmup_steps=warmup,
        warmup_epochs=warmup_epochs,
        decay_milestones=tuple(round(drop * share) for drop in recipe.decay_milestones),
    )
    return dataclasses.replace(
        optim, **{name: value for name, value in fitted.items() if name not in given}
    )


def fit_batch(
    optim: OptimSettings,
    has_fewer: Callable[[int], bool],
    count: Callable[[], int],
    least: int = 1,
) -> tuple[OptimSettings, list[str]]:
    """``optim`` with a batch that little data fills at least twice an epoch, and a line that says so.

    Args:
        optim: what was asked for.
        has_fewer: whether there are fewer training pictures than a number; quicker than ``count``.
        count: how many there are.
        least: the smallest batch.

    Example:
        >>> optim, notes = fit_batch(OptimSettings(batch_size=1024), lambda n: 186 < n, lambda: 186)
        >>> optim.batch_size, notes
        (64, ['`batch_size` 64 instead of 1024, for 186 training pictures'])
    """
    passes = optim.grad_accum_steps * int(os.environ.get("WORLD_SIZE", 1))
    if not has_fewer(4 * optim.batch_size * passes):
        return optim, []
    try:
        samples = count()
    except (ValueError, FileNotFoundError):
        # Folders that can't be read are for the run to refuse, not for its --help.
        return optim, []
    most = samples // (2 * passes)
    size = max(least, 2 ** max(0, most.bit_length() - 1))
    if optim.batch_size <= max(most, size):
        return optim, []
    note = f"`batch_size` {size} instead of {optim.batch_size}, for {samples} training pictures"
    return dataclasses.replace(optim, batch_size=size), [note]


def say_fitted(notes: Sequence[str]) -> None:
    """Log, in one of the processes, what was chosen for the data at hand."""
    if os.environ.get("RANK", "0") == "0":
        for line in notes:
            logger.info(line)


def override(settings: Settings, overrides: Mapping[str, Mapping[str, Any]]) -> Settings:
    """``settings`` with some fields of its parts changed."""
    parts: Any = settings
    changed = {
        name: dataclasses.replace(getattr(parts, name), **value)
        for name, value in overrides.items()
    }
    return dataclasses.replace(parts, **changed)


def settings_to_json(settings: Any) -> str:
    """Settings as JSON, by part and name of the flag."""
    return json.dumps(dataclasses.asdict(settings), indent=2, default=str) + "\n"


def read_settings(kind: type[Settings], path: Path) -> Settings:
    """Settings that :func:`settings_to_json` wrote; where a run writes is for its user to say, not for a file."""
    try:
        return from_plain(kind, read_json(path))
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} is no settings.json of this command: {error}") from error


def from_plain(kind: type[Settings], values: Any) -> Settings:
    """A dataclass from what JSON made of it: lists become tuples, names become paths; raises ``ValueError``."""
    if not isinstance(values, dict):
        raise ValueError(f"it must be a mapping, got {values!a:.60}")
    hints = typing.get_type_hints(kind)
    if unknown := sorted(set(values) - set(hints)):
        raise ValueError(f"it has {', '.join(unknown)!a:.200}, unknown here")
    made: dict[str, Any] = {}
    for name, value in values.items():
        hint = hints[name]
        if dataclasses.is_dataclass(hint):
            try:
                made[name] = from_plain(typing.cast("type[Any]", hint), value)
            except ValueError as error:
                raise ValueError(f"{name!r}: {error}") from error
        elif not _fits(hint, value):
            wanted = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
            raise ValueError(f"{name!r} must be of {wanted}, got {value!a:.60}")
        else:
            made[name] = Path(value) if hint is Path else _as_tuple(value)
    if kind is RunSettings:
        made = {name: value for name, value in made.items() if name not in NOT_FROM_FILES}
    return kind(**made)


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def _fits(hint: Any, value: Any) -> bool:
    """Whether JSON's ``value`` is one of the type ``hint``."""
    arguments = typing.get_args(hint)
    origin = typing.get_origin(hint)
    if origin is Literal:
        return value in arguments
    if origin is tuple:
        if not isinstance(value, list):
            return False
        if arguments[-1] is not Ellipsis:
            return len(value) == len(arguments) and all(map(_fits, arguments, value))
        return all(_fits(arguments[0], item) for item in value)
    if arguments:
        return any(_fits(argument, value) for argument in arguments)
    if hint in (int, float):
        kinds = int if hint is int else (int, float)
        return isinstance(value, kinds) and not isinstance(value, bool) and abs(value) < math.inf
    return isinstance(value, str if hint is Path else hint)
