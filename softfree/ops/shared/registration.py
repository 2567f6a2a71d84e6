"""Operators registered with PyTorch, whose dispatcher most eager calls bypass.

A registered operator is one node for ``torch.compile`` and has a fake implementation for shapes, a FLOP count
and a gradient: what tracers, modes and profilers need. Most eager calls have no such observer, and PyTorch's
dispatcher would cost the host more than launching a kernel. :func:`register` therefore returns a function
that checks for observers and, if there are none, computes directly. The results are bitwise the same.

PyTorch schemas have no records. Functions registered here may still take named tuples: the schema lists their
fields, :func:`flatten` turns records into such flat arguments, and each function gets its records back.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, get_args, get_type_hints

import torch
from torch import _C, Tensor
from torch.autograd import Function, forward_ad
from torch.utils.flop_counter import register_flop_formula

from softfree.ops.shared import devices
from softfree.ops.shared.precision import NOTHING, full_precision, without_autocast

LIBRARY = torch.library.Library("softfree", "FRAGMENT")
PLAIN = {Tensor, torch.nn.Parameter}
LEFT_OUT: Any = None  # stands for an output that is not computed

_is_wrapped = _C._functorch.is_functorch_wrapped_tensor


def flatten(*inputs: Any) -> list[Any]:
    """Flatten inputs as an operator takes them: each record is replaced by its fields.

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
    *,
    keeps: bool = False,
    passing: Callable[..., Any] | None = None,
    launches: bool = False,
) -> Callable[..., Any]:
    """Register ``softfree::name``.

    Args:
        name: name of the operator.
        compute: the computation. It runs below autograd, on the device of its first input and without
            autocast. Its parameters are annotated, tensors first, without defaults. It changes none of its
            inputs, and no output shares memory with them. If there are several outputs, some may be
            ``LEFT_OUT``; the operator returns these as empty tensors.
        fake: returns outputs with the right shapes, dtypes and strides.
        setup_context, gradient: ``setup_context(ctx, inputs, output)`` saves what ``gradient(ctx, *grads)``
            needs to return the gradients of the first inputs; the remaining inputs have none. None: a
            gradient is refused. ``gradient`` computes through an operator registered without a gradient, so
            second derivatives are refused as well.
        flops: takes the arguments of ``compute`` with shapes in place of tensors; a multiply-add counts as
            two.
        keeps: whether outputs after the first exist only for ``setup_context``. An eager call with a gradient
            then returns only the first, as a tuple, which leaves PyTorch less to track.
        passing: replaces ``compute`` in eager calls without a gradient. It does the same, except that outputs
            may be ``LEFT_OUT``.
        launches: whether ``compute`` only launches our own kernels, which ignore autocast and the precision
            of PyTorch's products. If it does more, it calls :func:`softfree.ops.shared.precision.exactly`
            itself.

    Returns:
        A function that takes the arguments of ``compute``.
    """
    kinds = get_type_hints(compute)
    result = kinds.pop("return")
    outputs = len(get_args(result)) or 1
    forms = [_form(kind) for kind in kinds.values()]
    leading = sum(map(_is_tensors, kinds.values()))
    records = forms[:leading] if any(forms[:leading]) else []
    one_record = leading == 1 and bool(records)

    def with_records(flat: Sequence) -> tuple:
        values = iter(flat)
        return tuple(_build(form, values) for form in forms)

    apart = _on_its_device if launches else _alone
    alone = apart(compute)
    unkept = apart(passing or compute)

    def registered(*flat: Any) -> Any:
        output = alone(*with_records(flat))
        if not isinstance(output, tuple):
            return output
        return tuple(flat[0].new_empty(0) if part is None else part for part in output)

    by_kind = [[*_parameters(*kind)] for kind in kinds.items()]
    parameters = [parameter for part in by_kind for parameter in part]
    padding = (None,) * sum(map(len, by_kind[:leading]))
    registered.__signature__ = inspect.Signature(parameters, return_annotation=result)  # type: ignore[attr-defined]
    LIBRARY.define(
        name + torch.library.infer_schema(registered, mutates_args=()),
        tags=(torch.Tag.pt2_compliant_tag,),
    )
    LIBRARY.impl(name, registered, "CompositeExplicitAutograd")
    torch.library.register_fake(
        f"softfree::{name}", lambda *flat: fake(*with_records(flat)), lib=LIBRARY
    )
    packet = getattr(torch.ops.softfree, name)
    operator = packet.default
    if flops is not None:
        register_flop_formula(packet)(lambda *flat, **_: flops(*with_records(flat)))

    class Differentiable(Function):
        """Computes ``run(*inputs)``.

        The tensors among the inputs are passed again so that autograd sees them.
        """

        @staticmethod
        def forward(ctx: Any, run: Callable, inputs: tuple, *tensors: Any) -> Any:
            output = run(*inputs)
            if setup_context is not None:
                setup_context(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return None, None, *gradients(ctx, grads)

    class Shown(Differentiable):
        """The same for an eager call, which does not return outputs that only the gradient needs."""

        @staticmethod
        def forward(ctx: Any, run: Callable, inputs: tuple, *tensors: Any) -> Any:
            return Differentiable.forward(ctx, run, inputs)[:1]

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return None, None, *gradients(ctx, (*grads, *unshown))

    class Transformable(Function):
        """For ``torch.func``, which needs flat inputs."""

        @staticmethod
        def forward(*flat: Any) -> Any:
            return call(*with_records(flat), run=alone)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
            if setup_context is not None:
                setup_context(ctx, with_records(inputs), output)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            found = gradients(ctx, grads)
            return *found, *(None,) * (len(ctx.needs_input_grad) - len(found))

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> NoReturn:
            _refuse(name, "forward-mode derivative")

        @staticmethod
        def vmap(info: Any, in_dims: tuple, *flat: Any) -> Any:
            """One call per sample."""

            def one(sample: int) -> Any:
                values = [
                    x if d is None else x.select(d, sample)
                    for x, d in zip(flat, in_dims, strict=True)
                ]
                return call(*with_records(values), run=alone)

            calls = [one(sample) for sample in range(info.batch_size)]
            if isinstance(calls[0], Tensor):
                return torch.stack(calls), 0
            parts = zip(*calls, strict=True)
            outputs = tuple(LEFT_OUT if part[0] is None else torch.stack(part) for part in parts)
            return outputs, tuple(None if output is None else 0 for output in outputs)

    unshown = (None,) * (outputs - 1)

    def gradients(ctx: Any, grads: tuple) -> tuple:
        """One gradient for each tensor among the inputs."""
        if gradient is None:
            _refuse(name.removesuffix("_backward"), "second derivative")
        found = gradient(ctx, *grads)
        return found + padding[len(found) :]

    # Not ``Function.apply``: it handles torch.func, at some cost.
    everything = super(Function, Differentiable).apply
    differentiable = super(Function, Shown).apply if keeps else everything

    def with_autograd(keyset: Any, *flat: Any) -> Any:
        def below_autograd(*_: Any) -> Any:
            with _C._AutoDispatchBelowAutograd():
                return operator.redispatch(keyset & _C._after_autograd_keyset, *flat)

        _refuse_tangents(name, flat)
        if torch.is_grad_enabled() and _C._any_requires_grad(*flat):
            inputs = with_records(flat)
            return Differentiable.apply(below_autograd, inputs, *flatten(*inputs[:leading]))
        return below_autograd()

    LIBRARY.impl(name, with_autograd, "Autograd", with_keyset=True)

    def call(*inputs: Any, run: Callable = unkept) -> Any:
        if torch.compiler.is_dynamo_compiling():  # other tracers have modes
            return operator(*flatten(*inputs))
        if _C._are_functorch_transforms_active():
            return Transformable.apply(*flatten(*inputs))
        tensors: Sequence[Tensor | None] = inputs[0] if one_record else inputs[:leading]
        if records and not one_record:
            tensors = []
            for value, form in zip(inputs, records, strict=False):  # like flatten, but faster
                tensors += (value,) if form is None else value
        if _observed(tensors):
            return operator(*flatten(*inputs))
        if forward_ad._current_level >= 0:
            _refuse_tangents(name, tensors)
        if torch.is_grad_enabled() and _C._any_requires_grad(*tensors):
            return (everything if run is alone else differentiable)(alone, inputs, *tensors)
        return run(*inputs)

    return call


def unseen(tensors: Sequence[Tensor | None]) -> bool:
    """Whether an eager call with these tensors consists only of its kernel launches.

    That is: nothing observes it, gradients are disabled, autocast is off, and the first tensor's device is
    the current one. Callers of several operators check this once.
    """
    first: Any = tensors[0]
    device = first.device
    return not (
        torch.is_grad_enabled()
        or torch.compiler.is_dynamo_compiling()
        or _C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or _observed(tensors)
        or torch.is_autocast_enabled(device.type)
        or not devices.is_current(device)
    )


def _alone(compute: Callable[..., Any]) -> Callable[..., Any]:
    """``compute`` on the device of its first input, without autocast and with exact float32 products."""

    def alone(*inputs: Any) -> Any:
        first = inputs[0]
        device = (first if isinstance(first, Tensor) else first[0]).device
        exact = full_precision(device)
        if (
            exact is NOTHING
            and not torch.is_autocast_enabled(device.type)
            and devices.is_current(device)
        ):
            return compute(*inputs)
        with without_autocast(device), exact, devices.on(device):
            return compute(*inputs)

    return alone


def _on_its_device(compute: Callable[..., Any]) -> Callable[..., Any]:
    """``compute`` on the device of its first input."""

    def alone(*inputs: Any) -> Any:
        first = inputs[0]
        device = (first if isinstance(first, Tensor) else first[0]).device
        if devices.is_current(device):
            return compute(*inputs)
        with devices.on(device):
            return compute(*inputs)

    return alone


def _observed(tensors: Sequence[Tensor | None]) -> bool:
    """Whether a mode, a tracer, a profiler or a non-plain tensor needs to see the registered operator."""
    if (
        _C._len_torch_dispatch_stack() > 0
        or _C._len_torch_function_stack() > 0
        or _C._is_tracing()
        or torch.autograd._profiler_enabled()
    ):
        return True
    for tensor in tensors:
        # A torch.func transform may have left a wrapper behind.
        if tensor is not None and (type(tensor) not in PLAIN or _is_wrapped(tensor)):
            return True
    first: Any = tensors[0]  # the others are on the same device
    return first.is_meta


def _refuse_tangents(name: str, inputs: Sequence[Any]) -> None:
    """Raise if a tensor has a tangent, because it would be lost."""
    if forward_ad._current_level >= 0 and any(
        isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None
        for value in inputs
    ):
        _refuse(name, "forward-mode derivative")


def _refuse(name: str, what: str) -> NoReturn:
    raise NotImplementedError(
        f"softfree::{name} has no {what}; backend='reference', plain PyTorch, has all derivatives"
    )


def _is_record(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")


def _is_tensors(kind: Any) -> bool:
    """Whether a parameter is a tensor, an optional tensor, or a record of these."""
    if _is_record(kind):
        return all(map(_is_tensors, get_type_hints(kind).values()))
    return kind in (Tensor, Tensor | None)


def _parameters(name: str, kind: Any) -> Iterator[inspect.Parameter]:
    """The parameters of the schema: the parameter itself, or one for each field of a record."""
    if not _is_record(kind):
        yield inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=kind)
        return
    for field, kind_of_field in get_type_hints(kind).items():
        yield from _parameters(f"{name}_{field}", kind_of_field)


def _form(kind: Any) -> Any:
    """How to build a value from flat ones: a record type and its fields' forms, or None for the next one."""
    if not _is_record(kind):
        return None
    return kind, [_form(kind_of_field) for kind_of_field in get_type_hints(kind).values()]


def _build(form: Any, values: Iterator) -> Any:
    if form is None:
        return next(values)
    record, forms = form
    return record(*(_build(field, values) for field in forms))
