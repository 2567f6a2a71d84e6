"""A pyramid's attention layer as one operator."""

from softfree.ops.image_attention.operator import Weights, fits, image_attention

__all__ = ["Weights", "fits", "image_attention"]
