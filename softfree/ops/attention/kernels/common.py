"""Functions that the kernels share: loading, the Gaussian kernel of a tile, products of chosen precision.

Names: ``b_*`` are blocks in registers, ``p_*`` are pointers, capitals are compile-time constants. Shapes in
comments use M landmarks, N tokens per tile, D channels of q and C channels of v, each padded to a block.
Every loaded value is cast to float32 at once unless it goes straight into a matrix product.
"""

import triton
import triton.language as tl

# The low part of a split float32 is stored multiplied by this, so that it does not underflow in float16.
LOW_SCALE = tl.constexpr(2048.0)


@triton.jit
def part_and_head(parts):
    """The part and the head that this program works on; the parts of a head are adjacent.

    Both are on the grid's first axis, because the other axes are limited to 65,535.
    """
    program = tl.program_id(0)
    return program % parts, (program // parts).to(tl.int64)


@triton.jit
def load_rows(p_rows, stride, offs_n, present, width, BLOCK: tl.constexpr):
    """Load rows (N, BLOCK) of a token tensor, 0 where ``present`` is False or beyond ``width``."""
    offs = tl.arange(0, BLOCK)
    p_tile = p_rows + offs_n.to(tl.int64)[:, None] * stride + offs[None, :]
    return tl.load(p_tile, mask=present[:, None] & (offs < width)[None, :], other=0.0)


@triton.jit
def store_rows(p_rows, stride, offs_n, present, width, b_rows, BLOCK: tl.constexpr):
    """Store rows (N, BLOCK) where ``present`` is True."""
    offs = tl.arange(0, BLOCK)
    p_tile = p_rows + offs_n.to(tl.int64)[:, None] * stride + offs[None, :]
    mask = present[:, None] & (offs < width)[None, :]
    tl.store(p_tile, b_rows.to(p_rows.dtype.element_ty), mask=mask)


@triton.jit
def present_landmarks(p_mask, m, BLOCK_M: tl.constexpr, HAS_MASK: tl.constexpr):
    """(M,) bool: whether each landmark exists and takes part."""
    offs_m = tl.arange(0, BLOCK_M)
    present = offs_m < m
    if HAS_MASK:
        present = present & (tl.load(p_mask + offs_m, mask=present, other=0) != 0)
    return present


@triton.jit
def present_keys(p_mask, batch, n, offs_n):
    """(N,) bool: whether each key exists and is not masked out."""
    p_row = p_mask + batch.to(tl.int64) * n
    return tl.load(p_row + offs_n, mask=offs_n < n, other=0) != 0


@triton.jit
def prepare_landmarks(b_l, b_present, log2_scale, FLOAT32: tl.constexpr):
    """Landmarks (M, D) as one side of the exponent: the centred landmarks, the centre (D,) and the bias (M,).

    The shift keeps the terms of the exponent as small as the distances. Only float32 landmarks are centred:
    products of half-precision inputs are exact in float32. The bias is log2_scale |l|^2 / 2. It is infinite
    for a landmark that takes no part, so that its kernel value is 0.
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
    """The same as (M, N): it can be the left factor of a product with values without a change of layout."""
    b_s = tl.dot(b_l, tl.trans(b_t), input_precision=PRECISION)
    b_s = b_s * log2_scale - b_bias[:, None] - token_bias(b_t, log2_scale)[None, :]
    return tl.exp2(tl.minimum(b_s, 0.0))


@triton.jit
def product(b_a, b_b, PRECISION: tl.constexpr):
    """``a @ b`` with float32 ``a``; if ``b`` is bfloat16, in bfloat16."""
    if b_b.dtype == tl.bfloat16:
        return tl.dot(b_a.to(tl.bfloat16), b_b)
    return tl.dot(for_tf32(b_a, PRECISION), b_b.to(tl.float32), input_precision=PRECISION)


@triton.jit
def add_exact_product(b_sum, b_a, b_b, PRECISION: tl.constexpr):
    """``sum + a @ b`` with float32 ``a``; if ``b`` is bfloat16, ``a`` is kept to 16 bits of precision."""
    if b_b.dtype == tl.bfloat16:
        b_high = cut_to_bfloat16(b_a)
        b_low = (b_a - b_high).to(tl.bfloat16)
        return tl.dot(b_high.to(tl.bfloat16), b_b, tl.dot(b_low, b_b, b_sum))
    return tl.dot(for_tf32(b_a, PRECISION), b_b.to(tl.float32), b_sum, input_precision=PRECISION)


@triton.jit
def for_tf32(b_x, PRECISION: tl.constexpr):
    """float32 rounded to the 10 bits that a single TF32 product reads.

    The hardware would truncate instead.
    """
    if PRECISION == "tf32":
        b_bits = (b_x.to(tl.uint32, bitcast=True) + 0x1000) & 0xFFFFE000
        b_x = b_bits.to(tl.float32, bitcast=True)
    return b_x


@triton.jit
def cut_to_bfloat16(b_x):
    """A float32 block with the lower 16 bits cut off.

    It uses integer operations, because a conversion to bfloat16 and back is as slow as an exponential.
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
    """``a @ b`` of float32 blocks on the matrix units, to float32 accuracy.

    With ``SPLIT`` it takes three float16 products. For entries below 65504 they are as accurate as three TF32
    products, at half the cost.
    """
    if SPLIT:
        b_high, b_low = split(b_a)
        return product_of_split(b_high, b_low, b_b)
    return tl.dot(b_a, b_b, input_precision="tf32x3")


@triton.jit
def product_of_split(b_high, b_low, b_b):
    """:func:`split_product` with a first block that is already split."""
    b_b_high, b_b_low = split(b_b)
    b_cross = tl.dot(b_low, b_b_high, tl.dot(b_high, b_b_low))
    return tl.dot(b_high, b_b_high) + b_cross * (1.0 / LOW_SCALE)


@triton.jit
def halves(b_x):
    """A float32 block as the sum of two float16 blocks.

    The error is at most 2^-22 relative plus 2^-25 absolute. Unlike in :func:`split`, the low block is not
    scaled, so one accumulator can take all products of halves. It is for entries of about 1, or entries that
    matter less the smaller they are.
    """
    b_high = b_x.to(tl.float16)
    return b_high, (b_x - b_high.to(tl.float32)).to(tl.float16)


@triton.jit
def product_of_halves(b_high, b_low, b_b):
    """``a @ b`` to float32 accuracy, with a first block that is already in halves."""
    b_b_high, b_b_low = halves(b_b)
    return tl.dot(b_high, b_b_high, tl.dot(b_low, b_b_high, tl.dot(b_high, b_b_low)))


@triton.jit
def scaled_product(b_a, b_b, FIRST_IS_SMALL: tl.constexpr = False):
    """``a @ b`` of float32 blocks of any magnitude, to 2^-22 of their largest entries.

    ``FIRST_IS_SMALL``: ``a`` is already within the range of float16.
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
    """The largest absolute value of a block, at least 1e-30.

    It is taken over both axes at once. One axis after the other would first exchange a whole row between
    threads.
    """
    return tl.maximum(tl.max(tl.abs(b_x)), 1e-30)
