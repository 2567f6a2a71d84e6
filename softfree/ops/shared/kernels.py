"""Sums over rows."""

import triton
import triton.language as tl


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
