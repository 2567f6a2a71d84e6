"""Calls of the operator that reach every branch of the kernels, and how far off a result is."""

from dataclasses import dataclass

import torch
from torch import Tensor

import softfree
from softfree.ops.attention import mixing
from softfree.ops.attention.reference import gaussian_kernel, landmark_kernel
from softfree.ops.attention.settings import AttentionSettings, InverseSettings
from softfree.ops.attention.solve import inverse_factor

# A relative error below this needs no comparison: a few roundings of float32, whichever order sums are taken in.
FLOOR = 4e-6


@dataclass(frozen=True)
class Case:
    """Sizes and settings of one call."""

    n: int
    m: int
    d: int
    n_k: int | None = None  # cross-attention
    d_v: int | None = None
    batch: int = 2
    heads: int = 2
    key_mask: bool = False
    landmark_mask: bool = False
    smooth: bool = False
    normalize: bool = True
    start: str = "halving"
    ridge: float = 0.0
    iterations: int = 20
    inverse: str = "newton"
    order: int = 2
    one_sign: bool = (
        False  # values and the result's gradient, so that rounding adds up along sums over tokens
    )


SMALL = {
    "one token": Case(1, 1, 4),
    "odd": Case(37, 7, 8),
    "masks": Case(75, 17, 16, key_mask=True, landmark_mask=True),
    "cross": Case(21, 5, 16, n_k=50, d_v=24, key_mask=True, normalize=False, start="scaled"),
    "ridge": Case(40, 9, 8, normalize=False, start="scaled", ridge=0.01),
    "many steps": Case(20, 3, 8, iterations=40),
    "solve": Case(40, 9, 8, key_mask=True, landmark_mask=True, inverse="solve", ridge=0.1),
    "solve, cross": Case(
        21,
        37,
        16,
        n_k=50,
        d_v=24,
        key_mask=True,
        normalize=False,
        inverse="solve",
        order=1,
        ridge=0.01,
    ),
    "landmarks in tiles": Case(45, 40, 40, key_mask=True, landmark_mask=True),
    "landmarks in tiles, cross": Case(33, 50, 48, n_k=21, d_v=20, key_mask=True),
    "landmarks beyond the registers": Case(80, 70, 16, batch=1, landmark_mask=True),
    "more landmarks than one inverse takes": Case(
        150, 140, 8, batch=1, heads=1, landmark_mask=True
    ),
    "more landmarks and steps": Case(150, 140, 8, batch=1, heads=1, iterations=31, ridge=0.1),
    "solve, landmarks in tiles": Case(
        45, 40, 40, key_mask=True, landmark_mask=True, inverse="solve", ridge=0.1
    ),
    "solve, landmarks beyond the registers": Case(
        110, 100, 16, batch=1, key_mask=True, landmark_mask=True, inverse="solve", ridge=0.1
    ),
    "solve, more landmarks than one program factors": Case(
        150, 140, 8, batch=1, heads=1, landmark_mask=True, inverse="solve", ridge=0.1
    ),
    "solve, more landmarks, cross": Case(
        50,
        140,
        8,
        n_k=150,
        d_v=16,
        batch=1,
        heads=1,
        key_mask=True,
        normalize=False,
        inverse="solve",
        order=1,
        ridge=0.01,
    ),
}
LARGE = {
    "stage 1": Case(3136, 49, 32),
    "stage 1, smooth": Case(3136, 49, 32, smooth=True),
    "stage 2, masked": Case(785, 49, 32, key_mask=True, landmark_mask=True, smooth=True),
    "stage 3": Case(196, 49, 32, normalize=False, start="scaled", ridge=0.01, heads=5),
    "stage 3, solve": Case(196, 49, 32, heads=5, inverse="solve", ridge=0.1),
    "stage 4": Case(50, 50, 32, heads=8),
    "stage 4, solve": Case(49, 49, 32, heads=8, smooth=True, inverse="solve", ridge=0.1),
    "cross": Case(2000, 7, 16, n_k=1500, d_v=24, key_mask=True),
    "long, masked": Case(20000, 49, 32, key_mask=True, batch=1),
    "few landmarks": Case(1500, 3, 32),
    "many heads": Case(40, 6, 16, batch=35000, key_mask=True),
    "a program a head": Case(300, 49, 32, batch=150),
    "a program a head, solve": Case(
        300, 49, 32, batch=150, key_mask=True, inverse="solve", ridge=0.1
    ),
    "many short heads, solve": Case(196, 49, 32, batch=300, inverse="solve", ridge=0.1),
    "a program a head, long": Case(4096, 49, 32, batch=150, one_sign=True),
    "wide": Case(1000, 128, 128),
    "wide, solve": Case(1000, 128, 128, key_mask=True, inverse="solve", ridge=0.1),
    "wider": Case(1000, 256, 128, batch=1, landmark_mask=True),
    "wider, solve": Case(
        1000, 256, 128, batch=1, landmark_mask=True, inverse="solve", order=1, ridge=0.01
    ),
    "many landmarks": Case(2000, 500, 32, batch=1),
    "many landmarks, solve": Case(2000, 500, 32, batch=1, inverse="solve", ridge=0.1),
}


def arguments(case: Case, device: str) -> dict[str, Tensor | None]:
    """Float64 tensors by name, ``grad`` among them."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, device=device)

    batch, heads, keys = case.batch, case.heads, case.n_k or case.n
    q = normal(batch, heads, case.n, case.d)
    if case.smooth:
        q = q.cumsum(2) / case.n**0.5
    chosen = torch.linspace(0, case.n - 1, case.m, device=device).long()
    landmarks = q[:, :, chosen] + 0.3 * normal(batch, heads, case.m, case.d)
    some = torch.rand(batch, keys, device=device) > 0.3
    few = torch.rand(batch, case.m, device=device) > 0.2
    few[:, 0] = True
    v = normal(batch, heads, keys, case.d_v or case.d)
    grad = normal(batch, heads, case.n, case.d_v or case.d)
    return {
        "q": q,
        "v": v.abs() if case.one_sign else v,
        "landmarks": landmarks,
        "k": normal(batch, heads, keys, case.d) if case.n_k else None,
        "key_mask": some if case.key_mask else None,
        "landmark_mask": few if case.landmark_mask else None,
        "grad": grad.abs() if case.one_sign else grad,
    }


def results(
    case: Case, tensors: dict[str, Tensor | None], dtype: torch.dtype, backend: str
) -> dict[str, Tensor]:
    """The result and all gradients at inputs of ``dtype``; backend "plain" is :func:`plain_attention`."""
    inputs = {
        name: tensors[name].to(dtype).detach().requires_grad_()
        for name in ("q", "v", "landmarks", "k")
        if tensors[name] is not None
    }
    masks = {name: tensors[name] for name in ("key_mask", "landmark_mask")}
    attend = plain_attention
    settings: dict[str, object] = dict(case=case)
    if backend != "plain":
        attend = softfree.soft_attention
        names = ("normalize", "start", "ridge", "iterations", "inverse", "order")
        settings = {name: getattr(case, name) for name in names} | dict(backend=backend)
    x = attend(**inputs, **masks, **settings)
    if backend == "triton":  # which does not keep then what a gradient needs
        with torch.no_grad():
            assert torch.equal(attend(**inputs, **masks, **settings), x)
    gradients = torch.autograd.grad(x, list(inputs.values()), tensors["grad"].to(dtype))
    return {"x": x.detach(), **dict(zip(inputs, gradients, strict=True))}


def plain_attention(
    case: Case,
    q: Tensor,
    v: Tensor,
    landmarks: Tensor,
    k: Tensor | None = None,
    key_mask: Tensor | None = None,
    landmark_mask: Tensor | None = None,
) -> Tensor:
    """The formula as one would write it in PyTorch: what is as large as the tokens in their dtype, the rest in float32."""
    scale, dtype = q.shape[-1] ** -0.5, q.dtype
    if landmark_mask is not None:
        landmarks = torch.where(landmark_mask[:, None, :, None], landmarks, 0)
    r = gaussian_kernel(q.float(), landmarks.float(), scale).to(dtype)
    p = r if k is None else gaussian_kernel(k.float(), landmarks.float(), scale).to(dtype)
    if landmark_mask is not None:
        r, p = (torch.where(landmark_mask[:, None, None, :], t, 0) for t in (r, p))
    if key_mask is not None:
        p, v = (torch.where(key_mask[:, None, :, None], t, 0) for t in (p, v))
    inverse = InverseSettings.of(case.inverse, case.iterations, case.start, case.ridge, case.order)
    settings = AttentionSettings(scale, case.normalize, inverse)
    present = None if landmark_mask is None else landmark_mask[:, None]
    a = landmark_kernel(landmarks.float(), present, scale)
    if case.inverse == "solve":
        kept = inverse_factor(a, case.ridge)
    else:
        kept = softfree.newton_inverse(a, case.iterations, start=case.start, ridge=case.ridge)
    w = mixing.mix((p.mT @ v).float(), a, kept, settings).to(dtype)
    return r @ w


def errors(case: Case, dtype: torch.dtype, device: str) -> dict[str, tuple[float, float]]:
    """Relative norms of what the kernels are off, and of what they may be, by part of the result.

    Against float64 at the same (rounded) inputs, and twice what plain PyTorch in ``dtype`` is off.
    """
    tensors = arguments(case, device)
    rounded = {
        name: t.to(dtype).double() if t is not None and t.is_floating_point() else t
        for name, t in tensors.items()
    }
    expected = results(case, rounded, torch.float64, "reference")
    plain = results(case, rounded, dtype, "plain")
    if case.landmark_mask:  # the kernels must not look at a landmark that takes no part
        absent = ~rounded["landmark_mask"][:, None, :, None]
        rounded["landmarks"] = rounded["landmarks"].masked_fill(absent, float("nan"))
    got = results(case, rounded, dtype, "triton")

    def error(found: Tensor, name: str) -> float:
        return ((found.double() - expected[name]).norm() / expected[name].norm()).item()

    return {
        name: (error(got[name], name), 2 * error(plain[name], name) + FLOOR) for name in expected
    }
