"""The m x m part by one factorisation: ``B = A + r I = C C^T``, ``M = C^-1``, and thin products with M.

With ``G = B^-1 = M^T M`` the inverse is ``Y = G`` (order 1) or ``Y = G + r G^2`` (order 2). It is never formed:
``Y U`` is ``M^T (M U)``, or ``M^T (M (U + r M^T (M U)))``, which keeps float32's digits where Y would lose
them. Of the factorisation only M is kept, as its lower triangle.

A matrix (m, m) is a tuple of tiles below and on the diagonal, row after row: tile (i, j) is at ``place(i, j)``.
Vectors of a landmark each are tuples of their tiles likewise. Blocks of values are held turned round, channels by
landmarks, and so are the tiles of M: nearly every product is then of the form ``a b^T``, whose operands are
where one warp's matrix instructions left them, so that no tile moves through shared memory.
"""

# Tuples of tiles grow where Triton unrolls a loop, which no type says.
# mypy: disable-error-code="assignment, var-annotated"

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from softfree.ops.attention.kernels.common import present_landmarks


@triton.constexpr_function
def place(i, j):
    """Where tile (i, j), j <= i, of a lower triangle lies in its tuple."""
    return i * (i + 1) // 2 + j


@triton.jit
def put(tiles, at: tl.constexpr, b_tile):
    """The tuple with one tile replaced."""
    return tiles[:at] + (b_tile,) + tiles[at + 1 :]


@triton.jit
def halves(b_x):
    """A float32 block as the sum of two float16 blocks, to 2^-22 of it and 2^-25.

    Unlike :func:`softfree.ops.attention.kernels.common.split` without a scale for the lower one: entries here are about 1
    or matter as little as they are small. Then one sum takes all products of halves.
    """
    b_high = b_x.to(tl.float16)
    return b_high, (b_x - b_high.to(tl.float32)).to(tl.float16)


@triton.jit
def add_product(b_sum, b_a, b_b):
    """``sum + a @ b``, as exact as float32."""
    b_a_high, b_a_low = halves(b_a)
    b_b_high, b_b_low = halves(b_b)
    b_sum = tl.dot(b_a_low, b_b_high, tl.dot(b_a_high, b_b_low, b_sum))
    return tl.dot(b_a_high, b_b_high, b_sum)


@triton.jit
def product_of_turned(b_a, b_b):
    """``a @ b^T``."""
    return add_product(tl.zeros((b_a.shape[0], b_b.shape[0]), tl.float32), b_a, tl.trans(b_b))


# ---- The landmark matrix


@triton.jit
def landmark_blocks(
    p_l, p_landmark_mask, m, d,
    COUNT: tl.constexpr, TILE: tl.constexpr, BLOCK_D: tl.constexpr, HAS_LANDMARK_MASK: tl.constexpr,
):  # fmt: skip
    """Landmarks about their centre, float32 (TILE, D), 0 where one takes no part; and who does, (TILE,)."""
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

    float32 landmarks: distances from differences. Half precision: from products of the centred landmarks, with
    the products' own diagonal as norms, so that equal landmarks are at distance 0.
    """
    offs = tl.arange(0, TILE)
    b_eye = offs[:, None] == offs[None, :]
    log2_scale = -0.5 * 1.4426950408889634 * scale
    halves = ()
    norms = ()
    for i in tl.static_range(COUNT):
        # An infinite norm is infinitely far from everyone.
        b_norm = tl.where(present[i], 0.0, float("inf"))
        # float16's range: landmarks beyond it are like no other anyway.
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
def sums_of_rows(tiles, i: tl.constexpr, COUNT: tl.constexpr):
    """The sums of rows (TILE,) of tile row ``i`` of a symmetric matrix."""
    b_row = tiles[place(i, 0)]
    for j in tl.static_range(1, i + 1):
        b_row += tiles[place(i, j)]
    b_sum = tl.sum(b_row, 1)
    if i + 1 < COUNT:
        b_column = tiles[place(i + 1, i)]
        for k in tl.static_range(i + 2, COUNT):
            b_column += tiles[place(k, i)]
        b_sum += tl.sum(b_column, 0)
    return b_sum


@triton.jit
def normalizers(tiles, COUNT: tl.constexpr, TILE: tl.constexpr, NORMALIZE: tl.constexpr):
    """``D^-1/2`` by the row sums of A, or ones: (TILE,) each."""
    roots = ()
    for i in tl.static_range(COUNT):
        if NORMALIZE:
            b_root = tl.rsqrt(sums_of_rows(tiles, i, COUNT))
        else:
            b_root = tl.full((TILE,), 1.0, tl.float32)
        roots = roots + (b_root,)
    return roots


# ---- The factor


@triton.jit
def eliminate(b_d, steps, TILE: tl.constexpr):
    """Symmetric elimination in place of the first ``steps`` columns of a tile; pivots stay on the diagonal.

    Below the diagonal and, turned round, above it, a column once eliminated holds that of the unit inverse factor.
    So one column of the tile is all that a step reads: for rows above its pivot the inverse's, below
    the rest of the matrix. Adding 1 to the pivot makes ``a_ik - (a_ik / p) (p + 1)``, the inverse's new entry
    ``-a_ik / p``, by the same update as all others.
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
    """The inverse Cholesky factor (TILE, TILE) of a tile that is the identity beyond ``steps``; it and it turned."""
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
    """M of A's tiles: each tile turned round, at the place of its own."""
    offs = tl.arange(0, TILE)
    b_eye = offs[:, None] == offs[None, :]
    for k in tl.static_range(COUNT):
        b_d = tiles[place(k, k)]
        tiles = put(tiles, place(k, k), tl.where(b_eye, b_d + ridge, b_d))
    # Columns of tiles up to k - 1 hold M, less the factors of the rows still to come; the others what is left of B.
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
    """Where the entries of a tile turned round lie in a triangle kept row after row, and which are in it."""
    rows = i * TILE + tl.arange(0, TILE)[None, :]
    columns = j * TILE + tl.arange(0, TILE)[:, None]
    return rows * (rows + 1) // 2 + columns, (rows < m) & (columns <= rows)


@triton.jit
def store_factor(p_factor, tiles, m, COUNT: tl.constexpr, TILE: tl.constexpr):
    """Store M's lower triangle, row after row: m (m + 1) / 2 numbers."""
    for i in tl.static_range(COUNT):
        for j in tl.static_range(i + 1):
            offs, mask = triangle_of_turned(m, i, j, TILE)
            tl.store(p_factor + offs, tiles[place(i, j)], mask=mask)


@triton.jit
def load_factor(p_factor, m, COUNT: tl.constexpr, TILE: tl.constexpr):
    """What :func:`store_factor` has stored; 0 outside."""
    tiles = ()
    for i in tl.static_range(COUNT):
        for j in tl.static_range(i + 1):
            offs, mask = triangle_of_turned(m, i, j, TILE)
            tiles = tiles + (tl.load(p_factor + offs, mask=mask, other=0.0),)
    return tiles


@triton.jit
def lower_product(tiles, values, start, COUNT: tl.constexpr):
    """``M X`` of values (channels, TILE), ``x^T M^T``, added to ``start``."""
    out = ()
    for i in tl.static_range(COUNT):
        b_sum = start[i]
        for j in tl.static_range(i + 1):
            b_sum = add_product(b_sum, values[j], tiles[place(i, j)])
        out = out + (b_sum,)
    return out


@triton.jit
def upper_product(tiles, values, COUNT: tl.constexpr):
    """``M^T X`` of values (channels, TILE), ``x^T M``."""
    out = ()
    for j in tl.static_range(COUNT):
        b_sum = tl.zeros_like(values[j])
        for i in tl.static_range(j, COUNT):
            b_sum = add_product(b_sum, values[i], tl.trans(tiles[place(i, j)]))
        out = out + (b_sum,)
    return out


@triton.jit
def nothing(values, COUNT: tl.constexpr):
    """Zeros like a tuple's tiles."""
    out = ()
    for i in tl.static_range(COUNT):
        out = out + (tl.zeros_like(values[i]),)
    return out


@triton.jit
def sum_turned(
    p_parts, m, width, parts, stride, first,
    ROW: tl.constexpr, TILE: tl.constexpr, BLOCK_C: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Sum of ``parts`` blocks (m, width) of float32, ``stride`` apart: channels from ``first``, by a tile of rows."""
    rows = ROW * TILE + tl.arange(0, TILE)
    offs = first + tl.arange(0, BLOCK_C)
    p_tile = p_parts + rows[None, :] * width + offs[:, None]
    inside = (rows < m)[None, :] & (offs < width)[:, None]
    b_sum = tl.zeros((BLOCK_C, TILE), tl.float32)
    for part in range(0, parts, PARTS):
        for ahead in tl.static_range(PARTS):
            mask = inside & (part + ahead < parts)
            b_sum += tl.load(p_tile + (part + ahead) * stride, mask=mask, other=0.0)
    return b_sum


@triton.jit
def store_turned(
    p_out, b_x, m, width, first, ROW: tl.constexpr, TILE: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Store (channels, TILE) into (m, width)."""
    rows = ROW * TILE + tl.arange(0, TILE)
    offs = first + tl.arange(0, BLOCK_C)
    mask = (rows < m)[None, :] & (offs < width)[:, None]
    tl.store(p_out + rows[None, :] * width + offs[:, None], b_x, mask=mask)


@triton.jit
def channel_sizes(values, COUNT: tl.constexpr):
    """The largest absolute value of each channel (channels,)."""
    b_size = tl.abs(values[0])
    for i in tl.static_range(1, COUNT):
        b_size = tl.maximum(b_size, tl.abs(values[i]))
    return tl.maximum(tl.max(b_size, 1), 1e-30)


@triton.jit
def times(values, b_factor, COUNT: tl.constexpr):
    """Values (channels, TILE) times a factor of each channel."""
    out = ()
    for i in tl.static_range(COUNT):
        out = out + (values[i] * b_factor[:, None],)
    return out


@triton.jit
def scaled(values, factor, COUNT: tl.constexpr):
    """A tuple's tiles times a number."""
    out = ()
    for i in tl.static_range(COUNT):
        out = out + (values[i] * factor,)
    return out


@triton.jit
def scaled_tiles(tiles, factor, COUNT: tl.constexpr):
    """A triangle's tiles times a number."""
    return scaled(tiles, factor, COUNT * (COUNT + 1) // 2)


@triton.jit
def solve_kernel(
    p_l, p_landmark_mask, p_parts, p_factor, p_u, p_w,
    heads, m, d, d_v, parts, scale, ridge,
    COUNT: tl.constexpr, TILE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr,
    CHUNKS: tl.constexpr, PARTS: tl.constexpr, HAS_LANDMARK_MASK: tl.constexpr,
    NORMALIZE: tl.constexpr, ORDER: tl.constexpr, KEEP: tl.constexpr, FLOAT32: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (batch * heads,). Reads landmarks and the parts of U; writes M, W = Y' U and, to KEEP it, U.

    ``EARLY``: launched before the pass that writes the parts has ended, so that factor and pass run side by side.
    """
    head = tl.program_id(0).to(tl.int64)
    p_l += head * m * d
    blocks, present = landmark_blocks(
        p_l, p_landmark_mask + (head // heads) * m, m, d, COUNT, TILE, BLOCK_D, HAS_LANDMARK_MASK
    )
    tiles = landmark_tiles(p_l, blocks, present, d, scale, COUNT, TILE, FLOAT32)
    roots = normalizers(tiles, COUNT, TILE, NORMALIZE)
    tiles = inverse_factor(tiles, m, ridge, COUNT, TILE)
    store_factor(p_factor + head * (m * (m + 1) // 2), tiles, m, COUNT, TILE)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    p_parts += head * parts * m * d_v
    for chunk in tl.static_range(CHUNKS):
        values = ()
        for i in tl.static_range(COUNT):
            b_u = sum_turned(
                p_parts, m, d_v, parts, m * d_v, chunk * BLOCK_C, i, TILE, BLOCK_C, PARTS
            )
            if KEEP:
                store_turned(p_u + head * m * d_v, b_u, m, d_v, chunk * BLOCK_C, i, TILE, BLOCK_C)
            values = values + (roots[i][None, :] * b_u,)
        b_size = channel_sizes(values, COUNT)
        values = times(values, 1.0 / b_size, COUNT)
        half = lower_product(tiles, values, nothing(values, COUNT), COUNT)
        mixed = upper_product(tiles, half, COUNT)
        if ORDER == 2:
            # Y X = M^T (M X + r M (M^T M X)), with the root of r times M: other operands than M's, which then
            # need not be kept.
            root = tl.sqrt(ridge)
            small = scaled_tiles(tiles, root, COUNT)
            half = lower_product(small, scaled(mixed, root, COUNT), half, COUNT)
            mixed = upper_product(small, scaled(half, 1.0 / root, COUNT), COUNT)
        for i in tl.static_range(COUNT):
            b_w = roots[i][None, :] * mixed[i] * b_size[:, None]
            store_turned(p_w + head * m * d_v, b_w, m, d_v, chunk * BLOCK_C, i, TILE, BLOCK_C)


@triton.jit
def store_halves(p_half, values, COUNT: tl.constexpr, TILE: tl.constexpr, BLOCK_C: tl.constexpr):
    """Store values (channels, TILE) as two blocks (COUNT * TILE, C) of float16, one after the other."""
    offs_c = tl.arange(0, BLOCK_C)[:, None]
    for i in tl.static_range(COUNT):
        offs = (i * TILE + tl.arange(0, TILE))[None, :] * BLOCK_C + offs_c
        b_high, b_low = halves(values[i])
        tl.store(p_half + offs, b_high)
        tl.store(p_half + COUNT * TILE * BLOCK_C + offs, b_low)


@triton.jit
def add_kept_product(
    b_sum, p_a, p_b,
    i: tl.constexpr, j: tl.constexpr,
    COUNT: tl.constexpr, TILE: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """``sum + a_i b_j^T`` of blocks that :func:`store_halves` has stored, (TILE, TILE)."""
    LOW: tl.constexpr = COUNT * TILE * BLOCK_C
    offs = tl.arange(0, TILE)[:, None] * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    p_a += i * TILE * BLOCK_C + offs
    p_b += j * TILE * BLOCK_C + offs
    b_a_high, b_a_low = tl.load(p_a), tl.load(p_a + LOW)
    b_b_high, b_b_low = tl.trans(tl.load(p_b)), tl.trans(tl.load(p_b + LOW))
    b_sum = tl.dot(b_a_low, b_b_high, tl.dot(b_a_high, b_b_low, b_sum))
    return tl.dot(b_a_high, b_b_high, b_sum)


@triton.jit
def solve_twice(
    p_factor, values, m, ridge,
    COUNT: tl.constexpr, TILE: tl.constexpr, ORDER: tl.constexpr, IS_GRADIENT: tl.constexpr,
):  # fmt: skip
    """``G X`` and, of U, ``Y X``; of dW ``r G^2 X``: at order 2. At order 1 ``G X`` and nothing."""
    tiles = load_factor(p_factor, m, COUNT, TILE)
    half = lower_product(tiles, values, nothing(values, COUNT), COUNT)
    once = upper_product(tiles, half, COUNT)
    again = once
    if ORDER == 2:
        root = tl.sqrt(ridge)
        small = scaled_tiles(tiles, root, COUNT)
        start = half
        if IS_GRADIENT:
            start = nothing(values, COUNT)
        half = lower_product(small, scaled(once, root, COUNT), start, COUNT)
        again = upper_product(small, scaled(half, 1.0 / root, COUNT), COUNT)
    return once, again


@triton.jit
def solve_backward_kernel(
    p_l, p_landmark_mask, p_u_parts, p_dw_parts, p_factor, p_scratch, p_rows, p_w, p_du, p_done,
    heads, m, d, d_v, u_parts, dw_parts, tiles, scale, ridge,
    COUNT: tl.constexpr, TILE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr,
    CHUNKS: tl.constexpr, PARTS: tl.constexpr, HAS_LANDMARK_MASK: tl.constexpr,
    NORMALIZE: tl.constexpr, ORDER: tl.constexpr, FLOAT32: tl.constexpr,
):  # fmt: skip
    """Grid (batch * heads,). Reads the parts of U and dW; writes W, dU and what landmark_gradient_kernel needs.

    With x = D^-1/2 U, g = D^-1/2 dW and, at order 2, once = G x, back = G g, right = G (x + r once),
    again = r G back, left = back + again: W = D^-1/2 right, dU = D^-1/2 left, and
    ``dA = -(back right^T + again once^T)`` less ``D^-1 rowsum(g * right + x * left) / 2`` in every row. At order 1
    right is once, left is back and ``dA = -back right^T``. p_scratch holds these four of a chunk of channels,
    (CHUNKS, 4, 2, COUNT * TILE, C) of float16 a head: one warp's registers do not. p_rows takes what goes through the
    rows, (COUNT * TILE,), and the sizes of U and dW that all is divided by.

    Also sets the head's counters to 0, by which the next pass knows that all parts of dL are there.
    """
    head = tl.program_id(0).to(tl.int64)
    p_l += head * m * d
    p_u_parts += head * u_parts * m * d_v
    p_dw_parts += head * dw_parts * m * d_v
    p_factor += head * (m * (m + 1) // 2)
    p_w += head * m * d_v
    p_du += head * m * d_v
    BLOCK: tl.constexpr = 2 * COUNT * TILE * BLOCK_C
    p_scratch += head * CHUNKS * 4 * BLOCK
    offs = tl.arange(0, TILE)
    blocks, present = landmark_blocks(
        p_l, p_landmark_mask + (head // heads) * m, m, d, COUNT, TILE, BLOCK_D, HAS_LANDMARK_MASK
    )
    a_tiles = landmark_tiles(p_l, blocks, present, d, scale, COUNT, TILE, FLOAT32)
    roots = normalizers(a_tiles, COUNT, TILE, NORMALIZE)
    # All channels of U in one measure, and all of dW: what is small beside them matters little in their products.
    u_size = 1e-30
    g_size = 1e-30
    for chunk in tl.static_range(CHUNKS):
        for i in tl.static_range(COUNT):
            b_u = sum_turned(
                p_u_parts, m, d_v, u_parts, m * d_v, chunk * BLOCK_C, i, TILE, BLOCK_C, PARTS
            )
            b_g = sum_turned(
                p_dw_parts, m, d_v, dw_parts, m * d_v, chunk * BLOCK_C, i, TILE, BLOCK_C, PARTS
            )
            u_size = tl.maximum(u_size, tl.max(tl.max(tl.abs(b_u), 1), 0))
            g_size = tl.maximum(g_size, tl.max(tl.max(tl.abs(b_g), 1), 0))
    through_rows = ()
    for _ in tl.static_range(COUNT):
        through_rows = through_rows + (tl.zeros((TILE,), tl.float32),)
    for chunk in tl.static_range(CHUNKS):
        p_once = p_scratch + chunk * 4 * BLOCK
        p_back = p_once + 2 * BLOCK
        tl.debug_barrier()  # nothing of before is worth a register: it is read again
        values = ()
        for i in tl.static_range(COUNT):
            b_u = sum_turned(
                p_u_parts, m, d_v, u_parts, m * d_v, chunk * BLOCK_C, i, TILE, BLOCK_C, PARTS
            )
            values = values + (roots[i][None, :] * (b_u * (1.0 / u_size)),)
        once, right = solve_twice(p_factor, values, m, ridge, COUNT, TILE, ORDER, False)
        if ORDER == 2:
            store_halves(p_once, once, COUNT, TILE, BLOCK_C)
        store_halves(p_once + BLOCK, right, COUNT, TILE, BLOCK_C)
        for i in tl.static_range(COUNT):
            b_w = roots[i][None, :] * right[i] * u_size
            store_turned(p_w, b_w, m, d_v, chunk * BLOCK_C, i, TILE, BLOCK_C)
        tl.debug_barrier()
        values = ()
        for i in tl.static_range(COUNT):
            b_g = sum_turned(
                p_dw_parts, m, d_v, dw_parts, m * d_v, chunk * BLOCK_C, i, TILE, BLOCK_C, PARTS
            )
            values = values + (roots[i][None, :] * (b_g * (1.0 / g_size)),)
        back, left = solve_twice(p_factor, values, m, ridge, COUNT, TILE, ORDER, True)
        store_halves(p_back, back, COUNT, TILE, BLOCK_C)
        if ORDER == 2:
            store_halves(p_back + BLOCK, left, COUNT, TILE, BLOCK_C)
            total = ()
            for i in tl.static_range(COUNT):
                total = total + (back[i] + left[i],)
            left = total
        rows_of_w = ()
        for i in tl.static_range(COUNT):
            b_du = roots[i][None, :] * left[i]
            store_turned(p_du, b_du * g_size, m, d_v, chunk * BLOCK_C, i, TILE, BLOCK_C)
            b_through = through_rows[i]
            if NORMALIZE:
                b_w = sum_turned(p_w, m, d_v, 1, 0, chunk * BLOCK_C, i, TILE, BLOCK_C, 1)
                b_u = sum_turned(
                    p_u_parts, m, d_v, u_parts, m * d_v, chunk * BLOCK_C, i, TILE, BLOCK_C, PARTS
                )
                # values hold the root already
                b_rows = tl.sum(values[i] * (b_w * (1.0 / u_size)), 0) * (1.0 / roots[i])
                b_rows += tl.sum(b_du * (b_u * (1.0 / u_size)), 0)
                b_through += 0.5 * roots[i] * roots[i] * b_rows
            rows_of_w = rows_of_w + (b_through,)
        through_rows = rows_of_w
    p_rows += head * (COUNT * TILE + 2)
    for i in tl.static_range(COUNT):
        tl.store(p_rows + i * TILE + offs, through_rows[i])
    tl.store(p_rows + COUNT * TILE, u_size)
    tl.store(p_rows + COUNT * TILE + 1, g_size)
    offs_tile = tl.arange(0, 128)
    tl.store(p_done + head * tiles + offs_tile, 0, mask=offs_tile < tiles)


@triton.jit
def landmark_gradient_kernel(
    p_l, p_landmark_mask, p_scratch, p_rows, p_dl,
    heads, m, d, dl_parts, scale,
    COUNT: tl.constexpr, TILE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr,
    CHUNKS: tl.constexpr, HAS_LANDMARK_MASK: tl.constexpr, ORDER: tl.constexpr,
    FLOAT32: tl.constexpr,
):  # fmt: skip
    """Grid (batch * heads,). Reads what solve_backward_kernel left; writes, as part 0, the gradient of L through Y'."""
    head = tl.program_id(0).to(tl.int64)
    p_l += head * m * d
    BLOCK: tl.constexpr = 2 * COUNT * TILE * BLOCK_C
    p_scratch += head * CHUNKS * 4 * BLOCK
    p_rows += head * (COUNT * TILE + 2)
    offs = tl.arange(0, TILE)
    b_eye = offs[:, None] == offs[None, :]
    blocks, present = landmark_blocks(
        p_l, p_landmark_mask + (head // heads) * m, m, d, COUNT, TILE, BLOCK_D, HAS_LANDMARK_MASK
    )
    a_tiles = landmark_tiles(p_l, blocks, present, d, scale, COUNT, TILE, FLOAT32)
    u_size = tl.load(p_rows + COUNT * TILE)
    g_size = tl.load(p_rows + COUNT * TILE + 1)
    # E = scale A * (dA + dA^T), symmetric; what lies on its diagonal would cancel.
    e_tiles = ()
    e_size = 1e-30
    for i in tl.static_range(COUNT):
        for j in tl.static_range(i + 1):
            b_s = tl.load(p_rows + i * TILE + offs)[:, None]
            b_s += tl.load(p_rows + j * TILE + offs)[None, :]
            for chunk in tl.static_range(CHUNKS):
                p_once = p_scratch + chunk * 4 * BLOCK
                p_right = p_once + BLOCK
                p_back = p_right + BLOCK
                b_s = add_kept_product(b_s, p_back, p_right, i, j, COUNT, TILE, BLOCK_C)
                b_s = add_kept_product(b_s, p_right, p_back, i, j, COUNT, TILE, BLOCK_C)
                if ORDER == 2:
                    p_again = p_back + BLOCK
                    b_s = add_kept_product(b_s, p_again, p_once, i, j, COUNT, TILE, BLOCK_C)
                    b_s = add_kept_product(b_s, p_once, p_again, i, j, COUNT, TILE, BLOCK_C)
            b_e = a_tiles[place(i, j)] * b_s
            if i == j:
                b_e = tl.where(b_eye, 0.0, b_e)
            e_size = tl.maximum(e_size, tl.max(tl.max(tl.abs(b_e), 1), 0))
            e_tiles = e_tiles + (b_e,)
            tl.debug_barrier()
    e_tiles = scaled_tiles(e_tiles, 1.0 / e_size, COUNT)
    l_size = 1e-30
    for i in tl.static_range(COUNT):
        l_size = tl.maximum(l_size, tl.max(tl.max(tl.abs(blocks[i]), 1), 0))
    blocks = scaled(blocks, 1.0 / l_size, COUNT)
    offs_d = tl.arange(0, BLOCK_D)
    for i in tl.static_range(COUNT):
        b_dl = -sums_of_rows(e_tiles, i, COUNT)[:, None] * blocks[i]
        for j in tl.static_range(COUNT):
            if j <= i:
                b_e = e_tiles[place(i, j)]
            else:
                b_e = tl.trans(e_tiles[place(j, i)])
            b_dl = add_product(b_dl, b_e, blocks[j])
        rows = i * TILE + offs
        b_dl *= -scale * l_size * e_size
        p_tile = p_dl + head * dl_parts * m * d + rows[:, None] * d + offs_d[None, :]
        mask = (rows < m)[:, None] & (offs_d < d)[None, :]
        tl.store(p_tile, b_dl * u_size * g_size, mask=mask)
