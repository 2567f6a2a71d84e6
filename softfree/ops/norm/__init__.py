"""LayerNorm fused with the operation before or after it."""

from softfree.ops.norm.operator import add_norm, add_norm_over, landmark_norm

__all__ = ["add_norm", "add_norm_over", "landmark_norm"]
