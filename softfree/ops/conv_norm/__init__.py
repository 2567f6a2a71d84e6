"""What follows a convolution in evaluation: its bias, a batch norm, ReLU."""

from softfree.ops.conv_norm.operator import fits, norm_relu

__all__ = ["fits", "norm_relu"]
