"""The norm of queries in one pass each way, with the means of their windows and the gradient of the means.

    n[t] = s[head] (q[t] - mean) / deviation        mean and deviation over the channels
    L[w] = mean of n[t] over the tokens t of window w

The forward pass runs over windows and may overwrite q with n; the backward pass runs over tokens. The
gradient follows from n and 1 / deviation, so q is not kept.
"""

import triton
import triton.language as tl


@triton.jit
def load_scale(p_scale, LOG: tl.constexpr):
    b_scale = tl.load(p_scale).to(tl.float32)
    if LOG:
        b_scale = tl.exp(-b_scale)
    return b_scale


@triton.jit
def query_norm_kernel(
    p_q, p_scale, p_out, p_inverse, p_means,
    windows, rows, columns, heads, height, width, inverse_stride,
    q_batch, q_head, q_token, out_batch, out_head, out_token, eps,
    LOG: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr, MEANS: tl.constexpr,
    WINDOWS: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of windows,). Writes n, 1 / deviation (heads of all samples, tokens); with ``MEANS``, L.

    With ``LOG``, p_scale holds -log(s) instead of s. Blocks are (WINDOWS, TOKENS, D), so that divisions are
    made for each window, not for each token.
    """
    window = tl.program_id(0) * WINDOWS + tl.arange(0, WINDOWS)
    channel = tl.arange(0, BLOCK_D)
    row = window // (rows * columns)
    sample = (row // heads).to(tl.int64)
    head = row % heads
    top = window // columns % rows * DOWN
    left = window % columns * ACROSS
    b_scale = load_scale(p_scale + head, LOG)
    p_q += sample * q_batch + head * q_head
    p_out += sample * out_batch + head * out_head
    p_inverse += row.to(tl.int64) * inverse_stride
    b_sum = tl.zeros((WINDOWS, BLOCK_D), tl.float32)
    for first_token in range(0, DOWN * ACROSS, TOKENS):
        token = first_token + tl.arange(0, TOKENS)
        y = top[:, None] + (token // ACROSS)[None, :]
        x = left[:, None] + (token % ACROSS)[None, :]
        inside = (window < windows)[:, None] & (token < DOWN * ACROSS)[None, :]
        inside = inside & (y < height) & (x < width)
        place = (y * width + x).to(tl.int64)
        exists = inside[:, :, None] & (channel < CHANNELS)
        p_tile = p_q[:, None, None] + (place * q_token)[:, :, None] + channel
        b_q = tl.load(p_tile, mask=exists, other=0.0).to(tl.float32)
        b_q -= (tl.sum(b_q, 2) * (1 / CHANNELS))[:, :, None]
        if CHANNELS < BLOCK_D:
            b_q = tl.where(channel < CHANNELS, b_q, 0.0)
        b_inverse = tl.rsqrt(tl.sum(b_q * b_q, 2) * (1 / CHANNELS) + eps)
        b_normed = b_q * (b_inverse * b_scale[:, None])[:, :, None]
        p_tile = p_out[:, None, None] + (place * out_token)[:, :, None] + channel
        tl.store(p_tile, b_normed.to(p_tile.dtype.element_ty), mask=exists)
        tl.store(p_inverse[:, None] + place, b_inverse, mask=inside)
        if MEANS:
            b_sum += tl.sum(b_normed, 1)  # absent tokens are 0
    if MEANS:
        count = tl.minimum(height - top, DOWN) * tl.minimum(width - left, ACROSS)
        b_mean = b_sum * (1.0 / count.to(tl.float32))[:, None]
        p_tile = p_means + window.to(tl.int64)[:, None] * CHANNELS + channel
        tl.store(
            p_tile,
            b_mean.to(p_means.dtype.element_ty),
            mask=(window < windows)[:, None] & (channel < CHANNELS),
        )


@triton.jit
def query_norm_backward_kernel(
    p_g, p_normed, p_scale, p_inverse, p_dmeans, p_dq, p_dscale,
    rows, columns, heads, height, width, inverse_stride,
    g_batch, g_head, g_token, n_batch, n_head, n_token, dq_batch, dq_head, dq_token, kept,
    LOG: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr, MEANS: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid (heads of all samples, tiles of tokens). Writes dq and its part of ds, one number.

    The gradient of n is ``kept`` times g and, with ``MEANS``, the share of L's gradient for each token of the
    window. dq may overwrite g. With ``LOG``, p_scale holds -log(s) instead of s, and its gradient is written
    instead of ds.
    """
    row = tl.program_id(0)
    tile = tl.program_id(1)
    sample = (row // heads).to(tl.int64)
    head = row % heads
    token = tile * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, BLOCK_D)
    inside = token < height * width
    exists = inside[:, None] & (channel < CHANNELS)[None, :]
    g_place = sample * g_batch + head * g_head + token.to(tl.int64) * g_token
    b_g = tl.load(p_g + g_place[:, None] + channel[None, :], mask=exists, other=0.0)
    b_g = kept * b_g.to(tl.float32)
    if MEANS:
        down = token // width // DOWN
        across = token % width // ACROSS
        window = (row * rows + down).to(tl.int64) * columns + across
        p_tile = p_dmeans + window[:, None] * CHANNELS + channel[None, :]
        b_dmean = tl.load(p_tile, mask=exists, other=0.0).to(tl.float32)
        there = tl.minimum(height - down * DOWN, DOWN) * tl.minimum(width - across * ACROSS, ACROSS)
        share = 1.0 / tl.maximum(there, 1).to(tl.float32)  # 0 or less beyond the last token
        b_g += b_dmean * share[:, None]
    scale = load_scale(p_scale + head, LOG)
    n_place = sample * n_batch + head * n_head + token.to(tl.int64) * n_token
    b_n = tl.load(p_normed + n_place[:, None] + channel[None, :], mask=exists, other=0.0)
    b_n = b_n.to(tl.float32)
    p_inverse += row.to(tl.int64) * inverse_stride + token
    b_inverse = tl.load(p_inverse, mask=inside, other=0.0)
    b_along = tl.sum(b_g * b_n, 1) * (1.0 / scale)
    b_dq = b_g - (tl.sum(b_g, 1) * (1 / CHANNELS))[:, None]
    b_dq -= b_n * (b_along * (1.0 / scale) * (1 / CHANNELS))[:, None]
    b_dq *= (b_inverse * scale)[:, None]
    dq_place = sample * dq_batch + head * dq_head + token.to(tl.int64) * dq_token
    p_tile = p_dq + dq_place[:, None] + channel[None, :]
    tl.store(p_tile, b_dq.to(p_dq.dtype.element_ty), mask=exists)
    dscale = tl.sum(b_along, 0)
    if LOG:
        dscale *= -scale
    tl.store(p_dscale + row * tl.num_programs(1) + tile, dscale)
