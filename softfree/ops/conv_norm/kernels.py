"""A convolution's bias, a batch norm with running statistics, and ReLU, in one pass."""

import triton
import triton.language as tl

from softfree.ops.norm.kernels import load_vector, row_places


@triton.jit
def norm_relu_kernel(
    p_x, p_shift, p_mean, p_variance, p_weight, p_bias, p_out, rows, channels, eps,
    ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of rows,). Writes ``max(0, (x + shift - mean) / sqrt(variance + eps) * weight + bias)``."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    places, exists = row_places(row, rows, channels, BLOCK_C)
    b_scale = tl.rsqrt(load_vector(p_variance, channels, BLOCK_C) + eps)
    b_scale *= load_vector(p_weight, channels, BLOCK_C)
    b_shift = load_vector(p_shift, channels, BLOCK_C) - load_vector(p_mean, channels, BLOCK_C)
    b_x = tl.load(p_x + places, mask=exists, other=0.0).to(tl.float32) + b_shift[None, :]
    b_y = b_x * b_scale[None, :] + load_vector(p_bias, channels, BLOCK_C)[None, :]
    # Not a maximum, which would turn NaN into a number.
    b_out = tl.where(b_y < 0, 0.0, b_y)
    tl.store(p_out + places, b_out.to(p_out.dtype.element_ty), mask=exists)
