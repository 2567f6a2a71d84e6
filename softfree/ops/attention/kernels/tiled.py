"""The passes over the tokens that need all landmarks, for landmarks that do not fit into one program.

A program takes one tile of tokens and goes through the landmarks tile by tile:

    spread_tiled           X = R W
    spread_tiled_backward  from G, V, W and dU to dT and dV

The sums over tokens (U, dW, dL) need no such loop: there each tile of landmarks has its own program.
"""

import triton
import triton.language as tl

from softfree.ops.attention.kernels.common import (
    kernel_of_tokens,
    load_rows,
    part_and_head,
    present_keys,
    product,
    store_rows,
)
from softfree.ops.attention.kernels.mixing import load_small
from softfree.ops.attention.kernels.tokens import (
    like_product,
    load_landmarks,
    load_tokens,
    narrow,
    token_gradient,
)


@triton.jit
def spread_tiled_kernel(
    p_q, p_l, p_landmark_mask, p_w, p_x,
    heads, n, m, d, d_v,
    q_batch, q_head, q_stride, x_batch, x_head, x_stride, log2_scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr,
    HAS_LANDMARK_MASK: tl.constexpr, FLOAT32: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (batch * heads * token tiles,). Reads queries and W; writes the result."""
    tile, head = part_and_head(tl.cdiv(n, BLOCK_N))
    batch = head // heads
    p_q += batch * q_batch + (head % heads) * q_head
    p_x += batch * x_batch + (head % heads) * x_head
    p_l += head * m * d
    p_w += head * m * d_v
    p_landmark_mask += batch * m
    offs_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    present = offs_n < n
    b_x = tl.zeros((BLOCK_N, BLOCK_C), tl.float32)
    for first in range(0, m, BLOCK_M):
        b_l, b_centre, b_bias, _ = load_landmarks(
            p_l + first * d, p_landmark_mask + first, m - first, d, log2_scale,
            BLOCK_M, BLOCK_D, HAS_LANDMARK_MASK, FLOAT32,
        )  # fmt: skip
        b_q = load_tokens(p_q, q_stride, offs_n, present, d, b_centre, BLOCK_D, FLOAT32)
        b_r = kernel_of_tokens(b_q, b_l, b_bias, log2_scale, PRECISION)
        b_w = narrow(load_small(p_w + first * d_v, m - first, d_v, BLOCK_M, BLOCK_C), p_q)
        b_x += product(b_r, b_w, PRECISION)
    store_rows(p_x, x_stride, offs_n, present, d_v, b_x, BLOCK_C)


@triton.jit
def spread_tiled_backward_kernel(
    p_t, p_g, p_v, p_l, p_key_mask, p_landmark_mask, p_w, p_du, p_dt, p_dv,
    heads, n, m, d, d_v,
    t_batch, t_head, t_stride, g_batch, g_head, g_stride, v_batch, v_head, v_stride,
    dt_batch, dt_head, dt_stride, dv_batch, dv_head, dv_stride, scale, log2_scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, HAS_KEY_MASK: tl.constexpr,
    HAS_LANDMARK_MASK: tl.constexpr, FLOAT32: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (batch * heads * token tiles,). Reads tokens, G, V, W, dU; writes dT, and dV for keys."""
    tile, head = part_and_head(tl.cdiv(n, BLOCK_N))
    batch = head // heads
    column = head % heads
    p_t += batch * t_batch + column * t_head
    p_g += batch * g_batch + column * g_head
    p_v += batch * v_batch + column * v_head
    p_l += head * m * d
    p_w += head * m * d_v
    p_du += head * m * d_v
    p_landmark_mask += batch * m
    offs_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = offs_n < n
    present = inside
    if HAS_KEY_MASK:
        present = present_keys(p_key_mask, batch, n, offs_n) & inside
    taking_part = present
    if QUERIES:
        taking_part = inside
    b_dt = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    b_dv = tl.zeros((BLOCK_N, BLOCK_C), tl.float32)
    for first in range(0, m, BLOCK_M):
        b_l, b_centre, b_bias, _ = load_landmarks(
            p_l + first * d, p_landmark_mask + first, m - first, d, log2_scale,
            BLOCK_M, BLOCK_D, HAS_LANDMARK_MASK, FLOAT32,
        )  # fmt: skip
        b_t = load_tokens(p_t, t_stride, offs_n, taking_part, d, b_centre, BLOCK_D, FLOAT32)
        b_k = kernel_of_tokens(b_t, b_l, b_bias, log2_scale, PRECISION)
        b_e = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        if QUERIES:
            b_g = load_rows(p_g, g_stride, offs_n, inside, d_v, BLOCK_C)
            b_w = narrow(load_small(p_w + first * d_v, m - first, d_v, BLOCK_M, BLOCK_C), p_t)
            b_e += like_product(b_g, tl.trans(b_w), PRECISION)
        if KEYS:
            b_v = load_rows(p_v, v_stride, offs_n, present, d_v, BLOCK_C)
            b_du = narrow(load_small(p_du + first * d_v, m - first, d_v, BLOCK_M, BLOCK_C), p_t)
            b_e += like_product(b_v, tl.trans(b_du), PRECISION)
            b_dv += product(b_k, b_du, PRECISION)
        b_dt += token_gradient(b_e * b_k, b_t, b_l, PRECISION)
    p_dt += batch * dt_batch + column * dt_head
    store_rows(p_dt, dt_stride, offs_n, inside, d, scale * b_dt, BLOCK_D)
    if KEYS:
        p_dv += batch * dv_batch + column * dv_head
        if HAS_KEY_MASK:
            b_dv = tl.where(present[:, None], b_dv, 0.0)
        store_rows(p_dv, dv_stride, offs_n, inside, d_v, b_dv, BLOCK_C)
