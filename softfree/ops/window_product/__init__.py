"""Windows of tokens times one weight."""

from softfree.ops.window_product.operator import (
    cross_the_border,
    window_grid,
    window_product,
    windows,
)

__all__ = ["cross_the_border", "window_grid", "window_product", "windows"]
