"""The solve: its closed form, its exact gradient, its accuracy on matrices that are hard to invert."""

import math

import pytest
import torch

import softfree
from softfree.ops.attention.reference import gaussian_kernel
from softfree.ops.attention.settings import LEAST_SOLVE_RIDGE, SOLVE_RIDGE
from softfree.ops.attention.solve import inverse_factor, iterated_solve, solve, solve_backward
from tests.ops.attention.problems import hard_landmarks, kernel_matrix, relative_error

SETTINGS = [(1, 0.01), (2, 0.1), (2, LEAST_SOLVE_RIDGE)]


def kernel_of(landmarks):
    return gaussian_kernel(landmarks, landmarks, 1 / math.sqrt(landmarks.shape[-1]))


@pytest.mark.parametrize(("order", "ridge"), SETTINGS)
def test_the_solve_is_the_filter_of_its_spectrum(order, ridge):
    a = kernel_matrix(11, 8, batch=2)
    x = torch.randn(2, 11, 5, dtype=torch.float64)
    values, vectors = torch.linalg.eigh(a)
    kept = softfree.solve_spectrum(values, ridge=ridge, order=order)
    expected = vectors * kept[:, None, :] @ (vectors.mT @ x)
    torch.testing.assert_close(softfree.ridge_solve(a, x, ridge=ridge, order=order), expected)


def test_order_2_is_nearer_the_inverse_at_the_same_ridge():
    a = kernel_matrix(9, 8)
    first, second = (softfree.solve_residual(a, ridge=0.05, order=order) for order in (1, 2))
    assert second < first


def test_the_residual_is_that_of_its_worst_eigenvalue():
    a = kernel_matrix(9, 8)
    values = torch.linalg.eigvalsh(a)
    share = values * softfree.solve_spectrum(values, ridge=0.1)
    expected = ((1 - share) * values).amax(-1) / values.amax(-1)
    torch.testing.assert_close(softfree.solve_residual(a, ridge=0.1), expected)


@pytest.mark.parametrize("kind", ["random", "duplicates", "ones"])
@pytest.mark.parametrize(("order", "ridge"), SETTINGS[:2])
def test_the_gradient_is_exact(order, ridge, kind):
    a = kernel_of(hard_landmarks(5, 3)[kind]).requires_grad_()
    x = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)

    def attend(a, x):
        return softfree.ridge_solve((a + a.mT) / 2, x, ridge=ridge, order=order)

    assert torch.autograd.gradcheck(attend, (a, x))


@pytest.mark.parametrize(("order", "ridge"), SETTINGS[:2])
def test_the_thin_backward_is_autograd_s(order, ridge):
    a = kernel_matrix(7, 8, batch=2).requires_grad_()
    x = torch.randn(2, 7, 3, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(2, 7, 3, dtype=torch.float64)
    y = softfree.ridge_solve(a, x, ridge=ridge, order=order)
    of_a, of_x = torch.autograd.grad(y, (a, x), grad)
    factor = inverse_factor(a.detach(), ridge)
    right, left, grad_a = solve_backward(factor, x.detach(), grad, ridge, order)
    torch.testing.assert_close(right, y.detach())
    torch.testing.assert_close(left, of_x)
    # Autograd's gradient of a symmetric matrix is symmetric; the formula's is not.
    torch.testing.assert_close(grad_a + grad_a.mT, of_a + of_a.mT)


@pytest.mark.parametrize("m", [1, 2, 7, 16, 17, 49, 64, 65, 128, 256])
@pytest.mark.parametrize(("order", "ridge"), SETTINGS[:2])
def test_float32_keeps_its_digits_on_matrices_that_are_hard_to_invert(m, order, ridge):
    for kind, landmarks in hard_landmarks(m).items():
        a = kernel_of(landmarks.float().double())
        tokens = landmarks[torch.arange(300) % m] + 0.3 * torch.randn(300, 32).double()
        r = gaussian_kernel(tokens, landmarks, 1 / math.sqrt(32))
        u = r.mT @ torch.randn(300, 32, dtype=torch.float64)
        expected = r @ softfree.ridge_solve(a, u, ridge=ridge, order=order)
        factor = inverse_factor(a.float(), ridge)
        got = r @ solve(factor, u.float(), ridge, order).double()
        assert relative_error(got, expected) < 1e-5, kind


@pytest.mark.parametrize("m", [1, 7, 49, 256, 1000])
@pytest.mark.parametrize(("order", "ridge"), [*SETTINGS, (1, 1e-3)])
def test_the_solve_for_exporters_is_the_same_at_every_ridge(m, order, ridge):
    for kind in ("ones", "clusters", "line", "random"):
        landmarks = hard_landmarks(m)[kind]
        a = kernel_of(landmarks.float().double())
        tokens = landmarks[torch.arange(300) % m] + 0.3 * torch.randn(300, 32).double()
        r = gaussian_kernel(tokens, landmarks, 1 / math.sqrt(32))
        u = r.mT @ torch.randn(300, 32, dtype=torch.float64)
        expected = r @ softfree.ridge_solve(a, u, ridge=ridge, order=order)
        exported = iterated_solve(a.float()[None], u.float()[None], ridge, order)
        assert exported.dtype == torch.float32
        assert relative_error(r @ exported[0].double(), expected) < 1e-4, kind


def test_the_residual_is_the_same_under_autocast():
    a = kernel_matrix(5, 8).float()
    expected = softfree.solve_residual(a)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(softfree.solve_residual(a), expected)


def test_the_ridge_of_an_order_is_its_own_if_none_is_given():
    a, x = kernel_matrix(5, 8), torch.randn(1, 5, 2, dtype=torch.float64)
    for order, ridge in SOLVE_RIDGE.items():
        expected = softfree.ridge_solve(a, x, ridge=ridge, order=order)
        torch.testing.assert_close(softfree.ridge_solve(a, x, order=order), expected)


def test_half_precision_is_computed_in_float32():
    a, x = kernel_matrix(5, 8).bfloat16(), torch.randn(1, 5, 2).bfloat16()
    got = softfree.ridge_solve(a, x)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, softfree.ridge_solve(a.float(), x.float()).bfloat16())


@pytest.mark.parametrize("ridge", [0, -1, 1e-5, math.inf, math.nan, "large"])
def test_a_ridge_that_float32_could_not_factor_with_is_refused(ridge):
    with pytest.raises(ValueError, match=r"ridge must be (a finite number|at least 0.0001)"):
        softfree.ridge_solve(torch.eye(3), torch.eye(3), ridge=ridge)


@pytest.mark.parametrize("order", [0, 3, 1.5, True, None])
def test_other_orders_are_refused(order):
    with pytest.raises(ValueError, match="order must be 1 or 2"):
        softfree.ridge_solve(torch.eye(3), torch.eye(3), order=order, ridge=0.1)


def test_values_that_are_whole_numbers_are_refused():
    with pytest.raises(TypeError, match="x must be a floating-point tensor, got torch.int64"):
        softfree.ridge_solve(torch.eye(3), torch.ones(3, 2, dtype=torch.int64))


def test_values_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"x must have shape \(..., 3, channels\), got \(2, 3\)"):
        softfree.ridge_solve(torch.eye(3), torch.ones(2, 3))
