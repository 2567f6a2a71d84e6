"""Depthwise convolution of the attention's values over the image."""

from softfree.ops.value_conv.operator import value_conv

__all__ = ["value_conv"]
