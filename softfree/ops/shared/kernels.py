"""Kernels for sums over rows, over parts and of tokens; GELU."""

import triton
import triton.language as tl


@triton.jit
def gelu_and_slope(b_h, FAST: tl.constexpr):
    """The tanh form of GELU and its derivative.

    GELU is ``h s(h)`` with ``s(h) = sigmoid(2 u) = (1 + tanh(u)) / 2`` and ``u = sqrt(2 / pi) (h + 0.044715 h^3)``.
    With ``FAST`` it uses NVIDIA's tanh instruction, whose error is at most 2^-11, half a float16 step.
    """
    square = b_h * b_h
    if FAST:
        b_tanh = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f",
            [b_h * (0.7978845608028654 + 0.7978845608028654 * 0.044715 * square)],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
        b_s = 0.5 + 0.5 * b_tanh
    else:
        # 2 sqrt(2 / pi) / ln 2 = 2.302... A reciprocal root replaces the division, which takes several
        # instructions.
        b_root = tl.rsqrt(
            1 + tl.exp2(b_h * (-2.302208198144325 - 2.302208198144325 * 0.044715 * square))
        )
        b_s = b_root * b_root
    b_act = b_h * b_s
    b_steep = 1.5957691216057308 + 1.5957691216057308 * 3 * 0.044715 * square
    return b_act, b_s + b_act * (1 - b_s) * b_steep


@triton.jit
def gelu(b_h, FAST: tl.constexpr):
    """The tanh form of GELU, as in :func:`gelu_and_slope`."""
    return gelu_and_slope(b_h, FAST)[0]


@triton.jit
def column_sum_kernel(
    p_x, p_parts, rows, columns, steps, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Grid (stretches, tiles of columns). Writes the sum of its stretch of rows, (COLUMNS,)."""
    stretch = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    b_sum = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(steps):
        row = (stretch * steps + step) * ROWS + tl.arange(0, ROWS)
        places = row.to(tl.int64)[:, None] * columns + column[None, :]
        exists = (row < rows)[:, None] & (column < columns)[None, :]
        b_sum += tl.load(p_x + places, mask=exists, other=0.0).to(tl.float32)
    tl.store(p_parts + stretch * columns + column, tl.sum(b_sum, 0), mask=column < columns)


@triton.jit
def part_sum_kernel(
    p_parts, p_base, p_out, elements, middle, low,
    part_high, part_middle, part_low, out_high, out_middle, out_low,
    parts, inner, outer_stride, inner_stride,
    ADD: tl.constexpr, ELEMENTS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of elements,). Writes the sum of parts (high, middle, low); with ``ADD``, plus p_base.

    Part i starts ``i // inner * outer_stride + i % inner * inner_stride`` elements after the first.
    """
    element = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    high = element // (middle * low)
    between = element // low % middle
    place = (high * part_high + between * part_middle + element % low * part_low).to(tl.int64)
    b_sum = tl.zeros((PARTS, ELEMENTS), tl.float32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        begin = (part // inner).to(tl.int64) * outer_stride + part % inner * inner_stride
        exists = (part < parts)[:, None] & (element < elements)[None, :]
        b_part = tl.load(p_parts + begin[:, None] + place[None, :], mask=exists, other=0.0)
        b_sum += b_part.to(tl.float32)
    b_out = tl.sum(b_sum, 0)
    place = high * out_high + between * out_middle + element % low * out_low
    if ADD:
        b_out += tl.load(p_base + place, mask=element < elements, other=0.0).to(tl.float32)
    tl.store(p_out + place, b_out.to(p_out.dtype.element_ty), mask=element < elements)


@triton.jit
def token_sum_kernel(
    p_to, p_from, tokens, channels, to_batch, to_token, from_batch, from_token, scale,
    ADD: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Grid (tokens of all samples, tiles of channels).

    Multiplies p_to by ``scale``; with ``ADD``, adds p_from.
    """
    sample = (tl.program_id(0) // tokens).to(tl.int64)
    token = tl.program_id(0) % tokens
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < channels
    p_to += sample * to_batch + token * to_token + channel
    b_to = scale * tl.load(p_to, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        p_from += sample * from_batch + token * from_token + channel
        b_to += tl.load(p_from, mask=inside, other=0.0).to(tl.float32)
    tl.store(p_to, b_to.to(p_to.dtype.element_ty), mask=inside)
