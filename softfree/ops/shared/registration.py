"""Operators registered with PyTorch, at less cost a call than by ``torch.library.custom_op``.

The result is the same: one node for ``torch.compile``, shapes by a fake implementation, a gradient. But
``custom_op`` looks for arguments left at their defaults at each call, in time that grows with the square
of their number, and ours have none: for the attention, with its many, that is much of what a call costs the host.

A schema of PyTorch has no records. Functions registered here may take named tuples all the same: the schema has
their fields, :func:`flatten` makes such arguments, and each function gets its records back.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any, get_type_hints

import torch
from torch import _C
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

from softfree.ops.shared import devices
from softfree.ops.shared.precision import full_precision

LIBRARY = torch.library.Library("softfree", "FRAGMENT")


def flatten(*inputs: Any) -> list[Any]:
    """Inputs with their records replaced by the fields of these, as an operator takes them.

    Example:
        >>> flatten(1, (2, (3, 4)), None)
        [1, 2, 3, 4, None]
    """
    flat = []
    for value in inputs:
        if isinstance(value, tuple):
            flat.extend(flatten(*value))
        else:
            flat.append(value)
    return flat


def register(
    name: str,
    compute: Callable[..., Any],
    fake: Callable[..., Any],
    setup_context: Callable[[Any, tuple, Any], None] | None = None,
    gradient: Callable[..., tuple] | None = None,
    flops: Callable[..., int] | None = None,
) -> Any:
    """Register ``softfree::name``.

    Args:
        name: of the operator.
        compute: what it does, below autograd, on the device of its first input and without autocast; annotated,
            without defaults. It changes none of its inputs, and no output shares memory with them.
        fake: the shapes, dtypes and strides of its outputs.
        setup_context, gradient: ``setup_context(ctx, inputs, output)`` keeps what ``gradient(ctx, *grads)``
            needs to give the gradients of the first inputs; the rest have none. None: not differentiable.
        flops: as ``compute``, with shapes in the place of tensors; multiply-adds counted twice.

    Returns:
        The operator, ``torch.ops.softfree.name.default``.
    """
    kinds = get_type_hints(compute)
    result = kinds.pop("return")
    forms = [_form(kind) for kind in kinds.values()]

    def with_records(flat: tuple) -> tuple:
        values = iter(flat)
        return tuple(_build(form, values) for form in forms)

    def alone(*flat: Any) -> Any:
        device = flat[0].device
        with torch.autocast(device.type, enabled=False), full_precision(device), devices.on(device):
            return compute(*with_records(flat))

    parameters = [part for kind in kinds.items() for part in _parameters(*kind)]
    alone.__signature__ = inspect.Signature(parameters, return_annotation=result)  # type: ignore[attr-defined]
    LIBRARY.define(
        name + torch.library.infer_schema(alone, mutates_args=()),
        tags=(torch.Tag.pt2_compliant_tag,),
    )
    LIBRARY.impl(name, alone, "CompositeExplicitAutograd")
    torch.library.register_fake(
        f"softfree::{name}", lambda *flat: fake(*with_records(flat)), lib=LIBRARY
    )
    packet = getattr(torch.ops.softfree, name)
    operator = packet.default
    if flops is not None:
        register_flop_formula(packet)(lambda *flat, **_: flops(*with_records(flat)))
    if setup_context is not None and gradient is not None:
        implementation = _autograd_implementation(
            operator,
            lambda ctx, flat, output: setup_context(ctx, with_records(flat), output),
            gradient,
        )
        LIBRARY.impl(name, implementation, "Autograd", with_keyset=True)
    return operator


def _is_record(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")


def _parameters(name: str, kind: Any) -> Iterator[inspect.Parameter]:
    """Of the schema: a parameter as it is, or one for each field of a record."""
    if not _is_record(kind):
        yield inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=kind)
        return
    for field, kind_of_field in get_type_hints(kind).items():
        yield from _parameters(f"{name}_{field}", kind_of_field)


def _form(kind: Any) -> Any:
    """How a value is built of flat ones: a record with the forms of its fields, or None for the next one."""
    if not _is_record(kind):
        return None
    return kind, [_form(kind_of_field) for kind_of_field in get_type_hints(kind).values()]


def _build(form: Any, values: Iterator) -> Any:
    if form is None:
        return next(values)
    record, forms = form
    return record(*(_build(field, values) for field in forms))


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
            found = (None, *gradient(ctx, *grads))
            return *found, *(None,) * (len(ctx.needs_input_grad) - len(found))

    def implementation(keyset: Any, *inputs: Any) -> Any:
        if torch.is_grad_enabled() and _C._any_requires_grad(*inputs):
            return Differentiable.apply(keyset, *inputs)
        return below_autograd(keyset, *inputs)

    return implementation
