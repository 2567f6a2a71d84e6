"""What detection and segmentation share: settings of the backbone, pictures of many sizes."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from softfree.layers.landmarks import LandmarkSpec
from softfree.models.checks import check_model_name, mistakes_in
from softfree.models.features import FIXED_LANDMARKS
from softfree.models.metadata import check_arguments
from softfree.training.classification import parse_model_kwargs
from softfree.training.settings import Given


@dataclasses.dataclass(frozen=True)
class BackboneSettings:
    """The backbone and where its weights come from."""

    model: str = "softpp_tiny"
    """any model of timm's with maps at 1/4, 1/8, 1/16 and 1/32: softpp_*, swin_*, pvt_v2_*, resnet*"""
    model_kwargs: tuple[str, ...] = ()
    """further arguments of the backbone: embed_dims=32,64,96,128 img_size=512 drop_path_rate=0.1"""
    landmarks: str = FIXED_LANDMARKS
    """of SOFT backbones: conv:49 is at most 49 at any size, conv the papers' fixed stride"""
    backbone_checkpoint: str = ""
    """weights to start the backbone from: a checkpoint folder, a .safetensors or a .pth file"""
    frozen_bn: bool = False
    """keep the backbone's batch norms as they are in --backbone-checkpoint"""

    def arguments(self) -> dict[str, Any]:
        """``backbone_kwargs`` for the models of softfree.detection and softfree.segmentation."""
        with mistakes_in("landmarks"):
            LandmarkSpec.parse(self.landmarks)
        arguments = parse_model_kwargs(self.model_kwargs)
        check_model_name(self.model)
        with mistakes_in("model_kwargs"):
            check_arguments(self.model, arguments)
        return {"landmarks": self.landmarks, **arguments}


# For training on a CPU: few channels.
SMALL_BACKBONE = (
    "embed_dims=32,64,128,192", "num_heads=2,4,8,12", "depths=1,1,2,1", "img_size=96",
)  # fmt: skip


def fit_backbone(backbone: BackboneSettings, given: Given) -> BackboneSettings:
    """The backbone without the arguments of a recipe, which our pyramids alone take, if it is another."""
    pyramid = backbone.model.startswith(("soft_", "softpp_")) and "vit" not in backbone.model
    if pyramid or "model_kwargs" in given:
        return backbone
    return dataclasses.replace(backbone, model_kwargs=())


@contextlib.contextmanager
def any_sizes() -> Iterator[None]:
    """Around passes over pictures of many sizes: cuDNN does not time its algorithms anew for each size."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
