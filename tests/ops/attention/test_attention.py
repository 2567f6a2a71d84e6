"""What every backend of the operator must give, and what the call must refuse."""

import dataclasses
import functools
import itertools
import math
import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import softfree
from softfree.ops.attention import reference
from softfree.ops.attention.settings import AttentionSettings, InverseSettings
from softfree.ops.shared.registration import flatten

from .problems import (
    BACKENDS,
    ROUNDING,
    Problem,
    attend,
    errors,
    random_problem,
    relative_error,
    solve,
)

EPS = torch.finfo(torch.float32).eps
backends = pytest.mark.parametrize("backend", BACKENDS)
wide_backends = pytest.mark.parametrize("backend", ["reference", "torch"])
inverses = pytest.mark.parametrize("inverse", ["newton", "solve"])
variants = pytest.mark.parametrize("normalize", [True, False], ids=["softpp", "soft"])

# n, m, d; together they cover n 1..20000, m 1..300, d 1..64, masks, d_v != d and cross-attention.
RANDOM_SHAPES = {
    "one of all": {"n": 1, "m": 1, "d": 1},
    "one token": {"n": 1, "m": 7, "d": 8},
    "one landmark": {"n": 2, "m": 1, "d": 33, "d_v": 8},
    "masked": {"n": 17, "m": 7, "d": 8, "masked": True},
    "one channel": {"n": 196, "m": 49, "d": 1},
    "stage": {"n": 196, "m": 49, "d": 32},
    "both masks": {"n": 785, "m": 49, "d": 64, "masked": True, "landmarks_masked": True},
    "cross": {"n": 17, "m": 49, "d": 33, "n_k": 196, "d_v": 5, "masked": True},
    "cross, fewer keys": {"n": 785, "m": 7, "d": 32, "n_k": 2, "d_v": 64},
    "many landmarks": {"n": 785, "m": 300, "d": 33, "batch": 1},
    "long": {"n": 20000, "m": 49, "d": 32, "masked": True, "batch": 1, "heads": 1},
    "long, many landmarks": {"n": 20000, "m": 300, "d": 32, "batch": 1, "heads": 1},
}
SMOOTH_SHAPES = {
    "stage": {"n": 196, "m": 49, "d": 32},
    "masked": {"n": 785, "m": 49, "d": 64, "masked": True},
    "one channel": {"n": 785, "m": 7, "d": 1},
    "cross": {"n": 196, "m": 49, "d": 8, "n_k": 785, "d_v": 33},
    "many landmarks": {"n": 785, "m": 300, "d": 33, "batch": 1},
    "long": {"n": 20000, "m": 49, "d": 32, "batch": 1, "heads": 1},
}


@functools.cache
def shaped(name: str, smooth: bool) -> Problem:
    shapes = SMOOTH_SHAPES if smooth else RANDOM_SHAPES
    return random_problem(**shapes[name], smooth=smooth)


@functools.cache
def definition(
    name: str, smooth: bool, dtype: torch.dtype, normalize: bool, inverse: str = "newton"
) -> dict[str, Tensor]:
    """The float64 reference on inputs that ``dtype`` can represent."""
    return solve(shaped(name, smooth).rounded(dtype), normalize=normalize, inverse=inverse)


@functools.cache
def plain_float32_errors(name: str, smooth: bool, normalize: bool) -> dict[str, float]:
    got = solve(shaped(name, smooth), "reference", torch.float32, normalize=normalize)
    return errors(got, definition(name, smooth, torch.float32, normalize))


@variants
@pytest.mark.parametrize(
    "name, smooth",
    [(name, False) for name in RANDOM_SHAPES] + [(name, True) for name in SMOOTH_SHAPES],
)
@backends
def test_float32_is_within_1e_5(backend, name, smooth, normalize):
    got = solve(shaped(name, smooth), backend, torch.float32, normalize=normalize)
    for part, error in errors(got, definition(name, smooth, torch.float32, normalize)).items():
        tolerance = 1e-5
        if part == "landmarks":
            # Smooth tokens, or those on a line, depend little on where their landmarks are: large terms of this
            # gradient cancel, and what is left has the rounding of the terms, in the definition as well.
            plain = plain_float32_errors(name, smooth, normalize)["landmarks"]
            assert plain < 1e-4
            tolerance = max(tolerance, 2 * plain)
        assert error < tolerance, part


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("name", "smooth"),
    [(name, False) for name in RANDOM_SHAPES if name != "long, many landmarks"]
    + [(name, True) for name in SMOOTH_SHAPES],
)
@backends
@inverses
def test_half_precision_inputs_are_within_5e_3(backend, name, smooth, dtype, inverse):
    for normalize in (True, False):
        got = solve(shaped(name, smooth), backend, dtype, normalize=normalize, inverse=inverse)
        expected = definition(name, smooth, dtype, normalize, inverse)
        for part, error in errors(got, expected).items():
            assert error < 5e-3, (part, normalize)


@backends
@pytest.mark.parametrize(
    "settings",
    [
        {"start": "scaled"},
        {"start": "scaled", "ridge": 0.01, "normalize": False},
        {"iterations": 0},
        {"iterations": 3, "ridge": 0.5},
        {"iterations": 6},
        {"iterations": 30},
        {"scale": 2.0},
    ],
    ids=str,
)
def test_every_setting_gives_the_same_in_every_backend(backend, settings):
    problem = random_problem(n=30, m=9, d=8, n_k=20)
    expected = solve(problem, "reference", **settings)
    for part, error in errors(solve(problem, backend, **settings), expected).items():
        assert error < ROUNDING[backend], part


def clustered_problem(
    m: int, d: int, width: float, clusters: int = 1, gap: float = 0.0, n: int = 128
) -> Problem:
    """Landmarks in clusters of a given width whose centres lie ``gap * sqrt(d)`` from the origin."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(2, 2, *shape, generator=generator, dtype=torch.float64)

    centres = gap * normal(clusters, d)
    problem = Problem(
        q=centres[:, :, torch.arange(n) % clusters] + 0.5 * normal(n, d),
        v=normal(n, d),
        landmarks=centres[:, :, torch.arange(m) % clusters] + width * normal(m, d),
        grad=normal(n, d),
    )
    return problem.rounded(torch.float32)


def kernel_of(problem: Problem) -> Tensor:
    scale = 1 / math.sqrt(problem.q.shape[-1])
    return reference.gaussian_kernel(problem.landmarks, problem.landmarks, scale)


# Rounding that the inverse amplifies, in units of (1 + ||Y||^2) eps, relative to the result's norm.
AMPLIFICATION = {"out": 16, "q": 16, "v": 16, "landmarks": 64}
ILL_CONDITIONED = {
    "width 0.1": (49, 32, 0.1),
    "width 0.03": (49, 32, 0.03),
    "few landmarks": (20, 8, 0.1),
    "few landmarks, narrow": (20, 8, 0.04),
    "seven clusters": (49, 32, 0.01, 7, 1.0),
    "two clusters": (7, 8, 0.02, 2, 2.0),
    "seven clusters, far apart": (49, 32, 0.01, 7, 10.0),
    "two clusters, far apart": (7, 8, 0.02, 2, 20.0),
}


@pytest.mark.parametrize("start", ["scaled", "halving"])
@variants
@pytest.mark.parametrize("name", ILL_CONDITIONED)
@backends
def test_ill_conditioned_inputs_lose_no_more_than_the_inverse_amplifies(
    backend, name, normalize, start
):
    problem = clustered_problem(*ILL_CONDITIONED[name])
    a = kernel_of(problem)
    assert 1e4 < torch.linalg.cond(a).max() < 1e8
    y = softfree.newton_inverse(a, start=start)
    amplified = EPS * (1 + torch.linalg.matrix_norm(y, 2).max().item() ** 2)
    settings = {"normalize": normalize, "start": start}
    expected = solve(problem, **settings)
    plain = errors(solve(problem, "reference", torch.float32, **settings), expected)
    got = errors(solve(problem, backend, torch.float32, **settings), expected)
    for part, error in got.items():
        assert error < AMPLIFICATION[part] * amplified, part
        assert error < max(1e-5, 2 * plain[part]), part


@wide_backends
@variants
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("cross", [False, True])
@inverses
def test_gradients_are_those_of_the_function_where_well_conditioned(
    backend, normalize, masked, cross, inverse
):
    problem = random_problem(
        n=4, m=3, d=3, n_k=5 if cross else None, d_v=2, heads=1, masked=masked, spread=1.5
    )
    if masked:
        mask = torch.tensor([[True, False, True], [True, True, True]])
        problem = dataclasses.replace(problem, landmark_mask=mask)
    names = ("q", "v", "landmarks", "k")[: 4 if cross else 3]
    device = BACKENDS[backend]
    arguments = [getattr(problem, name).to(device).requires_grad_() for name in names]

    def function(*tensors: Tensor) -> Tensor:
        changed = dataclasses.replace(problem, **dict(zip(names, tensors, strict=True)))
        return attend(changed, backend, normalize=normalize, inverse=inverse)

    assert torch.linalg.cond(kernel_of(problem)).max() < 50
    assert torch.autograd.gradcheck(function, arguments)


@backends
@pytest.mark.parametrize("name", ["q", "k", "v", "landmarks"])
@inverses
def test_one_input_alone_may_need_a_gradient(backend, name, inverse):
    problem = random_problem(n_k=11)
    expected = solve(problem, "reference", inverse=inverse)[name]
    tensor = getattr(problem, name).clone().requires_grad_()
    out = attend(dataclasses.replace(problem, **{name: tensor}), backend, inverse=inverse)
    (grad,) = torch.autograd.grad(out, tensor, problem.grad.to(out))
    assert relative_error(grad, expected) < ROUNDING[backend]


@backends
@pytest.mark.parametrize("content", [math.nan, math.inf, 1e30])
@inverses
def test_a_masked_key_changes_nothing_whatever_it_holds(backend, content, inverse):
    problem = random_problem(n=9, n_k=12, masked=True)
    expected = solve(problem, backend, torch.float32, inverse=inverse)
    absent = ~problem.key_mask[:, None, :, None]
    spoilt = dataclasses.replace(
        problem,
        k=problem.k.masked_fill(absent, content),
        v=problem.v.masked_fill(absent, content),
    )
    for name, value in solve(spoilt, backend, torch.float32, inverse=inverse).items():
        assert torch.equal(value, expected[name]), name
    assert not expected["k"].masked_select(absent).any()
    assert not expected["v"].masked_select(absent).any()


@backends
@pytest.mark.parametrize("content", [math.nan, math.inf, 1e30])
@inverses
def test_the_value_of_a_masked_token_changes_nothing(backend, content, inverse):
    problem = random_problem(masked=True)
    expected = solve(problem, backend, torch.float32, inverse=inverse)
    absent = ~problem.key_mask[:, None, :, None]
    spoilt = dataclasses.replace(problem, v=problem.v.masked_fill(absent, content))
    for name, value in solve(spoilt, backend, torch.float32, inverse=inverse).items():
        assert torch.equal(value, expected[name]), name


@backends
@inverses
def test_a_masked_token_that_is_nan_spoils_no_other_query(backend, inverse):
    problem = random_problem(masked=True)
    expected = attend(problem, backend, inverse=inverse)
    absent = ~problem.key_mask[:, None, :, None]
    spoilt = dataclasses.replace(problem, q=problem.q.masked_fill(absent, math.nan))
    out = attend(spoilt, backend, inverse=inverse)
    present = problem.key_mask[:, None, :, None].expand_as(out)
    assert torch.equal(out[present], expected[present])


@backends
@pytest.mark.parametrize("cross", [False, True])
@inverses
def test_a_sample_without_keys_gives_zeros(backend, cross, inverse):
    problem = random_problem(n=9, n_k=12 if cross else None, masked=True)
    problem.key_mask[1] = False
    results = solve(problem, backend, inverse=inverse)
    for name, value in results.items():
        assert value.isfinite().all(), name
        assert not value[1].any(), name
        assert value[0].any(), name


@backends
@variants
@pytest.mark.parametrize("content", [0.0, math.nan, math.inf])
@inverses
def test_a_masked_landmark_is_one_left_out(backend, normalize, content, inverse):
    problem = random_problem(n=9, m=6, n_k=12)
    mask = torch.tensor([True, False, True, True, False, True])
    spoilt = dataclasses.replace(
        problem,
        landmarks=problem.landmarks.masked_fill(~mask[:, None], content),
        landmark_mask=mask.expand(2, 6),
    )
    without = dataclasses.replace(problem, landmarks=problem.landmarks[:, :, mask])
    got = solve(spoilt, backend, normalize=normalize, inverse=inverse)
    expected = solve(without, backend, normalize=normalize, inverse=inverse)
    assert not got["landmarks"][:, :, ~mask].any()
    got["landmarks"] = got["landmarks"][:, :, mask]
    for name, error in errors(got, expected).items():
        assert error < ROUNDING[backend], name


@backends
@inverses
def test_a_sample_without_landmarks_gives_zeros(backend, inverse):
    problem = random_problem(landmarks_masked=True)
    problem.landmark_mask[0] = False
    for name, value in solve(problem, backend, inverse=inverse).items():
        assert value.isfinite().all(), name
        assert not value[0].any(), name


@backends
@given(seed=st.integers(0, 1000), n_k=st.integers(1, 40), masked=st.booleans())
@inverses
def test_the_order_of_the_keys_does_not_matter(backend, seed, n_k, masked, inverse):
    problem = random_problem(n=5, n_k=n_k, masked=masked, seed=seed)
    order = torch.randperm(n_k, generator=torch.Generator().manual_seed(seed))
    permuted = dataclasses.replace(
        problem,
        k=problem.k[:, :, order],
        v=problem.v[:, :, order],
        key_mask=problem.key_mask[:, order] if masked else None,
    )
    expected = attend(problem, backend, inverse=inverse)
    assert relative_error(attend(permuted, backend, inverse=inverse), expected) < ROUNDING[backend]


@backends
@given(
    seed=st.integers(0, 1000),
    n=st.integers(1, 40),
    m=st.integers(1, 12),
    masked=st.booleans(),
    start=st.sampled_from(["scaled", "halving"]),
    iterations=st.sampled_from([4, 20]),
)
def test_a_sample_is_the_same_alone_and_in_a_batch(backend, seed, n, m, masked, start, iterations):
    problem = random_problem(n=n, m=m, batch=3, masked=masked, seed=seed)
    # Samples of different condition: what is good for one must not decide for the others.
    widths = torch.tensor([1.0, 0.5, 3.0], dtype=torch.float64)[:, None, None, None]
    problem = dataclasses.replace(problem, landmarks=problem.landmarks * widths)
    settings = {"start": start, "iterations": iterations}
    together = attend(problem.map(lambda t: t.float()), backend, **settings)
    for index in range(3):
        rows = slice(index, index + 1)
        alone = dataclasses.replace(
            problem.map(lambda t, rows=rows: t[rows].float()),
            key_mask=problem.key_mask[rows] if masked else None,
        )
        assert relative_error(together[rows], attend(alone, backend, **settings)) < 1e-5


@backends
@given(seed=st.integers(0, 1000), n=st.integers(1, 12), m=st.integers(1, 6))
@inverses
def test_the_attention_matrix_is_symmetric_where_queries_are_keys(backend, seed, n, m, inverse):
    problem = random_problem(n=n, m=m, batch=1, seed=seed)
    identity = torch.eye(n, dtype=torch.float64).expand(1, 2, n, n)
    matrix = attend(dataclasses.replace(problem, v=identity), backend, inverse=inverse)
    assert relative_error(matrix, matrix.mT) < ROUNDING[backend]


@backends
@inverses
def test_queries_as_keys_equal_the_same_tensor_given_as_keys(backend, inverse):
    problem = random_problem(masked=True)
    alone = solve(problem, backend, inverse=inverse)
    given_twice = solve(dataclasses.replace(problem, k=problem.q), backend, inverse=inverse)
    given_twice["q"] = given_twice["q"] + given_twice.pop("k")
    for name, error in errors(given_twice, alone).items():
        assert error < ROUNDING[backend], name


@backends
def test_no_scale_means_one_over_the_root_of_the_channels(backend):
    problem = random_problem(d=9)
    assert torch.equal(attend(problem, backend), attend(problem, backend, scale=1 / 3))


@backends
@given(factor=st.floats(0.01, 100), seed=st.integers(0, 1000))
@inverses
def test_the_scale_multiplies_squared_distances(backend, factor, seed, inverse):
    problem = random_problem(seed=seed)
    larger = dataclasses.replace(
        problem, q=factor * problem.q, landmarks=factor * problem.landmarks
    )
    expected = attend(problem, backend, scale=0.3, inverse=inverse)
    out = attend(larger, backend, scale=0.3 / factor**2, inverse=inverse)
    assert relative_error(out, expected) < max(1e-9, ROUNDING[backend])


@backends
@inverses
def test_a_common_shift_changes_nothing(backend, inverse):
    problem = random_problem()
    shifted = dataclasses.replace(problem, q=problem.q + 50, landmarks=problem.landmarks + 50)
    exact = attend(shifted.rounded(torch.float32), "reference", inverse=inverse)
    out = attend(shifted.map(lambda t: t.float()), backend, inverse=inverse)
    assert relative_error(out, exact) < 1e-5


@backends
@inverses
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e4, 1e19, 3e37])
def test_tokens_infinitely_far_apart_give_finite_results_and_gradients(
    backend, inverse, dtype, size
):
    if size > torch.finfo(dtype).max or (backend == "native" and dtype == torch.float64):
        pytest.skip("the dtype has no such numbers, or the backend no such dtype")
    for name, cross in itertools.product(("q", "landmarks", "both"), (False, True)):
        problem = random_problem(n=12, m=6, n_k=9 if cross else None)
        far = {name: getattr(problem, name).clone() for name in ("q", "landmarks")}
        if name == "both":
            far = {name: size * tokens for name, tokens in far.items()}
        else:
            far[name][:, :, 2] = size
        for part, found in solve(
            dataclasses.replace(problem, **far), backend, dtype, inverse=inverse
        ).items():
            assert found.isfinite().all(), (part, name, cross)


@inverses
def test_compiled_gradients_are_finite_where_distances_overflow(inverse):
    problem = random_problem().map(torch.Tensor.float)
    problem.q[:, :, 2] = 1e30
    inputs = [t.requires_grad_() for t in (problem.q, problem.v, problem.landmarks)]
    torch.compiler.reset()
    attend = functools.partial(softfree.soft_attention, inverse=inverse, backend="reference")
    out = torch.compile(lambda q, *rest: attend(q, None, *rest), backend="aot_eager")(*inputs)
    for found in (out, *torch.autograd.grad(out.sum(), inputs)):
        assert found.isfinite().all()


@backends
@inverses
@pytest.mark.parametrize("content", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_landmarks_that_are_not_finite_cost_other_samples_no_digits(
    backend, inverse, content, dtype
):
    if backend == "reference" and inverse == "solve":
        pytest.skip("LAPACK refuses to factor what is not finite")
    if backend == "native" and dtype == torch.float64:
        pytest.skip("the backend computes in float32")
    problem = random_problem(n=40, m=6)
    problem.q[:, :, 20:] += 1e4
    problem.landmarks[:, :, 3:] += 1e4
    expected = solve(problem.rounded(dtype), "reference", inverse=inverse)
    problem.landmarks[0, 0] = content
    found = solve(problem, backend, dtype, inverse=inverse)
    limit = 1e-8 if dtype == torch.float64 else 1e-4
    for name in found:
        assert relative_error(found[name][1], expected[name][1]) < limit, name


@backends
@inverses
def test_a_large_common_shift_costs_float32_no_digits(backend, inverse):
    q = torch.randn(1, 2, 300, 32) + 1.37e4
    grad, v = torch.randn(2, 1, 2, 300, 32)

    def results(dtype, backend):
        tokens = [t.to(dtype).requires_grad_() for t in (q, v, q[:, :, ::6])]
        out = softfree.soft_attention(
            tokens[0], None, *tokens[1:], inverse=inverse, backend=backend
        )
        return out.detach(), *torch.autograd.grad(out, tokens, grad.to(dtype))

    exact = results(torch.float64, "reference")
    errors = [
        relative_error(own, e)
        for own, e in zip(results(torch.float32, backend), exact, strict=True)
    ]
    assert errors[0] < 1e-5 and max(errors) < 1e-4, errors


@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@inverses
def test_strides_do_not_matter(backend, dtype, inverse):
    problem = random_problem(n=9, n_k=12, d_v=5, batch=3)
    expected = solve(problem, backend, dtype, inverse=inverse)

    def heads_inside(t: Tensor) -> Tensor:
        return t.transpose(1, 2).contiguous().transpose(1, 2)

    def channels_first(t: Tensor) -> Tensor:
        return t.mT.contiguous().mT

    for layout in (heads_inside, channels_first):
        got = solve(problem.map(layout), backend, dtype, inverse=inverse)
        for name, error in errors(got, expected).items():
            assert error < (1e-6 if dtype == torch.float32 else 1e-2), (name, layout.__name__)


@backends
@inverses
def test_expanded_inputs_and_gradients_are_read_correctly(backend, inverse):
    problem = random_problem(batch=1)
    expanded = problem.map(lambda t: t.expand(3, -1, -1, -1))
    expanded = dataclasses.replace(
        expanded, grad=torch.ones(1, dtype=torch.float64).expand_as(expanded.grad)
    )
    copied = expanded.map(lambda t: t.contiguous())
    got, expected = (solve(p, backend, inverse=inverse) for p in (expanded, copied))
    for name, error in errors(got, expected).items():
        assert error < ROUNDING[backend], name


@backends
@inverses
def test_the_same_call_gives_the_same_bits(backend, inverse):
    problem = random_problem(n=785, m=49, d=32)
    first = solve(problem, backend, torch.float32, inverse=inverse)
    second = solve(problem, backend, torch.float32, inverse=inverse)
    for name in first:
        assert torch.equal(first[name], second[name]), name


@backends
@pytest.mark.parametrize("cross", [False, True])
@inverses
@pytest.mark.parametrize("size", [{"batch": 0}, {"heads": 0}], ids=["batch", "heads"])
def test_no_samples_or_no_heads_give_an_empty_result(backend, cross, inverse, size):
    problem = random_problem(n_k=9 if cross else None, d_v=5, masked=True, **size)
    results = solve(problem, backend, torch.float32, inverse=inverse)
    assert results["out"].shape == problem.grad.shape
    assert results["landmarks"].shape == problem.landmarks.shape


def test_merging_the_heads_of_the_result_copies_nothing():
    problem = random_problem(d_v=5)
    out = attend(problem, "torch")
    merged = out.transpose(1, 2).flatten(2)
    assert merged.data_ptr() == out.data_ptr()
    assert merged.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@backends
@inverses
def test_keys_that_are_the_queries_themselves_take_the_path_without_keys(
    backend, compiled, inverse
):
    q, v, landmarks = (t.requires_grad_() for t in tensors().values())
    attend = functools.partial(softfree.soft_attention, backend=backend, inverse=inverse)
    function = lambda q, k, v, landmarks: attend(q, k, v, landmarks)  # noqa: E731
    if compiled:
        torch.compiler.reset()
        function = torch.compile(function, backend="aot_eager", fullgraph=True)
    out, expected = function(q, q, v, landmarks), attend(q, None, v, landmarks)
    assert torch.equal(out, expected)
    inputs = (q, v, landmarks)
    gradients = torch.autograd.grad(out.sum(), inputs)
    assert all(map(torch.equal, gradients, torch.autograd.grad(expected.sum(), inputs)))


@inverses
def test_auto_is_c_where_it_can_be_compiled_and_pytorch_in_float64(inverse):
    for dtype, backend in ((torch.float32, [*BACKENDS][-1]), (torch.float64, "torch")):
        problem = random_problem().map(lambda t, dtype=dtype: t.to(dtype))
        out = softfree.soft_attention(
            problem.q, None, problem.v, problem.landmarks, backend="auto", inverse=inverse
        )
        assert torch.equal(out, attend(problem, backend, inverse=inverse))


@backends
@inverses
def test_autocast_gives_its_dtype_and_keeps_the_inverse_in_float32(backend, inverse):
    # At this condition an inverse or a sum in bfloat16 would be wrong in the first digit.
    problem = clustered_problem(20, 8, 0.1)
    rounded = problem.rounded(torch.bfloat16)
    assert torch.linalg.cond(kernel_of(rounded)).max() > 1e4
    inputs = problem.map(lambda t: t.float().requires_grad_())
    with torch.autocast(BACKENDS[backend], dtype=torch.bfloat16):
        out = attend(inputs, backend, inverse=inverse)
    assert out.dtype == torch.bfloat16
    names = ("q", "v", "landmarks")
    grads = torch.autograd.grad(
        out, [getattr(inputs, name) for name in names], rounded.grad.to(out)
    )
    expected = solve(rounded, inverse=inverse)
    assert relative_error(out, expected["out"]) < 5e-3
    for name, grad in zip(names, grads, strict=True):
        assert grad.dtype == torch.float32
        assert relative_error(grad, expected[name]) < 5e-3, name


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "reference"])
@inverses
def test_a_backward_pass_under_autocast_is_the_same(backend, inverse):
    problem = clustered_problem(20, 8, 0.1)
    grads = []
    for enabled in (False, True):
        inputs = problem.map(lambda t: t.to(torch.bfloat16).requires_grad_())
        out = attend(inputs, backend, inverse=inverse)
        with torch.autocast(BACKENDS[backend], dtype=torch.bfloat16, enabled=enabled):
            grads.append(torch.autograd.grad(out, inputs.landmarks, inputs.grad.to(out))[0])
    assert torch.equal(*grads)


def operator_arguments(problem: Problem, inverse: str, *, grad: bool = True) -> tuple[object, ...]:
    """Positional arguments of ``torch.ops.softfree.attention``."""
    if grad:
        problem = problem.map(lambda t: t.detach().requires_grad_())
    tensors = (problem.q, problem.k, problem.v, problem.landmarks)
    masks = (problem.key_mask, problem.landmark_mask)
    method = InverseSettings(ridge=0.01) if inverse == "newton" else InverseSettings.solve(None, 2)
    settings = AttentionSettings(0.4, True, method)
    return (*flatten(*tensors, *masks, settings, "torch"),)


REGISTRATION_PROBLEMS = {
    "self": lambda: random_problem(),
    "cross": lambda: random_problem(n=5, n_k=9, d_v=3),
    "masks": lambda: random_problem(masked=True, landmarks_masked=True),
    "bfloat16": lambda: random_problem().map(lambda t: t.bfloat16()),
    "heads inside": lambda: random_problem(n=5, n_k=9, d_v=3, batch=3).map(
        lambda t: t.float().transpose(1, 2).contiguous().transpose(1, 2)
    ),
    "channels first": lambda: random_problem(masked=True).map(lambda t: t.mT.contiguous().mT),
}


@pytest.mark.parametrize("name", REGISTRATION_PROBLEMS)
@inverses
def test_the_operator_is_registered_correctly(name, inverse):
    arguments = operator_arguments(REGISTRATION_PROBLEMS[name](), inverse)
    torch.library.opcheck(torch.ops.softfree.attention.default, arguments)


@pytest.mark.parametrize("name", REGISTRATION_PROBLEMS)
@inverses
def test_the_gradient_operator_is_registered_correctly(name, inverse):
    arguments = operator_arguments(REGISTRATION_PROBLEMS[name](), inverse, grad=False)
    out, *kept = torch.ops.softfree.attention(*arguments)
    torch.library.opcheck(
        torch.ops.softfree.attention_backward.default,
        (torch.ones_like(out), *arguments[:6], *kept, *arguments[6:]),
    )


def test_compiled_code_calls_the_operator():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    q = torch.randn(1, 2, 30, 8)
    torch.compile(softfree.soft_attention, backend=backend)(q, q, q, q[:, :, :5])
    called = {node.target for graph in graphs for node in graph.graph.nodes}
    assert torch.ops.softfree.attention.default in called


@pytest.mark.parametrize(
    "compiler",
    [
        "aot_eager",
        pytest.param(
            "inductor",
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(
                    not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler"
                ),
            ],
        ),
    ],
)
@inverses
def test_compiled_equals_eager(compiler, inverse, tmp_path, monkeypatch):
    # Else it might run what it compiled when the operator had other outputs.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def merged(q: Tensor, v: Tensor, landmarks: Tensor, mask: Tensor) -> Tensor:
        q, v, landmarks = (t.unflatten(2, (2, -1)).transpose(1, 2) for t in (q, v, landmarks))
        out = softfree.soft_attention(2 * q, None, v, landmarks, key_mask=mask, inverse=inverse)
        return out.transpose(1, 2).flatten(2) + 1

    shapes = {"q": (2, 17, 16), "v": (2, 17, 16), "landmarks": (2, 7, 16)}
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes.values()]
    mask = torch.rand(2, 17) < 0.7
    torch.compiler.reset()
    compiled = torch.compile(merged, fullgraph=True, backend=compiler)
    results = []
    for function in (merged, compiled):
        out = function(*inputs, mask)
        results.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    for eager, other in zip(*results, strict=True):
        torch.testing.assert_close(other, eager, rtol=1e-5, atol=1e-5)


def test_flops_are_those_counted_by_hand():
    batch, heads, n, n_k, m, d, d_v, steps = 2, 3, 17, 11, 7, 8, 5, 4
    problem = random_problem(n=n, n_k=n_k, m=m, d=d, d_v=d_v, batch=batch, heads=heads)
    inputs = problem.map(lambda t: t.requires_grad_())
    with FlopCounterMode(display=False) as forward:
        out = attend(inputs, "torch", iterations=steps)
    multiply_adds = (
        m * n_k * d  # P
        + m * n_k * d_v  # P V
        + m * m * d  # A
        + steps * 2 * m**3  # Y A and (Y A) Y at every step
        + m * m * d_v  # Y' U
        + n * m * d  # R
        + n * m * d_v  # R W
    )
    assert forward.get_total_flops() == 2 * batch * heads * multiply_adds
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    multiply_adds = (
        (n + n_k) * m * d  # R and P once more
        + 2 * n * m * d_v  # R^T G and G W^T
        + 3 * n_k * m * d_v  # P V once more, V dU^T and P^T dU
        + 2 * (n + n_k) * m * d  # E L and E^T Q, for queries and for keys
        + 3 * m * m * d_v  # W, dU and dA, by Eq. 12 with matrices of the rank of the channels
        + 2 * m * m * d  # A, and its exponential's gradient
    )
    assert backward.get_total_flops() == 2 * batch * heads * multiply_adds


def test_flops_count_one_kernel_where_queries_are_keys():
    n, m, d, steps = 17, 7, 8, 4
    problem = random_problem(n=n, m=m, d=d, batch=1, heads=1)
    with FlopCounterMode(display=False) as counter:
        attend(problem, "torch", iterations=steps)
    multiply_adds = 3 * n * m * d + 2 * m * m * d + steps * 2 * m**3
    assert counter.get_total_flops() == 2 * multiply_adds


def tensors(**changed) -> dict[str, object]:
    shapes = {"q": (2, 3, 10, 4), "v": (2, 3, 10, 5), "landmarks": (2, 3, 6, 4)}
    return {name: torch.randn(shape) for name, shape in shapes.items()} | changed


BAD_CALLS = {
    "q is a list": ({"q": [[1.0]]}, TypeError, "q must be a tensor, got list"),
    "v is None": ({"v": None}, TypeError, "v must be a tensor, got NoneType"),
    "landmarks left out": (
        {"landmarks": None},
        TypeError,
        r"landmarks must be a tensor, got NoneType; call soft_attention\(q, k, v, landmarks\)",
    ),
    "landmarks is a number": ({"landmarks": 7}, TypeError, "landmarks must be a tensor, got int"),
    "k is a string": ({"k": "q"}, TypeError, "k must be a tensor, got str"),
    "q has 3 dimensions": (
        {"q": torch.randn(3, 10, 4)},
        ValueError,
        r"q must have shape \(batch, heads, tokens, channels\), got \(3, 10, 4\)",
    ),
    "landmarks have 3 dimensions": (
        {"landmarks": torch.randn(3, 6, 4)},
        ValueError,
        r"landmarks must have shape .*got \(3, 6, 4\)",
    ),
    "other batch": (
        {"v": torch.randn(1, 3, 10, 5)},
        ValueError,
        r"v must have q's batch and heads \(2, 3\), got \(1, 3\)",
    ),
    "other heads": (
        {"landmarks": torch.randn(2, 1, 6, 4)},
        ValueError,
        r"landmarks must have q's batch and heads \(2, 3\), got \(2, 1\)",
    ),
    "other heads of k": (
        {"k": torch.randn(2, 4, 10, 4)},
        ValueError,
        r"k must have q's batch and heads \(2, 3\), got \(2, 4\)",
    ),
    "other channels of landmarks": (
        {"landmarks": torch.randn(2, 3, 6, 5)},
        ValueError,
        r"landmarks must have q's 4 channels, got shape \(2, 3, 6, 5\)",
    ),
    "other channels of k": (
        {"k": torch.randn(2, 3, 10, 3)},
        ValueError,
        r"k must have q's 4 channels, got shape \(2, 3, 10, 3\)",
    ),
    "values not those of q": (
        {"v": torch.randn(2, 3, 9, 5)},
        ValueError,
        r"v must have one token per key, 10, got shape \(2, 3, 9, 5\); pass k",
    ),
    "values not those of k": (
        {"k": torch.randn(2, 3, 9, 4)},
        ValueError,
        r"v must have one token per key, 9, got shape \(2, 3, 10, 5\)$",
    ),
    "integers": (
        {"q": torch.ones(2, 3, 10, 4, dtype=torch.int64)},
        TypeError,
        "q must be float16, bfloat16, float32 or float64, got torch.int64",
    ),
    "complex": (
        {"v": torch.ones(2, 3, 10, 5, dtype=torch.complex64)},
        TypeError,
        "v must be float16, .* got torch.complex64",
    ),
    "mixed dtypes": (
        {"v": torch.randn(2, 3, 10, 5).bfloat16()},
        TypeError,
        "v must have q's dtype torch.float32, got torch.bfloat16",
    ),
    "other device": (
        {"landmarks": torch.randn(2, 3, 6, 4, device="meta")},
        ValueError,
        "landmarks must be on q's device cpu, got meta",
    ),
    "no tokens": (
        {"q": torch.randn(2, 3, 0, 4), "v": torch.randn(2, 3, 0, 5)},
        ValueError,
        r"q must have at least one token .*got shape \(2, 3, 0, 4\)",
    ),
    "no keys": (
        {"k": torch.randn(2, 3, 0, 4), "v": torch.randn(2, 3, 0, 5)},
        ValueError,
        r"[vk] must have at least one token .*got shape \(2, 3, 0, [45]\)",
    ),
    "no landmarks": (
        {"landmarks": torch.randn(2, 3, 0, 4)},
        ValueError,
        r"landmarks must have at least one token .*got shape \(2, 3, 0, 4\)",
    ),
    "no channels": (
        {"v": torch.randn(2, 3, 10, 0)},
        ValueError,
        r"v must have at least one token and one channel, got shape \(2, 3, 10, 0\)",
    ),
    "float mask": (
        {"key_mask": torch.ones(2, 10)},
        TypeError,
        "key_mask must be a bool tensor, .* got torch.float32",
    ),
    "NaN mask": (
        {"key_mask": torch.full((2, 10), math.nan)},
        TypeError,
        "key_mask must be a bool tensor, .* got torch.float32",
    ),
    "integer landmark mask": (
        {"landmark_mask": torch.ones(2, 6, dtype=torch.uint8)},
        TypeError,
        "landmark_mask must be a bool tensor, .* got torch.uint8",
    ),
    "mask is a list": (
        {"key_mask": [[True] * 10] * 2},
        TypeError,
        "key_mask must be a bool tensor, .* got list",
    ),
    "mask of other length": (
        {"key_mask": torch.ones(2, 9, dtype=torch.bool)},
        ValueError,
        r"key_mask must have shape \(2, 10\), got \(2, 9\)",
    ),
    "mask of other batch": (
        {"key_mask": torch.ones(1, 10, dtype=torch.bool)},
        ValueError,
        r"key_mask must have shape \(2, 10\), got \(1, 10\)",
    ),
    "mask with heads": (
        {"key_mask": torch.ones(2, 3, 10, dtype=torch.bool)},
        ValueError,
        r"key_mask must have shape \(2, 10\), got \(2, 3, 10\)",
    ),
    "landmark mask of other length": (
        {"landmark_mask": torch.ones(2, 10, dtype=torch.bool)},
        ValueError,
        r"landmark_mask must have shape \(2, 6\), got \(2, 10\)",
    ),
    "mask on another device": (
        {"key_mask": torch.ones(2, 10, dtype=torch.bool, device="meta")},
        ValueError,
        "key_mask must be on q's device cpu, got meta",
    ),
    "unknown backend": (
        {"backend": "cuda"},
        ValueError,
        "backend must be one of 'auto', .*'torch'.*, got 'cuda'",
    ),
    "unknown start": (
        {"start": "papers"},
        ValueError,
        "start must be one of 'scaled', 'halving', got 'papers'",
    ),
    "negative iterations": (
        {"iterations": -1},
        ValueError,
        "iterations must be an integer >= 0, got -1",
    ),
    "fractional iterations": (
        {"iterations": 2.5},
        ValueError,
        "iterations must be an integer >= 0, got 2.5",
    ),
    "negative ridge": ({"ridge": -0.01}, ValueError, "ridge must be .* >= 0, got -0.01"),
    "NaN ridge": ({"ridge": math.nan}, ValueError, "ridge must be .* >= 0, got nan"),
    "infinite ridge": ({"ridge": math.inf}, ValueError, "ridge must be .* >= 0, got inf"),
    "ridge is a string": (
        {"ridge": "0.01"},
        (TypeError, ValueError),
        "ridge must be .* >= 0, got '0.01'",
    ),
    "zero scale": ({"scale": 0.0}, ValueError, "scale must be .* 1e-30, got 0.0"),
    "negative scale": ({"scale": -1.0}, ValueError, "scale must be .* 1e-30, got -1.0"),
    "NaN scale": ({"scale": math.nan}, ValueError, "scale must be .* 1e-30, got nan"),
    "infinite scale": ({"scale": math.inf}, ValueError, "scale must be .* 1e-30, got inf"),
    "scale is a string": (
        {"scale": "1"},
        (TypeError, ValueError),
        "scale must be .* 1e-30, got '1'",
    ),
}


def test_three_tensors_by_position_are_refused_with_the_call_as_it_should_be():
    q, v, landmarks = tensors().values()
    with pytest.raises(TypeError, match=r"landmarks must .*soft_attention\(q, k, v, landmarks\)"):
        softfree.soft_attention(q, v[..., :4], landmarks)


@pytest.mark.parametrize("name", BAD_CALLS)
def test_a_bad_call_says_what_is_wrong_before_a_backend_is_chosen(name):
    changed, error, message = BAD_CALLS[name]
    with pytest.raises(error, match=message):
        softfree.soft_attention(**tensors() | changed)
