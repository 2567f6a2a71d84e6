"""What detection and segmentation share: settings of the backbone, pictures of many sizes."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from softfree.layers.landmarks import LandmarkSpec
from softfree.models.checks import check_model_name, check_pretrained, fetching, mistakes_in
from softfree.models.features import fixed_landmarks
from softfree.models.metadata import check_arguments
from softfree.training.classification import parse_model_kwargs
from softfree.training.engine import PictureTask
from softfree.training.settings import Given, OptimSettings, fit_length


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


class DenseTask(PictureTask):
    """A backbone with a head for boxes, masks or pixels. ``build`` takes ``backbone_checkpoint``, too."""

    settings: Any

    @classmethod
    def usual_recipe(cls, given: Given) -> str:
        return next(iter(cls.recipes)) if "data_dir" in given else "shapes"

    @classmethod
    def adapt(cls, settings: Any, given: Given) -> Any:
        """The length is fitted; a backbone other than our pyramids loses a recipe's arguments, which they alone take."""
        backbone = settings.backbone
        pyramid = (
            backbone.model.startswith(("softfree_", "soft_", "softpp_"))
            and "vit" not in backbone.model
        )
        if not pyramid and "model_kwargs" not in given:
            backbone = dataclasses.replace(backbone, model_kwargs=())
        optim = fit_length(settings.optim, cls.usual_length(settings), given)
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
