"""Settings that all tasks share; how they are changed, checked, written and read."""

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
# Arguments that the user gave: for each name, the first value as it was typed.
Given = Mapping[str, str]
# Only the user, not a file, decides where a run writes.
NOT_FROM_FILES = ("output", "resume", "overwrite")
# torch warns if there are more loading processes than cores.
WORKERS = min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 4)


@dataclasses.dataclass(frozen=True)
class OptimSettings:
    """The optimizer (AdamW), its schedule, and the precision."""

    batch_size: int = 128
    """samples per process in one forward pass"""
    grad_accum_steps: int = 1
    """forward passes accumulated into one optimizer step"""
    epochs: int = 300
    """passes over the training data"""
    steps: int = 0
    """optimizer steps; if above 0, replaces --epochs"""
    lr: float = 1e-3
    """highest learning rate"""
    min_lr: float = 5e-5
    """learning rate at the end (cosine, linear)"""
    sched: Literal["cosine", "linear", "multistep"] = "cosine"
    """how the learning rate falls: along a cosine, in a straight line, or in drops (multistep)"""
    warmup_epochs: float = 0.0
    """epochs during which the learning rate rises linearly"""
    warmup_steps: int = 0
    """the same in steps; if above 0, replaces --warmup-epochs"""
    warmup_lr: float = 0.0
    """learning rate at the start of the warm-up"""
    decay_milestones: tuple[int, ...] = ()
    """with --sched multistep: epochs (steps, with --steps) after which the learning rate drops"""
    decay_rate: float = 0.1
    """with --sched multistep: factor applied at each drop"""
    weight_decay: float = 0.05
    """AdamW's weight decay; biases, norms and position embeddings have none"""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's betas"""
    layer_decay: float = 1.0
    """learning rate of a layer relative to that of the layer after it; 1: the same for all"""
    clip_grad: float = 0.0
    """maximum norm of the gradient, larger ones are scaled down; 0: no limit"""
    amp_dtype: AmpDtype = "auto"
    """autocast dtype; auto: bfloat16 on a GPU, none on a CPU"""
    model_ema: bool = False
    """keep a moving average of the weights and evaluate it"""
    model_ema_decay: float = 0.9998
    """share of the old average in the new one"""


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """Where a run is stored, and how it is saved, logged and distributed over devices."""

    output: Path = Path("output")
    """folder for checkpoints, logs and settings"""
    resume: str = ""
    """continue from this checkpoint folder; 'auto': from OUTPUT/last if there is one"""
    overwrite: bool = False
    """start a new run even if --output has one, and remove the checkpoints and logs of the old run"""
    save_every: str = "1e"
    """how often to save OUTPUT/last, in epochs (2e), steps (500) or seconds (600s)"""
    eval_every: int = 0
    """steps between evaluations; 0: evaluate after each epoch (and at the end)"""
    patience: int = 0
    """end the run after this many evaluations in a row without a better score; 0: never"""
    seed: int = 42
    """random seed for weights, data order, augmentation and dropout"""
    device: str = "auto"
    """cuda, cpu, or auto: a GPU if there is one"""
    workers: int = WORKERS
    """data-loading processes per training process; 0: load in the training process itself"""
    log_interval: int = 50
    """steps between two lines of the log"""
    log_tensorboard: bool = False
    """also write TensorBoard's files into OUTPUT/tensorboard"""
    log_wandb: bool = False
    """also log to Weights & Biases"""
    max_skipped: int = 20
    """stop after this many steps in a row without a finite gradient"""
    channels_last: bool = False
    """keep weights and images in channels-last memory format"""
    torchcompile: bool = False
    """compile the model with torch.compile"""
    cuda_graph: bool = False
    """replay steps from a CUDA graph, so that a slow host does not matter (only classification and longrange,
    on one GPU)"""
    grad_checkpointing: bool = False
    """recompute activations in the backward pass: less memory, more time"""
    sync_bn: bool = False
    """compute batch norm statistics over the samples of all processes (GPU only)"""
    fsdp: bool = False
    """shard weights and optimizer state over the processes (FSDP2) instead of replicating them (DDP)"""


def parse_interval(text: str) -> tuple[int, Literal["e", "s", ""]]:
    """Parse a number of epochs ("e"), seconds ("s") or steps ("").

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
    """Raise if a value is invalid."""
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
            f"`overwrite` starts a new run and `resume` {run.resume} continues one: use only one of them"
        )
    if not all(0 <= beta < 1 for beta in optim.betas):
        first, second = optim.betas
        raise ValueError(f"`betas` must lie in [0, 1), got {first:g} {second:g}")
    if not 0 < optim.layer_decay <= 1:
        raise ValueError(f"`layer_decay` must lie in (0, 1], got {optim.layer_decay}")
    if not 0 <= optim.model_ema_decay < 1:
        raise ValueError(f"`model_ema_decay` must lie in [0, 1), got {optim.model_ema_decay}")


def fit_length(optim: OptimSettings, recipe: OptimSettings, given: Given) -> OptimSettings:
    """Fit warm-up and drops of ``optim``, the settings of ``recipe`` and the user, to the run's length.

    If the user gives ``epochs``, they replace the steps of a recipe. The warm-up takes at most a tenth of the
    run, and drops come at the same fraction of the run as in the recipe. What the user gave is kept.
    """
    steps = optim.steps if "steps" in given else recipe.steps
    if "epochs" in given and "steps" not in given:
        steps = 0
    warmup, warmup_epochs = recipe.warmup_steps, recipe.warmup_epochs
    if steps:
        # If the recipe counts in epochs, the warm-up takes the same share of the run.
        warmup = round(steps * warmup_epochs / recipe.epochs) if warmup_epochs else warmup
        warmup = min(warmup, steps // 10)
        warmup_epochs = 0.0
    elif recipe.steps:
        warmup = 0
    else:
        warmup_epochs = min(warmup_epochs, optim.epochs / 10)
    # If the user gave the warm-up in one unit, the recipe's value in the other unit does not apply.
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
    """Reduce the batch size if the data is small, so that an epoch has at least two steps.

    Also return a note.

    Args:
        optim: the settings to fit.
        has_fewer: tells whether there are fewer training pictures than a number; faster than ``count``.
        count: returns the number of training pictures.
        least: the smallest batch size allowed.

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
        # The run, but not its --help, should raise if a folder can't be read.
        return optim, []
    most = samples // (2 * passes)
    size = max(least, 2 ** max(0, most.bit_length() - 1))
    if optim.batch_size <= max(most, size):
        return optim, []
    note = f"`batch_size` {size} instead of {optim.batch_size}, for {samples} training pictures"
    return dataclasses.replace(optim, batch_size=size), [note]


def say_fitted(notes: Sequence[str]) -> None:
    """Log what was adjusted to the data, in the main process only."""
    if os.environ.get("RANK", "0") == "0":
        for line in notes:
            logger.info(line)


def override(settings: Settings, overrides: Mapping[str, Mapping[str, Any]]) -> Settings:
    """A copy of ``settings`` with some fields of its parts changed."""
    parts: Any = settings
    changed = {
        name: dataclasses.replace(getattr(parts, name), **value)
        for name, value in overrides.items()
    }
    return dataclasses.replace(parts, **changed)


def settings_to_json(settings: Any) -> str:
    """Convert settings to JSON, by part and field."""
    return json.dumps(dataclasses.asdict(settings), indent=2, default=str) + "\n"


def read_settings(kind: type[Settings], path: Path) -> Settings:
    """Read settings that :func:`settings_to_json` wrote, except those in ``NOT_FROM_FILES``."""
    try:
        return from_plain(kind, read_json(path))
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} is not a settings.json of this command: {error}") from error


def from_plain(kind: type[Settings], values: Any) -> Settings:
    """Create a dataclass from JSON values: lists become tuples, strings become paths.

    Raises ``ValueError``.
    """
    if not isinstance(values, dict):
        raise ValueError(f"it must be a mapping, got {values!a:.60}")
    hints = typing.get_type_hints(kind)
    if unknown := sorted(set(values) - set(hints)):
        raise ValueError(f"it has unknown settings: {', '.join(unknown)!a:.200}")
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
            raise ValueError(f"{name!r} must be {wanted}, got {value!a:.60}")
        else:
            made[name] = Path(value) if hint is Path else _as_tuple(value)
    if kind is RunSettings:
        made = {name: value for name, value in made.items() if name not in NOT_FROM_FILES}
    return kind(**made)


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def _fits(hint: Any, value: Any) -> bool:
    """Whether ``value``, read from JSON, is of the type ``hint``."""
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
