"""What detection and segmentation share: settings of the backbone, parameter groups."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import nn

from softfree.layers.landmarks import LandmarkSpec
from softfree.models.checks import check_model_name, mistakes_in
from softfree.models.features import FIXED_LANDMARKS
from softfree.models.metadata import check_arguments
from softfree.training.classification import parse_model_kwargs
from softfree.training.settings import Given, OptimSettings


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


def dense_parameter_groups(
    model: nn.Module, backbone: nn.Module, optim: OptimSettings
) -> list[dict[str, Any]]:
    """Groups for AdamW: layer-wise learning rates in the backbone, the full one outside of it.

    Biases, norms and what the backbone itself names (position embeddings) have no weight decay.

    Args:
        backbone: the feature extractor inside ``model`` that timm made.
    """
    # timm wraps networks that give their own features.
    network: Any = getattr(backbone, "model", backbone)
    exempt = network.no_weight_decay() if hasattr(network, "no_weight_decay") else set()
    groups: list[dict[str, Any]] = []
    if optim.layer_decay < 1:
        if not hasattr(network, "group_matcher"):
            raise ValueError(
                "`layer_decay` needs a backbone that tells its layers, as softpp_* and soft_* do, "
                f"got a {type(network).__name__}"
            )
        groups = param_groups_layer_decay(
            network,
            optim.weight_decay,
            no_weight_decay_list=exempt,
            layer_decay=optim.layer_decay,
        )
    grouped = {id(parameter) for group in groups for parameter in group["params"]}
    prefix = next(name for name, module in model.named_modules() if module is network)
    others = param_groups_weight_decay(
        model, optim.weight_decay, no_weight_decay_list=[f"{prefix}.{name}" for name in exempt]
    )
    for group in others:
        group["params"] = [p for p in group["params"] if id(p) not in grouped]
    return [*groups, *others]
