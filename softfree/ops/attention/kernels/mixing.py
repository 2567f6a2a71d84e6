"""The m x m part in one program per head: kernel matrix, Newton steps, normalisation, and the gradient."""

import math

import triton
import triton.language as tl

from softfree.ops.attention import inverse
from softfree.ops.attention.kernels.common import (
    LOW_SCALE,
    add_exact_product,
    for_tf32,
    halves,
    largest,
    present_landmarks,
    product_of_halves,
    scaled_product,
    split,
    split_product,
)

SAFE_FACTOR = tl.constexpr(inverse.SAFE_FACTOR)
RIDGE_FACTOR = tl.constexpr(inverse.RIDGE_FACTOR)
HALVINGS = tl.constexpr(inverse.HALVINGS)
LOG2_E = tl.constexpr(math.log2(math.e))
HALVING_TOLERANCE = tl.constexpr(inverse.HALVING_TOLERANCE)
LEAST_STEPS = tl.constexpr(10)  # the fewest steps that are taken one by one
# If the eigenvalues of I - BY sum to less than this, the root of float32's precision, their squares vanish in
# float32.
CONVERGED = tl.constexpr(2.0**-11.5)


@triton.jit
def landmark_matrix(
    p_l, b_present, m, d, scale,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, FLOAT32: tl.constexpr, TO_INVERT: tl.constexpr,
):  # fmt: skip
    """``A = kappa(L, L)`` (M, M), the identity where a landmark takes no part.

    For float32 landmarks, distances come from differences, channel by channel. That is exact for close
    landmarks, where the inverse amplifies errors most. In half precision they come from one product of the
    landmarks, which is many times faster. If A is ``TO_INVERT``, the landmarks are centred, and the error is
    2^-22 |l - c|^2. The norms are the diagonal of that product, so equal landmarks are at distance 0.
    """
    offs_m = tl.arange(0, BLOCK_M)
    b_eye = offs_m[:, None] == offs_m[None, :]
    if FLOAT32:
        b_distance = tl.zeros((BLOCK_M, BLOCK_M), tl.float32)
        for channel in tl.range(0, d, loop_unroll_factor=4):
            b_c = tl.load(p_l + offs_m * d + channel, mask=b_present, other=0.0).to(tl.float32)
            b_difference = b_c[:, None] - b_c[None, :]
            b_distance += b_difference * b_difference
        b_both = b_present[:, None] & b_present[None, :]
        b_a = tl.where(b_both, tl.exp(-0.5 * scale * b_distance), 0.0)
    else:
        b_l = tl.where(b_present[:, None], load_small(p_l, m, d, BLOCK_M, BLOCK_D), 0.0)
        if TO_INVERT:
            b_l = b_l.to(tl.float32)
            count = tl.maximum(tl.sum(b_present.to(tl.float32), 0), 1.0)
            b_l = tl.where(b_present[:, None], b_l - (tl.sum(b_l, 0) / count)[None, :], 0.0)
            # Clamped to the range of float16. Landmarks beyond it are similar to no other anyway.
            b_l = tl.clamp(b_l, -60000.0, 60000.0)
            b_gram = split_product(b_l, tl.trans(b_l), True)
        else:
            b_gram = tl.dot(b_l, tl.trans(b_l))
        # An infinite norm puts a landmark infinitely far from all others.
        b_norms = tl.sum(tl.where(b_eye, b_gram, 0.0), 1)
        b_norms = tl.where(b_present, b_norms, float("inf"))
        b_distance = b_norms[:, None] + b_norms[None, :] - 2.0 * b_gram
        b_a = tl.exp2((-0.5 * LOG2_E * scale) * tl.maximum(b_distance, 0.0))
    return tl.where(b_eye, 1.0, b_a)


@triton.jit
def newton_inverse(
    b_a, iterations, ridge, BLOCK_M: tl.constexpr, HALVING: tl.constexpr, SPLIT: tl.constexpr
):
    """The iteration of :mod:`softfree.ops.attention.inverse` on one matrix (M, M) with non-negative entries.

    All sums are along rows: the matrices are symmetric, and sums along columns take many times as many
    instructions.
    """
    offs_m = tl.arange(0, BLOCK_M)
    b_eye = offs_m[:, None] == offs_m[None, :]
    b_b = tl.where(b_eye, b_a + ridge, b_a)
    norm = tl.max(tl.sum(b_a, 1), 0)
    merged = 0
    if HALVING:
        b_square = split_product(b_b, b_b, SPLIT)
        alpha, merged = merged_start(norm, ridge, start_bound(b_square, b_eye), iterations)
        b_y = merged_steps(b_b, b_square, alpha, merged, SPLIT)
    else:
        b_y = start_value(norm, ridge, 0.0) * b_b
    remaining = BLOCK_M * 1.0
    for step in range(merged, iterations):
        if remaining > CONVERGED:
            b_by = split_product(b_b, b_y, SPLIT)
            b_y = 2.0 * b_y - split_product(b_y, b_by, SPLIT)
            if step > 8:
                # The eigenvalues of I - BY lie in [0, 1) here, so their sum bounds each of them, and the step
                # just taken has squared them. Below the bound, further steps would only add rounding.
                remaining = BLOCK_M - tl.sum(tl.where(b_eye, b_by, 0.0))
    return b_y


@triton.jit
def start_bound(b_square, b_eye):
    """1 over the largest start value that the rows of ``B^2`` allow; ``b_eye`` marks their diagonal."""
    b_rows = tl.sum(b_square, 1)
    b_diagonal = tl.sum(tl.where(b_eye, b_square, 0.0), 1)
    b_bound = (b_rows - 2 * b_diagonal) * (1.0 / HALVING_TOLERANCE)
    return tl.max(tl.maximum(b_bound, b_rows / (2.0 + HALVING_TOLERANCE)), 0)


@triton.jit
def start_value(norm, ridge, reciprocal):
    """The factor of B to start with, from the norm of A. A ``reciprocal`` of 0 gives the scaled start."""
    alpha = 2.0 / (norm * norm)
    halved = alpha
    for _ in range(HALVINGS):
        halved = tl.where(halved * reciprocal > 1.0, 0.5 * halved, halved)
    with_ridge = (2.0 * RIDGE_FACTOR) / ((norm + ridge) * (norm + ridge))
    bound = tl.minimum(SAFE_FACTOR * alpha, with_ridge)
    return tl.minimum(bound, halved)


@triton.jit
def merged_start(norm, ridge, reciprocal, iterations):
    """The halving start, doubled as long as a step from it does little else, and the number of doublings.

    Doubling stops at the scaled start, or when only :data:`LEAST_STEPS` steps are left.
    """
    alpha = start_value(norm, ridge, reciprocal)
    most = start_value(norm, ridge, 0.0)
    merged = 0
    for _ in range(HALVINGS):
        doubles = (2.0 * alpha <= most) & (merged + LEAST_STEPS < iterations)
        alpha = tl.where(doubles, 2.0 * alpha, alpha)
        merged = tl.where(doubles, merged + 1, merged)
    return alpha, merged


@triton.jit
def merged_steps(b_rows, b_square, alpha, merged, SPLIT: tl.constexpr):
    """Rows of nearly the result of k = ``merged`` steps from ``alpha / 2^k``, given rows of B and ``B^2``.

    The residual is ``(1 - x / 2^k)^(2^k) = 1 - x + (1 - 2^-k) x^2 / 2 - ...`` with ``x = alpha B^2``. The
    steps that follow, at least :data:`LEAST_STEPS`, reduce the effect of the omitted terms to 2e-7.
    """
    second = 0.5 * (1.0 - tl.exp2(-merged.to(tl.float32)))
    return alpha * (b_rows - split_product(b_rows, (second * alpha) * b_square, SPLIT))


@triton.jit
def newton_inverse_in_memory(
    b_a, p_b, p_y, p_by, iterations, ridge,
    BLOCK_M: tl.constexpr, PANEL: tl.constexpr, HALVING: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """:func:`newton_inverse` for matrices too large for the registers; writes to ``p_y`` (M, M).

    B, Y and BY are in memory, in practice in its cache. Products are computed in panels of PANEL rows. A
    panel of Y can be overwritten at once, because each product reads only its own rows of Y.
    """
    offs_m = tl.arange(0, BLOCK_M)
    b_eye = offs_m[:, None] == offs_m[None, :]
    offs = offs_m[:, None] * BLOCK_M + offs_m[None, :]
    panel_offs = tl.arange(0, PANEL)[:, None] * BLOCK_M + offs_m[None, :]
    tl.store(p_b + offs, tl.where(b_eye, b_a + ridge, b_a))
    norm = tl.max(tl.sum(b_a, 1), 0)
    tl.debug_barrier()
    merged = 0
    if HALVING:
        reciprocal = 0.0
        b_right = tl.load(p_b + offs)
        for first in range(0, BLOCK_M, PANEL):
            b_square = split_product(tl.load(p_b + first * BLOCK_M + panel_offs), b_right, SPLIT)
            tl.store(p_by + first * BLOCK_M + panel_offs, b_square)
            b_diagonal = (first + tl.arange(0, PANEL))[:, None] == offs_m[None, :]
            reciprocal = tl.maximum(reciprocal, start_bound(b_square, b_diagonal))
        alpha, merged = merged_start(norm, ridge, reciprocal, iterations)
        tl.debug_barrier()
        b_right = tl.load(p_by + offs)
        for first in range(0, BLOCK_M, PANEL):
            b_rows = tl.load(p_b + first * BLOCK_M + panel_offs)
            b_rows = merged_steps(b_rows, b_right, alpha, merged, SPLIT)
            tl.store(p_y + first * BLOCK_M + panel_offs, b_rows)
    else:
        tl.store(p_y + offs, start_value(norm, ridge, 0.0) * tl.load(p_b + offs))
    tl.debug_barrier()
    remaining = BLOCK_M * 1.0
    for step in range(merged, iterations):
        if remaining > CONVERGED:
            b_right = tl.load(p_y + offs)
            trace = 0.0
            for first in range(0, BLOCK_M, PANEL):
                b_by = split_product(tl.load(p_b + first * BLOCK_M + panel_offs), b_right, SPLIT)
                tl.store(p_by + first * BLOCK_M + panel_offs, b_by)
                b_diagonal = (first + tl.arange(0, PANEL))[:, None] == offs_m[None, :]
                trace += tl.sum(tl.sum(tl.where(b_diagonal, b_by, 0.0), 1), 0)
            if step > 8:  # as in newton_inverse; before that, the start may overshoot
                remaining = BLOCK_M - trace
            tl.debug_barrier()
            b_right = tl.load(p_by + offs)
            for first in range(0, BLOCK_M, PANEL):
                p_panel = p_y + first * BLOCK_M + panel_offs
                b_y = tl.load(p_panel)
                tl.store(p_panel, 2.0 * b_y - split_product(b_y, b_right, SPLIT))
            tl.debug_barrier()


@triton.jit
def landmark_matrix_kernel(
    p_l, p_landmark_mask, p_a, heads, m, d, scale, tiles,
    BLOCK: tl.constexpr, HAS_LANDMARK_MASK: tl.constexpr,
):  # fmt: skip
    """Grid (batch * heads * tiles * tiles,).

    Writes a tile of ``A = kappa(L, L)`` (m, m), from differences.
    """
    program = tl.program_id(0)
    head = (program // (tiles * tiles)).to(tl.int64)
    first_row = program // tiles % tiles * BLOCK
    first_column = program % tiles * BLOCK
    p_landmark_mask += (head // heads) * m
    rows = first_row + tl.arange(0, BLOCK)
    columns = first_column + tl.arange(0, BLOCK)
    b_rows = present_landmarks(p_landmark_mask + first_row, m - first_row, BLOCK, HAS_LANDMARK_MASK)
    b_columns = present_landmarks(
        p_landmark_mask + first_column, m - first_column, BLOCK, HAS_LANDMARK_MASK
    )
    p_l += head * m * d
    b_distance = tl.zeros((BLOCK, BLOCK), tl.float32)
    for channel in range(d):
        b_row = tl.load(p_l + rows * d + channel, mask=b_rows, other=0.0).to(tl.float32)
        b_column = tl.load(p_l + columns * d + channel, mask=b_columns, other=0.0).to(tl.float32)
        b_difference = b_row[:, None] - b_column[None, :]
        b_distance += b_difference * b_difference
    b_eye = rows[:, None] == columns[None, :]
    b_both = b_rows[:, None] & b_columns[None, :]
    b_a = tl.where(b_both & ~b_eye, tl.exp(-0.5 * scale * b_distance), b_eye.to(tl.float32))
    p_tile = p_a + head * m * m + rows[:, None] * m + columns[None, :]
    tl.store(p_tile, b_a, mask=(rows < m)[:, None] & (columns < m)[None, :])


@triton.jit
def newton_product_kernel(
    p_a, p_b, p_y, p_out, m, tiles,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, UPDATE: tl.constexpr,
):  # fmt: skip
    """Grid (matrices * tiles * tiles,). Writes ``A B`` of float32 (m, m); with ``UPDATE``, ``2 Y - A B``.

    This is half a Newton step for matrices too large for one program.
    """
    program = tl.program_id(0)
    matrix = (program // (tiles * tiles)).to(tl.int64) * m * m
    offs_row = program // tiles % tiles * BLOCK + tl.arange(0, BLOCK)
    offs_column = program % tiles * BLOCK + tl.arange(0, BLOCK)
    offs_k = tl.arange(0, BLOCK_K)
    b_sum = tl.zeros((BLOCK, BLOCK), tl.float32)
    for first in range(0, m, BLOCK_K):
        inside = first + offs_k < m
        p_left = p_a + matrix + offs_row[:, None] * m + (first + offs_k)[None, :]
        p_right = p_b + matrix + (first + offs_k)[:, None] * m + offs_column[None, :]
        b_left = tl.load(p_left, mask=(offs_row < m)[:, None] & inside[None, :], other=0.0)
        b_right = tl.load(p_right, mask=inside[:, None] & (offs_column < m)[None, :], other=0.0)
        b_sum += split_product(b_left, b_right, False)
    offs = matrix + offs_row[:, None] * m + offs_column[None, :]
    mask = (offs_row < m)[:, None] & (offs_column < m)[None, :]
    if UPDATE:
        b_sum = 2.0 * tl.load(p_y + offs, mask=mask, other=0.0) - b_sum
    tl.store(p_out + offs, b_sum, mask=mask)


@triton.jit
def newton_split_kernel(
    p_a, p_b, p_y, p_out, side, tiles,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, UPDATE: tl.constexpr,
):  # fmt: skip
    """:func:`newton_product_kernel` for matrices stored split (:func:`split`), (2, side, side) in float16.

    They are split once, when a result is written, instead of by every tile that reads it. ``side`` is a
    multiple of BLOCK; entries beyond m are 0 and stay 0.
    """
    program = tl.program_id(0)
    matrix = (program // (tiles * tiles)).to(tl.int64) * 2 * side * side
    offs_row = program // tiles % tiles * BLOCK + tl.arange(0, BLOCK)
    offs_column = program % tiles * BLOCK + tl.arange(0, BLOCK)
    offs_k = tl.arange(0, BLOCK_K)
    low = side * side
    p_left = p_a + matrix + offs_row[:, None] * side + offs_k[None, :]
    p_right = p_b + matrix + offs_k[:, None] * side + offs_column[None, :]
    b_sum = tl.zeros((BLOCK, BLOCK), tl.float32)
    b_cross = tl.zeros((BLOCK, BLOCK), tl.float32)
    for _ in range(0, side, BLOCK_K):
        b_left, b_right = tl.load(p_left), tl.load(p_right)
        b_sum = tl.dot(b_left, b_right, b_sum)
        b_cross = tl.dot(b_left, tl.load(p_right + low), b_cross)
        b_cross = tl.dot(tl.load(p_left + low), b_right, b_cross)
        p_left += BLOCK_K
        p_right += BLOCK_K * side
    b_sum += b_cross * (1.0 / LOW_SCALE)
    offs = matrix + offs_row[:, None] * side + offs_column[None, :]
    if UPDATE:
        b_low = tl.load(p_y + low + offs).to(tl.float32)
        b_y = tl.load(p_y + offs).to(tl.float32) + b_low * (1.0 / LOW_SCALE)
        b_sum = 2.0 * b_y - b_sum
    b_high, b_low = split(b_sum)
    tl.store(p_out + offs, b_high)
    tl.store(p_out + low + offs, b_low)


@triton.jit
def mixing_matrix(b_y, b_root):
    """``Y' = D^-1/2 Y D^-1/2`` (M, M); the roots (M,) are 1 for SOFT."""
    return b_root[:, None] * b_y * b_root[None, :]


@triton.jit
def normalizer(b_a, NORMALIZE: tl.constexpr, BLOCK_M: tl.constexpr):
    """``D^-1/2`` (M,) from the row sums of ``A``, or ones."""
    if NORMALIZE:
        b_root = tl.rsqrt(tl.sum(b_a, 1))
    else:
        b_root = tl.full((BLOCK_M,), 1.0, tl.float32)
    return b_root


@triton.jit
def load_normalizer(p_root, m, NORMALIZE: tl.constexpr, BLOCK_M: tl.constexpr):
    """``D^-1/2`` (M,) as stored with the factorisation, or ones."""
    offs_m = tl.arange(0, BLOCK_M)
    if NORMALIZE:
        b_root = tl.load(p_root + offs_m, mask=offs_m < m, other=1.0)
    else:
        b_root = tl.full((BLOCK_M,), 1.0, tl.float32)
    return b_root


@triton.jit
def sum_parts(
    p_parts, m, width, parts, stride,
    BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Sum ``parts`` float32 blocks (m, width), ``stride`` apart, in a fixed order: (M, BLOCK)."""
    offs_m = tl.arange(0, BLOCK_M)
    offs = tl.arange(0, BLOCK)
    offs_part = tl.arange(0, PARTS)
    p_tile = p_parts + offs_m[None, :, None] * width + offs[None, None, :]
    inside = (offs_m < m)[None, :, None] & (offs < width)[None, None, :]
    b_sum = tl.zeros((BLOCK_M, BLOCK), tl.float32)
    for first in range(0, parts, PARTS):
        offs_p = (first + offs_part)[:, None, None]
        b_sum += tl.sum(
            tl.load(p_tile + offs_p * stride, mask=inside & (offs_p < parts), other=0.0), 0
        )
    return b_sum


@triton.jit
def store_small(p_out, b_x, m, width, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr):
    """Store (M, BLOCK) as (m, width)."""
    offs_m = tl.arange(0, BLOCK_M)
    offs = tl.arange(0, BLOCK)
    mask = (offs_m < m)[:, None] & (offs < width)[None, :]
    tl.store(p_out + offs_m[:, None] * width + offs[None, :], b_x, mask=mask)


@triton.jit
def load_small(p_in, m, width, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr):
    """Load (m, width) as (M, BLOCK), 0 outside."""
    offs_m = tl.arange(0, BLOCK_M)
    offs = tl.arange(0, BLOCK)
    mask = (offs_m < m)[:, None] & (offs < width)[None, :]
    return tl.load(p_in + offs_m[:, None] * width + offs[None, :], mask=mask, other=0.0)


@triton.jit
def store_triangle(p_out, b_x, m, BLOCK_M: tl.constexpr):
    """Store the lower triangle of a symmetric (M, M), row after row: m (m + 1) / 2 numbers."""
    offs, mask = triangle(m, BLOCK_M)
    tl.store(p_out + offs, b_x, mask=mask)


@triton.jit
def load_triangle(p_in, m, BLOCK_M: tl.constexpr):
    """The symmetric matrix stored by :func:`store_triangle`: (M, M), 0 outside."""
    offs, mask = triangle(m, BLOCK_M)
    b_lower = tl.load(p_in + offs, mask=mask, other=0.0)
    # Transposed on the chip, because the columns of the triangle are not contiguous in memory.
    return tl.where(mask, b_lower, tl.trans(b_lower))


@triton.jit
def load_lower(p_in, m, BLOCK_M: tl.constexpr):
    """A lower triangle in the layout of :func:`store_triangle`, not made symmetric: (M, M), 0 outside."""
    offs, mask = triangle(m, BLOCK_M)
    return tl.load(p_in + offs, mask=mask, other=0.0)


@triton.jit
def triangle(m, BLOCK_M: tl.constexpr):
    """The offsets of a lower triangle's entries, and a mask of those entries in (M, M)."""
    rows = tl.arange(0, BLOCK_M)[:, None]
    columns = tl.arange(0, BLOCK_M)[None, :]
    return rows * (rows + 1) // 2 + columns, (rows < m) & (columns <= rows)


@triton.jit
def mixing_kernel(
    p_l, p_landmark_mask, p_parts, p_inverse, p_u, p_w, p_scratch,
    heads, m, d, d_v, parts, scale, iterations, ridge,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr, PARTS: tl.constexpr,
    PANEL: tl.constexpr, HAS_LANDMARK_MASK: tl.constexpr, NORMALIZE: tl.constexpr,
    HALVING: tl.constexpr, SPLIT: tl.constexpr, KEEP: tl.constexpr, FLOAT32: tl.constexpr,
):  # fmt: skip
    """Grid (batch * heads,). Reads landmarks and parts of U; writes the inverse, W = Y' U and, with KEEP, U.

    ``PANEL`` is 0 if the inverse fits the registers; otherwise p_scratch has three matrices (M, M) per head.
    """
    head = tl.program_id(0).to(tl.int64)
    p_l += head * m * d
    p_landmark_mask += (head // heads) * m
    b_present = present_landmarks(p_landmark_mask, m, BLOCK_M, HAS_LANDMARK_MASK)
    b_a = landmark_matrix(p_l, b_present, m, d, scale, BLOCK_M, BLOCK_D, FLOAT32, True)
    b_root = normalizer(b_a, NORMALIZE, BLOCK_M)
    if PANEL == 0:
        b_y = newton_inverse(b_a, iterations, ridge, BLOCK_M, HALVING, SPLIT)
    else:
        p_b = p_scratch + head * 3 * BLOCK_M * BLOCK_M
        p_y = p_b + BLOCK_M * BLOCK_M
        p_by = p_y + BLOCK_M * BLOCK_M
        newton_inverse_in_memory(
            b_a, p_b, p_y, p_by, iterations, ridge, BLOCK_M, PANEL, HALVING, SPLIT
        )
        b_y = load_small(p_y, BLOCK_M, BLOCK_M, BLOCK_M, BLOCK_M)
    store_triangle(p_inverse + head * (m * (m + 1) // 2), b_y, m, BLOCK_M)
    p_parts += head * parts * m * d_v
    b_u = sum_parts(p_parts, m, d_v, parts, m * d_v, BLOCK_M, BLOCK_C, PARTS)
    if KEEP:
        store_small(p_u + head * m * d_v, b_u, m, d_v, BLOCK_M, BLOCK_C)
    b_w = scaled_product(mixing_matrix(b_y, b_root), b_u)
    store_small(p_w + head * m * d_v, b_w, m, d_v, BLOCK_M, BLOCK_C)


@triton.jit
def solve_by(b_high, b_low, b_x):
    """``G x = M^T (M x)`` with M (M, M) split in halves."""
    b_x = product_of_halves(b_high, b_low, b_x)
    return product_of_halves(tl.trans(b_high), tl.trans(b_low), b_x)


@triton.jit
def solve_again(b_high, b_low, b_x, ridge, FLOAT32: tl.constexpr):
    """``r G x``; unless ``FLOAT32``, to about 2^-11 of the largest entry of x.

    The norm of ``r G`` is at most 1, so these products, unlike those of :func:`solve_by`, do not amplify what
    is rounded.
    """
    if FLOAT32:
        b_x = solve_by(b_high, b_low, ridge * b_x)
    else:
        b_x = ridge * tl.dot(b_high, b_x.to(tl.float16))
        b_x = tl.dot(tl.trans(b_high), b_x.to(tl.float16))
    return b_x


@triton.jit
def solve_to_second_order(b_high, b_low, b_x, b_once, ridge, FLOAT32: tl.constexpr):
    """``G (x + r G x)``, given ``G x``."""
    if FLOAT32:
        b_x = solve_by(b_high, b_low, b_x + ridge * b_once)
    else:
        b_x = b_once + solve_again(b_high, b_low, b_once, ridge, FLOAT32)
    return b_x


@triton.jit
def solve_bound(ridge):
    """The largest entry of x for which ``G x`` and intermediate results stay within the range of float16."""
    return tl.minimum(1000.0 * ridge, 1.0)


@triton.jit
def newton_gradient(b_y, b_root, b_u, b_dw):
    """W and dU (M, C), and twice the symmetric part of A's gradient through Y (M, M), for Newton's steps."""
    b_mixing = mixing_matrix(b_y, b_root)
    b_w = scaled_product(b_mixing, b_u)
    b_du = scaled_product(tl.trans(b_mixing), b_dw)
    b_da = -scaled_product(b_du, tl.trans(b_w)) / (b_root[:, None] * b_root[None, :])
    return b_w, b_du, b_da + tl.trans(b_da)


@triton.jit
def solve_gradient(b_m, b_root, b_u, b_dw, ridge, ORDER: tl.constexpr, FLOAT32: tl.constexpr):
    """:func:`newton_gradient` for a solve, given M; see ``softfree.ops.attention.solve.solve_backward``."""
    small = 1.0 / solve_bound(ridge)
    u_size, dw_size = small * largest(b_u), small * largest(b_dw)
    b_high, b_low = halves(b_m)
    b_x = b_root[:, None] * b_u * (1.0 / u_size)
    b_right = solve_by(b_high, b_low, b_x)
    b_left = solve_by(b_high, b_low, b_root[:, None] * b_dw * (1.0 / dw_size))
    if ORDER == 2:
        b_again = solve_again(b_high, b_low, b_left, ridge, FLOAT32)
        b_da = symmetric_product(b_again, b_right, FLOAT32)
        b_right = solve_to_second_order(b_high, b_low, b_x, b_right, ridge, FLOAT32)
        b_da += symmetric_product(b_left, b_right, FLOAT32)
        b_left += b_again
    else:
        b_da = symmetric_product(b_left, b_right, FLOAT32)
    b_w = (b_root * u_size)[:, None] * b_right
    b_du = (b_root * dw_size)[:, None] * b_left
    return b_w, b_du, -(u_size * dw_size) * b_da


@triton.jit
def row_gradient(b_root, b_u, b_dw, b_w, b_du, NORMALIZE: tl.constexpr):
    """The gradient of A's row sums (M,) through the normalisation, or zeros."""
    if NORMALIZE:
        b_rows = -0.5 * b_root * b_root * tl.sum(b_dw * b_w + b_u * b_du, 1)
    else:
        b_rows = tl.zeros(b_root.shape, tl.float32)
    return b_rows


@triton.jit
def landmark_gradient(b_a, b_da, b_rows, b_l, scale, FLOAT32: tl.constexpr):
    """The landmarks' gradient (M, D) through Y'.

    It follows from twice the symmetric part of A's gradient through Y and from the gradient of A's row sums,
    as in ``softfree.ops.attention.mixing.mixing_backward``. Rounding in A and in products is below that of
    half-precision landmarks.
    """
    b_da += b_rows[:, None] + b_rows[None, :]
    # A landmark's distance to itself is always 0. Its contribution would cancel, except for rounding.
    offs_m = tl.arange(0, b_a.shape[0])
    b_e = tl.where(offs_m[:, None] != offs_m[None, :], scale * b_a * b_da, 0.0)
    if FLOAT32:
        b_dl = scaled_product(b_e, b_l)
    else:
        b_e = for_tf32(b_e, "tf32")  # once for the product and the sums, which nearly cancel
        b_dl = add_exact_product(tl.zeros(b_l.shape, tl.float32), b_e, b_l, "tf32")
    return b_dl - tl.sum(b_e, 1)[:, None] * b_l.to(tl.float32)


@triton.jit
def symmetric_product(b_a, b_b, FLOAT32: tl.constexpr):
    """``a b^T + b a^T`` (M, M) of blocks within the range of float16; unless ``FLOAT32``, to 2^-11."""
    if FLOAT32:
        b_product = split_product(b_a, tl.trans(b_b), True)
        b_product += tl.trans(b_product)
    else:
        b_a = b_a.to(tl.float16)
        b_b = b_b.to(tl.float16)
        b_product = tl.dot(b_b, tl.trans(b_a), tl.dot(b_a, tl.trans(b_b)))
    return b_product


@triton.jit
def mixing_backward_kernel(
    p_l, p_landmark_mask, p_u_parts, p_dw_parts, p_inverse, p_w, p_du, p_dl, p_done,
    heads, m, d, d_v, u_parts, dw_parts, dl_parts, tiles, scale, ridge,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr, PARTS: tl.constexpr,
    HAS_LANDMARK_MASK: tl.constexpr, NORMALIZE: tl.constexpr, ORDER: tl.constexpr,
    FLOAT32: tl.constexpr,
):  # fmt: skip
    """Grid (batch * heads,). Reads the parts of U and dW; writes W, dU and, as part 0, the gradient of L.

    It also resets the head's counters, by which the next pass knows that all parts of dL are complete.
    """
    head = tl.program_id(0).to(tl.int64)
    p_l += head * m * d
    p_landmark_mask += (head // heads) * m
    b_present = present_landmarks(p_landmark_mask, m, BLOCK_M, HAS_LANDMARK_MASK)
    p_u_parts += head * u_parts * m * d_v
    p_dw_parts += head * dw_parts * m * d_v
    b_u = sum_parts(p_u_parts, m, d_v, u_parts, m * d_v, BLOCK_M, BLOCK_C, PARTS)
    b_dw = sum_parts(p_dw_parts, m, d_v, dw_parts, m * d_v, BLOCK_M, BLOCK_C, PARTS)
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
    # Stored and summed up here, so that four blocks leave their registers to those of A's gradient.
    store_small(p_w + head * m * d_v, b_w, m, d_v, BLOCK_M, BLOCK_C)
    store_small(p_du + head * m * d_v, b_du, m, d_v, BLOCK_M, BLOCK_C)
    b_rows = row_gradient(b_root, b_u, b_dw, b_w, b_du, NORMALIZE)
    if ORDER > 0:
        b_a = landmark_matrix(p_l, b_present, m, d, scale, BLOCK_M, BLOCK_D, FLOAT32, False)
    b_l = tl.where(b_present[:, None], load_small(p_l, m, d, BLOCK_M, BLOCK_D), 0.0)
    b_dl = landmark_gradient(b_a, b_da, b_rows, b_l, scale, FLOAT32)
    store_small(p_dl + head * dl_parts * m * d, b_dl, m, d, BLOCK_M, BLOCK_D)
    offs_tile = tl.arange(0, BLOCK_M)
    tl.store(p_done + head * tiles + offs_tile, 0, mask=offs_tile < tiles)
