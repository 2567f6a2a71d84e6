"""Operators registered with PyTorch."""

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import softfree
from softfree.ops.shared.registration import LEFT_OUT, register, unseen


def scaled(x: Tensor, y: Tensor | None, factor: float) -> tuple[Tensor, Tensor]:
    return x * factor, torch.zeros_like(x) if y is None else y + x


def keep(ctx, inputs, output):
    ctx.factor, ctx.has_y = inputs[2], inputs[1] is not None


def gradient(ctx, grad, grad_sum):
    grad_x = grad * ctx.factor + (grad_sum if ctx.has_y else 0)
    return grad_x, grad_sum if ctx.has_y else None, None


@pytest.fixture(scope="module")
def operator():
    shapes = lambda x, y, factor: (torch.empty_like(x), torch.empty_like(x))  # noqa: E731
    return register("scaled_for_a_test", scaled, shapes, keep, gradient)


def inputs(y: bool = True) -> tuple:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    return x, torch.randn_like(x, requires_grad=True) if y else None, 3.0


@pytest.mark.parametrize("y", [True, False])
def test_an_operator_passes_pytorchs_own_check(operator, y):
    torch.library.opcheck(torch.ops.softfree.scaled_for_a_test.default, inputs(y))


def test_gradients_are_those_of_the_formula(operator):
    torch.autograd.gradcheck(operator, inputs())


def test_the_gradient_of_a_call_may_have_a_graph_but_no_gradient_of_its_own():
    tokens = [torch.randn(1, 1, n, 4, requires_grad=True) for n in (12, 12, 3)]
    q, v, landmarks = tokens
    out = softfree.soft_attention(q, None, v, landmarks, backend="torch").square().sum()
    plain = torch.autograd.grad(out, tokens, retain_graph=True)
    with_graph = torch.autograd.grad(out, tokens, create_graph=True)
    assert all(map(torch.equal, with_graph, plain))
    with pytest.raises(RuntimeError, match="attention has no second derivative.*reference"):
        with_graph[0].sum().backward()


def test_without_gradients_there_is_no_graph(operator):
    x, y, factor = inputs()
    assert not operator(x.detach(), y.detach(), factor)[0].requires_grad
    with torch.no_grad():
        assert not operator(x, y, factor)[0].requires_grad


def test_compiled_code_has_the_operator_as_one_node(operator):
    torch.compiler.reset()
    x, y, factor = inputs()
    compiled = torch.compile(lambda x, y: operator(x, y, factor)[0].sum(), backend="aot_eager")
    compiled(x, y).backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, factor))


def halves(x: Tensor, keep: bool) -> tuple[Tensor, Tensor]:
    return x / 2, x * 1 if keep else LEFT_OUT


def test_an_output_that_is_left_out_is_an_empty_tensor_to_onlookers():
    shapes = lambda x, keep: (torch.empty_like(x), x.new_empty(x.shape if keep else 0))  # noqa: E731
    call = register("halves_for_a_test", halves, shapes)
    operator = torch.ops.softfree.halves_for_a_test.default
    x = torch.randn(3, 4)
    for keep in (True, False):
        torch.library.opcheck(operator, (x, keep), test_utils=("test_schema", "test_faketensor"))
    assert call(x, False)[1] is None
    assert operator(x, False)[1].shape == (0,)
    assert torch.equal(torch.func.vmap(lambda row: call(row, False)[0])(x), x / 2)


def test_what_is_kept_for_the_gradient_is_not_returned_by_an_eager_call_with_one():
    def keep_product(ctx, inputs, output):
        ctx.save_for_backward(output[1])
        ctx.set_materialize_grads(False)

    def by_product(ctx, grad, none):
        assert none is None
        return None if grad is None else grad * ctx.saved_tensors[0], None

    shapes = lambda x, y: (torch.empty_like(x), torch.empty_like(x))  # noqa: E731
    compute = lambda x, y: (x.square() / 2 * y, x * y)  # noqa: E731
    compute.__annotations__ = dict(x=Tensor, y=float) | {"return": tuple[Tensor, Tensor]}
    call = register(
        "kept_for_a_test", compute, shapes, keep_product, by_product, keeps=True,
        passing=lambda x, y: (compute(x, y)[0], LEFT_OUT),
    )  # fmt: skip
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    assert len(call(x, 2.0)) == 1
    with torch.no_grad():
        out, left_out = call(x, 2.0)
    assert torch.equal(out, call(x, 2.0)[0]) and left_out is None
    torch.autograd.gradcheck(lambda x: call(x, 2.0)[0], (x,))
    with Counting():  # onlookers get the operator's outputs, and the same gradient
        (found,) = torch.autograd.grad(call(x, 2.0)[0].sum(), x)
    assert torch.equal(found, 2 * x.detach())
    held = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
        call(x, 2.0)
    assert [torch.equal(t, 2 * x.detach()) for t in held] == [True]
    assert torch.equal(torch.func.grad(lambda x: call(x, 2.0)[0].sum())(x.detach()), 2 * x.detach())


class Counting(TorchDispatchMode):
    """Keeps the names of what is called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class Wrapped(Tensor):
    """Not a plain tensor."""


@pytest.mark.parametrize("onlooker", ["mode", "profiler", "meta", "jit", "subclass", "nobody"])
def test_whoever_looks_on_sees_the_operator(operator, onlooker):
    x, y, factor = inputs()
    name, seen = "softfree::scaled_for_a_test", []
    if onlooker == "mode":
        with Counting() as counting:
            operator(x, y, factor)
        seen = counting.names
    elif onlooker == "profiler":
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as run:
            operator(x, y, factor)
        seen = [event.key for event in run.key_averages()]
    elif onlooker == "meta":
        assert operator(x.to("meta"), None, factor)[0].is_meta
        return
    elif onlooker == "jit":
        traced = torch.jit.trace(lambda x: operator(x, None, factor)[0], (x.detach(),))
        seen = [node.kind() for node in traced.graph.nodes()]
    elif onlooker == "subclass":
        found = operator(x.detach().as_subclass(Wrapped), None, factor)[0]
        assert torch.equal(found.as_subclass(Tensor), x * factor)
        return
    else:
        out = operator(x, y, factor)[0]
        assert out.grad_fn.name() == "DifferentiableBackward"
        return
    assert name in seen


def test_a_call_without_onlooker_gradient_or_autocast_is_unseen():
    x, weight = torch.ones(2), torch.nn.Parameter(torch.ones(2))
    assert not unseen((x, None, weight))
    with torch.no_grad():
        assert unseen((x, None, weight))
        assert not unseen((x.as_subclass(Wrapped), weight)) and not unseen((x.to("meta"),))
        with Counting():
            assert not unseen((x, weight))
        with torch.autocast("cpu"):
            assert not unseen((x, weight))
        with forward_ad.dual_level():
            assert not unseen((x, weight))
        kept = []
        torch.func.vmap(lambda row: kept.append(row) or row)(torch.ones(2, 2))
        assert not unseen((x, kept[0]))  # left behind by a transform
        seen = []
        torch.func.vmap(lambda row: seen.append(unseen((x,))) or row)(torch.ones(2, 2))
        assert seen == [False]
    with torch.inference_mode():
        assert unseen((x, weight))
