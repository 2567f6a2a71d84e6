"""What detection and segmentation share: settings of the backbone, pictures of many sizes."""

import contextlib
import dataclasses
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from softfree.data.classification import has_fewer
from softfree.layers.landmarks import LandmarkSpec
from softfree.models.checks import check_model_name, check_pretrained, fetching, mistakes_in
from softfree.models.features import fixed_landmarks
from softfree.models.metadata import check_arguments
from softfree.training.classification import FEW_PICTURES, parse_model_kwargs
from softfree.training.engine import PictureTask
from softfree.training.settings import Given, OptimSettings, fit_batch, fit_length, say_fitted


@dataclasses.dataclass(frozen=True)
class BackboneSettings:
    """The backbone and where its weights come from."""

    model: str = "softfree_tiny"
    """any model of timm's with maps at 1/4, 1/8, 1/16 and 1/32: softfree_*, softpp_*, swin_*, pvt_v2_*, resnet*"""
    model_kwargs: tuple[str, ...] = ()
    """further arguments of the backbone: embed_dims=32,64,96,128 img_size=512 drop_path_rate=0.1"""
    landmarks: str = ""
    """of softfree's backbones: conv:49 is at most 49 at any size, conv the papers' fixed stride; '': 49, or average:128 of softfree_*"""
    backbone_checkpoint: str = ""
    """weights to start the backbone from: a checkpoint folder, a .safetensors or a .pth file"""
    pretrained: bool = False
    """start the backbone from the weights that timm fetches for --model, where it knows some"""
    frozen_bn: bool = False
    """keep the backbone's batch norms as they are in the weights it starts from"""

    def arguments(self) -> dict[str, Any]:
        """``backbone_kwargs`` for the models of softfree.detection and softfree.segmentation."""
        with mistakes_in("landmarks"):
            LandmarkSpec.parse(self.landmarks or "conv")
        arguments = parse_model_kwargs(self.model_kwargs)
        check_model_name(self.model)
        with mistakes_in("model_kwargs"):
            check_arguments(self.model, arguments)
        own = fixed_landmarks(self.model, arguments.get("attention"))
        return {"landmarks": self.landmarks or own, **arguments}


# For training on a CPU: few channels.
SMALL_BACKBONE = (
    "embed_dims=32,64,128,192", "num_heads=2,4,8,12", "depths=1,1,2,1", "img_size=96",
)  # fmt: skip
# Of the recipes `small`: counted in steps, so that hundreds of pictures are seen often and thousands take no longer.
SMALL_OPTIM = OptimSettings(
    batch_size=8, steps=3000, warmup_steps=200, warmup_lr=1e-6, lr=3e-4, min_lr=1e-6, weight_decay=0.05,
    clip_grad=1.0,
)  # fmt: skip
# Both: the share of brightness, contrast and saturation that changes, and of the size.
SMALL_JITTER: dict[str, Any] = dict(color_jitter=0.4, scales=(0.5, 2.0))


def check_variation(scales: tuple[float, float], color_jitter: float) -> None:
    """Refuse what no picture can be resized to or coloured by."""
    low, high = scales
    if not 0 < low <= high:
        raise ValueError(f"`scales` must be above 0 and in order, got {low:g} {high:g}")
    if not 0 <= color_jitter <= 1:
        raise ValueError(f"`color_jitter` must be from 0 to 1, got {color_jitter:g}")


def has_fewer_files(data_dir: str, count: int) -> bool:
    """Whether a folder has fewer training pictures than ``count``, by its files: annotations may be long."""
    # No class maps beside the pictures.
    folders = (Path(data_dir) / name for name in ("images", "JPEGImages"))
    return has_fewer(str(next(filter(Path.is_dir, folders), data_dir)), count)


class DenseTask(PictureTask):
    """A backbone with a head for boxes, masks or pixels. ``build`` takes ``backbone_checkpoint``, too."""

    settings: Any

    @classmethod
    @abstractmethod
    def has_fewer(cls, data_dir: str, count: int) -> bool:
        """Whether a folder has fewer training pictures than ``count``; False where it can't be told."""

    @classmethod
    @abstractmethod
    def count_samples(cls, data_dir: str) -> int:
        """Training pictures of a folder; raises as a run would."""

    @classmethod
    def usual_recipe(cls, given: Given) -> str:
        if "data_dir" not in given:
            return "shapes"
        return (
            "small" if cls.has_fewer(given["data_dir"], FEW_PICTURES) else next(iter(cls.recipes))
        )

    @classmethod
    def adapt(cls, settings: Any, given: Given) -> Any:
        """Length and batch are fitted; a backbone other than our pyramids loses a recipe's arguments, which they alone take.

        Of the batch only that of `small`: for other recipes, too little data is an error.
        """
        notes = []
        if "recipe" not in given and settings.recipe == "small":
            notes.append(f"`recipe` small, for fewer than {FEW_PICTURES:,} training pictures")
        backbone = settings.backbone
        pyramid = (
            backbone.model.startswith(("softfree_", "soft_", "softpp_"))
            and "vit" not in backbone.model
        )
        if not pyramid and "model_kwargs" not in given:
            backbone = dataclasses.replace(backbone, model_kwargs=())
        optim = fit_length(settings.optim, cls.usual_length(settings), given)
        data_dir = settings.data.data_dir
        if settings.recipe == "small" and "batch_size" not in given and data_dir:
            optim, fitted = fit_batch(
                optim,
                lambda most: cls.has_fewer(data_dir, most),
                lambda: cls.count_samples(data_dir),
                least=2,  # batch norms see one value of a picture
            )
            notes += fitted
        say_fitted(notes)
        return dataclasses.replace(settings, backbone=backbone, optim=optim)

    @classmethod
    def usual_length(cls, settings: Any) -> OptimSettings:
        """The length of the recipe that was chosen."""
        return cls.recipes[settings.recipe].optim

    def build_model(self) -> nn.Module:
        given, metadata = self.settings.backbone, self.metadata()
        if self.resumes:
            return self.build(metadata)
        if not given.pretrained:
            start = given.backbone_checkpoint or None
            return self.build(metadata, backbone_checkpoint=start)  # type: ignore[call-arg]
        if given.backbone_checkpoint:
            raise ValueError("`pretrained` and `backbone_checkpoint` can't be used together")
        check_pretrained(given.model)
        with fetching(given.model):
            return self.build(metadata, backbone_checkpoint=True)  # type: ignore[call-arg]


@contextlib.contextmanager
def any_sizes() -> Iterator[None]:
    """Around passes over pictures of many sizes: cuDNN does not time its algorithms anew for each size."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
