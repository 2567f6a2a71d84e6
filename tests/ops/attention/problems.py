"""Inputs of the operator, and what comes out of it, for the tests of every backend."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import softfree
from softfree.ops.attention import native, reference

# Every backend under test and the device it runs on.
BACKENDS = {"reference": "cpu", "torch": "cpu"}
# What the widest dtype that each computes in may be off by.
ROUNDING = dict.fromkeys(BACKENDS, 1e-12)
if native.available():
    BACKENDS["native"] = "cpu"
    ROUNDING["native"] = 2e-6
TENSORS = ("q", "k", "v", "landmarks", "grad")


@dataclass(frozen=True)
class Problem:
    """Arguments of ``soft_attention`` and ``grad``, the gradient that arrives at its result."""

    q: Tensor
    v: Tensor
    landmarks: Tensor
    grad: Tensor
    k: Tensor | None = None
    key_mask: Tensor | None = None
    landmark_mask: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> "Problem":
        """The problem with ``function`` applied to its floating-point tensors."""
        changed = {name: getattr(self, name) for name in TENSORS}
        changed = {name: t if t is None else function(t) for name, t in changed.items()}
        return dataclasses.replace(self, **changed)

    def rounded(self, dtype: torch.dtype) -> "Problem":
        """The float64 problem whose inputs ``dtype`` can represent."""
        return self.map(lambda t: t.to(dtype).double())


def random_problem(
    n: int = 17,
    m: int = 7,
    d: int = 8,
    *,
    batch: int = 2,
    heads: int = 2,
    n_k: int | None = None,
    d_v: int | None = None,
    masked: bool = False,
    landmarks_masked: bool = False,
    smooth: bool = False,
    spread: float = 1.0,
    seed: int = 0,
) -> Problem:
    """Normal tokens, or tokens that change slowly along the sequence; float64.

    Landmarks are normal too, or means of windows of the smooth tokens.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def tokens(count: int, channels: int) -> Tensor:
        if not smooth:
            return spread * normal(batch, heads, count, channels)
        position = torch.linspace(0, 2 * math.pi, count, dtype=torch.float64)[:, None]
        waves = torch.cat([torch.sin(f * position + f) for f in range(1, 6)], -1)
        curve = waves @ normal(batch, heads, 5, channels) / math.sqrt(2.5)
        return spread * (curve + 0.05 * normal(batch, heads, count, channels))

    q = tokens(n, d)
    k = None if n_k is None else tokens(n_k, d)
    keys = n if n_k is None else n_k
    if smooth:
        windows = torch.linspace(0, n - 1, m + 1).round().long().tolist()
        pairs = itertools.pairwise(windows)
        landmarks = torch.stack([q[:, :, a : max(a + 1, b)].mean(2) for a, b in pairs], 2)
    else:
        landmarks = spread * normal(batch, heads, m, d)
    channels = d if d_v is None else d_v
    key_mask = landmark_mask = None
    if masked:
        key_mask = torch.rand(batch, keys, generator=generator) < 0.7
        key_mask[:, 0] = True
    if landmarks_masked:
        landmark_mask = torch.rand(batch, m, generator=generator) < 0.7
        landmark_mask[:, 0] = True
    return Problem(
        q=q,
        v=tokens(keys, channels),
        landmarks=landmarks,
        grad=normal(batch, heads, n, channels),
        k=k,
        key_mask=key_mask,
        landmark_mask=landmark_mask,
    )


def attend(problem: Problem, backend: str = "reference", **settings) -> Tensor:
    """The operator's result on the backend's device, computed in the problem's own dtype if the backend has it."""
    device = BACKENDS[backend]
    if backend == "native" and problem.q.dtype == torch.float64:
        problem = problem.map(torch.Tensor.float)
    arguments = {
        field.name: getattr(problem, field.name)
        for field in dataclasses.fields(problem)
        if field.name != "grad"
    }
    arguments = {name: t if t is None else t.to(device) for name, t in arguments.items()}
    return softfree.soft_attention(**arguments, backend=backend, **settings)


def solve(
    problem: Problem, backend: str = "reference", dtype: torch.dtype = torch.float64, **settings
) -> dict[str, Tensor]:
    """``out`` and the gradient of each input, computed in ``dtype``, returned in float64 on the CPU."""
    inputs = problem.map(lambda t: t.to(dtype).detach().requires_grad_())
    out = attend(inputs, backend, **settings)
    assert out.dtype == dtype or (backend == "native" and dtype == torch.float64)
    named = {name: getattr(inputs, name) for name in ("q", "k", "v", "landmarks")}
    named = {name: t for name, t in named.items() if t is not None}
    grads = torch.autograd.grad(out, list(named.values()), inputs.grad.to(out).detach())
    results = {"out": out.detach()} | dict(zip(named, grads, strict=True))
    return {name: t.double().cpu() for name, t in results.items()}


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what was expected; the norm itself where that is 0."""
    size = expected.double().norm().item()
    return (got.double() - expected.double()).norm().item() / (size or 1.0)


def errors(got: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Relative error of the output and of each gradient."""
    assert got.keys() == expected.keys()
    return {name: relative_error(got[name], expected[name]) for name in expected}


def kernel_matrix(m: int, d: int, *, batch: int = 1, spread: float = 1.0, seed: int = 0) -> Tensor:
    """``kappa(L, L)`` of normal landmarks, (batch, m, m), float64."""
    generator = torch.Generator().manual_seed(seed)
    points = spread * torch.randn(batch, m, d, generator=generator, dtype=torch.float64)
    return reference.gaussian_kernel(points, points, 1 / math.sqrt(d))


def hard_landmarks(m: int, d: int = 32) -> dict[str, Tensor]:
    """Landmarks (m, d) by what their kernel matrix is like; float64."""
    generator = torch.Generator().manual_seed(m)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    line = torch.linspace(0, 1, m, dtype=torch.float64)[:, None]
    clusters = torch.randint(5, (m,), generator=generator)
    return {
        "identity": 40 * normal(m, d),
        "ones": normal(1, d).expand(m, d).clone(),
        "duplicates": normal((m + 1) // 2, d).repeat(2, 1)[:m],
        "clusters": 3 * normal(5, d)[clusters] + 0.05 * normal(m, d),
        "line": line * normal(1, d),
        "random": normal(m, d),
        "smooth": torch.sin(line * torch.arange(1, d + 1)) + 0.05 * normal(m, d),
    }


def hard_problems(m: int) -> Iterator[tuple[str, bool, Problem]]:
    """The kind, whether tokens lie near the landmarks, and the problem, for each of :func:`hard_landmarks`.

    Other tokens hardly lie where some of these landmarks are. The inputs are float32's, in float64.
    """
    problem = random_problem(n=60, m=m, d=32, batch=1, heads=1)
    for kind, landmarks in hard_landmarks(m).items():
        around = landmarks[torch.arange(60) % m] + 0.3 * problem.q
        for near, tokens in (False, problem.q), (True, around):
            hard = dataclasses.replace(problem, q=tokens, landmarks=landmarks[None, None])
            yield kind, near, hard.rounded(torch.float32)
