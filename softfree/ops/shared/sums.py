"""Sums over all tokens: what a bias's gradient is."""

import torch
from torch import Tensor

from softfree.ops.shared import devices
from softfree.ops.shared.shapes import power_of_two, tiles_of

ELEMENTS = 4096  # of a tile
COLUMNS = 128
PROGRAMS_PER_PROCESSOR = 8


def column_sums(x: Tensor) -> Tensor:
    """The sums of the columns of (rows, columns), float32; for tensors that Triton's kernels take.

    PyTorch's own sum takes three times as long where columns are few and rows many.
    """
    from softfree.ops.shared.kernels import column_sum_kernel
    from softfree.ops.shared.launching import launch

    x = x.contiguous()
    rows, columns = x.shape
    width = min(COLUMNS, power_of_two(columns))
    height = ELEMENTS // width
    tiles = tiles_of(columns, width)
    stretches = max(1, PROGRAMS_PER_PROCESSOR * devices.processors(x.device) // tiles)
    steps = max(1, tiles_of(rows, height * stretches))
    parts = torch.empty(
        (tiles_of(rows, height * steps), columns), dtype=torch.float32, device=x.device
    )
    if parts.numel() > 0:
        launch(
            column_sum_kernel, (parts.shape[0], tiles), (x, parts), (rows, columns, steps),
            ROWS=height, COLUMNS=width, num_warps=4,
        )  # fmt: skip
    return parts.sum(0)
