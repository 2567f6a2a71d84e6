"""Checkpoints: folders of plain files, replaced as a whole or not at all.

    OUTPUT/last/    model.safetensors   weights
                    ema.safetensors     their moving average, if kept
                    state.pt            the rest of a run: optimizer, step, best score (weights-only)
                    metadata.json       what the model is: enough to build and use it again
                    settings.json       the run's settings
    OUTPUT/best/    the same without state.pt

A checkpoint is written into a hidden folder next to its final place, flushed to disk, and renamed. A process
killed at any moment leaves a complete checkpoint, either the old one or the new one. Nothing is pickled.
Reading while a run writes gives all files of one checkpoint, and checksums in the metadata reveal damaged
files.
"""

import dataclasses
import io
import json
import logging
import os
import shlex
import shutil
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from softfree.data.files import write_durably
from softfree.models.metadata import check_fields, read_json
from softfree.training.settings import from_plain

WEIGHTS, EMA, STATE = "model.safetensors", "ema.safetensors", "state.pt"
METADATA, SETTINGS = "metadata.json", "settings.json"
CHECKSUMS = "crc32"  # field of the metadata: by name of a file
CHUNK = 2**24
# How often to retry reading a checkpoint that a run keeps replacing.
MOST_READS = 100
# What AdamW keeps for each parameter besides its step count.
MOMENTS = ("exp_avg", "exp_avg_sq")

# The parts of the settings that say what is trained and on what data. In these parts, a resumed run may
# change only the settings in MAY_CHANGE.
OF_THE_RUN = ("data", "model", "backbone", "detector", "decoder")
MAY_CHANGE = (
    "data_dir", "strict_data", "data_on_device", "check_data", "skip_bad_annotations", "short_sides",
    "short_side", "max_size", "crop", "scales", "color_jitter", "class_weights", "balance", "window",
    "pretrained_checkpoint", "backbone_checkpoint", "pretrained", "eval_samples",
)  # fmt: skip
# Settings whose name in the files differs from the name that the user types.
TYPED_AS = {"attention_options": "model_kwargs"}


Found = TypeVar("Found")
logger = logging.getLogger(__name__)


class CheckpointWriteError(RuntimeError):
    """A checkpoint could not be written; the one before it is intact."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint folder.

    ``weights`` are the ones to use: the moving average if there is one.
    """

    path: Path
    metadata: dict[str, Any]
    weights: dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class SavedRun:
    """Everything that a run needs to continue; ``ema`` is None if no moving average was kept."""

    path: Path
    metadata: dict[str, Any]
    weights: dict[str, Tensor]
    ema: dict[str, Tensor] | None
    state: dict[str, Any]


def write_checkpoint(
    folder: Path,
    weights: dict[str, Tensor],
    metadata: dict[str, Any],
    settings_json: str,
    ema: dict[str, Tensor] | None = None,
    state: dict[str, Any] | None = None,
) -> None:
    """Write a checkpoint in place of the one at ``folder``; raises :class:`CheckpointWriteError`."""
    files = {WEIGHTS: _safetensors(weights)}
    if ema is not None:
        files[EMA] = _safetensors(ema)
    if state is not None:
        buffer = io.BytesIO()
        torch.save(state, buffer)
        files[STATE] = buffer.getvalue()
    metadata = {**metadata, CHECKSUMS: {name: _shown(zlib.crc32(x)) for name, x in files.items()}}
    files[METADATA] = (json.dumps(metadata, indent=2) + "\n").encode()
    files[SETTINGS] = settings_json.encode()
    new, old = _new(folder), _old(folder)
    try:
        recover(folder)
        new.mkdir(parents=True)
        for name, content in files.items():
            write_durably(new / name, content)
        _sync_folder(new)
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
        _sync_folder(folder.parent)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        # This also frees the space that half-written files take.
        recover(folder)
        kept = f"the checkpoint before it is intact in {folder}" if folder.exists() else "none yet"
        raise CheckpointWriteError(
            f"can't write the checkpoint {folder}: {error.strerror or error} ({kept}); "
            "make room there, then continue with `resume` auto"
        ) from error


def recover(folder: Path) -> None:
    """Remove what an interrupted write left next to ``folder``; put the old checkpoint back if necessary."""
    new, old = _new(folder), _old(folder)
    shutil.rmtree(new, ignore_errors=True)
    if old.exists() and not folder.exists():
        old.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def remove(path: Path) -> None:
    """Remove a checkpoint (completely or not at all), or another file or folder of a run."""
    if path.is_dir():
        recover(path)
        path.rename(_new(path))
        shutil.rmtree(_new(path))
    else:
        path.unlink(missing_ok=True)


def locate(path: Path) -> Path:
    """The folder to read for the checkpoint ``path``, also between the two renames of a write."""
    # `path` is tried again in case a write has finished since the first try.
    for folder in (path, _old(path), path):
        if (folder / METADATA).is_file():
            return folder
    near = [
        folder
        for folder in (path / "best", path / "last", path.parent / "best", path.parent / "last")
        if (folder / METADATA).is_file()
    ]
    advice = f"; did you mean {near[0]}?" if near else ""
    if not path.exists():
        raise FileNotFoundError(f"no checkpoint at {path}{advice}")
    raise ValueError(f"{path} is not a checkpoint folder (it has no {METADATA}){advice}")


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Metadata and the weights to use from a checkpoint folder such as OUTPUT/best."""

    def read(folder: Path) -> Checkpoint:
        metadata = read_metadata(folder)
        chosen = EMA if has_ema(folder, metadata) else WEIGHTS
        return Checkpoint(folder, metadata, read_weights(folder, chosen))

    found = _undisturbed(Path(path), read)
    if names := nonfinite(found.weights):
        logger.warning("%s: %s not finite", found.path, _some(names, "is", "are"))
    return found


def read_run(path: Path) -> SavedRun:
    """Everything in a checkpoint folder such as OUTPUT/last."""

    def read(folder: Path) -> SavedRun:
        metadata = read_metadata(folder)
        weights = read_weights(folder)
        ema = read_weights(folder, EMA) if has_ema(folder, metadata) else None
        return SavedRun(folder, metadata, weights, ema, read_state(folder))

    return _undisturbed(path, read)


def _undisturbed(path: Path, read: Callable[[Path], Found]) -> Found:
    """Return ``read(folder)`` of a checkpoint; read again if a run replaced the checkpoint meanwhile."""
    for _ in range(MOST_READS):
        folder = locate(path)
        before = _identity(folder)
        try:
            found = read(folder)
        except (ValueError, OSError):
            if _identity(folder) == before:
                raise
            continue
        if _identity(folder) == before:
            return found
    raise ValueError(f"{path} is replaced faster than it can be read; try again when its run ends")


def _identity(folder: Path) -> tuple[int, ...] | None:
    """Identify a folder together with its content: the inode alone may be reused by a later folder."""
    try:
        status = folder.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns


def read_metadata(path: Path) -> dict[str, Any]:
    """Read metadata.json of a checkpoint."""
    file = locate(path) / METADATA
    try:
        metadata = read_json(file)
    except (ValueError, OSError) as error:
        raise ValueError(_damaged(file, error)) from error
    check_fields(file, metadata, ())
    return metadata


def has_ema(folder: Path, metadata: dict[str, Any]) -> bool:
    """Whether a checkpoint was written with a moving average, even if the file is now missing."""
    return EMA in metadata.get(CHECKSUMS, {}) or (folder / EMA).is_file()


def read_run_settings(folder: Path) -> dict[str, Any]:
    """Read the settings, by part, of the run that wrote a checkpoint."""
    file = folder / SETTINGS
    try:
        settings = read_json(file)
    except (ValueError, OSError) as error:
        raise ValueError(_damaged(file, error)) from error
    for part in (*OF_THE_RUN, "optim"):
        if not isinstance(values := settings.get(part, {}), dict):
            raise ValueError(f"{file}: {part!r} must be a mapping, got {values!a:.60}")
    return settings


def data_settings(path: Path, kind: type[Found]) -> Found:
    """The data settings of the run that wrote a checkpoint; ``kind`` is the dataclass of its task."""
    folder = locate(path)
    settings = read_run_settings(folder)
    if "data" not in settings:
        raise ValueError(f"{folder / SETTINGS}: 'data' is missing")
    try:
        return from_plain(kind, settings["data"])
    except ValueError as error:
        raise ValueError(f"{folder / SETTINGS}: 'data': {error}") from error


def check_task(path: str | Path, metadata: dict[str, Any], task: str) -> None:
    """Refuse a checkpoint of another task."""
    if metadata.get("task") != task:
        raise ValueError(f"{path} is a checkpoint of {metadata.get('task')}, not of {task}")


def read_weights(path: Path, name: str = WEIGHTS) -> dict[str, Tensor]:
    """The tensors of one of a checkpoint's files."""
    file = locate(path) / name
    try:
        weights = safetensors.torch.load_file(file)
    except (SafetensorError, OSError, RuntimeError, ValueError, KeyError) as error:
        raise ValueError(_damaged(file, error)) from error
    _check_sum(file)
    return weights


def read_state(path: Path) -> dict[str, Any]:
    """Read what a run needs besides the weights to continue."""
    file = locate(path) / STATE
    if not file.is_file():
        raise ValueError(f"{path} has no {STATE}, so no run can continue from it; use OUTPUT/last")
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises whatever its unpickler met
        raise ValueError(_damaged(file, error)) from error
    _check_sum(file)
    if not isinstance(state, dict):
        raise ValueError(f"{file}: it must be a mapping, got {type(state).__name__}")
    return state


def _check_sum(file: Path) -> None:
    """Raise if a file differs from its checksum in the metadata; older checkpoints have no checksums."""
    expected = read_metadata(file.parent).get(CHECKSUMS, {}).get(file.name)
    if expected is None:
        return
    found = 0
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            found = zlib.crc32(chunk, found)
    if _shown(found) != expected:
        raise ValueError(
            f"{file} is damaged or was changed: its checksum is {_shown(found)}, but {METADATA} says "
            f"{expected!a:.30}; use another checkpoint, or remove {CHECKSUMS!r} from {METADATA} if you "
            "changed the file yourself"
        )


def _shown(checksum: int) -> str:
    return f"{checksum:08x}"


def nonfinite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors that contain non-finite numbers."""
    return [
        name
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and not bool(tensor.isfinite().all())
    ]


def check_optimizer(
    file: Path, state: Any, parameters: Mapping[str, Tensor], without: Collection[str]
) -> None:
    """Raise unless ``state``, read from a run's ``state.pt``, fits an AdamW over ``parameters``.

    ``without`` names the parameters that no step had used when the file was written.
    """
    entries = state.get("state") if isinstance(state, dict) else None
    if not isinstance(entries, dict):
        raise ValueError(f"{file}: the optimizer's state is missing")
    problems = [f"{name} is missing" for name in parameters if name not in {*entries, *without}]
    for name, entry in entries.items():
        if name not in parameters:
            problems.append(f"{name!a:.60} is not in the model")
            continue
        like = parameters[name]
        wanted = {"step": (torch.float32, torch.Size())}
        wanted |= dict.fromkeys(MOMENTS, (like.dtype, like.shape))
        if not isinstance(entry, dict) or entry.keys() != wanted.keys():
            problems.append(f"{name} must have {', '.join(wanted)}")
            continue
        for key, given in entry.items():
            dtype, shape = wanted[key]
            if not isinstance(given, Tensor) or (given.dtype, given.shape) != (dtype, shape):
                found = _kind(given)
                problems.append(f"{key} of {name} must be {dtype} {tuple(shape)}, got {found}")
            elif nonfinite({key: given}):
                problems.append(f"{key} of {name} is not finite")
    if problems:
        raise ValueError(f"{file}: the optimizer's state does not fit: {_first(problems)}")


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    return type(value).__name__


def check_same_run(folder: Path, settings_json: str) -> None:
    """Raise if a run with these settings can't continue from ``folder``, because network or data differ."""
    made_with = read_run_settings(folder)
    differing = different_settings(made_with, json.loads(settings_json), OF_THE_RUN, MAY_CHANGE)
    if differing:
        raise ValueError(
            f"{folder} was written by a run with {', '.join(differing)}; use the same settings, "
            f"as `config` {shlex.quote(str(folder / SETTINGS))} does, or start a new run in another `output`"
        )


def different_settings(
    found: dict[str, Any], wanted: dict[str, Any], parts: Sequence[str], except_for: Sequence[str]
) -> list[str]:
    """The settings of ``found``, as the user types them, whose value differs in ``wanted``.

    Only the given ``parts`` are compared, and only settings that both have.
    """
    return [
        _as_typed(name, value)
        for part in parts
        for name, value in found.get(part, {}).items()
        if name not in except_for and wanted.get(part, {}).get(name, value) != value
    ]


def _as_typed(name: str, value: Any) -> str:
    name = TYPED_AS.get(name, name)
    if isinstance(value, bool):
        return f"`{name}`" if value else f"`no_{name}`"
    words = map(str, value) if isinstance(value, list) else [str(value) or "''"]
    return " ".join([f"`{name}`", *words])


def check_fits(
    path: Path,
    weights: dict[str, Tensor],
    expected: dict[str, Tensor],
    model: str,
    exactly: bool = False,
) -> None:
    """Raise unless ``weights`` have the names and shapes of ``expected``; ``model`` is for the message.

    They must also be of the same kind, floating-point or integer. With ``exactly`` they must have the same
    dtype and be finite.
    """
    problems = [f"{name} is missing" for name in expected if name not in weights]
    problems += [f"{name} is not in the model" for name in sorted(weights) if name not in expected]
    common = {name: tensor for name, tensor in expected.items() if name in weights}
    problems += [
        f"{name} is {tuple(weights[name].shape)}, in the model {tuple(tensor.shape)}"
        for name, tensor in common.items()
        if weights[name].shape != tensor.shape
    ]
    problems += [
        f"{name} has dtype {weights[name].dtype}, in the model {tensor.dtype}"
        for name, tensor in common.items()
        if (
            weights[name].dtype != tensor.dtype
            if exactly
            else weights[name].is_floating_point() != tensor.is_floating_point()
        )
    ]
    if problems:
        raise ValueError(
            f"{path} holds weights of another architecture than {model}: {_first(problems)}. Use the model "
            "and the arguments that it was trained with"
        )
    usual = nonfinite(expected) if exactly else ()
    if exactly and (names := [name for name in nonfinite(weights) if name not in usual]):
        raise ValueError(f"{path}: {_some(names, 'is', 'are')} not finite; use another checkpoint")


def _first(problems: Sequence[str]) -> str:
    more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
    return "; ".join(problems[:3]) + more


def _some(names: Sequence[str], one: str, several: str) -> str:
    """The first of ``names`` and how many more there are, with the matching verb."""
    if len(names) == 1:
        return f"{names[0]} {one}"
    return f"{names[0]} and {len(names) - 1} more {several}"


def _safetensors(tensors: dict[str, Tensor]) -> bytes:
    # Cloned: safetensors refuses tensors that share memory, as tied weights do.
    copies = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    return safetensors.torch.save(copies, metadata={"format": "pt"})


def _damaged(file: Path, error: Exception) -> str:
    reason = (str(error) or type(error).__name__).splitlines()[0].split(". ")[0]
    return (
        f"{file} is unreadable, perhaps truncated ({reason}); use another checkpoint, or train again "
        "with another `output`"
    )


def _new(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.new")


def _old(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
