"""Registration of the model families with timm: one entry in its registry per name."""

import sys
from collections.abc import Mapping
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, model_entrypoint, register_model
from torch import nn

from softfree.models.checkpoints import filter_checkpoint

AUTHORS = "https://github.com/fudan-zvg/SOFT"


def is_ours(name: str) -> bool:
    """Whether a model of timm's registry is one of softfree's."""
    return model_entrypoint(name).__module__.startswith("softfree.")


def has_weights(arguments: Mapping[str, Any]) -> bool:
    """Whether timm's keywords name weights; our models come without any."""
    config = arguments.get("pretrained_cfg")
    config = {} if config is None else config if isinstance(config, dict) else vars(config)
    known = {**config, **(arguments.get("pretrained_cfg_overlay") or {})}
    return any(known.get(key) for key in ("url", "file", "hf_hub_id", "state_dict"))


def default_cfg(first_conv: str) -> dict[str, Any]:
    """The information about a model that timm's tools (data pipelines, fine-tuning) need."""
    return {
        "url": "",
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": None,
        "crop_pct": 0.875,
        "interpolation": "bicubic",
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": first_conv,
        "classifier": "head",
        "fixed_input_size": False,
        "license": "mit",
    }


def register(
    model_class: type[nn.Module],
    name: str,
    arguments: dict[str, Any],
    default_out_indices: int | tuple[int, ...],
) -> None:
    """Make ``timm.create_model(name)`` build ``model_class(**arguments)``; keywords override the arguments.

    The module of ``model_class`` must already have its ``default_cfgs``, because timm looks them up there.
    """

    def create(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        if kwargs.pop("output_stride", None) is not None:
            raise ValueError(f"{name} can't be dilated: leave output_stride out")
        if kwargs.get("feature_cls") in ("fx", "list", "dict"):
            raise ValueError(
                f"{name} gives its features itself: feature_cls must be 'getter', the default, or 'hook', "
                f"got {kwargs['feature_cls']!r}"
            )
        place = {key: kwargs.pop(key) for key in ("device", "dtype") if key in kwargs}
        out_indices = kwargs.pop("out_indices", default_out_indices)
        if pretrained and not has_weights(kwargs):
            raise RuntimeError(
                f"no weights come with {name}. The authors' files are listed at {AUTHORS}; "
                'softfree.load_release_checkpoint(timm.create_model("soft_tiny_release"), FILE) loads one. '
                'Folders that `softfree export` writes for timm load as "local-dir:FOLDER".'
            )
        return build_model_with_cfg(
            model_class,
            name,
            pretrained,
            pretrained_filter_fn=filter_checkpoint,
            feature_cfg=dict(out_indices=out_indices, feature_cls="getter"),
            **{**arguments, **kwargs},
        ).to(**place)

    create.__name__ = create.__qualname__ = name
    create.__module__ = model_class.__module__
    create.__doc__ = f"{name}: a {model_class.__name__}, which documents the keywords."
    register_model(create)
    # timm adds the name to the module's __all__, so the module must have it.
    setattr(sys.modules[model_class.__module__], name, create)
