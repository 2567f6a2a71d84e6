"""The attention operator, its inverse and their gradients.

:mod:`softfree.ops.attention.reference` is the definition.
"""

from softfree.ops.attention.inverse import newton_inverse, newton_residuals
from softfree.ops.attention.operator import BACKENDS, check_backend, soft_attention
from softfree.ops.attention.solve import ridge_solve, solve_residual, solve_spectrum

__all__ = [
    "BACKENDS",
    "check_backend",
    "newton_inverse",
    "newton_residuals",
    "ridge_solve",
    "soft_attention",
    "solve_residual",
    "solve_spectrum",
]
