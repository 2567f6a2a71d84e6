"""A pyramid's attention layer as one operator."""

from softfree.ops.image_attention.operator import fits, image_attention

__all__ = ["fits", "image_attention"]
