"""The norm of queries in one pass each way, with the means of their windows and the gradient of the means.

    n[t] = s[head] (q[t] - mean) / deviation        mean and deviation over the channels
    L[w] = mean of n[t] over the tokens t of window w

The forward pass runs over windows and may overwrite q with n; the backward pass runs over tokens. The
gradient follows from n and 1 / deviation, so q is not kept.
"""

import triton
import triton.language as tl

from softfree.ops.norm.kernels import norm_gradient, norm_rows


@triton.jit
def load_scale(p_scale, LOG: tl.constexpr):
    b_scale = tl.load(p_scale).to(tl.float32)
    if LOG:
        b_scale = tl.exp(-b_scale)
    return b_scale


@triton.jit
def query_norm_kernel(
    p_q, p_scale, p_out, p_inverse, p_means,
    windows, rows, columns, heads, height, width, channels, inverse_stride,
    q_batch, q_head, q_token, out_batch, out_head, out_token, eps,
    LOG: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr, MEANS: tl.constexpr,
    WINDOWS: tl.constexpr, TOKENS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of windows,). Writes n, 1 / deviation (heads of all samples, tokens); with ``MEANS``, L.

    With ``LOG``, p_scale holds -log(s) instead of s.
    """
    first_window = tl.program_id(0) * WINDOWS
    within = tl.arange(0, WINDOWS * TOKENS)
    window = first_window + within // TOKENS
    row = window // (rows * columns)
    sample = (row // heads).to(tl.int64)
    head = row % heads
    top = window // columns % rows * DOWN
    left = window % columns * ACROSS
    channel = tl.arange(0, BLOCK_D)
    b_scale = load_scale(p_scale + head, LOG)
    b_sum = tl.zeros((WINDOWS, BLOCK_D), tl.float32)
    for first_token in range(0, DOWN * ACROSS, TOKENS):
        token = first_token + within % TOKENS
        y = top + token // ACROSS
        x = left + token % ACROSS
        inside = (window < windows) & (token < DOWN * ACROSS) & (y < height) & (x < width)
        exists = inside[:, None] & (channel < channels)[None, :]
        place = (y * width + x).to(tl.int64)
        q_place = sample * q_batch + head * q_head + place * q_token
        b_q = tl.load(p_q + q_place[:, None] + channel[None, :], mask=exists, other=0.0)
        b_normed, b_inverse = norm_rows(b_q.to(tl.float32), exists, channels, eps)
        b_out = (b_normed * b_scale[:, None]).to(p_out.dtype.element_ty)
        out_place = sample * out_batch + head * out_head + place * out_token
        tl.store(p_out + out_place[:, None] + channel[None, :], b_out, mask=exists)
        tl.store(p_inverse + row.to(tl.int64) * inverse_stride + place, b_inverse, mask=inside)
        if MEANS:
            b_sum += tl.sum(tl.reshape(b_out.to(tl.float32), (WINDOWS, TOKENS, BLOCK_D)), 1)
    if MEANS:
        window = first_window + tl.arange(0, WINDOWS)
        down = tl.minimum(height - window // columns % rows * DOWN, DOWN)
        across = tl.minimum(width - window % columns * ACROSS, ACROSS)
        b_mean = (b_sum / (down * across).to(tl.float32)[:, None]).to(p_means.dtype.element_ty)
        p_tile = p_means + window.to(tl.int64)[:, None] * channels + channel[None, :]
        mask = (window < windows)[:, None] & (channel < channels)[None, :]
        tl.store(p_tile, b_mean, mask=mask)


@triton.jit
def query_norm_backward_kernel(
    p_g, p_normed, p_scale, p_inverse, p_dmeans, p_dq, p_dscale,
    rows, columns, heads, height, width, channels, inverse_stride,
    g_batch, g_head, g_token, n_batch, n_head, n_token, dq_batch, dq_head, dq_token, kept,
    LOG: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr, MEANS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
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
    exists = inside[:, None] & (channel < channels)[None, :]
    g_place = sample * g_batch + head * g_head + token.to(tl.int64) * g_token
    b_g = tl.load(p_g + g_place[:, None] + channel[None, :], mask=exists, other=0.0)
    b_g = kept * b_g.to(tl.float32)
    if MEANS:
        down = token // width // DOWN
        across = token % width // ACROSS
        window = (row * rows + down).to(tl.int64) * columns + across
        p_tile = p_dmeans + window[:, None] * channels + channel[None, :]
        b_dmean = tl.load(p_tile, mask=exists, other=0.0).to(tl.float32)
        there = tl.minimum(height - down * DOWN, DOWN) * tl.minimum(width - across * ACROSS, ACROSS)
        b_g += b_dmean / tl.maximum(there, 1).to(tl.float32)[:, None]  # 0 beyond the last token
    scale = load_scale(p_scale + head, LOG)
    n_place = sample * n_batch + head * n_head + token.to(tl.int64) * n_token
    b_normed = tl.load(p_normed + n_place[:, None] + channel[None, :], mask=exists, other=0.0)
    b_normed = b_normed.to(tl.float32) / scale
    p_inverse += row.to(tl.int64) * inverse_stride + token
    b_inverse = tl.load(p_inverse, mask=inside, other=0.0)
    b_dq = norm_gradient(b_g * scale, b_normed, b_inverse, channels)
    dq_place = sample * dq_batch + head * dq_head + token.to(tl.int64) * dq_token
    p_tile = p_dq + dq_place[:, None] + channel[None, :]
    tl.store(p_tile, b_dq.to(p_dq.dtype.element_ty), mask=exists)
    dscale = tl.sum(b_g * b_normed)
    if LOG:
        dscale *= -scale
    tl.store(p_dscale + row * tl.num_programs(1) + tile, dscale)
