"""Functions on tensors, a folder each; :mod:`softfree.ops.attention.reference` is the definition of it all."""

from softfree.ops.attention import newton_inverse, newton_residuals, soft_attention

__all__ = ["newton_inverse", "newton_residuals", "soft_attention"]
