"""The definition against formulas written out here, and its two gradients."""

import math

import pytest
import torch
from torch import Tensor

import softfree
from softfree.ops.attention import reference
from softfree.ops.attention.settings import AttentionSettings, Inputs, InverseSettings

from .problems import Problem, attend, random_problem, relative_error, solve


def kappa(x: Tensor, y: Tensor, scale: float) -> Tensor:
    rows = []
    for point in x:
        rows.append(torch.stack([torch.exp(-0.5 * scale * ((point - o) ** 2).sum()) for o in y]))
    return torch.stack(rows)


def naive_attention(problem: Problem, scale: float, normalize: bool, ridge: float = 0.0) -> Tensor:
    """Eq. 9 and Eq. 17 sample by sample, head by head, with an exact inverse."""
    keys = problem.q if problem.k is None else problem.k
    out = problem.q.new_zeros(*problem.q.shape[:3], problem.v.shape[3])
    for b in range(problem.q.shape[0]):
        kept = torch.ones(keys.shape[2], dtype=torch.bool)
        if problem.key_mask is not None:
            kept = problem.key_mask[b]
        used = torch.ones(problem.landmarks.shape[2], dtype=torch.bool)
        if problem.landmark_mask is not None:
            used = problem.landmark_mask[b]
        for h in range(problem.q.shape[1]):
            points = problem.landmarks[b, h][used]
            a = kappa(points, points, scale)
            y = torch.linalg.inv(a + ridge * torch.eye(len(a), dtype=a.dtype))
            if normalize:
                degree = a.sum(1)
                y = torch.diag(degree**-0.5) @ y @ torch.diag(degree**-0.5)
            p = kappa(points, keys[b, h][kept], scale)
            r = kappa(problem.q[b, h], points, scale)
            out[b, h] = r @ y @ p @ problem.v[b, h][kept]
    return out


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("ridge", [0.0, 0.01])
@pytest.mark.parametrize(
    "shape",
    [
        {"n": 1, "m": 1, "d": 1},
        {"n": 9, "m": 5, "d": 8},
        {"n": 6, "m": 3, "d": 8, "n_k": 11, "d_v": 5},
        {"n": 9, "m": 5, "d": 8, "masked": True, "landmarks_masked": True},
    ],
)
def test_is_the_formula_of_the_papers(shape, ridge, normalize):
    problem = random_problem(**shape, spread=1.5)
    scale = 1 / math.sqrt(shape["d"])
    expected = naive_attention(problem, scale, normalize, ridge)
    got = attend(problem, normalize=normalize, ridge=ridge)
    assert relative_error(got, expected) < 1e-9


def test_soft_is_exact_gaussian_attention_when_every_token_is_a_landmark():
    problem = random_problem(n=10, d=6, spread=1.5)
    out = softfree.soft_attention(
        problem.q,
        None,
        problem.v,
        problem.q,
        scale=0.7,
        normalize=False,
        iterations=40,
        backend="reference",
    )
    for b in range(2):
        for h in range(2):
            exact = kappa(problem.q[b, h], problem.q[b, h], 0.7) @ problem.v[b, h]
            assert relative_error(out[b, h], exact) < 1e-9


def test_equal_points_have_similarity_one_and_none_has_more():
    x = 1e3 + torch.randn(50, 7)
    kernel = reference.gaussian_kernel(x, x, 1.0)
    assert (kernel.diagonal() == 1).all()
    assert (kernel >= 0).all() and (kernel <= 1).all()
    assert torch.equal(kernel, kernel.mT)


def unrolled(problem: Problem, start: str = "halving", normalize: bool = True):
    def function(q, k, v, landmarks):
        return reference.soft_attention(
            Inputs(q, k, v, landmarks, problem.key_mask, problem.landmark_mask),
            AttentionSettings(0.5, normalize, InverseSettings(start=start)),
            unrolled_gradient=True,
        )

    return function


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("start", ["scaled", "halving"])
@pytest.mark.parametrize(
    ("spread", "masked"), [(1.0, False), (0.05, True)], ids=["well-conditioned", "ill-conditioned"]
)
def test_unrolled_gradient_is_that_of_the_function(spread, masked, start, normalize):
    problem = random_problem(
        n=2, m=4, d=2, n_k=3, d_v=1, spread=spread, masked=masked, batch=1, heads=1
    )
    a = reference.gaussian_kernel(problem.landmarks, problem.landmarks, 0.5)
    assert (torch.linalg.cond(a).item() > 1e4) == (spread < 1)
    inputs = problem.map(lambda t: t.requires_grad_())
    assert torch.autograd.gradcheck(
        unrolled(problem, start=start, normalize=normalize),
        (inputs.q, inputs.k, inputs.v, inputs.landmarks),
    )


def test_both_gradients_agree_where_the_inverse_is_exact_and_only_there():
    differences = []
    for spread in (1.5, 0.2):
        problem = random_problem(n=6, m=5, d=3, n_k=7, spread=spread)
        inputs = problem.map(lambda t: t.requires_grad_())
        arguments = (inputs.q, inputs.k, inputs.v, inputs.landmarks)
        out = unrolled(problem)(*arguments)
        (grad,) = torch.autograd.grad(out, inputs.landmarks, problem.grad.detach())
        differences.append(relative_error(solve(problem, scale=0.5)["landmarks"], grad))
    assert differences[0] < 1e-8
    assert differences[1] > 1e-3
