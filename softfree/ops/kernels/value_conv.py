"""The depthwise convolution of the values on the matrix units.

A head's channels share one filter, so a row of the filter acts on a row of the image as a banded matrix,

    out[y, i, c] = sum_dy sum_j T_dy[i, j] v[y + dy, j, c],    T_dy[i, j] = w[dy, j - i],

and the convolution is a few small matrix products for several image rows at a time. Most entries of T are
0, but the matrix units are faster than the rest by more than that. Tokens are read where they lie, with any
stride, and the result is written as (batch, tokens, channels): no change of layout.
"""

import triton
import triton.language as tl


@triton.jit
def load_tile(
    p_v, token_stride, top, left, height, width, channels,
    BLOCK_X: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Image columns left.., rows top.. of one head: (X, ROWS * C), 0 outside the image."""
    offs = tl.arange(0, ROWS * BLOCK_C)
    x = left + tl.arange(0, BLOCK_X)
    y = top + offs // BLOCK_C
    c = offs % BLOCK_C
    token = y[None, :] * width + x[:, None]
    inside = (x >= 0)[:, None] & (x < width)[:, None] & (y >= 0)[None, :] & (y < height)[None, :]
    p_tile = p_v + token.to(tl.int64) * token_stride + c[None, :]
    return tl.load(p_tile, mask=inside & (c < channels)[None, :], other=0.0)


@triton.jit
def value_conv_kernel(
    p_v, p_w, p_out, heads, height, width, channels, tiles_y, tiles_x,
    v_batch, v_token, out_batch, out_token,
    KERNEL: tl.constexpr, FLIP: tl.constexpr,
    BLOCK_X: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Grid (tiles_x * tiles_y, batch * heads). Writes ROWS image rows of at most X - KERNEL + 1 columns.

    ``FLIP`` turns the filter by 180 degrees: then it is the gradient of the input.
    """
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    head = row % heads
    p_v += row // heads * v_batch + head * channels
    p_out += row // heads * out_batch + head * channels
    p_w += head * KERNEL * KERNEL
    top = tile // tiles_x * ROWS
    left = tile % tiles_x * (BLOCK_X - KERNEL + 1)
    offs_i = tl.arange(0, BLOCK_X)
    b_dx = offs_i[None, :] - offs_i[:, None]
    in_band = (b_dx >= 0) & (b_dx < KERNEL)
    b_out = tl.zeros((BLOCK_X, ROWS * BLOCK_C), tl.float32)
    for dy in range(KERNEL):
        b_v = load_tile(
            p_v, v_token, top + dy - KERNEL // 2, left - KERNEL // 2, height, width, channels,
            BLOCK_X, ROWS, BLOCK_C,
        )  # fmt: skip
        place = dy * KERNEL + b_dx
        if FLIP:
            place = KERNEL * KERNEL - 1 - place
        b_band = tl.load(p_w + place, mask=in_band, other=0.0)
        b_out += tl.dot(b_band.to(b_v.dtype), b_v)
    offs = tl.arange(0, ROWS * BLOCK_C)
    x = left + offs_i
    y = top + offs // BLOCK_C
    c = offs % BLOCK_C
    inside = (offs_i < BLOCK_X - KERNEL + 1) & (x < width)
    mask = inside[:, None] & ((y < height) & (c < channels))[None, :]
    p_tile = p_out + (y[None, :] * width + x[:, None]).to(tl.int64) * out_token + c[None, :]
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
    writes = offs_i < BLOCK_X - KERNEL + 1
    b_sum = tl.zeros((BLOCK_X, BLOCK_X), tl.float32)
    for item in range(stretch, batch * tiles_y * tiles_x, stretches):
        image = (item // (tiles_y * tiles_x)).to(tl.int64)
        top = item // tiles_x % tiles_y * ROWS
        left = item % tiles_x * (BLOCK_X - KERNEL + 1)
        b_g = load_tile(
            p_g + image * g_batch, g_token, top, left, height, width, channels,
            BLOCK_X, ROWS, BLOCK_C,
        )  # fmt: skip
        b_g = tl.where(writes[:, None], b_g, 0.0)
        b_v = load_tile(
            p_v + image * v_batch, v_token, top + dy - KERNEL // 2, left - KERNEL // 2,
            height, width, channels, BLOCK_X, ROWS, BLOCK_C,
        )  # fmt: skip
        b_sum += tl.dot(b_g.to(b_v.dtype), tl.trans(b_v))
    for dx in range(KERNEL):
        total = tl.sum(tl.sum(tl.where(b_dx == dx, b_sum, 0.0), 1), 0)
        tl.store(p_dw + ((head * stretches + stretch) * KERNEL + dy) * KERNEL + dx, total)
