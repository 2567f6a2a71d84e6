"""Why the inverse iterates Y <- 2 Y - Y A Y and not the recurrence of its residual, which looks cheaper.

    python benchmarks/newton_recurrences.py

With R_k = I - A Y_k the Newton step is also R_{k+1} = R_k^2, Y_{k+1} = Y_k (I + R_k): the same numbers in exact
arithmetic, and the two products of a step do not depend on each other. In float32 the two differ: Newton's
step uses A again each time and so corrects its rounding; the recurrence never does.
"""

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from softfree.ops.attention.inverse import start_value

SIZE = 49
STEPS = 20
# Spread of the points whose kernel matrix is inverted; small means close together and ill-conditioned.
SPREADS = (1.5, 0.75, 0.5, 0.4, 0.33, 0.25)


def kernel_matrix(spread: float, seed: int = 0) -> Tensor:
    """A = exp(-||x_i - x_j||^2 / 2) of 49 random points in 8 dimensions, float64."""
    generator = torch.Generator().manual_seed(seed)
    points = spread * torch.randn(SIZE, 8, generator=generator, dtype=torch.float64)
    return torch.exp(-0.5 * torch.cdist(points, points).square())


def newton(a: Tensor, alpha: Tensor) -> Tensor:
    """Y <- 2 Y - Y A Y."""
    y = alpha * a
    for _ in range(STEPS):
        y = 2 * y - y @ a @ y
    return y


def residual_recurrence(a: Tensor, alpha: Tensor) -> Tensor:
    """Y <- Y (I + R), R <- R R."""
    y = alpha * a
    r = torch.eye(SIZE, dtype=a.dtype) - a @ y
    for _ in range(STEPS):
        y, r = y + y @ r, r @ r
    return y


def closed_form(a: Tensor, alpha: Tensor) -> Tensor:
    """What both should give: eigenvalues (1 - (1 - alpha lam^2)^(2^T)) / lam."""
    values, vectors = torch.linalg.eigh(a)
    kept = 1 - (1 - alpha.squeeze() * values.square()).pow(2**STEPS)
    return (vectors * (kept / values)) @ vectors.mT


def main() -> None:
    table = Table(
        header_style="bold", title=f"relative error of Y in float32, {STEPS} steps, m = {SIZE}"
    )
    for title in ("condition of A", "Newton", "residual recurrence"):
        table.add_column(title, justify="right")
    for spread in SPREADS:
        a = kernel_matrix(spread)
        alpha = start_value(a, "scaled")
        truth = closed_form(a, alpha)
        errors = [
            float((method(a.float(), alpha.float()).double() - truth).norm() / truth.norm())
            for method in (newton, residual_recurrence)
        ]
        table.add_row(f"{float(torch.linalg.cond(a)):.1e}", *(f"{error:.1e}" for error in errors))
    Console().print(table)


if __name__ == "__main__":
    main()
