"""The layer as one operator on a GPU, against the layer's parts in float64 there."""

import pytest
import torch

import softfree
from softfree.ops.attention.settings import AttentionSettings
from softfree.ops.shared.registration import flatten

from .cases import FLOOR
from .gpu import ON_GPU, SIXTEEN_BIT, check_against_plain, plain_pytorch, poisoned_memory, spread

pytestmark = ON_GPU
# batch, heads, channels per head, stride, side of the values' convolution, size, tokens before the image, landmarks:
# of normed queries where they are averages
CASES = {
    "stage 1": (8, 2, 32, 8, 9, (56, 56), 0),
    "stage 1, large batch": (256, 2, 32, 8, 9, (56, 56), 0),
    "stage 2": (8, 4, 32, 4, 5, (28, 28), 0),
    "stage 3": (8, 10, 32, 2, 3, (14, 14), 0),
    "stage 4": (8, 16, 32, 1, 3, (7, 7), 1),
    "odd": (3, 3, 20, 3, 5, (29, 31), 2),
    "wide": (2, 2, 64, 4, 3, (27, 30), 0),
    "many landmarks": (2, 2, 32, 2, 3, (32, 32), 0),
    "stage 1, pooled": (2, 2, 32, 8, 9, (200, 333), 0, "conv:49"),
    "stage 4, pooled": (2, 16, 32, 1, 3, (25, 42), 1, "conv:49"),
    "own, stage 1": (8, 2, 32, 8, 9, (56, 56), 0, "average:49"),
    "own, stage 1, large batch": (256, 2, 32, 8, 9, (56, 56), 0, "average:49"),
    "own, stage 1, pooled": (2, 2, 32, 8, 9, (200, 333), 0, "average:49"),
    "own, stage 2": (8, 4, 32, 4, 5, (28, 28), 0, "average:49"),
    "own, stage 3": (8, 10, 32, 2, 3, (14, 14), 0, "average:49"),
    "own, stage 4": (8, 16, 32, 1, 3, (7, 7), 0, "average:49"),
    "own, stage 4, pooled": (2, 16, 32, 1, 3, (25, 42), 1, "average:49"),
    "own, odd": (3, 3, 20, 3, 5, (29, 31), 2, "average"),
    "own, wide": (2, 2, 64, 4, 3, (27, 30), 0, "average"),
    "stage 2, no convolution": (8, 4, 32, 4, 0, (28, 28), 0),
    "own, stage 1, no convolution": (8, 2, 32, 8, 0, (56, 56), 0, "average:49"),
    "own, stage 4, pooled, no convolution": (2, 16, 32, 1, 0, (25, 42), 1, "average:49"),
    "own, normed landmarks": (8, 2, 32, 8, 9, (56, 56), 0, "average:36"),
}


def layer_of(name: str, **options):
    batch, heads, d, stride, conv, size, prefix, *landmarks = CASES[name]
    options["landmarks"] = landmarks[0] if landmarks else "conv"
    own = options["landmarks"].startswith("average")
    if own:
        options |= dict(query_norm=True, bandwidth="learned", inverse="solve")
        options["landmark_norm"] = name == "own, normed landmarks"
    torch.manual_seed(0)
    layer = softfree.SoftAttention(heads * d, heads, stride=stride, value_conv=conv, **options)
    if own:
        torch.nn.init.uniform_(layer.log_bandwidth, -0.3, 0.3)
    else:
        torch.nn.init.normal_(layer.sampler.norm.weight, 1, 0.2)
        torch.nn.init.normal_(layer.sampler.norm.bias, 0, 0.2)
    tokens = prefix + size[0] * size[1]
    x = torch.randn(batch, tokens, heads * d, device="cuda", requires_grad=True)
    return layer.cuda(), x, size, torch.randn_like(x)


def results(layer, x, size, grad):
    out = layer(x, size)
    names, parameters = zip(*layer.named_parameters(), strict=True)
    found = torch.autograd.grad(out, (x, *parameters), grad.to(out.dtype))
    return dict(zip(("out", "x", *names), (out.detach(), *found), strict=True))


@pytest.mark.parametrize(
    "name, dtype, normalize",
    spread(CASES, SIXTEEN_BIT, (True, False), in_full=("stage 1", "own, stage 1")),
)
def test_layer_and_gradients_are_as_exact_as_plain_pytorch(name, dtype, normalize):
    layer, x, size, grad = layer_of(name, normalize=normalize)
    if name == "wide":
        grad = (
            256 * grad
        )  # the landmarks' gradients are small there, below float16's normal numbers
    layer, x, grad = layer.to(dtype), x.detach().to(dtype).requires_grad_(), grad.to(dtype)
    assert layer._is_one_operator(x)
    with poisoned_memory():
        found = results(layer, x, size, grad)
    with plain_pytorch():
        plain = results(layer, x, size, grad)
        exact = results(layer.double(), x.detach().double().requires_grad_(), size, grad.double())
    if name.startswith("own"):
        # Plain PyTorch attends in float32 here, and so does it sum over queries that are not yet rounded.
        widths = [[parts.pop("log_bandwidth")] for parts in (found, plain, exact)]
        check_against_plain(*widths, times=5, floor=torch.finfo(dtype).eps)
    floor = torch.finfo(dtype).eps if name.startswith("own") else FLOOR
    check_against_plain(*(tuple(parts.values()) for parts in (found, plain, exact)), floor=floor)


@pytest.mark.parametrize("name", ["stage 1", "own, stage 1"])
def test_twice_gives_the_same_bits_and_an_empty_batch_no_error(name):
    layer, x, size, grad = layer_of(name)
    with torch.autocast("cuda", torch.bfloat16):
        once, again = (results(layer, x, size, grad) for _ in range(2))
        empty = results(layer, x[:0].detach().requires_grad_(), size, grad[:0])
    for part in once:
        assert torch.equal(once[part], again[part]), part
    assert empty["out"].shape == (0, 3136, 64)
    assert all(not empty[part].any() for part in empty)


@pytest.mark.parametrize("name", ["stage 4", "own, stage 4"])
def test_compiled_layer_is_one_graph_and_equals_eager(name):
    layer, x, size, grad = layer_of(name)
    compiled = torch.compile(layer, fullgraph=True)
    with torch.autocast("cuda", torch.bfloat16):
        eager = results(layer, x, size, grad)
        out = compiled(x, size)
    (grad_x,) = torch.autograd.grad(out, x, grad.to(out.dtype))
    assert (out - eager["out"]).norm() < 5e-3 * eager["out"].norm()
    assert (grad_x - eager["x"]).norm() < 1e-2 * eager["x"].norm()


@pytest.mark.parametrize("name", ["odd", "own, odd"])
def test_weights_get_their_gradients_in_their_own_dtype_under_autocast(name):
    layer, x, size, grad = layer_of(name)
    with torch.autocast("cuda", torch.bfloat16):
        found = results(layer, x, size, grad)
    assert all(found[part].dtype == torch.float32 for part in found if part != "out")


def test_operator_is_registered_correctly():
    def weights(*shapes: tuple) -> list[torch.Tensor]:
        return [torch.randn(s, device="cuda").bfloat16().requires_grad_() for s in shapes]

    first, last = weights((2, 30, 32), (64, 32), (64,)), weights((2, 1, 3, 3), (32, 32), (32,))
    papers = [None, *weights((16, 16, 2, 2), (16,), (16,))]
    own = [torch.rand(2, device="cuda", requires_grad=True), None, None, None]
    settings = flatten(6, 5, 6, 5, 2, 2, 1e-5, False, AttentionSettings(0.25), True)
    for sampler in (papers, own):
        for pooling in (None, torch.rand(4, 9, device="cuda")):
            arguments = (*first, *sampler, *last, pooling, *settings)
            torch.library.opcheck(torch.ops.softfree.image_attention, arguments)


def test_our_own_layer_keeps_no_more_than_softpp_beyond_a_number_per_query():
    """In bytes, what the forward pass leaves for the gradient."""

    def asked_for() -> int:  # what is allocated is up to a MiB more, by what was free
        return torch.cuda.memory_stats()["requested_bytes.all.current"]

    held = {}
    for name in ("stage 1, large batch", "own, stage 1, large batch"):
        layer, x, size, _ = layer_of(name)
        with torch.autocast("cuda", torch.bfloat16):
            layer(x, size)  # makes what calls share
            before = asked_for()
            out = layer(x, size)
            held[name] = asked_for() - before
        del out, layer
    papers, own = held.values()
    assert own <= papers + 256 * 2 * 3136 * 4 * 1.02
