"""The passes over the tokens. Each reads a token once and never writes anything of size n x m.

    collect          U = P V; in the backward pass also dW = R^T G, in the same pass if queries are the keys
    spread           X = R W
    spread_backward  from G, V, W and dU to dQ, dK, dV and dL

A head's tokens are divided into stretches, one per program, and each program computes one part of a sum. The
parts are added in a fixed order, so results are reproducible bit by bit. A program holds all landmarks of its
head. If they do not fit, it holds a tile of them, and :mod:`softfree.ops.attention.kernels.tiled` has the
passes that need them all.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from softfree.ops.attention.kernels.common import (
    add_exact_product,
    for_tf32,
    kernel_of_landmarks,
    kernel_of_tokens,
    load_rows,
    part_and_head,
    prepare_landmarks,
    present_keys,
    present_landmarks,
    product,
    store_rows,
)
from softfree.ops.attention.kernels.mixing import load_small, store_small, sum_parts

# The smallest side of a matrix product. E is summed by a product with this many columns of ones. That takes a
# tenth of the instructions of sums across threads, and it sums E as rounded for the other products.
LEAST_SIDE = tl.constexpr(16)


@triton.jit
def load_landmarks(
    p_l, p_landmark_mask, m, d, log2_scale,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, HAS_LANDMARK_MASK: tl.constexpr,
    FLOAT32: tl.constexpr,
):  # fmt: skip
    """Prepared landmarks of one head, or a tile of them: (M, D), centre (D,), bias (M,), present (M,)."""
    b_present = present_landmarks(p_landmark_mask, m, BLOCK_M, HAS_LANDMARK_MASK)
    offs_m = tl.arange(0, BLOCK_M)
    b_l = load_rows(p_l, d, offs_m, b_present, d, BLOCK_D)
    b_l, b_centre, b_bias = prepare_landmarks(b_l, b_present, log2_scale, FLOAT32)
    return b_l, b_centre, b_bias, b_present


@triton.jit
def load_tokens(
    p_t, stride, offs_n, present, d, b_centre, BLOCK_D: tl.constexpr, FLOAT32: tl.constexpr
):
    """Tokens (N, D), shifted by the landmarks' centre in float32."""
    b_t = load_rows(p_t, stride, offs_n, present, d, BLOCK_D)
    if FLOAT32:
        b_t = b_t - b_centre[None, :]
    return b_t


@triton.jit
def collect_tokens(
    p_t, p_g, p_v, p_key_mask, batch, n, d, d_v, t_stride, g_stride, v_stride, first, last,
    b_l, b_centre, b_bias, log2_scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, HAS_KEY_MASK: tl.constexpr, FLOAT32: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Contributions of tokens first..last to dW and U (M, C): ``sum_j kappa(L, T_j) G_j``, the same with V.

    dW is computed if the tokens are queries, U if they are keys; otherwise they are 0.
    """
    # Each tile's product is added to the sums instead of accumulating into them. That takes fewer registers,
    # and float32 additions round to nearest, whereas the matrix units truncate.
    b_zero = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    b_dw = b_zero
    b_u = b_zero
    for start in range(first, last, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        inside = offs_n < last
        present = inside
        if HAS_KEY_MASK:
            present = present_keys(p_key_mask, batch, n, offs_n) & inside
        taking_part = present
        if QUERIES:
            taking_part = inside
        b_t = load_tokens(p_t, t_stride, offs_n, taking_part, d, b_centre, BLOCK_D, FLOAT32)
        b_k = kernel_of_landmarks(b_t, b_l, b_bias, log2_scale, PRECISION)
        # Absent rows have g = 0 and v = 0, so their kernel values do not count.
        if QUERIES:
            b_g = load_rows(p_g, g_stride, offs_n, inside, d_v, BLOCK_C)
            b_dw += add_exact_product(b_zero, b_k, b_g, PRECISION)
        if KEYS:
            b_v = load_rows(p_v, v_stride, offs_n, present, d_v, BLOCK_C)
            b_u += add_exact_product(b_zero, b_k, b_v, PRECISION)
    return b_dw, b_u


@triton.jit
def collect_kernel(
    p_t, p_g, p_v, p_l, p_key_mask, p_landmark_mask, p_dw_parts, p_u_parts,
    heads, n, m, d, d_v, parts, stretch,
    t_batch, t_head, t_stride, g_batch, g_head, g_stride, v_batch, v_head, v_stride, log2_scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, HAS_KEY_MASK: tl.constexpr,
    HAS_LANDMARK_MASK: tl.constexpr, FLOAT32: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (batch * heads * parts, landmark tiles). Reads tokens, G, V; writes its part of dW and of U."""
    part, head = part_and_head(parts)
    first_landmark = tl.program_id(1) * BLOCK_M
    batch = head // heads
    p_t += batch * t_batch + (head % heads) * t_head
    p_g += batch * g_batch + (head % heads) * g_head
    p_v += batch * v_batch + (head % heads) * v_head
    b_l, b_centre, b_bias, _ = load_landmarks(
        p_l + (head * m + first_landmark) * d, p_landmark_mask + batch * m + first_landmark,
        m - first_landmark, d, log2_scale, BLOCK_M, BLOCK_D, HAS_LANDMARK_MASK, FLOAT32,
    )  # fmt: skip
    first = part * stretch
    b_dw, b_u = collect_tokens(
        p_t, p_g, p_v, p_key_mask, batch, n, d, d_v, t_stride, g_stride, v_stride,
        first, tl.minimum(first + stretch, n), b_l, b_centre, b_bias, log2_scale,
        BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_C, QUERIES, KEYS, HAS_KEY_MASK, FLOAT32, PRECISION,
    )  # fmt: skip
    row = ((head * parts + part) * m + first_landmark) * d_v
    if QUERIES:
        store_small(p_dw_parts + row, b_dw, m - first_landmark, d_v, BLOCK_M, BLOCK_C)
    if KEYS:
        store_small(p_u_parts + row, b_u, m - first_landmark, d_v, BLOCK_M, BLOCK_C)
    if OVERLAP:
        gdc_wait()  # so that a kernel that waits for this one has also waited for the one before it


@triton.jit
def spread_tokens(
    p_q, p_x, d, d_v, q_stride, x_stride, first, last,
    b_l, b_centre, b_bias, b_w, log2_scale,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr,
    FLOAT32: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write ``X_j = kappa(Q_j, L) W`` for tokens first..last."""
    for start in range(first, last, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        present = offs_n < last
        b_q = load_tokens(p_q, q_stride, offs_n, present, d, b_centre, BLOCK_D, FLOAT32)
        b_r = kernel_of_tokens(b_q, b_l, b_bias, log2_scale, PRECISION)
        store_rows(p_x, x_stride, offs_n, present, d_v, product(b_r, b_w, PRECISION), BLOCK_C)


@triton.jit
def narrow(b_small, p_like):
    """A landmark-sized block in the form that the products with tokens take."""
    if p_like.dtype.element_ty == tl.bfloat16:
        b_small = b_small.to(tl.bfloat16)
    elif p_like.dtype.element_ty == tl.float16:
        b_small = for_tf32(b_small, "tf32")  # its values may exceed the range of float16
    return b_small


@triton.jit
def spread_kernel(
    p_q, p_l, p_landmark_mask, p_w, p_x,
    heads, n, m, d, d_v, parts, stretch,
    q_batch, q_head, q_stride, x_batch, x_head, x_stride, log2_scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr,
    HAS_LANDMARK_MASK: tl.constexpr, FLOAT32: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (batch * heads * parts,). Reads queries and W; writes the result."""
    part, head = part_and_head(parts)
    batch = head // heads
    p_q += batch * q_batch + (head % heads) * q_head
    p_x += batch * x_batch + (head % heads) * x_head
    b_l, b_centre, b_bias, _ = load_landmarks(
        p_l + head * m * d, p_landmark_mask + batch * m, m, d, log2_scale,
        BLOCK_M, BLOCK_D, HAS_LANDMARK_MASK, FLOAT32,
    )  # fmt: skip
    if OVERLAP:
        gdc_wait()  # for W
    b_w = narrow(load_small(p_w + head * m * d_v, m, d_v, BLOCK_M, BLOCK_C), p_q)
    first = part * stretch
    spread_tokens(
        p_q, p_x, d, d_v, q_stride, x_stride, first, tl.minimum(first + stretch, n),
        b_l, b_centre, b_bias, b_w, log2_scale, BLOCK_N, BLOCK_D, BLOCK_C, FLOAT32, PRECISION,
    )  # fmt: skip


@triton.jit
def spread_backward_tokens(
    p_t, p_g, p_v, p_dt, p_dv, p_key_mask, batch, n, d, d_v,
    t_stride, g_stride, v_stride, dt_stride, dv_stride, first, last,
    b_l, b_centre, b_bias, b_w, b_du, scale, log2_scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, WRITE: tl.constexpr, HAS_KEY_MASK: tl.constexpr,
    FLOAT32: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Contribution of tokens first..last to dL (M, D). With ``WRITE``, also writes their dT, and dV for keys.

    ``E = R * (G W^T)`` for queries, ``E = P^T * (V dU^T)`` for keys, and the sum of both if tokens are both.
    Then ``dT = scale (E L - rowsum(E) T)`` and ``dL = scale (E^T T - colsum(E) L)``. The terms of dL cancel
    with those through the inverse, so E is kept to 16 bits for dL.
    """
    b_dl = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    b_columns = tl.zeros((BLOCK_M, LEAST_SIDE), tl.float32)
    for start in range(first, last, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        inside = offs_n < last
        present = inside
        if HAS_KEY_MASK:
            present = present_keys(p_key_mask, batch, n, offs_n) & inside
        taking_part = present
        if QUERIES:
            taking_part = inside
        b_t = load_tokens(p_t, t_stride, offs_n, taking_part, d, b_centre, BLOCK_D, FLOAT32)
        b_k = kernel_of_tokens(b_t, b_l, b_bias, log2_scale, PRECISION)
        b_e = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        if QUERIES:
            b_g = load_rows(p_g, g_stride, offs_n, inside, d_v, BLOCK_C)
            b_e += like_product(b_g, tl.trans(b_w), PRECISION)
        if KEYS:
            b_v = load_rows(p_v, v_stride, offs_n, present, d_v, BLOCK_C)
            b_e += like_product(b_v, tl.trans(b_du), PRECISION)
            if WRITE:
                b_dv = product(b_k, b_du, PRECISION)
                if HAS_KEY_MASK:
                    b_dv = tl.where(present[:, None], b_dv, 0.0)
                store_rows(p_dv, dv_stride, offs_n, inside, d_v, b_dv, BLOCK_C)
        b_e *= b_k
        b_dl = add_exact_product(b_dl, tl.trans(b_e), b_t, PRECISION)
        b_ones = tl.full((BLOCK_N, LEAST_SIDE), 1.0, b_t.dtype)
        b_columns = add_exact_product(b_columns, tl.trans(b_e), b_ones, PRECISION)
        if WRITE:
            b_dt = token_gradient(b_e, b_t, b_l, PRECISION)
            store_rows(p_dt, dt_stride, offs_n, inside, d, scale * b_dt, BLOCK_D)
    b_columns = tl.sum(b_columns, 1) * (1.0 / LEAST_SIDE)
    return scale * (b_dl - b_columns[:, None] * b_l.to(tl.float32))


@triton.jit
def token_gradient(b_e, b_t, b_l, PRECISION: tl.constexpr):
    """``E L - rowsum(E) T`` (N, D), with the row sums of E as rounded for the product.

    The rounding of E then acts on the differences L - T.
    """
    b_ones = tl.full((b_l.shape[0], LEAST_SIDE), 1.0, b_l.dtype)
    b_sum = tl.sum(product(b_e, b_ones, PRECISION), 1) * (1.0 / LEAST_SIDE)
    return product(b_e, b_l, PRECISION) - b_sum[:, None] * b_t.to(tl.float32)


@triton.jit
def like_product(b_a, b_b, PRECISION: tl.constexpr):
    """``a @ b`` in ``b``'s dtype."""
    return tl.dot(b_a.to(b_b.dtype), b_b, input_precision=PRECISION)


@triton.jit
def spread_backward_kernel(
    p_g, p_q, p_k, p_v, p_l, p_key_mask, p_landmark_mask, p_w, p_du,
    p_dq, p_dk, p_dv, p_parts, p_done, p_dl,
    heads, n, n_k, m, d, d_v, parts, query_parts, stretch, key_stretch,
    g_batch, g_head, g_stride, q_batch, q_head, q_stride, k_batch, k_head, k_stride,
    v_batch, v_head, v_stride, dq_batch, dq_head, dq_stride, dk_batch, dk_head, dk_stride,
    dv_batch, dv_head, dv_stride, scale, log2_scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr,
    PARTS: tl.constexpr, ALONE: tl.constexpr, CROSS: tl.constexpr, WRITE: tl.constexpr,
    HAS_KEY_MASK: tl.constexpr, HAS_LANDMARK_MASK: tl.constexpr, FLOAT32: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (batch * heads * parts, landmark tiles). Reads tokens, G, V, W, dU; writes dQ, dK, dV and dL.

    Part 0 of dL comes from the inverse. The program that finishes last adds up all parts. ``ALONE``: the
    tokens give only one part, which is added directly and not written.
    """
    part, head = part_and_head(parts)
    tile = tl.program_id(1)
    first_landmark = tile * BLOCK_M
    left = m - first_landmark
    batch = head // heads
    column = head % heads
    p_g += batch * g_batch + column * g_head
    p_v += batch * v_batch + column * v_head
    p_dv += batch * dv_batch + column * dv_head
    row = head * m + first_landmark
    b_l, b_centre, b_bias, _ = load_landmarks(
        p_l + row * d, p_landmark_mask + batch * m + first_landmark, left, d, log2_scale,
        BLOCK_M, BLOCK_D, HAS_LANDMARK_MASK, FLOAT32,
    )  # fmt: skip
    if OVERLAP:
        gdc_wait()  # for W, dU and the inverse's part of dL
    b_w = narrow(load_small(p_w + row * d_v, left, d_v, BLOCK_M, BLOCK_C), p_q)
    b_du = narrow(load_small(p_du + row * d_v, left, d_v, BLOCK_M, BLOCK_C), p_q)
    if part < query_parts:
        first = part * stretch
        b_dl = spread_backward_tokens(
            p_q + batch * q_batch + column * q_head, p_g, p_v,
            p_dq + batch * dq_batch + column * dq_head, p_dv, p_key_mask, batch, n, d, d_v,
            q_stride, g_stride, v_stride, dq_stride, dv_stride, first, tl.minimum(first + stretch, n),
            b_l, b_centre, b_bias, b_w, b_du, scale, log2_scale,
            BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_C, True, not CROSS, WRITE, HAS_KEY_MASK and not CROSS,
            FLOAT32, PRECISION,
        )  # fmt: skip
    else:
        b_dl = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        if CROSS:
            first = (part - query_parts) * key_stretch
            b_dl = spread_backward_tokens(
                p_k + batch * k_batch + column * k_head, p_g, p_v,
                p_dk + batch * dk_batch + column * dk_head, p_dv, p_key_mask, batch, n_k, d, d_v,
                k_stride, g_stride, v_stride, dk_stride, dv_stride,
                first, tl.minimum(first + key_stretch, n_k),
                b_l, b_centre, b_bias, b_w, b_du, scale, log2_scale,
                BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_C, False, True, WRITE, HAS_KEY_MASK,
                FLOAT32, PRECISION,
            )  # fmt: skip
    p_dl += row * d
    if ALONE:
        b_dl += load_small(p_parts + row * d, left, d, BLOCK_M, BLOCK_D)
        store_small(p_dl, b_dl.to(p_dl.dtype.element_ty), left, d, BLOCK_M, BLOCK_D)
    else:
        p_parts += (head * (parts + 1) * m + first_landmark) * d
        store_small(p_parts + (1 + part) * m * d, b_dl, left, d, BLOCK_M, BLOCK_D)
        tl.debug_barrier()  # all threads must have stored before one of them counts the program as done
        done = tl.atomic_add(p_done + head * tl.num_programs(1) + tile, 1)
        if done == parts - 1:
            b_dl = sum_parts(p_parts, left, d, parts + 1, m * d, BLOCK_M, BLOCK_D, PARTS)
            store_small(p_dl, b_dl.to(p_dl.dtype.element_ty), left, d, BLOCK_M, BLOCK_D)
