"""Functions on tensors, one folder per operator.

:mod:`softfree.ops.attention.reference` defines the attention; every faster path is tested against it.
"""

from softfree.ops.attention import (
    newton_inverse,
    newton_residuals,
    ridge_solve,
    soft_attention,
    solve_residual,
    solve_spectrum,
)

__all__ = [
    "newton_inverse",
    "newton_residuals",
    "ridge_solve",
    "soft_attention",
    "solve_residual",
    "solve_spectrum",
]
