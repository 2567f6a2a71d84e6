"""Products of whole windows with one weight: a convolution whose stride is its window, for all heads.

    out[w, o] = sum_t sum_c q[w, t, c] W[t, c, o]        t: the tokens of window w

A tile holds WINDOWS windows, of any images and heads, with TOKENS tokens of each side by side: (WINDOWS,
TOKENS * D). Its rows are gathered directly from the tokens, so q is not copied by window. Every token is in
exactly one window, so it is read once, and its gradient is written once. Tokens beyond the border count as 0.
"""

import triton
import triton.language as tl


@triton.jit
def tile_places(
    first_window, first_token, windows, rows, columns, heads, height, width, channels,
    batch_stride, head_stride, token_stride,
    DOWN: tl.constexpr, ACROSS: tl.constexpr,
    WINDOWS: tl.constexpr, TOKENS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The offsets of a tile's elements in the token tensor, and which exist: (WINDOWS, TOKENS * D)."""
    window = first_window + tl.arange(0, WINDOWS)
    head = window // (rows * columns)
    top = window // columns % rows * DOWN
    left = window % columns * ACROSS
    first = (head // heads).to(tl.int64) * batch_stride + (head % heads).to(tl.int64) * head_stride
    first += (top * width + left).to(tl.int64) * token_stride
    offs = tl.arange(0, TOKENS * BLOCK_D)
    token = first_token + offs // BLOCK_D
    channel = offs % BLOCK_D
    y = token // ACROSS
    x = token % ACROSS
    within = (y * width + x).to(tl.int64) * token_stride + channel
    exists = ((token < DOWN * ACROSS) & (channel < channels))[None, :] & (window < windows)[:, None]
    inside = (top[:, None] + y[None, :] < height) & (left[:, None] + x[None, :] < width)
    return first[:, None] + within[None, :], exists & inside


@triton.jit
def weight_tile(
    p_w, first_token, channels, width_out,
    WINDOW: tl.constexpr, TOKENS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_O: tl.constexpr,
):  # fmt: skip
    """Load TOKENS tokens' part of the weight (window, channels, width_out): (TOKENS * D, O)."""
    offs = tl.arange(0, TOKENS * BLOCK_D)
    token = first_token + offs // BLOCK_D
    channel = offs % BLOCK_D
    out = tl.arange(0, BLOCK_O)
    mask = ((token < WINDOW) & (channel < channels))[:, None] & (out < width_out)[None, :]
    place = (token * channels + channel)[:, None] * width_out + out[None, :]
    return tl.load(p_w + place, mask=mask, other=0.0)


@triton.jit
def window_product_kernel(
    p_q, p_w, p_out, windows, rows, columns, heads, height, width, channels, width_out,
    q_batch, q_head, q_token,
    DOWN: tl.constexpr, ACROSS: tl.constexpr, WINDOWS: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_O: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of windows,). Writes out (windows, width_out)."""
    first_window = tl.program_id(0) * WINDOWS
    b_out = tl.zeros((WINDOWS, BLOCK_O), tl.float32)
    for first_token in range(0, DOWN * ACROSS, TOKENS):
        places, exists = tile_places(
            first_window, first_token, windows, rows, columns, heads, height, width, channels,
            q_batch, q_head, q_token, DOWN, ACROSS, WINDOWS, TOKENS, BLOCK_D,
        )  # fmt: skip
        b_q = tl.load(p_q + places, mask=exists, other=0.0)
        b_w = weight_tile(
            p_w, first_token, channels, width_out, DOWN * ACROSS, TOKENS, BLOCK_D, BLOCK_O
        )
        b_out += tl.dot(b_q, b_w, input_precision=PRECISION)
    window = first_window + tl.arange(0, WINDOWS)
    out = tl.arange(0, BLOCK_O)
    p_tile = p_out + window.to(tl.int64)[:, None] * width_out + out[None, :]
    mask = (window < windows)[:, None] & (out < width_out)[None, :]
    tl.store(p_tile, b_out.to(p_out.dtype.element_ty), mask=mask)


@triton.jit
def window_product_token_kernel(
    p_g, p_w, p_dq, windows, rows, columns, heads, height, width, channels, width_out,
    q_batch, q_head, q_token, scale,
    DOWN: tl.constexpr, ACROSS: tl.constexpr, WINDOWS: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_O: tl.constexpr, PRECISION: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of windows,). Writes the tokens' gradient, ``dq[w, t] = g[w] W[t]^T``.

    With ``ADD`` it is added to scale times the contents of p_dq.
    """
    first_window = tl.program_id(0) * WINDOWS
    b_g = gradient_tile(p_g, first_window, windows, width_out, WINDOWS, BLOCK_O)
    for first_token in range(0, DOWN * ACROSS, TOKENS):
        b_w = weight_tile(
            p_w, first_token, channels, width_out, DOWN * ACROSS, TOKENS, BLOCK_D, BLOCK_O
        )
        b_dq = tl.dot(b_g, tl.trans(b_w), input_precision=PRECISION)
        places, exists = tile_places(
            first_window, first_token, windows, rows, columns, heads, height, width, channels,
            q_batch, q_head, q_token, DOWN, ACROSS, WINDOWS, TOKENS, BLOCK_D,
        )  # fmt: skip
        if ADD:
            b_dq += scale * tl.load(p_dq + places, mask=exists, other=0.0)
        tl.store(p_dq + places, b_dq.to(p_dq.dtype.element_ty), mask=exists)


@triton.jit
def window_product_weight_kernel(
    p_q, p_g, p_dw, windows, rows, columns, heads, height, width, channels, width_out, stretches,
    q_batch, q_head, q_token,
    DOWN: tl.constexpr, ACROSS: tl.constexpr, WINDOWS: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_O: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (groups of TOKENS tokens, stretches). Writes its part of ``dW[:, t] = sum_w g[w]^T q[w, t]``.

    The parts are (stretches, width_out, window, channels).
    """
    first_token = tl.program_id(0) * TOKENS
    stretch = tl.program_id(1)
    b_dw = tl.zeros((BLOCK_O, TOKENS * BLOCK_D), tl.float32)
    for tile in range(stretch, tl.cdiv(windows, WINDOWS), stretches):
        places, exists = tile_places(
            tile * WINDOWS, first_token, windows, rows, columns, heads, height, width, channels,
            q_batch, q_head, q_token, DOWN, ACROSS, WINDOWS, TOKENS, BLOCK_D,
        )  # fmt: skip
        b_q = tl.load(p_q + places, mask=exists, other=0.0)
        b_g = gradient_tile(p_g, tile * WINDOWS, windows, width_out, WINDOWS, BLOCK_O)
        b_dw += tl.dot(tl.trans(b_g), b_q, input_precision=PRECISION)
    offs = tl.arange(0, TOKENS * BLOCK_D)
    token = first_token + offs // BLOCK_D
    channel = offs % BLOCK_D
    out = tl.arange(0, BLOCK_O)
    mask = ((token < DOWN * ACROSS) & (channel < channels))[None, :] & (out < width_out)[:, None]
    row = (stretch * width_out + out).to(tl.int64) * DOWN * ACROSS * channels
    tl.store(p_dw + row[:, None] + (token * channels + channel)[None, :], b_dw, mask=mask)


@triton.jit
def gradient_tile(
    p_g, first_window, windows, width_out, WINDOWS: tl.constexpr, BLOCK_O: tl.constexpr
):
    """Rows of the result's gradient: (WINDOWS, O)."""
    window = first_window + tl.arange(0, WINDOWS)
    out = tl.arange(0, BLOCK_O)
    p_tile = p_g + window.to(tl.int64)[:, None] * width_out + out[None, :]
    return tl.load(p_tile, mask=(window < windows)[:, None] & (out < width_out)[None, :], other=0.0)
