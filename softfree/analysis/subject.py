"""The models that figures, the explorer, `inspect` and `export` work on."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import timm
import timm.data
import torch
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import nn

from softfree.analysis.pictures import View, view
from softfree.models.checks import check_model_name

DEFAULT_MODEL = "softfree_tiny"
# For checkpoints that do not record it.
PREPARATION = {"img_size": 224, "mean": IMAGENET_DEFAULT_MEAN, "std": IMAGENET_DEFAULT_STD}


class Subject(NamedTuple):
    """A model to examine.

    ``metadata`` has its task and how its images are prepared: img_size, mean and std. For a detector,
    ``model`` is its backbone with the feature pyramid. ``checkpoint`` is where it was loaded from, None for a
    fresh model.
    """

    title: str
    model: nn.Module
    metadata: dict[str, Any]
    checkpoint: Path | None = None

    def look(self, photo: Image.Image, img_size: int | None = None) -> View:
        """The photo as the model sees it, at its own size or at ``img_size``."""
        self.check_photos()
        return view(photo, img_size or self.metadata["img_size"], self.metadata)

    def check_photos(self) -> None:
        """Raise if the model does not take photos."""
        task = self.metadata.get("task")
        if task == "longrange":
            raise ValueError(
                f"`checkpoint` {self.checkpoint} is for the task {task!r}, which has no photos"
            )


def load_subject(
    checkpoint: Path | None, model: str | None, device: torch.device | str = "cpu", **kwargs: Any
) -> Subject:
    """Load the model of a checkpoint, or create one by name (None: softfree_tiny) with random weights.

    ``kwargs`` are passed to a fresh model.
    """
    if checkpoint is not None:
        if model is not None:
            raise ValueError(
                f"`model` {model} and `checkpoint` {checkpoint}: use only one; a checkpoint has its own model"
            )
        from softfree.training.tasks import load_for_inference

        network, metadata = load_for_inference(checkpoint)
        if metadata["task"] == "detection":
            # The rest of a detector takes lists of images and has no attention.
            backbone: Any = network.backbone
            network = backbone
        title = checkpoint_title(checkpoint, metadata)
        return Subject(title, network.eval().to(device), {**PREPARATION, **metadata}, checkpoint)
    name = model or DEFAULT_MODEL
    check_model_name(name)
    torch.manual_seed(0)
    network = timm.create_model(name, **kwargs)
    config = timm.data.resolve_data_config(model=network)
    metadata = {
        "task": "classification",
        "model": name,
        "img_size": config["input_size"][-1],
        **{key: config[key] for key in ("mean", "std", "crop_pct", "interpolation")},
    }
    return Subject(f"{name} (untrained)", network.eval().to(device), metadata)


def load_subjects(
    checkpoints: Sequence[Path],
    models: Sequence[str],
    attentions: Sequence[str] = (),
    device: torch.device | str = "cpu",
) -> list[Subject]:
    """Load every checkpoint, and every fresh model with every requested attention."""
    subjects = [load_subject(path, None, device) for path in checkpoints]
    if checkpoints and attentions and not models:
        raise ValueError("`attention` is for fresh models; a checkpoint has its own")
    for name in models or (() if checkpoints else (None,)):
        for attention in attentions or (None,):
            kwargs = {} if attention is None else {"attention": attention}
            subjects.append(load_subject(None, name, device, **kwargs))
    return subjects


def checkpoint_title(checkpoint: Path, metadata: Mapping[str, Any]) -> str:
    """The names of the model and of the run's folder; also of the checkpoint's folder, if it is not "best".

    Example:
        >>> checkpoint_title(Path("output/cats/best"), {"model": "softpp_tiny"})
        'softpp_tiny, cats'
    """
    *_, run, folder = checkpoint.absolute().parts
    model = metadata.get("model") or metadata["task"]
    return ", ".join([model, run] if folder == "best" else [model, run, folder])
