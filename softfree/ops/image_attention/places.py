"""The positions of a layer's tokens."""

from typing import NamedTuple

from torch import Tensor

from softfree.ops.window_product import window_grid


class Places(NamedTuple):
    """The positions of a layer's tokens.

    rows, columns: grid of the tokens that landmarks are made from, which are the last ones.
    height, width: image that the values' convolution sees, made of the last tokens; earlier ones pass
    unchanged.
    down, across: size of a landmark's window.
    """

    rows: int
    columns: int
    height: int
    width: int
    down: int
    across: int

    @property
    def grid(self) -> tuple[int, int]:
        return self.rows, self.columns

    @property
    def window(self) -> tuple[int, int]:
        return self.down, self.across

    def before_grid(self, n: int) -> int:
        return n - self.rows * self.columns

    def before_image(self, n: int) -> int:
        return n - self.height * self.width

    def share(self, landmarks: int) -> float:
        """Landmarks over windows, see :func:`softfree.layers.landmarks.pooled_share`."""
        down, across = window_grid(self.grid, self.window)
        return landmarks / (down * across)


def split(qv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Queries and values by head, (batch, heads, n, d) each, as views of their projection."""
    batch, n, both = qv.shape
    q, v = qv.view(batch, n, 2, heads, both // heads // 2).transpose(1, 3).unbind(2)
    return q, v
