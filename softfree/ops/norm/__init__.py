"""LayerNorm with what stands before or after it."""

from softfree.ops.norm.operator import add_norm, landmark_norm

__all__ = ["add_norm", "landmark_norm"]
