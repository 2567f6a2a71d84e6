"""The forward and the backward pass in one launch each, for short inputs: one program per head."""

import triton
import triton.language as tl

from softfree.ops.attention.kernels.common import present_landmarks, scaled_product
from softfree.ops.attention.kernels.mixing import (
    landmark_gradient,
    landmark_matrix,
    load_lower,
    load_normalizer,
    load_small,
    load_triangle,
    mixing_matrix,
    newton_gradient,
    newton_inverse,
    normalizer,
    row_gradient,
    solve_gradient,
    store_small,
    store_triangle,
)
from softfree.ops.attention.kernels.solve import factor_landmarks, solve_sums
from softfree.ops.attention.kernels.tokens import (
    collect_tokens,
    load_landmarks,
    narrow,
    spread_backward_tokens,
    spread_tokens,
)


@triton.jit
def short_forward_kernel(
    p_q, p_k, p_v, p_l, p_key_mask, p_landmark_mask, p_x, p_inverse,
    heads, n, n_k, m, d, d_v,
    q_batch, q_head, q_stride, k_batch, k_head, k_stride, v_batch, v_head, v_stride,
    x_batch, x_head, x_stride, scale, log2_scale, iterations, ridge,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr,
    HAS_KEY_MASK: tl.constexpr, HAS_LANDMARK_MASK: tl.constexpr, NORMALIZE: tl.constexpr,
    FLOAT32: tl.constexpr, PRECISION: tl.constexpr, ORDER: tl.constexpr,
    HALVING: tl.constexpr, SPLIT: tl.constexpr, COUNT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (batch * heads,). Reads q, k, v, landmarks; writes the result and the inverse.

    ORDER is 0 for Newton's steps, which HALVING and SPLIT configure. Otherwise it is the order of the solve,
    in COUNT tiles of TILE landmarks.
    """
    head = tl.program_id(0).to(tl.int64)
    batch = head // heads
    column = head % heads
    p_l += head * m * d
    p_landmark_mask += batch * m
    if ORDER == 0:
        b_present = present_landmarks(p_landmark_mask, m, BLOCK_M, HAS_LANDMARK_MASK)
        b_a = landmark_matrix(p_l, b_present, m, d, scale, BLOCK_M, BLOCK_D, FLOAT32, True)
        b_root = normalizer(b_a, NORMALIZE, BLOCK_M)
        b_y = newton_inverse(b_a, iterations, ridge, BLOCK_M, HALVING, SPLIT)
        store_triangle(p_inverse + head * (m * (m + 1) // 2), b_y, m, BLOCK_M)
    else:
        p_inverse += head * (m * (m + 3) // 2)
        factor_landmarks(
            p_l, p_landmark_mask, p_inverse, m, d, scale, ridge,
            COUNT, TILE, BLOCK_D, HAS_LANDMARK_MASK, NORMALIZE, FLOAT32,
        )  # fmt: skip
    b_l, b_centre, b_bias, _ = load_landmarks(
        p_l, p_landmark_mask, m, d, log2_scale, BLOCK_M, BLOCK_D, HAS_LANDMARK_MASK, FLOAT32
    )
    p_v += batch * v_batch + column * v_head
    _, b_u = collect_tokens(
        p_k + batch * k_batch + column * k_head, p_v, p_v,
        p_key_mask, batch, n_k, d, d_v, k_stride, v_stride, v_stride, 0, n_k,
        b_l, b_centre, b_bias, log2_scale,
        BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_C, False, True, HAS_KEY_MASK, FLOAT32, PRECISION,
    )  # fmt: skip
    if ORDER == 0:
        b_w = scaled_product(mixing_matrix(b_y, b_root), b_u)
    else:
        tl.debug_barrier()  # every thread loads parts of the factor that others have stored
        b_w = solve_sums(p_inverse, b_u, m, ridge, BLOCK_M, NORMALIZE, ORDER, FLOAT32)
    b_w = narrow(b_w, p_q)
    spread_tokens(
        p_q + batch * q_batch + column * q_head, p_x + batch * x_batch + column * x_head,
        d, d_v, q_stride, x_stride, 0, n, b_l, b_centre, b_bias, b_w, log2_scale,
        BLOCK_N, BLOCK_D, BLOCK_C, FLOAT32, PRECISION,
    )  # fmt: skip


@triton.jit
def short_backward_kernel(
    p_g, p_q, p_k, p_v, p_l, p_key_mask, p_landmark_mask, p_inverse,
    p_dq, p_dk, p_dv, p_dl,
    heads, n, n_k, m, d, d_v,
    g_batch, g_head, g_stride, q_batch, q_head, q_stride, k_batch, k_head, k_stride,
    v_batch, v_head, v_stride, dq_batch, dq_head, dq_stride, dk_batch, dk_head, dk_stride,
    dv_batch, dv_head, dv_stride, scale, log2_scale, ridge,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr,
    CROSS: tl.constexpr, HAS_KEY_MASK: tl.constexpr, HAS_LANDMARK_MASK: tl.constexpr,
    NORMALIZE: tl.constexpr, FLOAT32: tl.constexpr, PRECISION: tl.constexpr, ORDER: tl.constexpr,
):  # fmt: skip
    """Grid (batch * heads,). Reads the forward pass's input, its inverse, and G; writes all gradients."""
    head = tl.program_id(0).to(tl.int64)
    batch = head // heads
    column = head % heads
    p_l += head * m * d
    p_g += batch * g_batch + column * g_head
    p_q += batch * q_batch + column * q_head
    p_k += batch * k_batch + column * k_head
    p_v += batch * v_batch + column * v_head
    p_dq += batch * dq_batch + column * dq_head
    p_dk += batch * dk_batch + column * dk_head
    p_dv += batch * dv_batch + column * dv_head
    p_landmark_mask += batch * m
    b_l, b_centre, b_bias, b_present = load_landmarks(
        p_l, p_landmark_mask, m, d, log2_scale, BLOCK_M, BLOCK_D, HAS_LANDMARK_MASK, FLOAT32
    )
    b_dw, b_u = collect_tokens(
        p_q, p_g, p_v, p_key_mask, batch, n, d, d_v, q_stride, g_stride, v_stride, 0, n,
        b_l, b_centre, b_bias, log2_scale,
        BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_C, True, not CROSS, HAS_KEY_MASK and not CROSS, FLOAT32,
        PRECISION,
    )  # fmt: skip
    if CROSS:
        _, b_u = collect_tokens(
            p_k, p_g, p_v, p_key_mask, batch, n_k, d, d_v, k_stride, g_stride, v_stride, 0, n_k,
            b_l, b_centre, b_bias, log2_scale,
            BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_C, False, True, HAS_KEY_MASK, FLOAT32, PRECISION,
        )  # fmt: skip
    if ORDER == 0:
        b_a = landmark_matrix(p_l, b_present, m, d, scale, BLOCK_M, BLOCK_D, FLOAT32, False)
        b_root = normalizer(b_a, NORMALIZE, BLOCK_M)
        b_y = load_triangle(p_inverse + head * (m * (m + 1) // 2), m, BLOCK_M)
        b_w, b_du, b_da = newton_gradient(b_y, b_root, b_u, b_dw)
    else:
        p_inverse += head * (m * (m + 3) // 2)
        b_root = load_normalizer(p_inverse + m * (m + 1) // 2, m, NORMALIZE, BLOCK_M)
        b_m = load_lower(p_inverse, m, BLOCK_M)
        b_w, b_du, b_da = solve_gradient(b_m, b_root, b_u, b_dw, ridge, ORDER, FLOAT32)
        b_a = landmark_matrix(p_l, b_present, m, d, scale, BLOCK_M, BLOCK_D, FLOAT32, False)
    b_rows = row_gradient(b_root, b_u, b_dw, b_w, b_du, NORMALIZE)
    b_plain = load_small(p_l, m, d, BLOCK_M, BLOCK_D)
    b_plain = tl.where(b_present[:, None], b_plain, 0.0)
    b_dl = landmark_gradient(b_a, b_da, b_rows, b_plain, scale, FLOAT32)
    b_w = narrow(b_w, p_q)
    b_du = narrow(b_du, p_q)
    b_dl += spread_backward_tokens(
        p_q, p_g, p_v, p_dq, p_dv, p_key_mask, batch, n, d, d_v,
        q_stride, g_stride, v_stride, dq_stride, dv_stride, 0, n,
        b_l, b_centre, b_bias, b_w, b_du, scale, log2_scale,
        BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_C, True, not CROSS, True, HAS_KEY_MASK and not CROSS, FLOAT32,
        PRECISION,
    )  # fmt: skip
    if CROSS:
        b_dl += spread_backward_tokens(
            p_k, p_g, p_v, p_dk, p_dv, p_key_mask, batch, n_k, d, d_v,
            k_stride, g_stride, v_stride, dk_stride, dv_stride, 0, n_k,
            b_l, b_centre, b_bias, b_w, b_du, scale, log2_scale,
            BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_C, False, True, True, HAS_KEY_MASK, FLOAT32, PRECISION,
        )  # fmt: skip
    store_small(p_dl + head * m * d, b_dl.to(p_dl.dtype.element_ty), m, d, BLOCK_M, BLOCK_D)
