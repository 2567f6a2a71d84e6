"""The settings of the attention and of its inverse, which travel as one record.

A further setting is a field with its check here. The operator's schema, :mod:`softfree.ops.shared.registration`, has the
fields by itself.
"""

import math
from typing import NamedTuple

STARTS = ("scaled", "halving")


class InverseSettings(NamedTuple):
    """Of the regularised inverse, see :func:`softfree.newton_inverse`."""

    iterations: int = 20
    start: str = "halving"
    ridge: float = 0.0

    def check(self) -> None:
        """Raise if a setting makes no sense."""
        steps = self.iterations
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 0:
            raise ValueError(f"iterations must be an integer >= 0, got {steps!r}")
        if self.start not in STARTS:
            starts = ", ".join(map(repr, STARTS))
            raise ValueError(f"start must be one of {starts}, got {self.start!r}")
        if not isinstance(self.ridge, (int, float)) or not 0 <= self.ridge < math.inf:
            raise ValueError(f"ridge must be a finite number >= 0, got {self.ridge!r}")


class AttentionSettings(NamedTuple):
    """Of the operator, see :func:`softfree.soft_attention`."""

    scale: float
    normalize: bool = True
    inverse: InverseSettings = InverseSettings()

    def check(self) -> None:
        """Raise if a setting makes no sense."""
        if not isinstance(self.scale, (int, float)) or not 0 < self.scale < math.inf:
            raise ValueError(f"scale must be a finite number > 0, got {self.scale!r}")
        self.inverse.check()
