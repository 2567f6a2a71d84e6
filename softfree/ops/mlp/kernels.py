"""GELU again for the backward pass, its gradient, and that gradient's sum over all tokens."""

import triton
import triton.language as tl


@triton.jit
def mlp_backward_kernel(
    p_g, p_h, p_dh, p_parts, rows, columns, steps, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Grid (stretches, tiles of columns). Writes dh of its stretch of rows, and their sum, (COLUMNS,).

    p_g: the gradient of GELU's result, which gives place to that result.

    GELU's tanh form is ``h s(h)``, ``s(h) = sigmoid(2 sqrt(2 / pi) (h + 0.044715 h^3))``.
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
        square = b_h * b_h
        b_s = tl.sigmoid(1.5957691216057308 * b_h * (1 + 0.044715 * square))
        slope = 1.5957691216057308 * (1 + 3 * 0.044715 * square)
        b_act = b_h * b_s
        b_dh = b_g * (b_s + b_act * (1 - b_s) * slope)
        tl.store(p_dh + places, b_dh.to(p_dh.dtype.element_ty), mask=exists)
        tl.store(p_g + places, b_act.to(p_g.dtype.element_ty), mask=exists)
        b_sum += b_dh
    tl.store(p_parts + stretch * columns + column, tl.sum(b_sum, 0), mask=column < columns)
