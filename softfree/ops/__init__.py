"""Functions on tensors, a folder each; :mod:`softfree.ops.attention.reference` is the definition of it all."""

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
