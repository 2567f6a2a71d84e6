"""The operator with ``inverse="solve"``: every backend against the definition, and an exact gradient."""

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import softfree
from tests.ops.attention.problems import (
    BACKENDS,
    attend,
    errors,
    hard_landmarks,
    random_problem,
    relative_error,
    solve,
)

CASES = {
    "plain": dict(),
    "one token": dict(n=1),
    "one landmark": dict(m=1),
    "cross-attention": dict(n=11, n_k=23, d_v=5),
    "masks": dict(masked=True, landmarks_masked=True),
    "masked cross-attention": dict(n_k=23, masked=True, landmarks_masked=True),
    "smooth tokens": dict(n=64, m=16, smooth=True),
    "many landmarks": dict(n=40, m=70, smooth=True, batch=1),
    "many tokens": dict(n=1100, m=5, batch=1, heads=1),
}
VARIANTS = [
    dict(normalize=True),
    dict(normalize=False, order=1),
    dict(normalize=True, order=2, ridge=1e-3),
]


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "reference"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_backend_computes_the_definition(backend, case, variant):
    problem = random_problem(**CASES[case])
    settings = dict(inverse="solve", **variant)
    if backend == "torch":
        expected = solve(problem, "reference", **settings)
        assert max(errors(solve(problem, "torch", **settings), expected).values()) < 1e-10
    in_float32 = errors(
        solve(problem.rounded(torch.float32), backend, torch.float32, **settings),
        solve(problem.rounded(torch.float32), "reference", **settings),
    )
    assert in_float32["out"] < 1e-5
    assert max(in_float32.values()) < 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("m", [1, 7, 49, 256])
def test_float32_holds_on_hard_landmarks_and_is_never_nan(backend, m):
    problem = random_problem(n=60, m=m, d=32, batch=1, heads=1)
    for kind, landmarks in hard_landmarks(m).items():
        hard = dataclasses.replace(problem, landmarks=landmarks[None, None])
        hard = hard.rounded(torch.float32)
        got = solve(hard, backend, torch.float32, inverse="solve")
        expected = solve(hard, inverse="solve")
        plain = errors(solve(hard, "reference", torch.float32, inverse="solve"), expected)
        for part, error in errors(got, expected).items():
            assert error < max(1e-5 if part == "out" else 1e-4, 2 * plain[part]), (kind, part)


def test_the_definition_is_the_formula_with_the_inverse_written_out():
    problem = random_problem(n=12, m=5, batch=1, heads=1)
    kernel = softfree.ops.attention.reference.gaussian_kernel
    scale = problem.q.shape[-1] ** -0.5
    a = kernel(problem.landmarks, problem.landmarks, scale)
    r = kernel(problem.q, problem.landmarks, scale)
    g = torch.linalg.inv(a + 0.1 * torch.eye(5, dtype=a.dtype))
    d = torch.diag_embed(a.sum(-1).rsqrt())
    expected = r @ d @ (g + 0.1 * g @ g) @ d @ r.mT @ problem.v
    torch.testing.assert_close(attend(problem, inverse="solve"), expected)
    expected = r @ torch.linalg.inv(a + 0.01 * torch.eye(5, dtype=a.dtype)) @ r.mT @ problem.v
    got = attend(problem, inverse="solve", order=1, normalize=False)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("kind", ["apart", "coinciding"])
def test_the_gradient_is_exact_in_every_argument(backend, order, kind):
    problem = random_problem(n=4, m=4, d=3, n_k=5, batch=1, heads=1)
    landmarks = problem.landmarks
    if kind == "coinciding":
        landmarks = landmarks[:, :, :2].repeat(1, 1, 2, 1)
    inputs = (problem.q, problem.k, problem.v, landmarks)
    inputs = tuple(t.detach().requires_grad_() for t in inputs)

    def call(*tensors):
        return softfree.soft_attention(*tensors, inverse="solve", order=order, backend=backend)

    assert torch.autograd.gradcheck(call, inputs)
    alone = (inputs[0], inputs[2].detach()[:, :, :4].requires_grad_(), inputs[3])
    assert torch.autograd.gradcheck(lambda q, v, marks: call(q, None, v, marks), alone)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_as_exact_as_its_inputs(dtype, backend):
    problem = random_problem(n=64, m=16, d=32, smooth=True).rounded(dtype)
    got = attend(problem.map(lambda t: t.to(dtype)), backend, inverse="solve")
    assert got.dtype == dtype
    limit = 2 * torch.finfo(dtype).eps
    assert relative_error(got, attend(problem, inverse="solve")) < limit


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sample_does_not_depend_on_its_batch(backend):
    problem = random_problem(n=33, m=9, batch=3)
    whole = attend(problem, backend, inverse="solve")
    one = attend(problem.map(lambda t: t[1:2]), backend, inverse="solve")
    assert relative_error(whole[1:2], one) < 1e-13


@pytest.mark.parametrize("n", [9, 1100])
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "reference"])
def test_the_registered_operator_passes_opcheck(backend, n):
    problem = random_problem(n=n, m=4, masked=True, landmarks_masked=True).map(torch.Tensor.float)
    tensors = [
        problem.q,
        None,
        problem.v,
        problem.landmarks,
        problem.key_mask,
        problem.landmark_mask,
    ]
    tensors = [t if t is None or t.dtype == torch.bool else t.requires_grad_() for t in tensors]
    settings = (0.5, True, "solve", 20, "halving", 0.1, 2)
    torch.library.opcheck(torch.ops.softfree.attention.default, (*tensors, *settings, backend))


def test_compiled_it_is_the_same():
    problem = random_problem(n=40, m=9, smooth=True).map(lambda t: t.float())

    def call(q, v, landmarks):
        return softfree.soft_attention(q, None, v, landmarks, inverse="solve")

    inputs = (problem.q, problem.v, problem.landmarks)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*inputs), call(*inputs))


def test_it_costs_fewer_operations_than_the_iteration():
    problem = random_problem(n=40, m=9).map(lambda t: t.float())
    counts = {}
    for inverse in ("newton", "solve"):
        with FlopCounterMode(display=False) as counter:
            attend(problem, "torch", inverse=inverse)
        counts[inverse] = counter.get_total_flops()
    m, d = 9, 8
    assert counts["newton"] - counts["solve"] == 2 * 4 * (40 * m**3 - m**3 // 6 - m * m * d)


@pytest.mark.parametrize(("order", "products"), [(1, 3), (2, 6)])
def test_flops_of_the_gradient_are_those_counted_by_hand(order, products):
    n, m, d = 40, 9, 8
    inputs = random_problem(n=n, m=m, d=d).map(lambda t: t.requires_grad_())
    out = attend(inputs, "torch", inverse="solve", order=order)
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    multiply_adds = (
        n * m * d  # R once more
        + 5 * n * m * d  # R^T G, G W^T, P V once more, V dU^T and P^T dU
        + 2 * n * m * d  # E L and E^T Q
        + products * m * m * d  # G U and G dW, at order 2 G of these, and as many terms of dA
        + 2 * m * m * d  # A, and its exponential's gradient
    )
    assert counter.get_total_flops() == 2 * 4 * multiply_adds


def test_exported_it_is_the_same():
    problem = random_problem(n=40, m=49, d=16, smooth=True, landmarks_masked=True).map(
        lambda t: t.float()
    )

    class Attend(torch.nn.Module):
        def forward(self, q, v, landmarks, mask):
            return softfree.soft_attention(
                q, None, v, landmarks, landmark_mask=mask, inverse="solve"
            )

    inputs = (problem.q, problem.v, problem.landmarks, problem.landmark_mask)
    program = torch.export.export(Attend(), inputs)
    names = {str(node.target) for node in program.graph.nodes}
    assert not any("softfree" in name or "cholesky" in name for name in names)
    assert relative_error(program.module()(*inputs), Attend()(*inputs)) < 1e-5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(inverse="lu"), "inverse must be one of 'newton', 'solve', got 'lu'"),
        (dict(inverse="solve", ridge=0.0), "ridge must be at least 0.0001 for inverse='solve'"),
        (dict(inverse="solve", order=3), "order must be 1 or 2, got 3"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        attend(random_problem(), **settings)
