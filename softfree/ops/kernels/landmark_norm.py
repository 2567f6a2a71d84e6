"""LayerNorm and GELU of landmarks in one pass each way, whatever half precision they come in."""

import triton
import triton.language as tl


@triton.jit
def load_normed(
    p_x, p_weight, p_bias, row, rows, d, scale, eps, ROWS: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Rows of ``x``: normed (ROWS, D), 1 / deviation (ROWS,), weight (D,), ``y = normed weight + bias``."""
    column = tl.arange(0, BLOCK_D)
    exists = (row < rows)[:, None] & (column < d)[None, :]
    places = row.to(tl.int64)[:, None] * d + column[None, :]
    b_x = scale * tl.load(p_x + places, mask=exists, other=0.0).to(tl.float32)
    b_mean = tl.sum(b_x, 1) / d
    b_x = tl.where((column < d)[None, :], b_x - b_mean[:, None], 0.0)
    b_inverse = tl.rsqrt(tl.sum(b_x * b_x, 1) / d + eps)
    b_normed = b_x * b_inverse[:, None]
    b_weight = tl.load(p_weight + column, mask=column < d, other=0.0).to(tl.float32)
    b_bias = tl.load(p_bias + column, mask=column < d, other=0.0).to(tl.float32)
    return b_normed, b_inverse, b_weight, b_normed * b_weight[None, :] + b_bias[None, :]


@triton.jit
def landmark_norm_kernel(
    p_x, p_weight, p_bias, p_out, rows, d, scale, eps, ROWS: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Grid (tiles of rows,). Writes ``GELU(LayerNorm(scale x)) / scale``."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    _, _, _, b_y = load_normed(p_x, p_weight, p_bias, row, rows, d, scale, eps, ROWS, BLOCK_D)
    b_out = 0.5 * b_y * (1 + tl.erf(b_y * 0.7071067811865476)) / scale
    column = tl.arange(0, BLOCK_D)
    exists = (row < rows)[:, None] & (column < d)[None, :]
    p_tile = p_out + row.to(tl.int64)[:, None] * d + column[None, :]
    tl.store(p_tile, b_out.to(p_out.dtype.element_ty), mask=exists)


@triton.jit
def landmark_norm_backward_kernel(
    p_g, p_x, p_weight, p_bias, p_dx, p_parts, rows, d, steps, scale, eps,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid (stretches,). Writes dx of its stretch of rows, and its part (2, d) of dweight and dbias."""
    stretch = tl.program_id(0)
    column = tl.arange(0, BLOCK_D)
    b_dweight = tl.zeros((ROWS, BLOCK_D), tl.float32)
    b_dbias = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for step in range(steps):
        row = (stretch * steps + step) * ROWS + tl.arange(0, ROWS)
        b_normed, b_inverse, b_weight, b_y = load_normed(
            p_x, p_weight, p_bias, row, rows, d, scale, eps, ROWS, BLOCK_D
        )
        exists = (row < rows)[:, None] & (column < d)[None, :]
        places = row.to(tl.int64)[:, None] * d + column[None, :]
        b_g = tl.load(p_g + places, mask=exists, other=0.0).to(tl.float32) / scale
        b_below = 0.5 * (1 + tl.erf(b_y * 0.7071067811865476))
        b_dy = b_g * (b_below + b_y * 0.3989422804014327 * tl.exp(-0.5 * b_y * b_y))
        b_dweight += b_dy * b_normed
        b_dbias += b_dy
        b_dn = b_dy * b_weight[None, :]
        b_along = tl.sum(b_dn * b_normed, 1) / d
        b_dx = b_dn - (tl.sum(b_dn, 1) / d)[:, None] - b_normed * b_along[:, None]
        b_dx = b_dx * (scale * b_inverse)[:, None]
        tl.store(p_dx + places, b_dx.to(p_dx.dtype.element_ty), mask=exists)
    p_parts += stretch * 2 * d + column
    tl.store(p_parts, tl.sum(b_dweight, 0), mask=column < d)
    tl.store(p_parts + d, tl.sum(b_dbias, 0), mask=column < d)
