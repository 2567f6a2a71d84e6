"""Whether a layer may be computed by an operator that knows its weights alone."""

from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module does what its kind does: no adapter or sharded layer in its place, no hooks, plain tensors.

    Some libraries give an instance a ``forward`` of its own, others quantize weights in place.
    """
    hooks = (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    )
    return (
        type(module) is kind
        and not any(hooks)
        and "forward" not in vars(module)
        and not any(map(is_traceable_wrapper_subclass, module._parameters.values()))
    )
