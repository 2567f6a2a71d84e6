"""The regularised inverse against its closed form, its gradient, its start values and its errors."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import softfree
from softfree.ops.attention import inverse
from softfree.ops.attention.inverse import factored_newton, newton_iterate
from softfree.ops.attention.reference import gaussian_kernel
from softfree.ops.attention.settings import InverseSettings
from softfree.ops.shared.precision import full_precision

from .problems import hard_landmarks, kernel_matrix, relative_error

STARTS = ("scaled", "halving")


def naive_start(a: Tensor, start: str, ridge: float = 0.0) -> float:
    """The start value of one matrix by the loop that defines it."""
    norm = a.abs().sum(0).max().item()
    if start == "scaled":
        return 1.8 / norm**2
    b = a + ridge * torch.eye(len(a), dtype=a.dtype)
    alpha = 2 / norm**2
    for _ in range(10):
        if (torch.eye(len(a), dtype=a.dtype) - alpha * b @ b).abs().sum(0).max() <= 1.01:
            break
        alpha /= 2
    return min(alpha, 1.8 / norm**2)


def closed_form(a: Tensor, start: str, iterations: int = 20, ridge: float = 0.0) -> Tensor:
    """Eigenvalues ``(1 - (1 - alpha lam^2)^(2^T)) / lam``, 0 at 0, for (batch, m, m)."""
    inverses = []
    for matrix in a.double():
        lam, vectors = torch.linalg.eigh(matrix + ridge * torch.eye(len(matrix), dtype=a.dtype))
        x = naive_start(matrix, start, ridge) * lam.square()
        # (1 - x)^(2^T) through its logarithm: no digits are lost at small x.
        power = 2.0**iterations * torch.where(x < 1, torch.log1p(-x), (x - 1).abs().log())
        values = torch.where(lam == 0, 0.0, -torch.expm1(power) / lam)
        inverses.append(vectors * values @ vectors.mT)
    return torch.stack(inverses)


def edge_matrices() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    points = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    repeated = points[[0, 0, 1, 2, 3, 3, 3, 4]]
    ones = [torch.ones(size, size, dtype=torch.float64) for size in (1, 3, 5)]
    return {
        "identity": torch.eye(6, dtype=torch.float64),
        "all ones": torch.ones(49, 49, dtype=torch.float64),
        "blocks of ones": torch.block_diag(*ones),
        "blocks": torch.block_diag(kernel_matrix(4, 3)[0], kernel_matrix(9, 5, seed=1)[0]),
        "duplicated landmarks": torch.exp(-0.5 * torch.cdist(repeated, repeated).square()),
        "one landmark": torch.ones(1, 1, dtype=torch.float64),
    }


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("ridge", [0.0, 0.01])
@pytest.mark.parametrize(
    ("m", "d", "spread"),
    [(1, 4, 1.0), (7, 8, 1.0), (49, 32, 1.0), (49, 32, 0.5), (100, 32, 0.7)],
)
def test_matches_the_closed_form_where_well_conditioned(m, d, spread, ridge, start):
    a = kernel_matrix(m, d, batch=3, spread=spread)
    assert torch.linalg.cond(a).max() < 1e4
    y = softfree.newton_inverse(a, start=start, ridge=ridge)
    assert relative_error(y, closed_form(a, start, ridge=ridge)) < 1e-9


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("ridge", [0.0, 0.01])
@pytest.mark.parametrize(
    ("m", "d", "spread"), [(49, 2, 1.0), (49, 32, 0.02), (300, 1, 3.0), (20, 8, 1e-4)]
)
def test_matches_the_closed_form_at_any_condition(m, d, spread, ridge, start):
    a = kernel_matrix(m, d, batch=2, spread=spread)
    assert torch.linalg.cond(a).min() > 1e4
    y = softfree.newton_inverse(a, start=start, ridge=ridge)
    assert relative_error(y, closed_form(a, start, ridge=ridge)) < 1e-4


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("iterations", [0, 1, 2, 6, 30])
def test_matches_the_closed_form_after_any_number_of_steps(iterations, start):
    a = kernel_matrix(20, 8, batch=2, spread=0.8)
    expected = closed_form(a, start, iterations)
    if iterations == 0:
        alphas = torch.tensor([naive_start(matrix, start) for matrix in a], dtype=a.dtype)
        expected = alphas[:, None, None] * a
    y = softfree.newton_inverse(a, iterations, start=start)
    assert relative_error(y, expected) < 1e-9


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("name", edge_matrices())
def test_edge_matrices_are_inverted(name, start):
    a = edge_matrices()[name]
    y = softfree.newton_inverse(a, start=start)
    assert relative_error(y, closed_form(a[None], start)[0]) < 1e-9
    if name != "duplicated landmarks":  # there an eigenvalue is small enough to be cut off
        assert relative_error(y, torch.linalg.pinv(a, hermitian=True)) < 1e-8


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("ridge", [0.1, 0.5, 3.0])
@pytest.mark.parametrize("name", edge_matrices())
def test_a_large_ridge_still_converges(name, ridge, start):
    a = edge_matrices()[name]
    y = softfree.newton_inverse(a, iterations=40, start=start, ridge=ridge)
    b = a + ridge * torch.eye(len(a), dtype=a.dtype)
    assert relative_error(y, torch.linalg.inv(b)) < 1e-9


@pytest.mark.parametrize("start", STARTS)
def test_each_matrix_has_its_own_start(start):
    size = 6
    many = torch.stack(
        [
            torch.eye(size, dtype=torch.float64),
            torch.ones(size, size, dtype=torch.float64),
            kernel_matrix(size, 2, spread=0.1)[0],
            kernel_matrix(size, 32, spread=2.0)[0],
        ]
    )
    together = softfree.newton_inverse(many, iterations=5, start=start)
    alone = torch.stack([softfree.newton_inverse(a, iterations=5, start=start) for a in many])
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)


def test_leading_dimensions_are_free():
    a = kernel_matrix(5, 4, batch=6)
    y = softfree.newton_inverse(a)
    assert torch.equal(softfree.newton_inverse(a.view(2, 3, 5, 5)), y.view(2, 3, 5, 5))
    assert softfree.newton_inverse(a[:0]).shape == (0, 5, 5)


@given(
    m=st.integers(1, 40),
    d=st.integers(1, 32),
    spread=st.floats(0.01, 4.0),
    seed=st.integers(0, 10_000),
)
def test_halving_start_agrees_with_the_loop_that_defines_it(m, d, spread, seed):
    a = kernel_matrix(m, d, batch=8, spread=spread, seed=seed)
    start = softfree.newton_inverse(a, iterations=0, start="halving")[:, 0, 0] / a[:, 0, 0]
    expected = torch.tensor([naive_start(matrix, "halving") for matrix in a], dtype=a.dtype)
    torch.testing.assert_close(start, expected, rtol=1e-12, atol=0)


def test_halving_start_is_right_for_few_and_for_many_halvings():
    counts = set()
    for seed, spread in enumerate(torch.linspace(0.05, 3, 60).tolist()):
        for size in (4, 49, 200):
            a = kernel_matrix(size, 16, spread=spread, seed=seed)[0]
            got = softfree.newton_inverse(a, iterations=0, start="halving")[0, 0].item()
            assert got == pytest.approx(naive_start(a, "halving"), rel=1e-12)
            counts.add(round(math.log2(2 / a.abs().sum(0).max().item() ** 2 / got)))
    assert counts >= {0, 5, 6, 7, 8}


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("ridge", [0.0, 0.01])
@pytest.mark.parametrize("m", [1, 2, 7, 16, 49, 100, 256])
def test_the_factored_form_is_within_5e_5_of_twenty_plain_steps(m, ridge, start):
    settings = InverseSettings("newton", 20, start, ridge)
    conditions = []
    for kind, landmarks in hard_landmarks(m).items():
        landmarks = landmarks.float().double()
        a = gaussian_kernel(landmarks, landmarks, 1 / math.sqrt(32)).float()[None]
        conditions.append(torch.linalg.cond(a.double()).item())
        expected, got = newton_iterate(a.double(), settings), factored_newton(a, settings)
        assert got.dtype == torch.float32
        assert relative_error(got, expected) < 5e-5, kind
        generator = torch.Generator().manual_seed(0)
        noise, v = torch.randn(2, 300, 32, generator=generator, dtype=torch.float64)
        tokens = landmarks[torch.arange(300) % m] + 0.3 * noise
        r = gaussian_kernel(tokens, landmarks, 1 / math.sqrt(32))
        for d in (1.0, a[0].double().sum(-1, keepdim=True).rsqrt()):  # SOFT and SOFT++
            x, exact = (r @ (d * (y[0].double() @ (d * (r.mT @ v)))) for y in (got, expected))
            assert relative_error(x, exact) < 5e-5, kind
    assert m == 1 or max(conditions) > 1e12


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("iterations", [14, 17, 25, 40])
def test_the_factored_form_is_as_near_after_any_number_of_steps_that_it_takes(iterations, start):
    settings = InverseSettings("newton", iterations, start)
    for kind, landmarks in hard_landmarks(49).items():
        a = gaussian_kernel(landmarks.float(), landmarks.float(), 1 / math.sqrt(32))[None]
        expected = newton_iterate(a.double(), settings)
        plain = relative_error(newton_iterate(a, settings), expected)
        assert relative_error(factored_newton(a, settings), expected) < max(5e-5, 2 * plain), kind


def test_the_weights_of_the_factored_form_make_an_exponential():
    x = torch.logspace(-6, 10, 20_000, dtype=torch.float64)
    part = x / 2**inverse.SQUARINGS
    g = 1 / (1 + inverse.POLE * part)
    first, second, third = inverse.WEIGHTS
    residual = 1 - part * g * (first + second * g + third * g**2)
    assert sum(inverse.WEIGHTS) == pytest.approx(1, abs=1e-12)
    assert (residual ** (2**inverse.SQUARINGS) - torch.exp(-x)).abs().max() < 8e-7


@pytest.mark.parametrize(
    ("iterations", "dtype"),
    [(0, torch.float32), (13, torch.float32), (41, torch.float32), (20, torch.float64)],
)
def test_other_numbers_of_steps_and_float64_take_plain_steps(iterations, dtype):
    a = kernel_matrix(9, 8, batch=2).to(dtype)
    settings = InverseSettings("newton", iterations)
    assert torch.equal(factored_newton(a, settings), newton_iterate(a, settings))


def test_a_matrix_of_nan_spoils_no_other_in_the_factored_form():
    a = kernel_matrix(9, 8, batch=3).float()
    expected = factored_newton(a, InverseSettings())
    a[1] = math.nan
    got = factored_newton(a, InverseSettings())
    assert torch.equal(got[[0, 2]], expected[[0, 2]])
    assert got[1].isnan().all()
    assert factored_newton(a[:0], InverseSettings()).shape == (0, 9, 9)


@pytest.mark.parametrize("start", STARTS)
def test_gradient_is_equation_12_whatever_the_condition(start):
    a = kernel_matrix(12, 2, batch=2, spread=0.5).requires_grad_()
    y = softfree.newton_inverse(a, start=start, ridge=0.01)
    grad_y = torch.randn_like(y)
    (grad_a,) = torch.autograd.grad(y, a, grad_y)
    y = y.detach()
    torch.testing.assert_close(grad_a, -(y.mT @ grad_y @ y.mT), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("ridge", [0.0, 0.01, 0.5])
def test_gradient_is_that_of_an_inverse_where_well_conditioned(start, ridge):
    a = kernel_matrix(5, 8, batch=2, spread=1.5).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda t: softfree.newton_inverse(t, start=start, ridge=ridge), a
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    a = kernel_matrix(30, 8, batch=2).to(dtype).requires_grad_()
    y = softfree.newton_inverse(a)
    assert y.dtype == dtype
    assert torch.equal(y, softfree.newton_inverse(a.float()).to(dtype))
    grad_y = torch.randn_like(y)
    (grad_a,) = torch.autograd.grad(y, a, grad_y)
    assert grad_a.dtype == dtype
    wide = a.detach().float().requires_grad_()
    (expected,) = torch.autograd.grad(softfree.newton_inverse(wide), wide, grad_y.float())
    assert torch.equal(grad_a, expected.to(dtype))


def test_autocast_leaves_inverse_and_gradient_in_float32():
    a = kernel_matrix(30, 8).float().requires_grad_()
    grad_y = torch.randn(1, 30, 30)
    y = softfree.newton_inverse(a)
    (grad_a,) = torch.autograd.grad(y, a, grad_y)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast_y = softfree.newton_inverse(a)
        (cast_grad,) = torch.autograd.grad(cast_y, a, grad_y)
        residuals = softfree.newton_residuals(a)
    assert torch.equal(cast_y, y)
    assert torch.equal(cast_grad, grad_a)
    assert residuals[0, -1] < 1e-5


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("ridge", [0.0, 0.01, 0.5])
def test_residuals_fall_at_every_step_and_end_small(start, ridge):
    a = kernel_matrix(49, 32, batch=3, spread=0.8)
    assert torch.linalg.cond(a).max() < 1e4
    residuals = softfree.newton_residuals(a, start=start, ridge=ridge)
    assert residuals.shape == (3, 21)
    assert (residuals[:, 1:] <= residuals[:, :-1] + 1e-12).all()
    assert (residuals[:, 1:4] < residuals[:, :3]).all()
    assert (residuals[:, -1] < 1e-2).all()


def test_residuals_are_those_of_the_inverse():
    a = kernel_matrix(12, 4, batch=2, spread=0.8)
    residuals = softfree.newton_residuals(a, 6, start="halving", ridge=0.01)
    b = a + 0.01 * torch.eye(12, dtype=a.dtype)
    for step in range(7):
        y = softfree.newton_inverse(a, step, start="halving", ridge=0.01)
        expected = torch.linalg.matrix_norm(b @ y @ b - b, 2) / torch.linalg.matrix_norm(b, 2)
        torch.testing.assert_close(residuals[:, step], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("function", [softfree.newton_inverse, softfree.newton_residuals])
@pytest.mark.parametrize(
    ("arguments", "settings", "error", "message"),
    [
        (([[1.0]],), {}, TypeError, "a must be a tensor, got list"),
        ((torch.ones(3),), {}, ValueError, r"a must have shape \(\.\.\., m, m\).*got \(3,\)"),
        ((torch.ones(2, 3),), {}, ValueError, r"a must have shape.*got \(2, 3\)"),
        ((torch.ones(2, 0, 0),), {}, ValueError, r"a must have shape.*got \(2, 0, 0\)"),
        ((torch.ones(2, 2).int(),), {}, TypeError, "a must be a floating-point.*torch.int32"),
        ((torch.eye(2), -1), {}, ValueError, "iterations must be an integer >= 0, got -1"),
        ((torch.eye(2), 2.5), {}, ValueError, "iterations must be an integer >= 0, got 2.5"),
        ((torch.eye(2), True), {}, ValueError, "iterations must be an integer >= 0, got True"),
        ((torch.eye(2),), {"start": "papers"}, ValueError, "start must be .*'halving', got 'pap"),
        ((torch.eye(2),), {"ridge": -0.1}, ValueError, "ridge must be .* >= 0, got -0.1"),
        ((torch.eye(2),), {"ridge": math.nan}, ValueError, "ridge must be .* >= 0, got nan"),
        ((torch.eye(2),), {"ridge": math.inf}, ValueError, "ridge must be .* >= 0, got inf"),
        ((torch.eye(2),), {"ridge": "0.01"}, (TypeError, ValueError), "ridge must be .*'0.01'"),
    ],
)
def test_bad_arguments_are_named(function, arguments, settings, error, message):
    with pytest.raises(error, match=message):
        function(*arguments, **settings)


def test_full_precision_holds_inside_and_leaves_the_setting_as_it_was():
    gpu = torch.device("cuda")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with full_precision(gpu), full_precision(gpu):
            assert torch.backends.cuda.matmul.fp32_precision == "ieee"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
