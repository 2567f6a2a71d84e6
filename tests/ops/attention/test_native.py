"""Backend "native": neither threads nor the batch change a bit, any size is right, and what it can't take it says."""

import concurrent.futures
import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import softfree
from softfree.ops.attention import native

from .problems import attend, errors, random_problem, relative_error, solve

needs_compiler = pytest.mark.skipif(not native.available(), reason="no C compiler")


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@needs_compiler
@given(
    n=st.integers(1, 200),
    n_k=st.none() | st.integers(1, 200),
    m=st.integers(1, 40),
    d=st.integers(1, 50),
    d_v=st.integers(1, 50),
    masked=st.booleans(),
    landmarks_masked=st.booleans(),
    inverse=st.sampled_from(["newton", "solve"]),
)
def test_every_size_gives_the_definition(inverse, **shape):
    problem = random_problem(**shape, batch=2, heads=2).rounded(torch.float32)
    expected = solve(problem, inverse=inverse)
    plain = errors(solve(problem, "reference", torch.float32, inverse=inverse), expected)
    got = solve(problem, "native", torch.float32, inverse=inverse)
    for part, error in errors(got, expected).items():
        assert error < max(1e-5, 2 * plain[part]), part


@needs_compiler
@pytest.mark.parametrize("inverse", ["newton", "solve"])
@pytest.mark.parametrize("shape", [{}, {"masked": True}, {"n_k": 700}], ids=str)
def test_the_number_of_threads_changes_no_bit(two_threads, shape, inverse):
    problem = random_problem(n=1500, m=20, d=16, **shape)
    together = solve(problem, "native", torch.float32, inverse=inverse)
    torch.set_num_threads(1)
    for name, alone in solve(problem, "native", torch.float32, inverse=inverse).items():
        if inverse == "solve":
            assert torch.equal(alone, together[name]), name
        else:  # PyTorch's own products, in Newton's iteration and its gradient, may round otherwise
            assert errors_below(alone, together[name]), name


def errors_below(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((got - expected).norm() < 1e-6 * expected.norm())


@needs_compiler
def test_what_else_is_in_the_batch_changes_no_bit():
    problem = random_problem(n=700, m=20, d=16, batch=3).map(torch.Tensor.float)
    whole = attend(problem, "native", inverse="solve")
    for sample in range(3):
        one = problem.map(lambda t, sample=sample: t[sample : sample + 1])
        assert torch.equal(attend(one, "native", inverse="solve")[0], whole[sample])


@needs_compiler
@pytest.mark.parametrize("n", [100, 2000])
@pytest.mark.parametrize("n_k", [None, 150])
def test_a_sample_with_landmarks_far_apart_changes_no_bit_of_the_others(n, n_k):
    problem = random_problem(n=n, n_k=n_k, m=20, d=16, batch=3).rounded(torch.float32)
    problem.q[1] *= 8
    problem.landmarks[1] = problem.q[1, :, :20] + 0.25 * problem.landmarks[1]
    if n_k is not None:
        problem.k[1, :, :20] = problem.q[1, :, :20]
    whole = solve(problem, "native", torch.float32, inverse="solve")
    exact = solve(problem, "reference", torch.float64, inverse="solve")
    for sample in (0, 2):
        one = problem.map(lambda t, sample=sample: t[sample : sample + 1])
        for name, alone in solve(one, "native", torch.float32, inverse="solve").items():
            assert torch.equal(alone[0], whole[name][sample]), name
    for name, own in whole.items():
        assert relative_error(own[1].double(), exact[name][1]) < 1e-4, name


@needs_compiler
def test_a_masked_landmark_is_far_from_no_other(monkeypatch):
    problem = random_problem(n=100, m=20, d=16, landmarks_masked=True).map(torch.Tensor.float)
    shifted = dataclasses.replace(problem, q=problem.q + 30, landmarks=problem.landmarks + 30)
    assert not shifted.landmark_mask.all()
    expected = attend(shifted.map(torch.Tensor.double), inverse="solve")
    monkeypatch.setattr(native.chunked, "forward", None)  # the way of landmarks far apart
    assert relative_error(attend(shifted, "native", inverse="solve"), expected) < 1e-5


@needs_compiler
@pytest.mark.parametrize("n", [300, 3000])
def test_kernels_that_are_kept_and_those_computed_again_are_the_same(monkeypatch, n):
    problem = random_problem(n=n, m=20, d=16)
    kept = solve(problem, "native", torch.float32, inverse="solve")
    monkeypatch.setattr(native, "KEPT_ELEMENTS", 0)
    for name, again in solve(problem, "native", torch.float32, inverse="solve").items():
        assert torch.equal(again, kept[name]), name


@needs_compiler
def test_more_landmarks_than_c_is_good_for_are_solved_by_pytorch(monkeypatch):
    problem = random_problem(n=100, m=20, d=16)
    in_c = solve(problem, "native", torch.float32, inverse="solve")
    monkeypatch.setattr(native, "SOLVED_LANDMARKS", 19)
    monkeypatch.setattr(native._Landmarks, "solve", None)
    found = errors(solve(problem, "native", torch.float32, inverse="solve"), in_c)
    assert max(found.values()) < 1e-5


@needs_compiler
@pytest.mark.parametrize("landmarks_masked", [False, True])
def test_beyond_the_size_that_c_is_good_for_the_gradient_of_its_solve_is_by_pytorch(
    monkeypatch, landmarks_masked
):
    problem = random_problem(n=100, m=20, d=16, landmarks_masked=landmarks_masked)
    in_c = solve(problem, "native", torch.float32, inverse="solve")
    products, by_pytorch = native.mixing_backward, []
    monkeypatch.setattr(
        native, "mixing_backward", lambda *given: by_pytorch.append(1) or products(*given)
    )
    monkeypatch.setattr(native, "GRADIENT_ELEMENTS", 20 * 16)
    solve(problem, "native", torch.float32, inverse="solve")
    assert not by_pytorch
    monkeypatch.setattr(native, "GRADIENT_ELEMENTS", 20 * 16 - 1)
    found = errors(solve(problem, "native", torch.float32, inverse="solve"), in_c)
    assert by_pytorch and max(found.values()) < 1e-5


@needs_compiler
def test_threads_of_a_program_may_call_it_at_once():
    problems = [random_problem(n=900, m=10, seed=seed).map(torch.Tensor.float) for seed in range(8)]
    expected = [attend(problem, "native", inverse="solve") for problem in problems]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            found = pool.map(lambda p: attend(p, "native", inverse="solve"), problems)
            assert all(map(torch.equal, found, expected))


@needs_compiler
def test_a_token_that_is_nan_spoils_itself_as_a_query_and_all_as_a_key():
    problem = random_problem(n=100, n_k=80).map(torch.Tensor.float)
    q = problem.q.clone()
    q[0, 0, 70] = torch.nan
    out = attend(dataclasses.replace(problem, q=q), "native", inverse="solve")
    assert out.isnan().any(-1).sum() == 1 and out[0, 0, 70].isnan().all()
    k = problem.k.clone()
    k[0, 0, 70] = torch.nan
    out = attend(dataclasses.replace(problem, k=k), "native", inverse="solve")
    assert out[0, 0].isnan().all() and out[0, 1:].isfinite().all() and out[1].isfinite().all()


def test_float64_is_refused_and_left_to_pytorch_by_auto():
    problem = random_problem()
    arguments = (problem.q, None, problem.v, problem.landmarks)
    with pytest.raises(ValueError, match="backend 'native' can't take this input: it computes in"):
        softfree.soft_attention(*arguments, backend="native")
    assert softfree.soft_attention(*arguments).dtype == torch.float64


def test_without_a_compiler_auto_is_pytorch_and_native_says_so(monkeypatch):
    monkeypatch.setattr(native, "available", lambda: False)
    monkeypatch.setattr(softfree.ops.attention.operator, "_CHECKED", {})
    problem = random_problem().map(torch.Tensor.float)
    arguments = (problem.q, None, problem.v, problem.landmarks)
    assert torch.equal(softfree.soft_attention(*arguments), attend(problem, "torch"))
    with pytest.raises(ValueError, match="there is no C compiler"):
        softfree.soft_attention(*arguments, backend="native")
