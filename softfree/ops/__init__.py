"""Functions on tensors: the operator, the inverse, their gradients. `reference` is the definition."""

from softfree.ops.attention import soft_attention
from softfree.ops.inverse import newton_inverse, newton_residuals

__all__ = ["newton_inverse", "newton_residuals", "soft_attention"]
