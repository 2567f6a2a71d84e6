"""The attention layer of a pyramid backbone as one operator."""

from softfree.ops.image_attention.operator import Weights, fits, image_attention

__all__ = ["Weights", "fits", "image_attention"]
