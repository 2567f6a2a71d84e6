"""GELU computed again for the backward pass, its gradient, and the gradient's sum over all tokens."""

import triton
import triton.language as tl

from softfree.ops.shared.kernels import gelu_and_slope


@triton.jit
def mlp_backward_kernel(
    p_g, p_h, p_dh, p_parts, rows, columns, steps, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Grid (stretches, tiles of columns). Writes dh for its stretch of rows, and their sum, (COLUMNS,).

    p_g: the gradient of GELU's result; it is overwritten by that result.
    """
    stretch = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    b_sum = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(steps):
        row = (stretch * steps + step) * ROWS + tl.arange(0, ROWS)
        places = row.to(tl.int64)[:, None] * columns + column[None, :]
        exists = (row < rows)[:, None] & (column < columns)[None, :]
        b_g = tl.load(p_g + places, mask=exists, other=0.0).to(tl.float32)
        b_h = tl.load(p_h + places, mask=exists, other=0.0).to(tl.float32)
        b_act, b_slope = gelu_and_slope(b_h, False)
        b_dh = b_g * b_slope
        tl.store(p_dh + places, b_dh.to(p_dh.dtype.element_ty), mask=exists)
        tl.store(p_g + places, b_act.to(p_g.dtype.element_ty), mask=exists)
        b_sum += b_dh
    tl.store(p_parts + stretch * columns + column, tl.sum(b_sum, 0), mask=column < columns)
