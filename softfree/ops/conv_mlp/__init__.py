"""Two linear layers with a depthwise convolution over the image and GELU between them."""

from softfree.ops.conv_mlp.operator import Weights, conv_mlp, over_grid

__all__ = ["Weights", "conv_mlp", "over_grid"]
