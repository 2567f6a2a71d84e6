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
    """any timm model with feature maps at 1/4, 1/8, 1/16 and 1/32: softfree_*, softpp_*, swin_*, pvt_v2_*,
    resnet*"""
    model_kwargs: tuple[str, ...] = ()
    """further arguments of the backbone: embed_dims=32,64,96,128 img_size=512 drop_path_rate=0.1"""
    landmarks: str = ""
    """landmarks of our backbones: conv:49 gives at most 49 at any size, conv is the papers' fixed stride;
    '': conv:49, or average:128 for softfree_*"""
    backbone_checkpoint: str = ""
    """weights to start the backbone from: a checkpoint folder, a .safetensors or a .pth file"""
    pretrained: bool = False
    """start the backbone from the pretrained weights that timm downloads for --model, if it has any"""
    frozen_bn: bool = False
    """freeze the backbone's batch norms at the values of the weights it starts from"""

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
# For the recipes `small`. The length is in steps, so that hundreds of pictures are seen often and thousands
# take no longer.
SMALL_OPTIM = OptimSettings(
    batch_size=8, steps=3000, warmup_steps=200, warmup_lr=1e-6, lr=3e-4, min_lr=1e-6, weight_decay=0.05,
    clip_grad=1.0,
)  # fmt: skip
# Both the colours (brightness, contrast, saturation) and the size of the pictures vary.
SMALL_JITTER: dict[str, Any] = dict(color_jitter=0.4, scales=(0.5, 2.0))


def check_variation(scales: tuple[float, float], color_jitter: float) -> None:
    """Raise if pictures can't be resized or coloured by these values."""
    low, high = scales
    if not 0 < low <= high:
        raise ValueError(f"`scales` must be above 0 and in order, got {low:g} {high:g}")
    if not 0 <= color_jitter <= 1:
        raise ValueError(f"`color_jitter` must be from 0 to 1, got {color_jitter:g}")


def has_fewer_files(data_dir: str, count: int) -> bool:
    """Whether a folder has fewer training pictures than ``count``.

    Counts files, as annotations may be long.
    """
    # Only folders of pictures, not those of class maps.
    folders = (Path(data_dir) / name for name in ("images", "JPEGImages"))
    return has_fewer(str(next(filter(Path.is_dir, folders), data_dir)), count)


def is_pyramid(model: str) -> bool:
    """Whether a model's name is that of one of our pyramids."""
    return model.startswith(("softfree_", "soft_", "softpp_")) and "vit" not in model


class DenseTask(PictureTask):
    """A backbone with a head for boxes, masks or pixels. ``build`` also takes ``backbone_checkpoint``."""

    settings: Any

    @classmethod
    @abstractmethod
    def has_fewer(cls, data_dir: str, count: int) -> bool:
        """Whether a folder has fewer training pictures than ``count``; False if that can't be determined."""

    @classmethod
    @abstractmethod
    def count_samples(cls, data_dir: str) -> int:
        """The number of training pictures in a folder; raises the same errors as a run."""

    @classmethod
    def usual_recipe(cls, given: Given) -> str:
        if "data_dir" not in given:
            return "shapes"
        return (
            "small" if cls.has_fewer(given["data_dir"], FEW_PICTURES) else next(iter(cls.recipes))
        )

    @classmethod
    def adapt(cls, settings: Any, given: Given) -> Any:
        """Fit the run's length, the batch size and the backbone's arguments to what the user gave.

        The batch size is only fitted in the recipe `small`; in other recipes, too little data is an error.
        The recipe's ``model_kwargs`` are dropped for backbones other than our pyramids, which don't take
        them.
        """
        notes = []
        if "recipe" not in given and settings.recipe == "small":
            notes.append(f"`recipe` small, for fewer than {FEW_PICTURES:,} training pictures")
        backbone = settings.backbone
        if not is_pyramid(backbone.model) and "model_kwargs" not in given:
            backbone = dataclasses.replace(backbone, model_kwargs=())
        optim = fit_length(settings.optim, cls.usual_length(settings), given)
        data_dir = settings.data.data_dir
        if settings.recipe == "small" and "batch_size" not in given and data_dir:
            optim, fitted = fit_batch(
                optim,
                lambda most: cls.has_fewer(data_dir, most),
                lambda: cls.count_samples(data_dir),
                least=2,  # a batch norm may see only one value per picture
            )
            notes += fitted
        say_fitted(notes)
        return dataclasses.replace(settings, backbone=backbone, optim=optim)

    @classmethod
    def usual_length(cls, settings: Any) -> OptimSettings:
        """The optimizer settings of the chosen recipe, which set the usual length of the run."""
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
    """Context for passes over pictures of many sizes, in which cuDNN does not benchmark each size."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
