"""Whether a layer may be computed by an operator that knows its weights alone."""

from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def are_plain(*parts: tuple[nn.Module | None, type[nn.Module]]) -> bool:
    """Whether all these modules, each with its kind, are plain."""
    return all(is_plain(module, kind) for module, kind in parts)


def is_plain(module: nn.Module | None, kind: type[nn.Module]) -> bool:
    """Whether a module does what its kind does: no adapter or sharded layer in its place, no hooks, plain tensors.

    Some libraries give an instance a ``forward`` of its own, others quantize weights in place.
    """
    if module is None or type(module) is not kind:
        return False
    hooks = (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    )
    wrapped = any(map(is_traceable_wrapper_subclass, module._parameters.values()))
    return not any(hooks) and not wrapped and "forward" not in vars(module)
