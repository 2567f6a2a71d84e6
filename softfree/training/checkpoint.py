"""Checkpoints: folders of plain files, replaced as a whole or not at all.

    OUTPUT/last/    model.safetensors   weights
                    ema.safetensors     their moving average, if kept
                    state.pt            the rest of a run: optimizer, step, best score (weights-only)
                    metadata.json       what the model is: enough to build and use it again
                    settings.json       the run's settings
    OUTPUT/best/    the same without state.pt

A checkpoint is written into a hidden folder beside its place, forced to the disk, and renamed. A process
killed at any moment leaves a whole checkpoint, the old one or the new one. Nothing is pickled.
"""

import dataclasses
import io
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from softfree.data.files import write_durably
from softfree.models.metadata import check_fields, read_json

WEIGHTS, EMA, STATE = "model.safetensors", "ema.safetensors", "state.pt"
METADATA, SETTINGS = "metadata.json", "settings.json"

# Parts of the settings that say what is trained and on what, and settings in them that a resumed run may change.
OF_THE_RUN = ("data", "model", "backbone", "detector", "decoder")
MAY_CHANGE = (
    "data_dir", "strict_data", "data_on_device", "check_data", "skip_bad_annotations", "short_sides",
    "short_side", "max_size", "crop", "scales", "window", "pretrained_checkpoint", "backbone_checkpoint",
    "pretrained",
)  # fmt: skip
# Settings that the files name otherwise than the user does.
TYPED_AS = {"attention_options": "model_kwargs"}


class CheckpointWriteError(RuntimeError):
    """A checkpoint could not be written; the one before it is intact."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder that was read. ``weights`` are those to use: the average where one was kept."""

    path: Path
    metadata: dict[str, Any]
    weights: dict[str, Tensor]


def write_checkpoint(
    folder: Path,
    weights: dict[str, Tensor],
    metadata: dict[str, Any],
    settings_json: str,
    ema: dict[str, Tensor] | None = None,
    state: dict[str, Any] | None = None,
) -> None:
    """Write a checkpoint in place of the one at ``folder``; raises :class:`CheckpointWriteError`."""
    files = {
        WEIGHTS: _safetensors(weights),
        METADATA: (json.dumps(metadata, indent=2) + "\n").encode(),
        SETTINGS: settings_json.encode(),
    }
    if ema is not None:
        files[EMA] = _safetensors(ema)
    if state is not None:
        buffer = io.BytesIO()
        torch.save(state, buffer)
        files[STATE] = buffer.getvalue()
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
        # Also frees the space that the half-written files take.
        recover(folder)
        kept = f"the checkpoint before it is intact in {folder}" if folder.exists() else "none yet"
        raise CheckpointWriteError(
            f"can't write the checkpoint {folder}: {error.strerror or error} ({kept}); "
            "make room there, then continue with `resume` auto"
        ) from error


def recover(folder: Path) -> None:
    """Clear what an interrupted write left beside ``folder``, and put the old checkpoint back if need be."""
    new, old = _new(folder), _old(folder)
    shutil.rmtree(new, ignore_errors=True)
    if old.exists() and not folder.exists():
        old.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def locate(path: Path) -> Path:
    """The folder to read for the checkpoint ``path``, also between the two renames of a write."""
    if not path.exists() and _old(path).exists():
        return _old(path)
    if (path / METADATA).is_file():
        return path
    near = [
        folder
        for folder in (path / "best", path / "last", path.parent / "best", path.parent / "last")
        if (folder / METADATA).is_file()
    ]
    advice = f"; did you mean {near[0]}?" if near else ""
    if not path.exists():
        raise FileNotFoundError(f"no checkpoint at {path}{advice}")
    raise ValueError(f"{path} is no checkpoint folder (it has no {METADATA}){advice}")


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Metadata and the weights to use from a checkpoint folder such as OUTPUT/best."""
    folder = locate(Path(path))
    chosen = EMA if (folder / EMA).is_file() else WEIGHTS
    return Checkpoint(folder, read_metadata(folder), read_weights(folder, chosen))


def read_metadata(path: Path) -> dict[str, Any]:
    """What metadata.json says."""
    file = locate(path) / METADATA
    try:
        metadata = read_json(file)
    except ValueError as error:
        raise ValueError(_damaged(file, error)) from error
    check_fields(file, metadata, ())
    return metadata


def data_settings(path: Path) -> dict[str, Any]:
    """What the run that wrote a checkpoint was told about its data."""
    return read_json(locate(path) / SETTINGS)["data"]


def check_task(path: str | Path, metadata: dict[str, Any], task: str) -> None:
    """Refuse a checkpoint of another task."""
    if metadata.get("task") != task:
        raise ValueError(f"{path} is a checkpoint of {metadata.get('task')}, not of {task}")


def read_weights(path: Path, name: str = WEIGHTS) -> dict[str, Tensor]:
    """The tensors of one of a checkpoint's files."""
    file = locate(path) / name
    try:
        return safetensors.torch.load_file(file)
    except (SafetensorError, OSError) as error:
        raise ValueError(_damaged(file, error)) from error


def read_state(path: Path) -> dict[str, Any]:
    """What a run needs beside the weights to go on."""
    file = locate(path) / STATE
    if not file.is_file():
        raise ValueError(f"{path} has no {STATE}, so no run can go on from it; use OUTPUT/last")
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises whatever its unpickler met
        raise ValueError(_damaged(file, error)) from error


def check_same_run(folder: Path, settings_json: str) -> None:
    """Raise if a run with these settings can't go on from ``folder``: it was of another network or other data."""
    try:
        made_with = read_json(folder / SETTINGS)
    except (OSError, ValueError) as error:
        raise ValueError(_damaged(folder / SETTINGS, error)) from error
    differing = different_settings(made_with, json.loads(settings_json), OF_THE_RUN, MAY_CHANGE)
    if differing:
        raise ValueError(
            f"{folder} is of a run with {', '.join(differing)}; give the same, or begin anew in another "
            "`output`"
        )


def different_settings(
    found: dict[str, Any], wanted: dict[str, Any], parts: Sequence[str], except_for: Sequence[str]
) -> list[str]:
    """Settings of ``found`` whose value is another in ``wanted``, in those parts of both that are named."""
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
    path: Path, weights: dict[str, Tensor], expected: dict[str, Tensor], model: str
) -> None:
    """Raise unless ``weights`` have the names and shapes of ``expected``; ``model`` is for the message."""
    problems = [f"{name} is missing" for name in expected if name not in weights]
    problems += [f"{name} is not in the model" for name in sorted(weights) if name not in expected]
    problems += [
        f"{name} is {tuple(weights[name].shape)}, in the model {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in weights and weights[name].shape != tensor.shape
    ]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ValueError(
            f"{path} holds weights of another architecture than {model}: "
            f"{'; '.join(problems[:3])}{more}. Give the model and the arguments it "
            "was made with"
        )


def _safetensors(tensors: dict[str, Tensor]) -> bytes:
    # Cloned: safetensors refuses tensors that share memory, as tied weights do.
    copies = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    return safetensors.torch.save(copies, metadata={"format": "pt"})


def _damaged(file: Path, error: Exception) -> str:
    reason = (str(error) or type(error).__name__).splitlines()[0].split(". ")[0]
    return (
        f"{file} is unreadable, perhaps cut off ({reason}); use another checkpoint, or train anew "
        "into another `output`"
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
