"""Operators registered with PyTorch, at less cost a call than by ``torch.library.custom_op``.

The result is the same: one node for ``torch.compile``, shapes by a fake implementation, a gradient. But
``custom_op`` looks for arguments left at their defaults at each call, in time that grows with the square
of their number, and ours have none: for the attention, with its many, that is much of what a call costs the host.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import _C
from torch.autograd.function import once_differentiable

LIBRARY = torch.library.Library("softfree", "FRAGMENT")


def register(
    name: str,
    compute: Callable[..., Any],
    fake: Callable[..., Any],
    setup_context: Callable[[Any, tuple, Any], None] | None = None,
    gradient: Callable[..., tuple] | None = None,
) -> Any:
    """Register ``softfree::name``.

    Args:
        name: of the operator.
        compute: what it does, below autograd; annotated, without defaults. It changes none of its inputs,
            and no output shares memory with them.
        fake: the shapes, dtypes and strides of its outputs.
        setup_context, gradient: ``setup_context(ctx, inputs, output)`` keeps what ``gradient(ctx, *grads)``
            needs to give one gradient per input. None: not differentiable.

    Returns:
        The operator, ``torch.ops.softfree.name.default``.
    """
    LIBRARY.define(
        name + torch.library.infer_schema(compute, mutates_args=()),
        tags=(torch.Tag.pt2_compliant_tag,),
    )
    LIBRARY.impl(name, compute, "CompositeExplicitAutograd")
    torch.library.register_fake(f"softfree::{name}", fake, lib=LIBRARY)
    operator = getattr(torch.ops.softfree, name).default
    if setup_context is not None and gradient is not None:
        implementation = _autograd_implementation(operator, setup_context, gradient)
        LIBRARY.impl(name, implementation, "Autograd", with_keyset=True)
    return operator


def _autograd_implementation(
    operator: Any, setup_context: Callable[[Any, tuple, Any], None], gradient: Callable[..., tuple]
) -> Callable[..., Any]:
    def below_autograd(keyset: Any, *inputs: Any) -> Any:
        with _C._AutoDispatchBelowAutograd():
            return operator.redispatch(keyset & _C._after_autograd_keyset, *inputs)

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, keyset: Any, *inputs: Any) -> Any:
            output = below_autograd(keyset, *inputs)
            setup_context(ctx, inputs, output)
            return output

        @staticmethod
        @once_differentiable  # else a second derivative would take what ``gradient`` calls for constants
        def backward(ctx: Any, *grads: Any) -> Any:
            return None, *gradient(ctx, *grads)

    def implementation(keyset: Any, *inputs: Any) -> Any:
        if torch.is_grad_enabled() and _C._any_requires_grad(*inputs):
            return Differentiable.apply(keyset, *inputs)
        return below_autograd(keyset, *inputs)

    return implementation
