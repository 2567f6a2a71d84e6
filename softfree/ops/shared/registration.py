"""Operators registered with PyTorch, which an eager call goes past.

Registered, an operator is one node for ``torch.compile``, has shapes by a fake implementation, a count of FLOPs and a
gradient: what someone who looks on wants to see. Most eager calls have no such onlooker, and PyTorch's dispatcher would
cost their host more than the launch of a kernel. So :func:`register` returns a function that asks whether somebody
looks on and computes straight away if not, to the same bits.

A schema of PyTorch has no records. Functions registered here may take named tuples all the same: the schema has
their fields, :func:`flatten` makes such arguments, and each function gets its records back.
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
LEFT_OUT: Any = None  # in the place of an output

_is_wrapped = _C._functorch.is_functorch_wrapped_tensor


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
    *,
    keeps: bool = False,
    passing: Callable[..., Any] | None = None,
    launches: bool = False,
) -> Callable[..., Any]:
    """Register ``softfree::name``.

    Args:
        name: of the operator.
        compute: what it does, below autograd, on the device of its first input and without autocast; annotated,
            tensors first, without defaults. It changes none of its inputs, and no output shares memory with them. One of
            several outputs may be ``LEFT_OUT``, which the operator returns as an empty tensor.
        fake: the shapes, dtypes and strides of its outputs.
        setup_context, gradient: ``setup_context(ctx, inputs, output)`` keeps what ``gradient(ctx, *grads)``
            needs to give the gradients of the first inputs; the rest have none. None: a gradient is refused. What
            ``gradient`` computes is an operator registered without one, so that second derivatives are refused too.
        flops: as ``compute``, with shapes in the place of tensors; multiply-adds counted twice.
        keeps: whether outputs after the first are there for ``setup_context`` alone. An eager call with a gradient
            then returns the first alone, as a tuple: PyTorch has less to keep account of.
        passing: what eager calls without a gradient do in the place of ``compute``: the same, but for outputs that
            may be ``LEFT_OUT``.
        launches: whether ``compute`` launches kernels of our own, to which autocast and the precision of PyTorch's
            products mean nothing; where it does more, it says so itself by
            :func:`softfree.ops.shared.precision.exactly`.

    Returns:
        A function of the arguments of ``compute``.
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
        """Of ``run(*inputs)``; the tensors among the inputs again, for autograd to see."""

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
        """The same for an eager call, which does not return what is for the gradient alone."""

        @staticmethod
        def forward(ctx: Any, run: Callable, inputs: tuple, *tensors: Any) -> Any:
            return Differentiable.forward(ctx, run, inputs)[:1]

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return None, None, *gradients(ctx, (*grads, *unshown))

    class Transformable(Function):
        """For ``torch.func``, which takes the flat inputs apart."""

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
            """One call a sample."""

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
        """One for each tensor among the inputs."""
        if gradient is None:
            _refuse(name.removesuffix("_backward"), "second derivative")
        found = gradient(ctx, *grads)
        return found + padding[len(found) :]

    # Not by ``Function.apply``, which is for torch.func, and at some cost.
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
            for value, form in zip(inputs, records, strict=False):  # as flatten, in less time
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
    """Whether an eager call with these tensors is nothing but the launches of its kernels.

    Nobody looks on, no gradient is wanted, autocast is off, and launches go to the device of the first. Callers of
    several operators ask it once.
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
    """As ``compute``, on the device of its first input and without autocast."""

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
    """As ``compute``, on the device of its first input."""

    def alone(*inputs: Any) -> Any:
        first = inputs[0]
        device = (first if isinstance(first, Tensor) else first[0]).device
        if devices.is_current(device):
            return compute(*inputs)
        with devices.on(device):
            return compute(*inputs)

    return alone


def _observed(tensors: Sequence[Tensor | None]) -> bool:
    """Whether a mode, a tracer, a profiler or a tensor that is not plain wants to see the registered operator."""
    if (
        _C._len_torch_dispatch_stack() > 0
        or _C._len_torch_function_stack() > 0
        or _C._is_tracing()
        or torch.autograd._profiler_enabled()
    ):
        return True
    for tensor in tensors:
        # A wrapper may be left behind by a transform of torch.func.
        if tensor is not None and (type(tensor) not in PLAIN or _is_wrapped(tensor)):
            return True
    first: Any = tensors[0]  # the others are where it is
    return first.is_meta


def _refuse_tangents(name: str, inputs: Sequence[Any]) -> None:
    """Raise if a tensor has a tangent, which would be lost."""
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
    """Whether a parameter is a tensor, one or none, or a record of such."""
    if _is_record(kind):
        return all(map(_is_tensors, get_type_hints(kind).values()))
    return kind in (Tensor, Tensor | None)


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
