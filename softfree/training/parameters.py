"""Which parameters are trained, and how: groups for AdamW, frozen ones."""

import fnmatch
from collections.abc import Sequence
from typing import Any

from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import nn

from softfree.training.settings import OptimSettings


def parameter_groups(
    model: nn.Module, optim: OptimSettings, backbone: nn.Module | None = None
) -> list[dict[str, Any]]:
    """Groups for AdamW: layer-wise learning rates in the backbone, the full learning rate outside of it.

    Biases, norms and parameters that the backbone itself exempts (position embeddings) have no weight decay.

    Args:
        backbone: timm's feature extractor inside ``model``; None: the whole model.
    """
    # timm wraps networks that have their own method for features.
    network: Any = model if backbone is None else getattr(backbone, "model", backbone)
    exempt: set[str] = getattr(network, "no_weight_decay", set)()
    groups: list[dict[str, Any]] = []
    if optim.layer_decay < 1:
        if backbone is not None and not hasattr(network, "group_matcher"):
            raise ValueError(
                "`layer_decay` needs a backbone that defines its layers, as softfree_* and softpp_* do, "
                f"got a {type(network).__name__}"
            )
        groups = param_groups_layer_decay(
            network,
            optim.weight_decay,
            no_weight_decay_list=exempt,
            layer_decay=optim.layer_decay,
        )
    if groups and network is model:
        return groups
    grouped = {id(parameter) for group in groups for parameter in group["params"]}
    prefix = next(name for name, module in model.named_modules() if module is network)
    others = param_groups_weight_decay(
        model,
        optim.weight_decay,
        no_weight_decay_list=[f"{prefix}.{name}".lstrip(".") for name in exempt],
    )
    for group in others:
        group["params"] = [p for p in group["params"] if id(p) not in grouped]
    return [*groups, *others]


def freeze(model: nn.Module, globs: Sequence[str]) -> None:
    """Freeze the parameters whose names match a glob pattern."""
    names = [name for name, _ in model.named_parameters()]
    for glob in globs:
        matching = set(fnmatch.filter(names, glob))
        if not matching:
            raise ValueError(
                f"`freeze` {glob!r} matches no parameter; names look like {names[0]}, {names[-1]}, ..."
            )
        for name, parameter in model.named_parameters():
            if name in matching:
                parameter.requires_grad_(False)
