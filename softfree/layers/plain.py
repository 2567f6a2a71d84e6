"""Checks whether a layer may be replaced by an operator that only knows its weights."""

from typing import Any

import torch.nn.modules.module as everywhere
from timm.layers import DropPath
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

RANDOM = (nn.Dropout, DropPath)  # these do nothing in evaluation


def are_plain(*parts: tuple[nn.Module | None, type[nn.Module]]) -> bool:
    """Whether all these modules are plain, given as pairs of a module and its kind; see :func:`is_plain`."""
    module: Any
    for module, kind in parts:  # one loop: a call per module would double the time
        if type(module) is not kind:
            return False
        known = module.__dict__
        if (
            known["_forward_pre_hooks"]
            or known["_forward_hooks"]
            or known["_backward_pre_hooks"]
            or known["_backward_hooks"]
            or "forward" in known
            or "_compiled_call_impl" in known
        ):
            return False
        for weight in known["_parameters"].values():
            if type(weight) is not nn.Parameter and is_traceable_wrapper_subclass(weight):
                return False
    return True


def is_plain(module: nn.Module | None, kind: type[nn.Module]) -> bool:
    """Whether a module is exactly of this kind: no adapter or sharded layer, no hooks, plain tensors.

    Some libraries give an instance its own ``forward``, others quantize weights in place. A module that was
    compiled in place is not plain either, because it has to be called itself.
    """
    return are_plain((module, kind))


def are_all_hooked() -> bool:
    """Whether there are global hooks, which are called for every module."""
    return bool(
        everywhere._global_forward_hooks
        or everywhere._global_forward_pre_hooks
        or everywhere._global_backward_hooks
        or everywhere._global_backward_pre_hooks
    )


def does_nothing(module: nn.Module | None) -> bool:
    """Whether a plain module returns its input: an identity, or in evaluation a dropout or drop path."""
    return are_plain((module, idle_kind(module))) and not are_all_hooked()


def idle_kind(module: Any) -> type[nn.Module]:
    """The kind that a plain module must have to do nothing."""
    kind = type(module)
    return kind if kind in RANDOM and not module.training else nn.Identity


def parameter(module: nn.Module, name: str) -> Any:
    """Same as ``getattr(module, name)``, but faster: that searches three places, at a microsecond each."""
    try:
        return module._parameters[name]
    except KeyError:  # some libraries put views of larger tensors in their place
        return getattr(module, name)


def weight_and_bias(module: nn.Module) -> tuple[Tensor, Any]:
    """Same as ``module.weight, module.bias``, but as fast as :func:`parameter`."""
    parameters: Any = module._parameters
    try:
        return parameters["weight"], parameters["bias"]
    except KeyError:  # some libraries put views of larger tensors in their place
        found: Any = module
        return found.weight, found.bias
