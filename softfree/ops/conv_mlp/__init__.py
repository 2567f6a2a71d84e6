"""Two linear layers with a depthwise convolution over the image and GELU between them."""

from softfree.ops.conv_mlp.operator import conv_mlp, over_grid

__all__ = ["conv_mlp", "over_grid"]
