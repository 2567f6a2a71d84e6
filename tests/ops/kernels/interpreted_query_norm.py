"""The kernels of queries' norm in Triton's interpreter, against PyTorch's norm and means in float64.

Fresh memory is filled with NaN, so that a place no kernel writes shows. It prints one JSON line per case:
relative errors of normed queries, means, and the gradients of queries and scale.
"""

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
from interpreted import poisoned

from softfree.layers.landmarks import AverageLandmarks
from softfree.ops.query_norm import operator as query_norm
from softfree.ops.shared import shapes
from softfree.ops.shared.precision import compute_dtype

# heads, channels per head, grid, side of the windows, tokens before the grid
CASES = [
    (2, 16, (8, 8), 4, 0),
    (3, 20, (9, 7), 2, 2),
    (2, 32, (5, 11), 3, 1),
    (1, 8, (1, 7), 1, 0),
    (2, 16, (19, 17), 16, 0),
]


def problem(case: tuple) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    heads, d, grid, _, before = case
    tokens = before + grid[0] * grid[1]
    qv, grad_qv = torch.randn(2, 2, tokens, 2, heads, d).half()
    return qv, grad_qv, torch.rand(heads) + 0.5


def by_head(qv: torch.Tensor, before: int) -> torch.Tensor:
    """Where the queries lie in a projection to queries and values."""
    return qv[:, before:, 0].transpose(1, 2)


def in_place(case: tuple) -> dict[str, float]:
    """Norm, means and gradients as the layer's operator computes them, beside values that stay."""
    _, _, grid, side, before = case
    qv, grad_qv, scale = problem(case)
    window, kept = (side, side), 0.25
    q = by_head(qv, before).double().requires_grad_()
    wide = scale.double().requires_grad_()
    normed = query_norm.query_norm(q, wide)
    means = AverageLandmarks(side).reduce(normed, None, grid, window)
    grad_means = torch.randn(means.shape).half()
    grads = (kept * by_head(grad_qv, before).double(), grad_means.double())
    wanted = [normed, means, *torch.autograd.grad((normed, means), (q, wide), grads)]

    values, grad_values = qv[:, :, 1].clone(), grad_qv[:, :, 1].clone()
    place, grad_place = by_head(qv, before), by_head(grad_qv, before)
    inverse = query_norm.inverse_deviations(by_head(qv, 0))[:, :, before:]
    found_means = query_norm.norm(place, scale, place, inverse, grid, window, means=True)
    found_scale = query_norm.write_gradient(
        grad_place, place, scale, inverse, grad_means, grad_place, grid, window, kept
    )
    assert torch.equal(qv[:, :, 1], values) and torch.equal(grad_qv[:, :, 1], grad_values)
    found = [place, found_means, grad_place, found_scale]
    names = ("normed", "means", "q", "scale")
    return {
        name: ((f - w).norm() / w.norm()).item()
        for name, f, w in zip(names, found, wanted, strict=True)
    }


def alone(case: tuple) -> dict[str, float]:
    """The registered operator."""
    qv, grad_qv, scale = problem(case)
    results = []
    for dtype in (torch.float64, torch.float16):
        q = by_head(qv, 0).to(dtype).requires_grad_()
        factor = scale.to(compute_dtype(dtype)).requires_grad_()
        out = query_norm.query_norm(q, factor)
        grad = by_head(grad_qv, 0).to(dtype)
        results.append((out, *torch.autograd.grad(out, (q, factor), grad)))
    return {
        name: ((f - w).norm() / w.norm()).item()
        for name, w, f in zip(("out", "q", "scale"), *results, strict=True)
    }


def main() -> None:
    torch.manual_seed(0)
    # Several tiles of a head.
    query_norm.FORWARD_TILE = (512, 2)
    query_norm.SMALL_FORWARD_TILE = query_norm.BACKWARD_TILE = (512, 4)
    q = torch.randn(2, 3, 7, 16).half().requires_grad_()
    arguments = (q, torch.rand(3, requires_grad=True))
    torch.library.opcheck(torch.ops.softfree.query_norm, arguments)
    query_norm._fits = lambda q: q.dtype == torch.float16
    torch.empty = poisoned(torch.empty)
    query_norm.token_tensor = poisoned(shapes.token_tensor)
    for case in CASES:
        print(json.dumps({"case": case, "errors": in_place(case)}), flush=True)
        print(json.dumps({"case": case, "errors": alone(case)}), flush=True)


if __name__ == "__main__":
    main()
