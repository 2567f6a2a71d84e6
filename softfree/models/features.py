"""The feature maps that dense models take from a backbone, at 1/4, 1/8, 1/16 and 1/32 of the image."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from timm.layers import freeze_batch_norm_2d
from torch import Tensor, nn

from softfree.layers.factory import SETTINGS
from softfree.models.checkpoints import filter_checkpoint, read_state_dict
from softfree.models.checks import check_pretrained, mistakes_in
from softfree.models.metadata import read_json
from softfree.models.registry import is_ours

# Weights to start from: a file, a run's checkpoint folder, True for those that timm downloads, or none.
Weights = str | Path | bool | None
REDUCTIONS = (4, 8, 16, 32)
# The papers' 49 landmarks at 224², and no more at any size, so that the cost per token stays the same.
FIXED_LANDMARKS = "conv:49"


def fixed_landmarks(name: str, attention: str | None = None) -> str:
    """The landmarks for a backbone of this name or attention, with a fixed maximum at any size.

    Example:
        >>> fixed_landmarks("softfree_tiny"), fixed_landmarks("softpp_tiny")
        ('average:128', 'conv:49')
    """
    own = (attention or name.partition("_")[0]) == "softfree"
    return SETTINGS["softfree"]["landmarks"] if own else FIXED_LANDMARKS


def backbone_arguments(name: str, landmarks: str | None = None, **kwargs: Any) -> dict[str, Any]:
    """Keywords for ``timm.create_model(name)`` to build the backbone of a dense model.

    Args:
        name: a model that timm knows.
        landmarks: landmarks of softfree's backbones; None or ``""``: a fixed number, see
            :func:`fixed_landmarks`. ``"conv"`` is the papers' fixed stride, with a number that grows with the
            image. Other backbones have none.
        kwargs: further keywords, which take precedence.
    """
    if not timm.is_model(name):
        raise ValueError(
            f"no model is called {name!r}; `softfree models` lists softfree's, timm.list_models() all"
        )
    arguments: dict[str, Any] = {}
    if is_ours(name):
        arguments["landmarks"] = landmarks or fixed_landmarks(name, kwargs.get("attention"))
    if timm.models.model_entrypoint(name).__module__.endswith(".swin_transformer"):
        arguments["strict_img_size"] = False
    return arguments | kwargs


def available_reductions(name: str, arguments: dict[str, Any]) -> list[int]:
    """The reductions of a backbone's maps; raises if it can't be built this way or lacks one of the four."""
    try:
        with torch.device("meta"):
            whole: Any = timm.create_model(name, features_only=True, **arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"`model` {name} does not take `model_kwargs`: {error}") from error
    available = whole.feature_info.reduction()
    if not set(REDUCTIONS) <= set(available):
        raise ValueError(
            f"{name} has maps at 1/{', 1/'.join(map(str, available))} of the image; dense models "
            "need 1/4, 1/8, 1/16 and 1/32, as softfree_*, softpp_*, swin_*, pvt_v2_* and resnet* have"
        )
    return available


def pretrained_arguments(name: str, checkpoint: Weights, **kwargs: Any) -> dict[str, Any]:
    """Keywords that make timm start ``name`` from ``checkpoint``: a weights file, or a folder with one.

    Its classifier is ignored; everything else must be present. With True, timm downloads the weights. Without
    a checkpoint there are no keywords.
    """
    if checkpoint is None or checkpoint is False:
        return {}
    if checkpoint is True:
        check_pretrained(name)
        return dict(pretrained=True)
    path = Path(checkpoint)
    if path.is_dir():
        _check_task(path)
        # A run's checkpoint: the moving average of the weights, if it has one.
        average = path / "ema.safetensors"
        path = average if average.is_file() else path / "model.safetensors"
    # Read here first, as weights only, so that nothing in the file can run when timm reads it.
    with mistakes_in("backbone_checkpoint"):
        given = read_state_dict(path)
    with torch.device("meta"):
        model: Any = timm.create_model(name, **kwargs)
    if type(model).__module__.startswith("softfree."):
        given = filter_checkpoint(given, model)
    classifier = model.pretrained_cfg["classifier"]
    classifiers = tuple([classifier] if isinstance(classifier, str) else classifier)
    expected = {key for key in model.state_dict() if not key.startswith(classifiers)}
    missing = sorted(expected - given.keys())
    if missing:
        raise ValueError(
            f"{path} is no checkpoint of {name}: it lacks {len(missing)} of {len(expected)} tensors, "
            f"such as {missing[0]}"
        )
    return dict(pretrained=True, pretrained_cfg_overlay=dict(file=str(path)))


def _check_task(folder: Path) -> None:
    """Refuse a run's checkpoint whose model is not a classifier."""
    metadata = folder / "metadata.json"
    task = read_json(metadata).get("task") if metadata.is_file() else None
    if task not in (None, "classification"):
        raise ValueError(
            f"`backbone_checkpoint` {folder} is a checkpoint of {task}; give one of classification"
        )


def set_grad_checkpointing(body: Any, enable: bool) -> None:
    """Turn recomputation on or off in a feature extractor that timm created."""
    # timm wraps networks that return their features themselves.
    getattr(body, "model", body).set_grad_checkpointing(enable)


class PyramidFeatures(nn.Module):
    """The maps of a timm backbone at the requested reductions, channels first.

    Args:
        name: a model that timm knows, with maps at 1/4, 1/8, 1/16 and 1/32.
        checkpoint: weights to start from, see :func:`pretrained_arguments`.
        reductions: which maps.
        frozen_bn: keep the statistics and scales of the BatchNorms unchanged; for pretrained backbones.
        kwargs: keywords of the backbone, see :func:`backbone_arguments`.
    """

    def __init__(
        self,
        name: str,
        *,
        checkpoint: Weights = None,
        reductions: Sequence[int] = REDUCTIONS,
        frozen_bn: bool = False,
        **kwargs: Any,
    ):
        super().__init__()
        arguments = backbone_arguments(name, **kwargs)
        available = available_reductions(name, arguments)
        weights = pretrained_arguments(name, checkpoint, **arguments)
        body: Any = timm.create_model(
            name,
            features_only=True,
            out_indices=tuple(available.index(reduction) for reduction in reductions),
            **arguments,
            **weights,
        )
        self.channels: list[int] = body.feature_info.channels()
        self.channels_last = str(getattr(body, "output_fmt", "NCHW")).endswith("NHWC")
        self.body: nn.Module = freeze_batch_norm_2d(body) if frozen_bn else body

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the backbone's activations in the backward pass: less memory, more time."""
        set_grad_checkpointing(self.body, enable)

    def forward(self, image: Tensor) -> list[Tensor]:
        """(batch, 3, H, W), sides divisible by 32, to (batch, channels, H / r, W / r) per reduction r."""
        maps = self.body(image)
        return [x.permute(0, 3, 1, 2) for x in maps] if self.channels_last else maps
