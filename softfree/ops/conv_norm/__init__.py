"""The bias, batch norm and ReLU after a convolution, in evaluation."""

from softfree.ops.conv_norm.operator import fits, norm_relu

__all__ = ["fits", "norm_relu"]
