"""The window product's kernels on a GPU, against the library in float64 there."""

import pytest
import torch

from softfree.layers.landmarks import ConvLandmarks
from softfree.ops.window_product import operator as product

from .gpu import DTYPES, ON_GPU, check_against_plain, plain_pytorch, poisoned_memory, spread

pytestmark = ON_GPU
# batch, heads, channels, channels of the result, window, height, width
CASES = {
    "stage 1": (8, 2, 32, 32, (8, 8), 56, 56),
    "stage 1, large batch": (256, 2, 32, 32, (8, 8), 56, 56),
    "stage 2": (8, 4, 32, 32, (4, 4), 28, 28),
    "stage 3": (8, 10, 32, 32, (2, 2), 14, 14),
    "stage 3, large batch": (256, 10, 32, 32, (2, 2), 14, 14),
    "stage 4": (8, 16, 32, 32, (1, 1), 7, 7),
    "odd": (3, 3, 20, 24, (3, 3), 29, 31),
    "window beyond the image": (2, 2, 16, 16, (8, 8), 3, 5),
    "wide": (2, 2, 64, 64, (4, 4), 27, 30),
    "sequence": (2, 2, 32, 32, (1, 16), 1, 1001),
}


def tokens(batch: int, count: int, heads: int, channels: int, dtype: torch.dtype) -> torch.Tensor:
    """Queries as a projection to queries and values leaves them."""
    both = torch.randn(batch, count, 2, heads, channels, device="cuda", dtype=dtype)
    return both[:, :, 0].transpose(1, 2).detach().requires_grad_()


def results(q, weight, size, grad):
    out = product.window_product(q, weight, size)
    return (out, *torch.autograd.grad(out, (q, weight), grad.to(out.dtype)))


@pytest.mark.parametrize("name, dtype", spread(CASES, DTYPES, in_full=("stage 1",)))
def test_result_and_gradients_are_as_exact_as_plain_pytorch(name, dtype):
    batch, heads, d_in, d_out, window, height, width = CASES[name]
    q = tokens(batch, height * width, heads, d_in, dtype)
    weight = torch.randn(d_out, d_in, *window, device="cuda").to(dtype)
    by_kernels = weight.float().requires_grad_()
    assert product._fits(q, by_kernels)
    rows, columns = product.window_grid((height, width), window)
    grad = torch.randn(batch, heads, rows * columns, d_out, device="cuda").to(dtype)
    with poisoned_memory():
        found = results(q, by_kernels, (height, width), grad)
    with plain_pytorch():
        plain = results(q, weight.detach().requires_grad_(), (height, width), grad)
        wide = [t.detach().double().requires_grad_() for t in (q, weight)]
        exact = results(*wide, (height, width), grad)
    check_against_plain(found, plain, exact)


def test_128_channels_take_the_kernels_in_half_precision_and_the_library_in_float32():
    weight = torch.randn(128, 128, 2, 2, device="cuda")
    for dtype, by_kernels in ((torch.bfloat16, True), (torch.float32, False)):
        q = tokens(2, 63, 2, 128, dtype).detach()
        assert product._fits(q, weight) == by_kernels
        plain, exact = (
            product._by_library(q.to(t), weight.to(dtype).to(t), (9, 7))
            for t in (dtype, torch.float64)
        )
        check_against_plain([product.window_product(q, weight, (9, 7))], [plain], [exact])


def test_twice_gives_the_same_bits_and_an_empty_batch_no_error():
    q = tokens(64, 56 * 56, 2, 32, torch.bfloat16)
    weight = torch.randn(32, 32, 8, 8, device="cuda", requires_grad=True)
    grad = torch.randn(64, 2, 49, 32, device="cuda")
    once, again = (results(q, weight, (56, 56), grad) for _ in range(2))
    assert all(map(torch.equal, once, again))
    out, grad_q, grad_weight = results(q[:0], weight, (56, 56), grad[:0])
    assert out.shape == (0, 2, 49, 32) and grad_q.shape == (0, 2, 56 * 56, 32)
    assert not grad_weight.any()


def test_operator_is_registered_correctly():
    q = tokens(2, 35, 2, 16, torch.float32)
    weight = torch.randn(16, 16, 2, 2, device="cuda", requires_grad=True)
    torch.library.opcheck(torch.ops.softfree.window_product, (q, weight, 7, 5))


def test_autocast_takes_half_precision():
    q = tokens(2, 35, 2, 16, torch.float32)
    weight = torch.randn(16, 16, 2, 2, device="cuda", requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        out = product.window_product(q, weight, (7, 5))
    grad_q, grad_weight = torch.autograd.grad(out.float().square().sum(), (q, weight))
    assert out.dtype == torch.bfloat16
    assert grad_q.dtype == grad_weight.dtype == torch.float32


@pytest.mark.parametrize("size", [(28, 28), (13, 30), None], ids=str)
def test_compiled_landmarks_are_one_graph_and_equal_eager(size):
    sampler = ConvLandmarks(32, 4, sequence=size is None).cuda()
    q = tokens(2, 784 if size is None else size[0] * size[1], 2, 32, torch.float32)
    compiled = torch.compile(sampler, fullgraph=True)
    found, wanted = compiled(q, size)[0], sampler(q, size)[0]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    grads = [torch.autograd.grad(t.square().sum(), (q, sampler.weight)) for t in (found, wanted)]
    for a, b in zip(*grads, strict=True):
        assert (a - b).norm() < 1e-4 * b.norm()
