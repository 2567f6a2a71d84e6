"""The kernels of queries' norm on a GPU, against the library in float64 there."""

import pytest
import torch

from softfree.ops.query_norm import operator as query_norm

from .gpu import ON_GPU, SIXTEEN_BIT, check_against_plain, plain_pytorch, poisoned_memory, spread

pytestmark = ON_GPU
SHAPES = [(256, 2, 3136, 32), (64, 16, 49, 32), (3, 5, 7, 20), (2, 3, 1000, 128), (1, 1, 1, 8)]


def problem(shape: tuple, dtype: torch.dtype) -> tuple[list, torch.Tensor]:
    torch.manual_seed(0)
    batch, heads, n, d = shape
    qv, grad = torch.randn(2, batch, n, 2 * heads * d, device="cuda").to(dtype)
    q, grad = (t.unflatten(2, (2, heads, d))[:, :, 0].transpose(1, 2) for t in (qv, grad))
    return [q.requires_grad_(), torch.rand(heads, device="cuda").add_(0.5).requires_grad_()], grad


def results(inputs: list, grad: torch.Tensor):
    out = query_norm.query_norm(*inputs)
    return (out, *torch.autograd.grad(out, inputs, grad.to(out.dtype)))


@pytest.mark.parametrize("shape, dtype", spread(SHAPES, SIXTEEN_BIT, in_full=SHAPES[:1]))
def test_norm_and_gradients_are_as_exact_as_plain_pytorch(shape, dtype):
    inputs, grad = problem(shape, dtype)
    assert query_norm._fits(inputs[0])
    with poisoned_memory():
        found = results(inputs, grad)
    with plain_pytorch():
        plain = results([t.detach().requires_grad_() for t in inputs], grad)
        exact = results([t.detach().double().requires_grad_() for t in inputs], grad.double())
    check_against_plain(found[:2], plain[:2], exact[:2])
    # That of the scale is a sum over what was written, already rounded: the queries themselves are not kept.
    rounding = torch.finfo(dtype).eps
    check_against_plain(found[2:], plain[2:], exact[2:], floor=rounding)


def test_twice_gives_the_same_bits_and_an_empty_batch_no_error():
    inputs, grad = problem((64, 4, 784, 32), torch.bfloat16)
    assert all(map(torch.equal, results(inputs, grad), results(inputs, grad)))
    empty = [inputs[0][:0].detach().requires_grad_(), inputs[1]]
    assert not any(t.any() for t in results(empty, grad[:0]))


def test_operator_is_registered_correctly():
    inputs, _ = problem((2, 3, 7, 16), torch.bfloat16)
    torch.library.opcheck(torch.ops.softfree.query_norm, tuple(inputs))
