"""Backend "torch": chunks and scales change nothing, memory stays bounded, little is kept for the backward pass."""

import dataclasses

import pytest
import torch

import softfree
from softfree.ops.attention import chunked

from .problems import BACKENDS, Problem, errors, random_problem, solve

MIB = 2**20
WITHOUT_KEYS = ("q", "v", "landmarks", "grad")


@pytest.mark.parametrize("elements", [1, 50, 333])
@pytest.mark.parametrize(
    "shape",
    [
        {"n": 40},
        {"n": 40, "masked": True},
        {"n": 13, "n_k": 40, "d_v": 5},
        {"n": 40, "n_k": 13, "masked": True, "landmarks_masked": True},
    ],
    ids=["self", "self, masked", "cross", "cross, masks"],
)
def test_chunks_change_nothing(monkeypatch, shape, elements):
    problem = random_problem(batch=5, **shape)
    whole = solve(problem, "torch")
    monkeypatch.setitem(chunked.CHUNK_ELEMENTS, "cpu", elements)
    for name, error in errors(solve(problem, "torch"), whole).items():
        assert error < 1e-12, name


def test_half_precision_sums_over_chunks_are_not_rounded_between_chunks(monkeypatch):
    problem = random_problem(n=300, d=8)
    whole = solve(problem, "torch", torch.bfloat16)
    monkeypatch.setitem(chunked.CHUNK_ELEMENTS, "cpu", 14)
    for name, error in errors(solve(problem, "torch", torch.bfloat16), whole).items():
        assert error < 1e-3, name


def mixed_scales(largest: float, *, most: bool) -> Problem:
    """Tokens beside landmarks, a third of both, or all but two, ``largest`` times as far from the origin."""
    problem = random_problem(n=40, m=9)
    q = problem.q.clone()
    q[:, :, slice(2, None) if most else slice(None, None, 3)] *= largest
    beside = q[:, :, :6] + 0.3 * problem.landmarks[:, :, :6]
    return dataclasses.replace(problem, q=q, landmarks=torch.cat([beside, q[:, :, 6:9]], 2))


@pytest.mark.parametrize("inverse", ["newton", "solve"])
@pytest.mark.parametrize("most", [False, True])
@pytest.mark.parametrize("largest", [10.0, 1e2, 1e4, 1e6, 1e8, 1e12, 1e18])
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "reference"])
def test_scales_may_be_mixed(backend, largest, most, inverse):
    limits = {torch.float32: 1e-5, torch.float64: 1e-6}
    for dtype in limits if backend == "torch" else [torch.float32]:
        problem = mixed_scales(largest, most=most).rounded(dtype)
        expected = solve(problem, "reference", inverse=inverse)
        found = errors(solve(problem, backend, dtype, inverse=inverse), expected)
        for name in found if largest < 1e10 else ("out", "v"):
            assert found[name] < limits[dtype], (name, dtype)


@pytest.mark.parametrize("inverse", [{"inverse": "solve", "ridge": 1e-4, "order": 1}, {}])
def test_far_landmarks_cost_float64_no_digits(inverse):
    problem = random_problem(n=200, m=16, d=3, spread=0.3)
    for tokens in (problem.q, problem.landmarks):
        tokens[:, :, ::2] += 1e5
    expected = solve(problem, "reference", **inverse)
    found = errors(solve(problem, "torch", **inverse), expected)
    assert found["out"] < 1e-11
    assert max(found.values()) < 1e-6


def test_each_sample_is_computed_with_the_digits_that_its_own_landmarks_need():
    near, far, apart = (
        mixed_scales(largest, most=False).map(lambda t: t[:1].float()) for largest in (1, 1e2, 1e6)
    )
    problems = [apart, near, far, near]
    whole = dataclasses.replace(
        near, **{name: torch.cat([getattr(p, name) for p in problems]) for name in WITHOUT_KEYS}
    )
    results = solve(whole, "torch", torch.float32, inverse="solve")
    for sample, problem in enumerate(problems):
        for name, alone in solve(problem, "torch", torch.float32, inverse="solve").items():
            assert torch.equal(alone[0], results[name][sample]), (sample, name)


def peak_bytes(function) -> int:
    """The most memory held at once by what ``function`` allocates on the CPU, its result included."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        result = function()
    held = peak = 0
    events = profiler.profiler.kineto_results.events()
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    assert peak >= sum(t.nbytes for t in result)
    return peak


def long_inputs(tokens: int) -> list[torch.Tensor]:
    q, v = torch.randn(2, 1, 2, tokens, 32)
    landmarks = torch.randn(1, 2, 49, 32)
    return [t.requires_grad_() for t in (q, v, landmarks)]


def attend(inputs: list[torch.Tensor], **settings) -> torch.Tensor:
    q, v, landmarks = inputs
    return softfree.soft_attention(q, None, v, landmarks, backend="torch", **settings)


def test_the_memory_probe_sees_what_an_operator_allocates():
    def build_and_drop():
        return [torch.ones(MIB).exp().sum()]

    assert 8 * MIB <= peak_bytes(build_and_drop) < 9 * MIB


@pytest.mark.parametrize("masked", [False, True])
def test_a_long_call_needs_less_than_64_mib_beside_inputs_and_results(masked):
    inputs = long_inputs(65_536)
    mask = torch.rand(1, 65_536) < 0.7 if masked else None
    out = []

    def forward():
        out.append(attend(inputs, key_mask=mask))
        return out

    forward_extra = peak_bytes(forward) - out[0].nbytes
    grad = torch.ones_like(out[0])
    backward_extra = peak_bytes(lambda: torch.autograd.grad(out[0], inputs, grad)) - sum(
        t.nbytes for t in inputs
    )
    assert forward_extra < 64 * MIB
    assert backward_extra < 64 * MIB


def test_extra_memory_does_not_grow_with_the_tokens():
    extra = []
    for tokens in (32_768, 262_144):
        inputs = [t.detach() for t in long_inputs(tokens)]
        peak = peak_bytes(lambda inputs=inputs: [attend(inputs)])
        extra.append(peak - inputs[0].nbytes)
    assert extra[1] < extra[0] + MIB


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "channels"), [(4096, 32), (1000, 0)], ids=["many", "few tokens"])
def test_the_backward_pass_is_given_inputs_the_inverse_and_of_many_tokens_their_sums(
    dtype, n, channels
):
    m = 49
    inputs = [t.detach().to(dtype).requires_grad_() for t in long_inputs(n)]
    storages = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = attend(inputs)
    given = {t.untyped_storage().data_ptr() for t in inputs}
    beside_inputs = sum(size for pointer, size in storages.items() if pointer not in given)
    assert given <= storages.keys()
    assert beside_inputs == 2 * 4 * m * (m + channels)
    assert out.requires_grad


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_a_tiny_scale_is_as_good_as_any(backend):
    if backend not in BACKENDS:
        pytest.skip("no C compiler")
    scale = 1e-28
    problem = random_problem(n=40, m=9, d=8)
    landmarks = 1000 * problem.landmarks
    tokens = landmarks[:, :, torch.arange(40) % 9] + 0.3 * problem.q
    apart = dataclasses.replace(problem, q=tokens * scale**-0.5, landmarks=landmarks * scale**-0.5)
    problem = apart.rounded(torch.float32)
    settings = dict(inverse="solve", scale=scale)
    expected = solve(problem, **settings)
    found = solve(problem, backend, torch.float32, **settings)
    assert max(errors(found, expected).values()) < 1e-5
