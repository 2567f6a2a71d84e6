"""The kernels that solve instead of iterating, in Triton's interpreter, against float64.

Fresh memory is filled with NaN, so that a place no kernel writes shows. It prints one JSON line a case: relative
errors of W, of the factor's product and, going back, of W, dU and the landmarks' gradient, each beside
what float32 arithmetic may be off: what it is with LAPACK's factor, at least a rounding times the condition.
X = R W is beside what rounding W to the dtype of the tokens costs.
"""

import json
import math
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor

from softfree.ops.attention.kernels.launch import FACTOR_TILE
from softfree.ops.attention.kernels.mixing import mixing_backward_kernel
from softfree.ops.attention.kernels.solve import factor_kernel, solve_kernel
from softfree.ops.shared.shapes import block

RIDGES = {1: 0.01, 2: 0.1}
SHAPES = [
    (1, 16, 8),
    (7, 3, 5),
    (16, 16, 16),
    (33, 20, 32),
    (49, 32, 32),
    (64, 32, 40),
    (100, 16, 16),
]


def landmarks_of(kind: str, m: int, d: int) -> Tensor:
    generator = torch.Generator().manual_seed(m)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    if kind == "identity":
        return 40 * normal(m, d)
    if kind == "ones":
        return normal(1, d).expand(m, d).clone()
    if kind == "duplicates":
        return normal((m + 1) // 2, d).repeat(2, 1)[:m]
    if kind == "clusters":
        centres = 3 * normal(5, d)
        return centres[torch.randint(5, (m,), generator=generator)] + 0.05 * normal(m, d)
    if kind == "line":  # condition above 1e12
        return torch.linspace(0, 1, m)[:, None] * normal(1, d)
    if kind == "smooth":
        return 0.2 * normal(m, d)
    return normal(m, d)


KINDS = ["identity", "ones", "duplicates", "clusters", "line", "smooth", "random"]


def exact(landmarks, u, grad_w, mask, scale, normalize, order, ridge, dtype):
    """W, dU and dL by definition and autograd, in ``dtype``."""
    landmarks = landmarks.to(dtype).requires_grad_()
    u = u.to(dtype).requires_grad_()
    difference = landmarks[:, None, :] - landmarks[None, :, :]
    a = torch.exp(-0.5 * scale * difference.square().sum(-1))
    eye = torch.eye(len(a), dtype=dtype)
    both = mask[:, None] & mask[None, :]
    a = torch.where(both & (eye == 0), a, eye)
    root = a.sum(-1, keepdim=True).rsqrt() if normalize else torch.ones((), dtype=dtype)
    factor = torch.linalg.cholesky(a + ridge * eye)
    solved = torch.cholesky_solve(root * u, factor)
    if order == 2:
        solved = torch.cholesky_solve(root * u + ridge * solved, factor)
    w = root * solved
    grads = torch.autograd.grad(w, (u, landmarks), grad_w.to(dtype))
    return w.detach(), *grads, factor.detach()


def nan(*shape: int) -> Tensor:
    return torch.full(shape, float("nan"))


def relative(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted).norm() / wanted.norm().clamp(min=1e-9)).item()


def errors(kind: str, shape: tuple, dtype: torch.dtype, order: int, normalize: bool, masked: bool):
    m, d, d_v = shape
    heads, u_parts, dw_parts = 2, 3, 2
    ridge, scale = RIDGES[order], 1 / math.sqrt(d)
    landmarks = torch.stack([landmarks_of(kind, m, d), landmarks_of("random", m, d)]).to(dtype)
    mask = torch.ones(1, m, dtype=torch.bool)
    if masked:
        mask[0, ::3] = False
    # Sums as the passes over the tokens leave them, so that they lie where the landmarks' kernel does.
    tokens = landmarks.double()[:, torch.randint(m, (120,))]
    tokens = tokens + 0.3 * torch.randn(heads, 120, d, dtype=torch.float64)
    distance = (tokens[:, :, None] - landmarks.double()[:, None]).square().sum(-1)
    spread = torch.exp(-0.5 * scale * distance) * mask[0]

    def parts_of(parts: int) -> Tensor:
        values = torch.randn(heads, parts, 120 // parts, d_v, dtype=torch.float64)
        return (spread.unflatten(1, (parts, -1)).mT @ values).float()

    u, grad_w = parts_of(u_parts), parts_of(dw_parts)
    tile, _ = FACTOR_TILE[m > 64]
    bytes_of_mask = mask.view(torch.uint8)
    shared = dict(BLOCK_D=block(d), HAS_LANDMARK_MASK=masked, FLOAT32=dtype == torch.float32)
    mixing = dict(BLOCK_M=block(m), BLOCK_C=block(d_v), PARTS=2, NORMALIZE=normalize, ORDER=order)
    factor, w = nan(heads, m * (m + 3) // 2), nan(heads, m, d_v)
    kept = nan(heads, m, d_v)
    factor_kernel[(heads,)](
        landmarks, bytes_of_mask, factor, heads, m, d, scale, ridge,
        COUNT=-(-m // tile), TILE=tile, NORMALIZE=normalize, OVERLAP=False, **shared,
    )  # fmt: skip
    solve_kernel[(heads,)](
        u, factor, kept, w, m, d_v, u_parts, ridge,
        KEEP=True, FLOAT32=dtype == torch.float32, **mixing,
    )  # fmt: skip
    w_again, du, dl = nan(heads, m, d_v), nan(heads, m, d_v), nan(heads, 2, m, d)
    done = torch.full((heads, 1), 7, dtype=torch.int32)
    mixing_backward_kernel[(heads,)](
        landmarks, bytes_of_mask, u, grad_w, factor, w_again, du, dl, done,
        heads, m, d, d_v, u_parts, dw_parts, 2, 1, scale, ridge, **mixing, **shared,
    )  # fmt: skip
    assert (done == 0).all()
    lower = torch.zeros(heads, m, m)
    rows, columns = torch.tril_indices(m, m)
    lower[:, rows, columns] = factor[:, : m * (m + 1) // 2]
    assert relative(kept, u.sum(1).double()) < 1e-6
    worst: dict[str, list[float]] = {}
    for head in range(heads):
        given = (landmarks[head], u[head].sum(0), grad_w[head].sum(0), mask[0], scale)
        wanted = exact(*given, normalize, order, ridge, torch.float64)
        plain = exact(*given, normalize, order, ridge, torch.float32)
        inverse = torch.cholesky_inverse(wanted[3])
        product = lower[head].double().mT @ lower[head].double()
        through = spread[head] @ wanted[0]
        found = {
            "x": [
                relative(spread[head] @ w[head].double(), through),
                # Plain PyTorch rounds W to the dtype of the tokens.
                relative(spread[head] @ plain[0].to(dtype).double(), through),
            ],
            "factor": [
                relative(product, inverse),
                relative(torch.cholesky_inverse(plain[3]), inverse),
            ],
            "w": [relative(w[head], wanted[0]), relative(plain[0], wanted[0])],
            "w again": [relative(w_again[head], wanted[0]), relative(plain[0], wanted[0])],
            "du": [relative(du[head], wanted[1]), relative(plain[1], wanted[1])],
            "dl": [relative(dl[head, 0], wanted[2]), relative(plain[2], wanted[2])],
        }
        # Landmarks all alike or all apart have no gradient but rounding's, of what it is made of.
        size = (wanted[0].norm() * grad_w[head].sum(0).norm()).item() * scale
        found["dl"] = [e * wanted[2].norm().clamp(min=1e-9).item() / max(size * 1e-3, wanted[2].norm().item()) for e in found["dl"]]  # fmt: skip
        rounding = torch.finfo(torch.float32).eps * torch.linalg.cond(wanted[3]).square().item()
        for name, (error, plain) in found.items():
            pair = error, max(plain, rounding)
            worst[name] = [max(p) for p in zip(pair, worst.get(name, pair), strict=True)]
    return worst


def main(few: bool) -> None:
    torch.manual_seed(0)
    for index, shape in enumerate(SHAPES):
        for number, kind in enumerate(KINDS):
            for dtype in (torch.float32, torch.float16):
                if few and (index + number + (dtype == torch.float16)) % 6:
                    continue
                order, normalize = 1 + (index + number) % 2, number % 3 != 0
                masked = (index + number) % 4 == 3 and shape[0] > 1
                if shape[0] in (49, 100):
                    order = 2
                found = errors(kind, shape, dtype, order, normalize, masked)
                case = [kind, *shape, str(dtype), order, normalize, masked]
                print(json.dumps({"case": case, "errors": found}), flush=True)


if __name__ == "__main__":
    main(few="all" not in sys.argv)
