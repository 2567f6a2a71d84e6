"""The depthwise convolution of the values on the matrix units.

A head's channels share one filter, so a row of the filter acts on a row of the image as a banded matrix,

    out[y, i, c] = sum_dy sum_j T_dy[i, j] v[y + dy, j, c],    T_dy[i, j] = w[dy, j - i],

and the convolution is a few small matrix products for several image rows at a time. Most entries of T are 0,
but the speed of the matrix units more than makes up for that. Tokens are read in place, with any stride, and
the result is written as (batch, tokens, channels), so no layout changes.
"""

import triton
import triton.language as tl


@triton.jit
def load_tile(
    p_v, token_stride, top, left, columns, height, width, channels,
    BLOCK_X: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Load ``columns`` columns from ``left`` and ROWS rows from ``top``: (X, ROWS * C), 0 outside."""
    offs = tl.arange(0, ROWS * BLOCK_C)
    offs_x = tl.arange(0, BLOCK_X)
    x = left + offs_x
    y = top + offs // BLOCK_C
    c = offs % BLOCK_C
    in_x = (x >= 0) & (x < width) & (offs_x < columns)
    in_y = (y >= 0) & (y < height) & (c < channels)
    p_rows = p_v + (y * width).to(tl.int64) * token_stride + c
    p_tile = p_rows[None, :] + (x.to(tl.int64) * token_stride)[:, None]
    return tl.load(p_tile, mask=in_x[:, None] & in_y[None, :], other=0.0)


@triton.jit
def value_band_kernel(p_w, p_band, KERNEL: tl.constexpr, FLIP: tl.constexpr, BLOCK_X: tl.constexpr):
    """Grid (heads * KERNEL,). Writes the banded matrix of a filter row, (X, X).

    ``FLIP`` rotates the filter by 180 degrees; the convolution then computes the gradient of the input.
    """
    row = tl.program_id(0)
    offs = tl.arange(0, BLOCK_X)
    b_dx = offs[None, :] - offs[:, None]
    place = row * KERNEL + b_dx
    if FLIP:
        dy = row % KERNEL
        place = (row - dy + KERNEL - 1 - dy) * KERNEL + KERNEL - 1 - b_dx
    b_band = tl.load(p_w + place, mask=(b_dx >= 0) & (b_dx < KERNEL), other=0.0)
    p_tile = p_band + row * BLOCK_X * BLOCK_X + offs[:, None] * BLOCK_X + offs[None, :]
    tl.store(p_tile, b_band.to(p_band.dtype.element_ty))


@triton.jit
def value_conv_kernel(
    p_v, p_band, p_base, p_out, heads, height, width, channels, tiles_y, tiles_x,
    v_batch, v_token, base_batch, base_token, out_batch, out_token, base_scale,
    KERNEL: tl.constexpr, HAS_BASE: tl.constexpr,
    BLOCK_X: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Grid (batch * heads * tiles_y * tiles_x,). Writes ROWS image rows of at most X - KERNEL + 1 columns.

    With ``HAS_BASE`` the convolution is added to base_scale times p_base.
    """
    program = tl.program_id(0)
    tile = program % (tiles_y * tiles_x)
    row = (program // (tiles_y * tiles_x)).to(tl.int64)
    head = row % heads
    p_v += row // heads * v_batch + head * channels
    p_base += row // heads * base_batch + head * channels
    p_out += row // heads * out_batch + head * channels
    top = tile // tiles_x * ROWS
    left = tile % tiles_x * (BLOCK_X - KERNEL + 1)
    offs_i = tl.arange(0, BLOCK_X)
    p_band += head * KERNEL * BLOCK_X * BLOCK_X
    offs_band = offs_i[:, None] * BLOCK_X + offs_i[None, :]
    b_out = tl.zeros((BLOCK_X, ROWS * BLOCK_C), tl.float32)
    for dy in range(KERNEL):
        b_v = load_tile(
            p_v, v_token, top + dy - KERNEL // 2, left - KERNEL // 2, BLOCK_X,
            height, width, channels, BLOCK_X, ROWS, BLOCK_C,
        )  # fmt: skip
        b_band = tl.load(p_band + dy * BLOCK_X * BLOCK_X + offs_band)
        b_out += tl.dot(b_band, b_v)
    offs = tl.arange(0, ROWS * BLOCK_C)
    x = left + offs_i
    y = top + offs // BLOCK_C
    c = offs % BLOCK_C
    inside = (offs_i < BLOCK_X - KERNEL + 1) & (x < width)
    mask = inside[:, None] & ((y < height) & (c < channels))[None, :]
    token = (y[None, :] * width + x[:, None]).to(tl.int64)
    if HAS_BASE:
        b_out += base_scale * tl.load(
            p_base + token * base_token + c[None, :], mask=mask, other=0.0
        )
    p_tile = p_out + token * out_token + c[None, :]
    tl.store(p_tile, b_out.to(p_out.dtype.element_ty), mask=mask)


@triton.jit
def value_conv_weight_kernel(
    p_g, p_v, p_dw, batch, heads, height, width, channels, tiles_y, tiles_x, stretches,
    g_batch, g_token, v_batch, v_token,
    KERNEL: tl.constexpr, BLOCK_X: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Grid (KERNEL, stretches, heads). Writes its part (KERNEL,) of row dy of the filter's gradient.

    ``dw[dy, dx] = sum_i S[i, i + dx]``, ``S = sum_{b, y} G[b, y] V[b, y + dy]^T``.
    """
    dy = tl.program_id(0)
    stretch = tl.program_id(1)
    head = tl.program_id(2).to(tl.int64)
    p_g += head * channels
    p_v += head * channels
    offs_i = tl.arange(0, BLOCK_X)
    b_dx = offs_i[None, :] - offs_i[:, None]
    b_sum = tl.zeros((BLOCK_X, BLOCK_X), tl.float32)
    for item in range(stretch, batch * tiles_y * tiles_x, stretches):
        image = (item // (tiles_y * tiles_x)).to(tl.int64)
        top = item // tiles_x % tiles_y * ROWS
        left = item % tiles_x * (BLOCK_X - KERNEL + 1)
        b_g = load_tile(
            p_g + image * g_batch, g_token, top, left, BLOCK_X - KERNEL + 1,
            height, width, channels, BLOCK_X, ROWS, BLOCK_C,
        )  # fmt: skip
        b_v = load_tile(
            p_v + image * v_batch, v_token, top + dy - KERNEL // 2, left - KERNEL // 2, BLOCK_X,
            height, width, channels, BLOCK_X, ROWS, BLOCK_C,
        )  # fmt: skip
        b_sum += tl.dot(b_g.to(b_v.dtype), tl.trans(b_v))
    for dx in range(KERNEL):
        total = tl.sum(tl.sum(tl.where(b_dx == dx, b_sum, 0.0), 1), 0)
        tl.store(p_dw + ((head * stretches + stretch) * KERNEL + dy) * KERNEL + dx, total)
