"""Derivatives beyond a first gradient: right, or refused with one sentence; never silently without a part."""

import functools

import pytest
import timm
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.autograd import functional as twice
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

import softfree
from softfree.ops import image_attention
from softfree.ops.conv_mlp import operator as conv_mlp
from softfree.ops.conv_norm import operator as conv_norm
from softfree.ops.mlp import operator as mlp
from softfree.ops.norm import operator as norm
from softfree.ops.query_norm import operator as query_norm
from softfree.ops.value_conv import operator as value_conv
from softfree.ops.window_product import operator as window_product

NO_SECOND = "softfree::attention has no second derivative; backend='reference'"
NO_FORWARD = "softfree::attention has no forward-mode derivative; backend='reference'"


def attend(q: Tensor, v: Tensor, landmarks: Tensor, backend: str = "torch", **options) -> Tensor:
    return softfree.soft_attention(q, None, v, landmarks, backend=backend, **options)


@pytest.fixture
def tokens() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return tuple(torch.randn(2, 1, n, 4, dtype=torch.float64) for n in (12, 12, 3))


def small_model(backend: str) -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = dict(embed_dims=(8, 8, 8, 8), num_heads=(1, 1, 1, 1), depths=(1, 1, 1, 1))
    return timm.create_model("softpp_tiny", num_classes=3, backend=backend, **sizes).double().eval()


PICTURE = torch.linspace(-1, 1, 3 * 32 * 32, dtype=torch.float64).sin().view(1, 3, 32, 32)


def score_of_tokens(tokens):
    """Of the first tokens alone, so that derivatives go through the attention."""
    q, v, landmarks = tokens
    return lambda q: attend(q, v, landmarks).square().sum(), q


def score_of_a_model(tokens):
    model = small_model("torch")
    return lambda picture: model(picture).square().sum(), PICTURE


SCORES = pytest.mark.parametrize("score", [score_of_tokens, score_of_a_model])


def by_grad(score, x):
    x = x.detach().clone().requires_grad_()
    (first,) = torch.autograd.grad(score(x), x, create_graph=True)
    torch.autograd.grad(first.square().sum(), x)


def by_grad_of_a_sum(score, x):
    """Where the gradient that comes in needs none itself."""
    x = x.detach().clone().requires_grad_()
    (first,) = torch.autograd.grad(score(x), x, torch.ones((), dtype=x.dtype), create_graph=True)
    torch.autograd.grad(first.sum(), x)


def by_backward(score, x):
    x = x.detach().clone().requires_grad_()
    score(x).backward(create_graph=True)
    x.grad.square().sum().backward()


SECOND = [
    by_grad,
    by_grad_of_a_sum,
    by_backward,
    lambda score, x: twice.hvp(score, x, x),
    lambda score, x: twice.vhp(score, x, x),
    lambda score, x: twice.hessian(lambda part: score(x + part), x.new_zeros(1)),
    lambda score, x: twice.jvp(score, x, x),
    lambda score, x: grad(lambda x: grad(score)(x).square().sum())(x),
    lambda score, x: jacrev(lambda part: grad(lambda x: score(x + part))(x))(x.new_zeros(1)),
]
NAMES = (
    "grad",
    "grad of a sum",
    "backward",
    "hvp",
    "vhp",
    "hessian",
    "functional.jvp",
    "func.grad",
)


@SCORES
@pytest.mark.parametrize("way", SECOND, ids=[*NAMES, "func.jacrev"])
def test_a_second_derivative_is_refused_on_every_way(tokens, score, way):
    with pytest.raises(NotImplementedError, match=NO_SECOND):
        way(*score(tokens))


def dual(score, x):
    with forward_ad.dual_level():
        score(forward_ad.make_dual(x, x))


@SCORES
@pytest.mark.parametrize(
    "way", [dual, lambda score, x: jvp(score, (x,), (x,))], ids=["dual", "jvp"]
)
def test_a_forward_mode_derivative_is_refused(tokens, score, way):
    with pytest.raises(NotImplementedError, match=NO_FORWARD):
        way(*score(tokens))


@pytest.mark.parametrize("way", [jacfwd, hessian])
def test_a_jacobian_by_columns_is_refused(tokens, way):
    score, x = score_of_tokens(tokens)
    with pytest.raises(NotImplementedError, match=NO_FORWARD):
        way(lambda part: score(x + part))(x.new_zeros(1))


def test_the_registered_operator_refuses_a_tangent_too(tokens):
    with forward_ad.dual_level(), torch.utils.flop_counter.FlopCounterMode(display=False):
        q, v, landmarks = tokens
        with pytest.raises(NotImplementedError, match=NO_FORWARD):
            attend(forward_ad.make_dual(q, q), v, landmarks)


def test_tangents_elsewhere_are_no_hindrance(tokens):
    with forward_ad.dual_level():
        assert attend(*tokens).shape == tokens[0].shape


@pytest.mark.full
@pytest.mark.parametrize("inverse", ["newton", "solve"])
def test_the_reference_has_what_is_refused(tokens, inverse):
    run = functools.partial(attend, backend="reference", inverse=inverse, ridge=0.1)
    leaves = [t.requires_grad_() for t in tokens]
    if (
        inverse == "solve"
    ):  # the gradient of Newton's iteration is by Eq. 12, that of a true inverse
        torch.autograd.gradcheck(run, leaves, check_forward_ad=True)
        torch.autograd.gradgradcheck(run, leaves)
    q, v, landmarks = (t.detach() for t in tokens)
    score = lambda q: run(q, v, landmarks).square().sum()  # noqa: E731
    _, slope = jvp(score, (q,), (q,))
    torch.testing.assert_close(slope, (grad(score)(q) * q).sum())
    by_hand = grad(lambda x: (grad(score)(x) * q).sum())(q)
    torch.testing.assert_close(twice.vhp(score, q, q)[1], by_hand)
    assert jacfwd(score)(q).shape == q.shape


def test_a_model_on_the_reference_has_second_derivatives():
    model = small_model("reference")
    by_grad(lambda picture: model(picture).square().sum(), PICTURE)


def test_a_first_gradient_may_have_a_graph(tokens):
    leaves = [t.clone().requires_grad_() for t in tokens]
    out = attend(*leaves).square().sum()
    plain = torch.autograd.grad(out, leaves, retain_graph=True)
    with_graph = torch.autograd.grad(out, leaves, create_graph=True)
    assert all(map(torch.equal, with_graph, plain))


@pytest.mark.parametrize("inverse", ["newton", "solve"])
def test_gradients_of_torch_func_are_those_of_autograd(tokens, inverse):
    run = functools.partial(attend, inverse=inverse)
    leaves = [t.clone().requires_grad_() for t in tokens]
    expected = torch.autograd.grad(run(*leaves).square().sum(), leaves)
    found = grad(lambda *t: run(*t).square().sum(), argnums=(0, 1, 2))(*tokens)
    assert all(map(torch.equal, found, expected))
    out, pull = vjp(lambda *t: run(*t).square().sum(), *tokens)
    assert all(map(torch.equal, pull(torch.ones_like(out)), expected))
    rows = jacrev(lambda q: run(q, *tokens[1:]).square().sum((0, 1, 2)))(tokens[0])
    torch.testing.assert_close(rows.sum(0), expected[0])


def test_vmap_is_one_call_a_sample(tokens):
    q, v, landmarks = (torch.stack([t, t.flip(2)]) for t in tokens)
    found = vmap(attend, in_dims=(0, None, 0))(q, v[0], landmarks)
    expected = torch.stack([attend(q[i], v[0], landmarks[i]) for i in range(2)])
    assert torch.equal(found, expected)
    samples = vmap(grad(lambda q, v, m: attend(q, v, m).square().sum()))(q, v, landmarks)
    for i in range(2):
        one = grad(lambda q: attend(q, v[i], landmarks[i]).square().sum())(q[i])  # noqa: B023
        torch.testing.assert_close(samples[i], one)


def test_gradients_of_each_sample_of_a_layer():
    model = softfree.SoftAttention(8, 2, stride=2, value_conv=3).double()
    weights = {name: p.detach() for name, p in model.named_parameters()}
    pictures = torch.randn(2, 24, 8, dtype=torch.float64)

    def loss(weights, picture):
        return functional_call(model, weights, (picture[None], (6, 4))).square().sum()

    found = vmap(grad(loss), in_dims=(None, 0))(weights, pictures)
    for i, picture in enumerate(pictures):
        model.zero_grad()
        model(picture[None], (6, 4)).square().sum().backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name][i], parameter.grad, msg=name)


def test_a_checkpointed_call_has_the_same_gradients(tokens):
    for reentrant in (False, True):
        leaves = [t.clone().requires_grad_() for t in tokens]
        expected = torch.autograd.grad(attend(*leaves).square().sum(), leaves)
        checkpoint(attend, *leaves, use_reentrant=reentrant).square().sum().backward()
        assert all(torch.equal(leaf.grad, e) for leaf, e in zip(leaves, expected, strict=True))


def test_hooks_on_inputs_and_results_are_called(tokens):
    leaves = [t.clone().requires_grad_() for t in tokens]
    expected = torch.autograd.grad(attend(*leaves).sum(), leaves)
    called = []
    leaves[0].register_hook(lambda g: called.append("q"))
    out = attend(*leaves)
    out.register_hook(lambda g: called.append("out"))
    out.grad_fn.register_hook(lambda *_: called.append("node"))
    out.sum().backward()
    assert called == ["out", "node", "q"] or sorted(called) == ["node", "out", "q"]
    assert torch.equal(leaves[0].grad, expected[0])


def test_saved_tensors_go_through_the_hooks_for_them(tokens):
    leaves = [t.clone().requires_grad_() for t in tokens]
    expected = torch.autograd.grad(attend(*leaves).sum(), leaves)
    packed = []

    def pack(tensor):
        packed.append(tensor.shape)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
        out = attend(*leaves)
    assert leaves[0].shape in packed
    assert all(map(torch.equal, torch.autograd.grad(out.sum(), leaves), expected))


def test_a_result_may_be_changed_in_place(tokens):
    leaves = [t.clone().requires_grad_() for t in tokens]
    expected = torch.autograd.grad((2 * attend(*leaves)).sum(), leaves)
    found = torch.autograd.grad(attend(*leaves).mul_(2).sum(), leaves)
    assert all(map(torch.equal, found, expected))


def layer():
    """One operator on a GPU."""
    made = softfree.SoftAttention(32, 2, stride=4, value_conv=3)
    return lambda x: made(x, (12, 8)), (2, 96, 32)


OF_CONV_MLP = (7, 4), (7,), (7, 1, 3, 3), (7,), (4, 7), (4,)
# Those for half precision on a GPU have nothing to compute with here, and are asked with shapes alone.
BY_SHAPE = {
    "attention": lambda: (lambda q: attend(q, q, q[:, :, :2]), (2, 1, 12, 4)),
    "mlp": lambda: (
        lambda x: mlp.FORWARD(x, *empty((7, 4), (7,), (4, 7), (4,)))[0], (10, 4)
    ),
    "mlp_in_parts": lambda: (
        lambda x: mlp._parts(x, *empty((7, 4), (7,), (4, 7), (4,))), (10, 4)
    ),
    "conv_mlp": lambda: (
        lambda x: conv_mlp.FORWARD(x, conv_mlp.Weights(*empty(*OF_CONV_MLP)), 4, 3)[0], (2, 12, 4)
    ),
    "conv_mlp_in_parts": lambda: (
        lambda x: conv_mlp.IN_PARTS(x, conv_mlp.Weights(*empty(*OF_CONV_MLP)), 4, 3), (2, 12, 4)
    ),
    "landmark_norm": lambda: (
        lambda x: norm.LANDMARK_FORWARD(x, *empty((8,), (8,)), 0.5, 1e-5), (5, 8)
    ),
    "add_norm": lambda: (
        lambda x: norm.ADD_FORWARD(x, x, *empty((8,), (8,)), 1e-5, True)[0], (5, 8)
    ),
    "norm_relu": lambda: (
        lambda x: conv_norm.FORWARD(x, *empty(*[(8,)] * 5), 1e-5), (2, 8, 5, 3)
    ),
    "value_conv": lambda: (
        lambda v: value_conv.FORWARD(v, *empty((2, 1, 3, 3)), None, 4, 3), (2, 12, 8)
    ),
    "window_product": lambda: (
        lambda q: window_product.FORWARD(q, *empty((4, 8, 2, 2)), 7, 5), (2, 3, 35, 8)
    ),
    "query_norm": lambda: (lambda q: query_norm.FORWARD(q, *empty((3,)))[0], (2, 3, 35, 8)),
    "image_attention": layer,
}  # fmt: skip


def empty(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.empty(shape) for shape in shapes]


@pytest.mark.parametrize("name", BY_SHAPE)
def test_every_operator_refuses_what_it_would_miss(name, monkeypatch):
    monkeypatch.setattr(image_attention, "fits", lambda *_: True)
    with FakeTensorMode():
        call, shape = BY_SHAPE[name]()
        x = torch.empty(shape, requires_grad=True)
        for way in (by_grad, by_grad_of_a_sum, by_backward, dual):
            with pytest.raises(NotImplementedError, match=f"softfree::{name} has no"):
                way(lambda x: call(x).square().sum(), x)


def test_no_operator_is_left_out():
    registered = {
        name.removeprefix("softfree::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("softfree::") and not name.endswith(("_backward", "_for_a_test"))
    }
    assert registered == BY_SHAPE.keys()
