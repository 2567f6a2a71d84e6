"""The norms' kernels on a GPU, against the library in float64 there."""

import pytest
import torch

from softfree.ops.norm import operator as norm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
HALF = (torch.float16, torch.bfloat16)
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
    weights = [torch.randn(shape[-1], device="cuda") for _ in range(2)]
    return [t.requires_grad_() for t in (*tokens[1:], *weights)], tokens[0]


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(
    "shape",
    [(256, 3136, 64), (2560, 49, 32), (3, 7, 20), (5, 320), (64, 50, 512), (9, 1500)],
    ids=str,
)
@pytest.mark.parametrize("name", NORMS)
def test_norm_and_gradients_agree_with_float64(name, shape, dtype):
    inputs, grad = problem(name, shape, dtype)
    assert norm._fits(inputs[0])
    found = results(name, inputs, grad)
    wanted = results(name, [t.detach().double().requires_grad_() for t in inputs], grad)
    for f, w in zip(found, wanted, strict=True):
        assert f.dtype in (dtype, torch.float32)
        assert (f - w).norm() < 5e-3 * w.norm()


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
