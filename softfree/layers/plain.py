"""Whether a layer may be computed by an operator that knows its weights alone."""

from typing import Any

import torch.nn.modules.module as everywhere
from timm.layers import DropPath
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

RANDOM = (nn.Dropout, DropPath)  # which do nothing in evaluation


def are_plain(*parts: tuple[nn.Module | None, type[nn.Module]]) -> bool:
    """Whether all these modules, each with its kind, are plain."""
    module: Any
    for module, kind in parts:  # in one loop: a call for each would take as long as what it asks
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
    """Whether a module does what its kind does: no adapter or sharded layer in its place, no hooks, plain tensors.

    Some libraries give an instance a ``forward`` of its own, others quantize weights in place; one that was compiled
    in place is called as such.
    """
    return are_plain((module, kind))


def are_all_hooked() -> bool:
    """Whether someone wants to see every module that is called, by the hooks that all of them share."""
    return bool(
        everywhere._global_forward_hooks
        or everywhere._global_forward_pre_hooks
        or everywhere._global_backward_hooks
        or everywhere._global_backward_pre_hooks
    )


def does_nothing(module: nn.Module | None) -> bool:
    """Whether a plain module returns what it is given: an identity, or in evaluation what drops something at random."""
    return are_plain((module, idle_kind(module))) and not are_all_hooked()


def idle_kind(module: Any) -> type[nn.Module]:
    """The kind of which a module has to be plain to do nothing."""
    kind = type(module)
    return kind if kind in RANDOM and not module.training else nn.Identity


def parameter(module: nn.Module, name: str) -> Any:
    """As ``getattr(module, name)``, which a module looks for in three places, at a microsecond apiece."""
    try:
        return module._parameters[name]
    except KeyError:  # some libraries put views of larger tensors in their place
        return getattr(module, name)


def weight_and_bias(module: nn.Module) -> tuple[Tensor, Any]:
    """As ``module.weight, module.bias``, in the time of :func:`parameter`."""
    parameters: Any = module._parameters
    try:
        return parameters["weight"], parameters["bias"]
    except KeyError:  # some libraries put views of larger tensors in their place
        found: Any = module
        return found.weight, found.bias
