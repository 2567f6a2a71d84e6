"""Pieces that the kernels share: loading, the Gaussian kernel of a tile, products of chosen precision.

Names: ``b_*`` are blocks in registers, ``p_*`` pointers, capitals compile-time constants. Shapes in
comments use M landmarks, N tokens of a tile, D channels of q, C channels of v, each padded to a block.
Every load is cast to float32 at once unless it feeds a matrix product as it is.
"""

import triton
import triton.language as tl

# The low part of a split float32 is kept multiplied by this, so that it is not lost below float16's range.
LOW_SCALE = tl.constexpr(2048.0)


@triton.jit
def part_and_head(parts):
    """Which part of which head this program does; a head's parts are neighbours.

    Both along the grid's first axis: the others end at 65,535.
    """
    program = tl.program_id(0)
    return program % parts, (program // parts).to(tl.int64)


@triton.jit
def load_rows(p_rows, stride, offs_n, present, width, BLOCK: tl.constexpr):
    """Rows (N, BLOCK) of a token tensor, 0 where ``present`` is False or beyond ``width``."""
    offs = tl.arange(0, BLOCK)
    p_tile = p_rows + offs_n.to(tl.int64)[:, None] * stride + offs[None, :]
    return tl.load(p_tile, mask=present[:, None] & (offs < width)[None, :], other=0.0)


@triton.jit
def store_rows(p_rows, stride, offs_n, present, width, b_rows, BLOCK: tl.constexpr):
    """Store rows (N, BLOCK) where ``present``."""
    offs = tl.arange(0, BLOCK)
    p_tile = p_rows + offs_n.to(tl.int64)[:, None] * stride + offs[None, :]
    mask = present[:, None] & (offs < width)[None, :]
    tl.store(p_tile, b_rows.to(p_rows.dtype.element_ty), mask=mask)


@triton.jit
def present_landmarks(p_mask, m, BLOCK_M: tl.constexpr, HAS_MASK: tl.constexpr):
    """(M,) bool: the landmark exists and takes part."""
    offs_m = tl.arange(0, BLOCK_M)
    present = offs_m < m
    if HAS_MASK:
        present = present & (tl.load(p_mask + offs_m, mask=present, other=0) != 0)
    return present


@triton.jit
def present_keys(p_mask, batch, n, offs_n):
    """(N,) bool: the key exists and its mask lets it take part."""
    p_row = p_mask + batch.to(tl.int64) * n
    return tl.load(p_row + offs_n, mask=offs_n < n, other=0) != 0


@triton.jit
def prepare_landmarks(b_l, b_present, log2_scale, FLOAT32: tl.constexpr):
    """Landmarks (M, D) as one side of the exponent: centred (float32 only), centre (D,), bias (M,).

    The shift keeps the terms of the exponent as small as the distances. Half-precision inputs are left
    alone: their products are exact in float32 as they are. The bias is log2_scale |l|^2 / 2; a landmark
    that takes no part gets an infinite one, so that its kernel value is 0.
    """
    if FLOAT32:
        count = tl.maximum(tl.sum(b_present.to(tl.float32), 0), 1.0)
        b_centre = tl.sum(b_l, 0) / count
        b_l = tl.where(b_present[:, None], b_l - b_centre[None, :], 0.0)
    else:
        b_centre = tl.zeros((b_l.shape[1],), tl.float32)
    b_float32 = b_l.to(tl.float32)
    b_bias = tl.where(b_present, 0.5 * log2_scale * tl.sum(b_float32 * b_float32, 1), float("inf"))
    return b_l, b_centre, b_bias


@triton.jit
def token_bias(b_t, log2_scale):
    """log2_scale |t|^2 / 2 of tokens (N, D): (N,)."""
    b_float32 = b_t.to(tl.float32)
    return 0.5 * log2_scale * tl.sum(b_float32 * b_float32, 1)


@triton.jit
def kernel_of_tokens(b_t, b_l, b_bias, log2_scale, PRECISION: tl.constexpr):
    """``exp(-scale/2 ||t - l||^2)`` of tokens (N, D) and prepared landmarks (M, D): (N, M)."""
    b_s = tl.dot(b_t, tl.trans(b_l), input_precision=PRECISION)
    b_s = b_s * log2_scale - b_bias[None, :] - token_bias(b_t, log2_scale)[:, None]
    return tl.exp2(tl.minimum(b_s, 0.0))


@triton.jit
def kernel_of_landmarks(b_t, b_l, b_bias, log2_scale, PRECISION: tl.constexpr):
    """The same as (M, N): the left side of a product with values, without a change of layout."""
    b_s = tl.dot(b_l, tl.trans(b_t), input_precision=PRECISION)
    b_s = b_s * log2_scale - b_bias[:, None] - token_bias(b_t, log2_scale)[None, :]
    return tl.exp2(tl.minimum(b_s, 0.0))


@triton.jit
def product(b_a, b_b, PRECISION: tl.constexpr):
    """``a @ b`` with ``a`` float32, in ``b``'s precision where that is bfloat16."""
    if b_b.dtype == tl.bfloat16:
        return tl.dot(b_a.to(tl.bfloat16), b_b)
    return tl.dot(for_tf32(b_a, PRECISION), b_b.to(tl.float32), input_precision=PRECISION)


@triton.jit
def add_exact_product(b_sum, b_a, b_b, PRECISION: tl.constexpr):
    """``sum + a @ b`` with ``a`` float32 kept to 16 bits where ``b`` is bfloat16 (which is exact as it is)."""
    if b_b.dtype == tl.bfloat16:
        b_high = cut_to_bfloat16(b_a)
        b_low = (b_a - b_high).to(tl.bfloat16)
        return tl.dot(b_high.to(tl.bfloat16), b_b, tl.dot(b_low, b_b, b_sum))
    return tl.dot(for_tf32(b_a, PRECISION), b_b.to(tl.float32), b_sum, input_precision=PRECISION)


@triton.jit
def for_tf32(b_x, PRECISION: tl.constexpr):
    """float32 rounded to the 10 bits that a single TF32 product reads: left to itself it cuts the others off."""
    if PRECISION == "tf32":
        b_bits = (b_x.to(tl.uint32, bitcast=True) + 0x1000) & 0xFFFFE000
        b_x = b_bits.to(tl.float32, bitcast=True)
    return b_x


@triton.jit
def cut_to_bfloat16(b_x):
    """float32 blocks with the lower 16 bits cut off.

    By integer operations: a conversion to bfloat16 and back runs at the rate of the exponential.
    """
    b_bits = b_x.to(tl.uint32, bitcast=True) & 0xFFFF0000
    return b_bits.to(tl.float32, bitcast=True)


@triton.jit
def split(b_x):
    """A float32 block as two float16 blocks, ``x = high + low / 2048``, together 22 bits."""
    b_high = b_x.to(tl.float16)
    return b_high, ((b_x - b_high.to(tl.float32)) * LOW_SCALE).to(tl.float16)


@triton.jit
def split_product(b_a, b_b, SPLIT: tl.constexpr):
    """``a @ b`` of float32 blocks to float32 accuracy on the matrix units.

    With ``SPLIT``, three float16 products: as exact as three TF32 products at half their price, for
    entries below 65504.
    """
    if SPLIT:
        b_high, b_low = split(b_a)
        return product_of_split(b_high, b_low, b_b)
    return tl.dot(b_a, b_b, input_precision="tf32x3")


@triton.jit
def product_of_split(b_high, b_low, b_b):
    """:func:`split_product` of a first block that is split already."""
    b_b_high, b_b_low = split(b_b)
    b_cross = tl.dot(b_low, b_b_high, tl.dot(b_high, b_b_low))
    return tl.dot(b_high, b_b_high) + b_cross * (1.0 / LOW_SCALE)


@triton.jit
def halves(b_x):
    """A float32 block as the sum of two float16 blocks, to 2^-22 of it and 2^-25.

    Unlike :func:`split` without a scale for the lower one: for entries that are about 1 or matter as little as they are
    small. Then one sum takes all products of halves.
    """
    b_high = b_x.to(tl.float16)
    return b_high, (b_x - b_high.to(tl.float32)).to(tl.float16)


@triton.jit
def product_of_halves(b_high, b_low, b_b):
    """``a @ b`` as exact as float32, of a first block in halves already."""
    b_b_high, b_b_low = halves(b_b)
    return tl.dot(b_high, b_b_high, tl.dot(b_low, b_b_high, tl.dot(b_high, b_b_low)))


@triton.jit
def scaled_product(b_a, b_b, FIRST_IS_SMALL: tl.constexpr = False):
    """``a @ b`` of float32 blocks of any size, to 2^-22 of their largest entries.

    ``FIRST_IS_SMALL``: ``a`` is within float16's range as it is.
    """
    size = largest(b_b)
    b_b = b_b * (1.0 / size)
    if not FIRST_IS_SMALL:
        a_size = largest(b_a)
        b_a = b_a * (1.0 / a_size)
        size *= a_size
    return split_product(b_a, b_b, True) * size


@triton.jit
def largest(b_x):
    """The largest absolute value of a block.

    Over both axes at once: one after the other would exchange a whole row between threads first.
    """
    return tl.maximum(tl.max(tl.abs(b_x)), 1e-30)
