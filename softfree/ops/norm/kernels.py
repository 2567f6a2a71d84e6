"""LayerNorm fused with the landmarks' GELU after it or a block's sum before it, in one pass each way.

A program holds whole rows. The statistics are computed again for the gradient, from the half-precision input.
"""

import triton
import triton.language as tl


@triton.jit
def row_places(row, rows, channels, BLOCK_C: tl.constexpr):
    """The offsets of the rows' elements, and which of them exist: (ROWS, C)."""
    column = tl.arange(0, BLOCK_C)
    exists = (row < rows)[:, None] & (column < channels)[None, :]
    return row.to(tl.int64)[:, None] * channels + column[None, :], exists


@triton.jit
def load_vector(p_vector, channels, BLOCK_C: tl.constexpr):
    column = tl.arange(0, BLOCK_C)
    return tl.load(p_vector + column, mask=column < channels, other=0.0).to(tl.float32)


@triton.jit
def norm_rows(b_x, exists, channels, eps):
    """Normed rows (ROWS, C), 0 where they do not exist, and 1 / deviation (ROWS,)."""
    b_x = tl.where(exists, b_x - (tl.sum(b_x, 1) / channels)[:, None], 0.0)
    b_inverse = tl.rsqrt(tl.sum(b_x * b_x, 1) / channels + eps)
    # If eps is 0, rows that do not exist would be 0 times infinity.
    return tl.where(exists, b_x * b_inverse[:, None], 0.0), b_inverse


@triton.jit
def norm_gradient(b_dn, b_normed, b_inverse, channels):
    """The gradient of the rows, from that of the normed rows."""
    b_along = tl.sum(b_dn * b_normed, 1) / channels
    b_dx = b_dn - (tl.sum(b_dn, 1) / channels)[:, None] - b_normed * b_along[:, None]
    return b_dx * b_inverse[:, None]


@triton.jit
def store_parts(p_parts, stretch, channels, b_dweight, b_dbias, BLOCK_C: tl.constexpr):
    """Store a stretch's part (2, channels) of the gradients of weight and bias."""
    column = tl.arange(0, BLOCK_C)
    p_parts += stretch * 2 * channels + column
    tl.store(p_parts, tl.sum(b_dweight, 0), mask=column < channels)
    tl.store(p_parts + channels, tl.sum(b_dbias, 0), mask=column < channels)


@triton.jit
def landmark_norm_kernel(
    p_x, p_weight, p_bias, p_out, rows, channels, scale, eps,
    ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of rows,). Writes ``GELU(LayerNorm(scale x)) / scale``."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    places, exists = row_places(row, rows, channels, BLOCK_C)
    b_x = scale * tl.load(p_x + places, mask=exists, other=0.0).to(tl.float32)
    b_normed, _ = norm_rows(b_x, exists, channels, eps)
    b_weight = load_vector(p_weight, channels, BLOCK_C)
    b_y = b_normed * b_weight[None, :] + load_vector(p_bias, channels, BLOCK_C)[None, :]
    b_out = 0.5 * b_y * (1 + tl.erf(b_y * 0.7071067811865476)) / scale
    tl.store(p_out + places, b_out.to(p_out.dtype.element_ty), mask=exists)


@triton.jit
def landmark_norm_backward_kernel(
    p_g, p_x, p_weight, p_bias, p_dx, p_parts, rows, channels, steps, scale, eps,
    ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Grid (stretches,).

    Writes dx for its stretch of rows, and its part of the gradients of weight and bias.
    """
    stretch = tl.program_id(0)
    b_weight = load_vector(p_weight, channels, BLOCK_C)
    b_bias = load_vector(p_bias, channels, BLOCK_C)
    b_dweight = tl.zeros((ROWS, BLOCK_C), tl.float32)
    b_dbias = tl.zeros((ROWS, BLOCK_C), tl.float32)
    for step in range(steps):
        row = (stretch * steps + step) * ROWS + tl.arange(0, ROWS)
        places, exists = row_places(row, rows, channels, BLOCK_C)
        b_x = scale * tl.load(p_x + places, mask=exists, other=0.0).to(tl.float32)
        b_normed, b_inverse = norm_rows(b_x, exists, channels, eps)
        b_y = b_normed * b_weight[None, :] + b_bias[None, :]
        b_g = tl.load(p_g + places, mask=exists, other=0.0).to(tl.float32) / scale
        b_below = 0.5 * (1 + tl.erf(b_y * 0.7071067811865476))
        b_dy = b_g * (b_below + b_y * 0.3989422804014327 * tl.exp(-0.5 * b_y * b_y))
        b_dweight += b_dy * b_normed
        b_dbias += b_dy
        b_dx = scale * norm_gradient(b_dy * b_weight[None, :], b_normed, b_inverse, channels)
        tl.store(p_dx + places, b_dx.to(p_dx.dtype.element_ty), mask=exists)
    store_parts(p_parts, stretch, channels, b_dweight, b_dbias, BLOCK_C)


@triton.jit
def add_norm_kernel(
    p_x, p_branch, p_weight, p_bias, p_sum, p_out, rows, channels, eps,
    KEEP: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of rows,).

    Writes ``LayerNorm(x + branch)`` and, with ``KEEP``, the rounded sum that is normed.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    places, exists = row_places(row, rows, channels, BLOCK_C)
    b_sum = tl.load(p_x + places, mask=exists, other=0.0).to(tl.float32)
    b_sum += tl.load(p_branch + places, mask=exists, other=0.0).to(tl.float32)
    b_sum = b_sum.to(p_x.dtype.element_ty)
    if KEEP:
        tl.store(p_sum + places, b_sum, mask=exists)
    b_normed, _ = norm_rows(b_sum.to(tl.float32), exists, channels, eps)
    b_weight = load_vector(p_weight, channels, BLOCK_C)
    b_out = b_normed * b_weight[None, :] + load_vector(p_bias, channels, BLOCK_C)[None, :]
    tl.store(p_out + places, b_out.to(p_out.dtype.element_ty), mask=exists)


@triton.jit
def add_norm_backward_kernel(
    p_g, p_sum, p_weight, p_dsum, p_parts, rows, channels, steps, eps,
    ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Grid (stretches,).

    Writes the sum's gradient for its rows, and its part of the gradients of weight and bias.
    """
    stretch = tl.program_id(0)
    b_weight = load_vector(p_weight, channels, BLOCK_C)
    b_dweight = tl.zeros((ROWS, BLOCK_C), tl.float32)
    b_dbias = tl.zeros((ROWS, BLOCK_C), tl.float32)
    for step in range(steps):
        row = (stretch * steps + step) * ROWS + tl.arange(0, ROWS)
        places, exists = row_places(row, rows, channels, BLOCK_C)
        b_sum = tl.load(p_sum + places, mask=exists, other=0.0).to(tl.float32)
        b_g = tl.load(p_g + places, mask=exists, other=0.0).to(tl.float32)
        b_normed, b_inverse = norm_rows(b_sum, exists, channels, eps)
        b_dweight += b_g * b_normed
        b_dbias += b_g
        b_dsum = norm_gradient(b_g * b_weight[None, :], b_normed, b_inverse, channels)
        tl.store(p_dsum + places, b_dsum.to(p_dsum.dtype.element_ty), mask=exists)
    store_parts(p_parts, stretch, channels, b_dweight, b_dbias, BLOCK_C)
