"""The MLP with a convolution on a GPU: results, gradients and memory beside plain PyTorch's."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from softfree.ops.conv_mlp import Weights, conv_mlp, operator

from .gpu import (
    ON_GPU,
    SIXTEEN_BIT,
    check_against_plain,
    plain_pytorch,
    poisoned_memory,
    spread,
)

pytestmark = ON_GPU
CASES = {  # images, height, width, channels, hidden
    "stage 1": (3, 56, 56, 64, 256),
    "stage 4": (5, 7, 7, 128, 512),
    "odd": (2, 19, 33, 24, 100),
    "one token": (3, 1, 1, 16, 24),
    "one row": (2, 1, 37, 16, 24),
    "one column": (2, 37, 1, 16, 24),
}


def inputs_of(case, dtype=torch.float32) -> tuple[list[torch.Tensor], tuple[int, int]]:
    """x and the parameters at the size that training starts from; and the image's size."""
    images, height, width, channels, hidden = case
    layers = (
        torch.nn.Linear(channels, hidden),
        torch.nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden),
        torch.nn.Linear(hidden, channels),
    )
    parameters = [p for layer in layers for p in (layer.weight, layer.bias)]
    x = torch.randn(images, height * width, channels)
    return [t.detach().cuda().to(dtype) for t in (x, *parameters)], (height, width)


@pytest.mark.parametrize("name, dtype", spread(CASES, SIXTEEN_BIT))
def test_result_and_gradients_are_as_exact_as_plain_pytorch(name, dtype):
    inputs, size = inputs_of(CASES[name], dtype)
    inputs = [t.requires_grad_() for t in inputs]
    # Strided as a transpose is: a gradient need not be contiguous.
    grad = torch.randn(*inputs[0].shape[::-1], device="cuda").permute(2, 1, 0).to(dtype)

    def results(leaves):
        out = conv_mlp(leaves[0], Weights(*leaves[1:]), size)
        return (out, *torch.autograd.grad(out, leaves, grad.to(out.dtype)))

    with poisoned_memory():
        found = results(inputs)
        with torch.no_grad():
            evaluated = conv_mlp(inputs[0], Weights(*inputs[1:]), size)
    assert found[0].grad_fn.name() in ("DifferentiableBackward", "ShownBackward")
    with plain_pytorch():
        plain = results(inputs)
        exact = results([t.detach().double().requires_grad_() for t in inputs])
    check_against_plain((*found, evaluated), (*plain, plain[0]), (*exact, exact[0]))


def test_the_operators_can_be_traced():
    inputs, size = inputs_of(CASES["odd"], torch.bfloat16)
    torch.library.opcheck(
        torch.ops.softfree.conv_mlp, (*[t.clone().requires_grad_() for t in inputs], *size)
    )
    torch.library.opcheck(torch.ops.softfree.conv_mlp_in_parts, (*inputs, *size))


def test_gradients_are_the_same_bits_twice_and_in_the_dtype_of_the_weights():
    inputs, size = inputs_of((8, 56, 56, 64, 256))
    inputs = [t.requires_grad_() for t in inputs]
    found = []
    for _ in range(2):
        with torch.autocast("cuda", torch.bfloat16):
            out = conv_mlp(inputs[0], Weights(*inputs[1:]), size)
        found.append(torch.autograd.grad(out.float().square().sum(), inputs))
    for once, again in zip(*found, strict=True):
        assert once.dtype == torch.float32
        assert torch.equal(once, again)


@pytest.mark.parametrize("compiled", [False, True])
def test_many_images_without_a_gradient_hold_a_part_of_the_hidden_layer(compiled, monkeypatch):
    monkeypatch.setattr(operator, "PART_BYTES", 2**25)
    inputs, size = inputs_of((63, 56, 56, 64, 256), torch.bfloat16)
    call = torch.compile(conv_mlp) if compiled else conv_mlp
    with torch.no_grad():
        out = call(inputs[0], Weights(*inputs[1:]), size)  # makes what calls share
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        again = call(inputs[0], Weights(*inputs[1:]), size)
    assert torch.equal(out, again)
    assert torch.cuda.max_memory_allocated() - before < out.nbytes + 2**26
    with torch.no_grad():
        few = conv_mlp(inputs[0][40:50], Weights(*inputs[1:]), size)
    assert (few - out[40:50]).norm() < 1e-2 * few.norm()


def test_no_images_have_a_result_and_gradients_of_nothing():
    inputs, size = inputs_of((0, 5, 5, 16, 24), torch.bfloat16)
    inputs = [t.requires_grad_() for t in inputs]
    out = conv_mlp(inputs[0], Weights(*inputs[1:]), size)
    assert out.shape == inputs[0].shape
    for gradient in torch.autograd.grad(out.sum(), inputs):
        assert not gradient.any()


def test_whoever_counts_sees_products_and_convolution():
    inputs, size = inputs_of(CASES["stage 4"], torch.bfloat16)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        conv_mlp(inputs[0], Weights(*inputs[1:]), size)
    assert counter.get_total_flops() == 2 * 5 * 49 * 512 * (2 * 128 + 9)
