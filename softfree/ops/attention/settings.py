"""Inputs and settings of the attention and of its inverse, as records.

To add a setting, add a field and its check here. :mod:`softfree.ops.shared.registration` derives the
operator's schema from the fields.
"""

import math
from typing import NamedTuple

from torch import Tensor

METHODS = ("newton", "solve")
STARTS = ("scaled", "halving")
ORDERS = (1, 2)
# Default ridge of a solve, by order; the bias is r/λ or (r/λ)².
SOLVE_RIDGE = {1: 0.01, 2: 0.1}
# With a smaller ridge, float32 could not factor matrices of coinciding landmarks.
LEAST_SOLVE_RIDGE = 1e-4
LEAST_SCALE = 1e-30  # half of it times an infinite distance is still infinite in float32


class InverseSettings(NamedTuple):
    """Settings of the inverse, see :func:`softfree.newton_inverse` and :func:`softfree.ridge_solve`."""

    method: str = "newton"
    iterations: int = 20
    start: str = "halving"
    ridge: float = 0.0
    order: int = 2

    @classmethod
    def of(
        cls, method: str, iterations: int, start: str, ridge: float | None, order: int
    ) -> "InverseSettings":
        """Checked settings.

        ``ridge=None`` means 0 for Newton's iteration and the order's default for a solve.
        """
        if ridge is None:
            ridge = SOLVE_RIDGE.get(order, 0.0) if method == "solve" else 0.0
        settings = cls(method, iterations, start, ridge, order)
        settings.check()
        return settings._replace(ridge=float(ridge))

    @classmethod
    def solve(cls, ridge: float | None, order: int) -> "InverseSettings":
        """Checked settings of a solve; ``ridge=None`` means the order's default."""
        return cls.of("solve", cls().iterations, cls().start, ridge, order)

    @classmethod
    def newton(cls, iterations: int, start: str, ridge: float) -> "InverseSettings":
        """Checked settings of Newton's iteration."""
        return cls.of("newton", iterations, start, ridge, cls().order)

    def check(self) -> None:
        """Raise if a setting is invalid."""
        if self.method not in METHODS:
            methods = ", ".join(map(repr, METHODS))
            raise ValueError(f"inverse must be one of {methods}, got {self.method!r}")
        if self.order not in ORDERS or not isinstance(self.order, int) or self.order is True:
            raise ValueError(f"order must be 1 or 2, got {self.order!r}")
        steps = self.iterations
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 0:
            raise ValueError(f"iterations must be an integer >= 0, got {steps!r}")
        if self.start not in STARTS:
            starts = ", ".join(map(repr, STARTS))
            raise ValueError(f"start must be one of {starts}, got {self.start!r}")
        if not isinstance(self.ridge, (int, float)) or not 0 <= self.ridge < math.inf:
            raise ValueError(f"ridge must be a finite number >= 0, got {self.ridge!r}")
        if self.method == "solve" and self.ridge < LEAST_SOLVE_RIDGE:
            raise ValueError(
                f"ridge must be at least {LEAST_SOLVE_RIDGE} for inverse='solve', got {self.ridge!r}"
            )


class AttentionSettings(NamedTuple):
    """Settings of the operator, see :func:`softfree.soft_attention`."""

    scale: float
    normalize: bool = True
    inverse: InverseSettings = InverseSettings()

    def check(self) -> None:
        """Raise if a setting is invalid. The settings of the inverse are checked when they are created."""
        if not isinstance(self.scale, (int, float)) or not LEAST_SCALE <= self.scale < math.inf:
            raise ValueError(
                f"scale must be a finite number of at least {LEAST_SCALE}, got {self.scale!r}"
            )


class Inputs(NamedTuple):
    """Tensors of the operator, see :func:`softfree.soft_attention`. k is None if the queries are the keys."""

    q: Tensor
    k: Tensor | None
    v: Tensor
    landmarks: Tensor
    key_mask: Tensor | None = None
    landmark_mask: Tensor | None = None
