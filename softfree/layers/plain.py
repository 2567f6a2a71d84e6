"""Whether a layer may be computed by an operator that knows its weights alone."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def are_plain(*parts: tuple[nn.Module | None, type[nn.Module]]) -> bool:
    """Whether all these modules, each with its kind, are plain."""
    for module, kind in parts:  # noqa: SIM110  (a generator would be called for each)
        if not is_plain(module, kind):
            return False
    return True


def is_plain(module: nn.Module | None, kind: type[nn.Module]) -> bool:
    """Whether a module does what its kind does: no adapter or sharded layer in its place, no hooks, plain tensors.

    Some libraries give an instance a ``forward`` of its own, others quantize weights in place.
    """
    if module is None or type(module) is not kind:
        return False
    if (
        module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_pre_hooks
        or module._backward_hooks
        or "forward" in module.__dict__
    ):
        return False
    parameters: Iterable[Any] = module._parameters.values()
    for parameter in parameters:
        if type(parameter) is not nn.Parameter and is_traceable_wrapper_subclass(parameter):
            return False
    return True


def weight_and_bias(module: nn.Module) -> tuple[Tensor, Any]:
    """As ``module.weight, module.bias``, which a module looks for in three places each, at a microsecond apiece."""
    parameters: Any = module._parameters
    try:
        return parameters["weight"], parameters["bias"]
    except KeyError:  # some libraries put views of larger tensors in their place
        found: Any = module
        return found.weight, found.bias
