"""Whether a layer may be computed by an operator that knows its weights alone."""

from torch import nn


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module does what its kind does: no adapter, quantized or sharded layer in its place, no hooks."""
    hooks = (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    )
    return type(module) is kind and not any(hooks)
