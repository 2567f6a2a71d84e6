"""The m x m part by one factorisation: ``B = A + r I = C C^T``, ``M = C^-1``, and thin products with M.

With ``G = B^-1 = M^T M`` the inverse is ``Y = G`` (order 1) or ``Y = G + r G^2`` (order 2). It is never
formed: ``Y x`` is ``M^T (M x)``, or ``M^T (M (x + r M^T (M x)))``, which keeps float32 accuracy where Y would
lose digits (for half-precision tokens see ``solve_again`` in mixing.py). Only the lower triangle of M is
stored, followed by ``D^-1/2`` of the normalisation.

While B is factored, it is a tuple of the tiles below and on the diagonal, row by row: tile (i, j) is at
``place(i, j)``. The tiles of M are held transposed. Nearly every product then has the form ``a b^T``, and its
operands are already where one warp's matrix instructions left them, so that no tile moves through shared
memory.
"""

# Tuples of tiles grow in loops that Triton unrolls, which no type can express.
# mypy: disable-error-code="assignment, var-annotated"

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from softfree.ops.attention.kernels.common import halves, largest, present_landmarks
from softfree.ops.attention.kernels.mixing import (
    load_lower,
    load_normalizer,
    solve_bound,
    solve_by,
    solve_to_second_order,
    store_small,
    sum_parts,
)


@triton.constexpr_function
def place(i, j):
    """The index of tile (i, j), j <= i, of a lower triangle in its tuple."""
    return i * (i + 1) // 2 + j


@triton.jit
def put(tiles, at: tl.constexpr, b_tile):
    """The tuple with one tile replaced."""
    return tiles[:at] + (b_tile,) + tiles[at + 1 :]


@triton.jit
def add_product(b_sum, b_a, b_b):
    """``sum + a @ b``, to float32 accuracy."""
    b_a_high, b_a_low = halves(b_a)
    b_b_high, b_b_low = halves(b_b)
    b_sum = tl.dot(b_a_low, b_b_high, tl.dot(b_a_high, b_b_low, b_sum))
    return tl.dot(b_a_high, b_b_high, b_sum)


@triton.jit
def product_of_turned(b_a, b_b):
    """``a @ b^T``."""
    return add_product(tl.zeros((b_a.shape[0], b_b.shape[0]), tl.float32), b_a, tl.trans(b_b))


@triton.jit
def landmark_blocks(
    p_l, p_landmark_mask, m, d,
    COUNT: tl.constexpr, TILE: tl.constexpr, BLOCK_D: tl.constexpr, HAS_LANDMARK_MASK: tl.constexpr,
):  # fmt: skip
    """Tuples of centred float32 landmarks (TILE, D), 0 for those that take no part, and of masks (TILE,)."""
    offs = tl.arange(0, TILE)
    offs_d = tl.arange(0, BLOCK_D)
    plain = ()
    present = ()
    count = 0.0
    b_sum = tl.zeros((BLOCK_D,), tl.float32)
    for i in tl.static_range(COUNT):
        b_present = present_landmarks(
            p_landmark_mask + i * TILE, m - i * TILE, TILE, HAS_LANDMARK_MASK
        )
        p_tile = p_l + (i * TILE + offs)[:, None] * d + offs_d[None, :]
        mask = b_present[:, None] & (offs_d < d)[None, :]
        b_l = tl.load(p_tile, mask=mask, other=0.0).to(tl.float32)
        b_sum += tl.sum(b_l, 0)
        count += tl.sum(b_present.to(tl.float32), 0)
        plain = plain + (b_l,)
        present = present + (b_present,)
    b_centre = b_sum / tl.maximum(count, 1.0)
    blocks = ()
    for i in tl.static_range(COUNT):
        b_l = tl.where(present[i][:, None], plain[i] - b_centre[None, :], 0.0)
        blocks = blocks + (b_l,)
    return blocks, present


@triton.jit
def differences(p_l, b_row_present, b_column_present, i: tl.constexpr, j: tl.constexpr, d):
    """Squared distances (TILE, TILE), channel by channel: exact for close landmarks."""
    rows = i * b_row_present.shape[0] + tl.arange(0, b_row_present.shape[0])
    columns = j * b_row_present.shape[0] + tl.arange(0, b_row_present.shape[0])
    b_distance = tl.zeros((b_row_present.shape[0], b_row_present.shape[0]), tl.float32)
    for channel in tl.range(0, d, loop_unroll_factor=4):
        b_row = tl.load(p_l + rows * d + channel, mask=b_row_present, other=0.0)
        b_column = tl.load(p_l + columns * d + channel, mask=b_column_present, other=0.0)
        b_difference = b_row[:, None] - b_column[None, :]
        b_distance += b_difference * b_difference
    return b_distance


@triton.jit
def landmark_tiles(
    p_l, blocks, present, d, scale,
    COUNT: tl.constexpr, TILE: tl.constexpr, FLOAT32: tl.constexpr,
):  # fmt: skip
    """``A = kappa(L, L)`` in tiles, the identity where a landmark takes no part.

    For float32 landmarks, distances come from differences. In half precision they come from products of the
    centred landmarks, whose diagonal gives the norms, so that equal landmarks are at distance 0.
    """
    offs = tl.arange(0, TILE)
    b_eye = offs[:, None] == offs[None, :]
    log2_scale = -0.5 * 1.4426950408889634 * scale
    halves = ()
    norms = ()
    for i in tl.static_range(COUNT):
        # An infinite norm puts a landmark infinitely far from all others.
        b_norm = tl.where(present[i], 0.0, float("inf"))
        # Clamped to the range of float16. Landmarks beyond it are similar to no other anyway.
        b_l = tl.clamp(blocks[i], -60000.0, 60000.0)
        if not FLOAT32:
            b_norm += tl.sum(tl.where(b_eye, product_of_turned(b_l, b_l), 0.0), 1)
        halves = halves + (b_l,)
        norms = norms + (b_norm,)
    tiles = ()
    for i in tl.static_range(COUNT):
        for j in tl.static_range(i + 1):
            b_distance = norms[i][:, None] + norms[j][None, :]
            if FLOAT32:
                b_distance += differences(p_l, present[i], present[j], i, j, d)
            else:
                b_distance -= 2.0 * product_of_turned(halves[i], halves[j])
            b_a = tl.exp2(log2_scale * tl.maximum(b_distance, 0.0))
            if i == j:
                b_a = tl.where(b_eye, 1.0, b_a)
            tiles = tiles + (b_a,)
    return tiles


@triton.jit
def eliminate(b_d, steps, TILE: tl.constexpr):
    """Symmetric in-place elimination of the first ``steps`` columns of a tile; pivots stay on the diagonal.

    Once eliminated, a column holds that of the unit inverse factor, below the diagonal and, transposed, above
    it. So a step reads only one column of the tile: the inverse's entries above the pivot, and the rest of
    the matrix below. Adding 1 to the pivot makes ``a_ik - (a_ik / p) (p + 1) = -a_ik / p``, the inverse's new
    entry, by the same update as for all other entries.
    """
    offs = tl.arange(0, TILE)
    for k in range(steps):
        here = offs == k
        below = offs > k
        b_column = tl.sum(tl.where(here[None, :], b_d, 0.0), 1)
        b_pivot = tl.gather(b_column, tl.full((TILE,), 0, tl.int32) + k, 0)
        b_column = tl.where(here, b_pivot + 1.0, b_column)
        b_row = tl.where(below[:, None] | below[None, :], b_column[None, :], 0.0)
        b_d -= (b_column * (1.0 / b_pivot))[:, None] * b_row
    return b_d


@triton.jit
def tile_factor(b_d, steps, TILE: tl.constexpr):
    """The inverse Cholesky factor of a tile that is the identity beyond ``steps``, and its transpose."""
    offs = tl.arange(0, TILE)
    b_d = eliminate(b_d, steps, TILE)
    b_eye = offs[:, None] == offs[None, :]
    b_root = tl.rsqrt(tl.sum(tl.where(b_eye, b_d, 0.0), 1))
    b_ones = b_eye.to(tl.float32)
    b_lower = tl.where(offs[:, None] > offs[None, :], b_d, b_ones)
    b_upper = tl.where(offs[:, None] < offs[None, :], b_d, b_ones)
    return b_root[:, None] * b_lower, b_root[None, :] * b_upper


@triton.jit
def inverse_factor(tiles, m, ridge, COUNT: tl.constexpr, TILE: tl.constexpr):
    """M from the tiles of A. Each tile of M is transposed, at the index of its own position."""
    offs = tl.arange(0, TILE)
    b_eye = offs[:, None] == offs[None, :]
    for k in tl.static_range(COUNT):
        b_d = tiles[place(k, k)]
        tiles = put(tiles, place(k, k), tl.where(b_eye, b_d + ridge, b_d))
    # Tile columns before k hold M, except for the factors of rows still to come. The others hold what is left
    # of B.
    for k in tl.static_range(COUNT):
        b_t, b_turned = tile_factor(tiles[place(k, k)], tl.minimum(m - k * TILE, TILE), TILE)
        tiles = put(tiles, place(k, k), b_turned)
        for j in tl.static_range(k):
            tiles = put(tiles, place(k, j), product_of_turned(tiles[place(k, j)], b_t))
        column = ()
        negative = ()
        for i in tl.static_range(k + 1, COUNT):
            b_left = product_of_turned(tiles[place(i, k)], b_t)
            column = column + (b_left,)
            negative = negative + (-b_left,)
        for i in tl.static_range(k + 1, COUNT):
            b_left = tl.trans(negative[i - k - 1])
            for j in tl.static_range(k):
                b_sum = add_product(tiles[place(i, j)], tiles[place(k, j)], b_left)
                tiles = put(tiles, place(i, j), b_sum)
            b_zero = tl.zeros((TILE, TILE), tl.float32)
            tiles = put(tiles, place(i, k), add_product(b_zero, b_turned, b_left))
            for j in tl.static_range(k + 1, i + 1):
                b_right = tl.trans(negative[j - k - 1])
                b_sum = add_product(tiles[place(i, j)], column[i - k - 1], b_right)
                tiles = put(tiles, place(i, j), b_sum)
    return tiles


@triton.jit
def triangle_of_turned(m, i: tl.constexpr, j: tl.constexpr, TILE: tl.constexpr):
    """The offsets of a transposed tile's entries in a triangle stored row by row, and which are inside it."""
    rows = i * TILE + tl.arange(0, TILE)[None, :]
    columns = j * TILE + tl.arange(0, TILE)[:, None]
    return rows * (rows + 1) // 2 + columns, (rows < m) & (columns <= rows)


@triton.jit
def store_factor(p_factor, tiles, m, COUNT: tl.constexpr, TILE: tl.constexpr):
    """Store M's lower triangle, row by row: m (m + 1) / 2 numbers."""
    for i in tl.static_range(COUNT):
        for j in tl.static_range(i + 1):
            offs, mask = triangle_of_turned(m, i, j, TILE)
            tl.store(p_factor + offs, tiles[place(i, j)], mask=mask)


@triton.jit
def store_normalizers(p_root, tiles, m, COUNT: tl.constexpr, TILE: tl.constexpr):
    """Store ``D^-1/2``, from the row sums of A's tiles: m numbers."""
    for i in tl.static_range(COUNT):
        b_row = tiles[place(i, 0)]
        for j in tl.static_range(1, i + 1):
            b_row += tiles[place(i, j)]
        b_sum = tl.sum(b_row, 1)
        if i + 1 < COUNT:
            b_column = tiles[place(i + 1, i)]
            for j in tl.static_range(i + 2, COUNT):
                b_column += tiles[place(j, i)]
            b_sum += tl.sum(b_column, 0)
        rows = i * TILE + tl.arange(0, TILE)
        tl.store(p_root + rows, tl.rsqrt(b_sum), mask=rows < m)


@triton.jit
def factor_landmarks(
    p_l, p_landmark_mask, p_factor, m, d, scale, ridge,
    COUNT: tl.constexpr, TILE: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_LANDMARK_MASK: tl.constexpr, NORMALIZE: tl.constexpr, FLOAT32: tl.constexpr,
):  # fmt: skip
    """Write M's lower triangle for one head, followed by D^-1/2 with NORMALIZE.

    COUNT tiles of TILE landmarks cover them all.
    """
    blocks, present = landmark_blocks(
        p_l, p_landmark_mask, m, d, COUNT, TILE, BLOCK_D, HAS_LANDMARK_MASK
    )
    tiles = landmark_tiles(p_l, blocks, present, d, scale, COUNT, TILE, FLOAT32)
    if NORMALIZE:
        store_normalizers(p_factor + m * (m + 1) // 2, tiles, m, COUNT, TILE)
    store_factor(p_factor, inverse_factor(tiles, m, ridge, COUNT, TILE), m, COUNT, TILE)


@triton.jit
def factor_kernel(
    p_l, p_landmark_mask, p_factor, heads, m, d, scale, ridge,
    COUNT: tl.constexpr, TILE: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_LANDMARK_MASK: tl.constexpr, NORMALIZE: tl.constexpr, FLOAT32: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (batch * heads,). Reads landmarks; writes the factor.

    With OVERLAP, the next kernel may start as soon as all programs of this one have started.
    """
    if OVERLAP:
        gdc_launch_dependents()
    head = tl.program_id(0).to(tl.int64)
    factor_landmarks(
        p_l + head * m * d, p_landmark_mask + (head // heads) * m, p_factor + head * (m * (m + 3) // 2),
        m, d, scale, ridge, COUNT, TILE, BLOCK_D, HAS_LANDMARK_MASK, NORMALIZE, FLOAT32,
    )  # fmt: skip


@triton.jit
def solve_sums(
    p_factor, b_u, m, ridge, BLOCK_M: tl.constexpr, NORMALIZE: tl.constexpr, ORDER: tl.constexpr,
    FLOAT32: tl.constexpr,
):  # fmt: skip
    """W = Y' U (M, C), from what :func:`factor_landmarks` wrote."""
    b_root = load_normalizer(p_factor + m * (m + 1) // 2, m, NORMALIZE, BLOCK_M)
    size = largest(b_u) / solve_bound(ridge)
    b_x = b_root[:, None] * b_u * (1.0 / size)
    b_high, b_low = halves(load_lower(p_factor, m, BLOCK_M))
    b_w = solve_by(b_high, b_low, b_x)
    if ORDER == 2:
        b_w = solve_to_second_order(b_high, b_low, b_x, b_w, ridge, FLOAT32)
    return b_w * (size * b_root)[:, None]


@triton.jit
def solve_kernel(
    p_parts, p_factor, p_u, p_w, m, d_v, parts, ridge,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, PARTS: tl.constexpr,
    NORMALIZE: tl.constexpr, ORDER: tl.constexpr, KEEP: tl.constexpr, FLOAT32: tl.constexpr,
):  # fmt: skip
    """Grid (batch * heads,). Reads the factor and the parts of U; writes W = Y' U and, with KEEP, U."""
    head = tl.program_id(0).to(tl.int64)
    p_parts += head * parts * m * d_v
    b_u = sum_parts(p_parts, m, d_v, parts, m * d_v, BLOCK_M, BLOCK_C, PARTS)
    if KEEP:
        store_small(p_u + head * m * d_v, b_u, m, d_v, BLOCK_M, BLOCK_C)
    p_factor += head * (m * (m + 3) // 2)
    b_w = solve_sums(p_factor, b_u, m, ridge, BLOCK_M, NORMALIZE, ORDER, FLOAT32)
    store_small(p_w + head * m * d_v, b_w, m, d_v, BLOCK_M, BLOCK_C)
