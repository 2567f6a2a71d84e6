"""The norms' kernels on a GPU, against the library in float64 there."""

import pytest
import torch

from softfree.ops.norm import operator as norm

from .gpu import ON_GPU, SIXTEEN_BIT, check_against_plain, plain_pytorch, poisoned_memory, spread

pytestmark = ON_GPU
SHAPES = [(256, 3136, 64), (2560, 49, 32), (3, 7, 20), (5, 320), (64, 50, 512), (9, 1500)]
NORMS = {
    "landmark_norm": (norm.landmark_norm, 1, (0.4, 1e-5)),
    "add_norm": (norm.add_norm, 2, (1e-5,)),
}


def results(name: str, inputs: list, grad):
    function, _, settings = NORMS[name]
    out = function(*inputs, *settings)
    return (out, *torch.autograd.grad(out, inputs, grad.to(out.dtype)))


def problem(name: str, shape: tuple, dtype: torch.dtype) -> tuple[list, torch.Tensor]:
    torch.manual_seed(0)
    tokens = [torch.randn(shape, device="cuda").to(dtype) for _ in range(1 + NORMS[name][1])]
    weights = [torch.randn(shape[-1], device="cuda").to(dtype).float() for _ in range(2)]
    return [t.requires_grad_() for t in (*tokens[1:], *weights)], tokens[0]


@pytest.mark.parametrize("shape, dtype", spread(SHAPES, SIXTEEN_BIT, in_full=SHAPES[:1]))
@pytest.mark.parametrize("name", NORMS)
def test_norm_and_gradients_are_as_exact_as_plain_pytorch(name, shape, dtype):
    inputs, grad = problem(name, shape, dtype)
    assert norm._fits(inputs[0])
    with poisoned_memory():
        found = results(name, inputs, grad)
    assert all(f.dtype in (dtype, torch.float32) for f in found)
    with plain_pytorch():
        plain = results(name, [t.detach().to(dtype).requires_grad_() for t in inputs], grad)
        exact = results(name, [t.detach().double().requires_grad_() for t in inputs], grad)
    check_against_plain(found, plain, exact)


@pytest.mark.parametrize("name", NORMS)
def test_twice_gives_the_same_bits_and_an_empty_batch_no_error(name):
    inputs, grad = problem(name, (64, 784, 128), torch.bfloat16)
    once, again = (results(name, inputs, grad) for _ in range(2))
    assert all(map(torch.equal, once, again))
    tokens, weights = inputs[:-2], inputs[-2:]
    empty = [*(t[:0].detach().requires_grad_() for t in tokens), *weights]
    assert not any(t.any() for t in results(name, empty, grad[:0]))


def test_operators_are_registered_correctly():
    (x, y, *weights), _ = problem("add_norm", (3, 7, 16), torch.bfloat16)
    torch.library.opcheck(torch.ops.softfree.landmark_norm, (x, *weights, 0.5, 1e-5))
    torch.library.opcheck(torch.ops.softfree.add_norm, (x, y, *weights, 1e-5, True))
