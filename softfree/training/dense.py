"""What detection and segmentation share: settings of data and backbone, and parameter groups."""

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

from timm.optim import param_groups_layer_decay
from torch import nn

from softfree.models.features import FIXED_LANDMARKS
from softfree.training.classification import parse_model_kwargs
from softfree.training.settings import OptimSettings


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
        return {"landmarks": self.landmarks, **parse_model_kwargs(self.model_kwargs)}


def small_backbone(argv: Sequence[str]) -> tuple[str, ...]:
    """``model_kwargs`` for training on a CPU: few channels, if the model asked for is one of our pyramids."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model", default=BackboneSettings.model)
    model = parser.parse_known_args(list(argv))[0].model
    if not model.startswith(("soft_", "softpp_")) or "vit" in model:
        return ()
    return (
        "embed_dims=32,64,128,192", "num_heads=2,4,8,12", "depths=1,1,2,1", "img_size=96",
    )  # fmt: skip


def dense_parameter_groups(
    model: nn.Module, backbone: nn.Module, optim: OptimSettings
) -> list[dict[str, Any]]:
    """Groups for AdamW: layer-wise learning rates in the backbone, the full one outside of it.

    Biases, norms and what the backbone itself names (position embeddings) have no weight decay.

    Args:
        backbone: the feature extractor inside ``model`` that timm made.
    """
    network: Any = getattr(
        backbone, "model", backbone
    )  # timm wraps networks that give their own features
    exempt = network.no_weight_decay() if hasattr(network, "no_weight_decay") else set()
    groups: list[dict[str, Any]] = []
    grouped: set[int] = set()
    if optim.layer_decay < 1:
        if not hasattr(network, "group_matcher"):
            raise ValueError(
                "--layer-decay needs a backbone that tells its layers, as softpp_* and soft_* do, "
                f"got a {type(network).__name__}"
            )
        groups = param_groups_layer_decay(
            network,
            optim.weight_decay,
            no_weight_decay_list=exempt,
            layer_decay=optim.layer_decay,
        )
        grouped = {id(parameter) for group in groups for parameter in group["params"]}
    exempt_ids = {id(p) for name, p in network.named_parameters() if name in exempt}
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for parameter in model.parameters():
        if not parameter.requires_grad or id(parameter) in grouped:
            continue
        no_decay = parameter.ndim <= 1 or id(parameter) in exempt_ids
        (plain if no_decay else decayed).append(parameter)
    return [
        *groups,
        {"params": decayed, "weight_decay": optim.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
