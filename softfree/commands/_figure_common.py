"""What the figures, `inspect` and `export` share: the model and photo they look at."""

from pathlib import Path
from typing import Annotated, Any, NamedTuple

import timm
import timm.data
import torch
import tyro
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import nn

from softfree.analysis.pictures import View, view
from softfree.commands._common import NARROWEST
from softfree.commands._picture import landscape
from softfree.models.checks import check_at_least, check_model_name

DEFAULT_MODEL = "softpp_tiny"
Photo = Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="[PHOTO]")]
# For checkpoints that leave it to their model.
PREPARATION = {"img_size": 224, "mean": IMAGENET_DEFAULT_MEAN, "std": IMAGENET_DEFAULT_STD}
# Each use of the option adds one, so that a photo may follow it.
Repeated = tyro.conf.UseAppendAction


class Subject(NamedTuple):
    """A model to look at.

    ``metadata`` has its task and what its images want: img_size, mean and std. Of a detector, ``model`` is its
    backbone with the feature pyramid.
    """

    title: str
    model: nn.Module
    metadata: dict[str, Any]


def load_subject(
    checkpoint: Path | None,
    model: str | None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Subject:
    """The model of a checkpoint, or a fresh one of that name (None: softpp_tiny) with random weights.

    ``kwargs`` go to a fresh model.
    """
    if checkpoint is not None:
        if model is not None:
            raise ValueError(
                f"--model {model} and --checkpoint {checkpoint}: give one; a checkpoint knows its model"
            )
        from softfree.training.checkpoint import load_for_inference

        network, metadata = load_for_inference(checkpoint)
        if metadata["task"] == "detection":
            # The rest of a detector takes lists of images and has no attention.
            backbone: Any = network.backbone
            network = backbone
        title = checkpoint_title(checkpoint)
        return Subject(title, network.eval().to(device), {**PREPARATION, **metadata})
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


def checkpoint_title(checkpoint: Path) -> str:
    """The last two parts of a checkpoint's path, which name the run: OUT/best."""
    return "/".join(checkpoint.absolute().parts[-2:])


def load_photo(photo: Path | None) -> Image.Image:
    """The photo in a file, or a drawn one for None."""
    if photo is None:
        return landscape()
    if not photo.is_file():
        raise FileNotFoundError(f"no photo at {photo}")
    from softfree.data.images import UnreadableImageError, open_image

    try:
        return open_image(photo)
    except UnreadableImageError as error:
        raise ValueError(f"{photo} can't be read as a photo: {error}") from error


def look(photo: Image.Image, subject: Subject, img_size: int | None) -> View:
    """The photo as the model sees it, at its own size or at ``img_size``."""
    return view(photo, img_size or subject.metadata["img_size"], subject.metadata)


def check_img_size(img_size: int | None) -> None:
    """Refuse images too small for a pyramid."""
    if img_size is not None:
        check_at_least(NARROWEST, **{"--img-size": img_size})
