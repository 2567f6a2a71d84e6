"""Sums over all tokens, such as a bias's gradient: in parts, and of the parts."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from softfree.ops.shared import devices
from softfree.ops.shared.shapes import power_of_two, tiles_of

ELEMENTS = 4096  # of a tile
COLUMNS = 128
PROGRAMS_PER_PROCESSOR = 8
PARTS = 256  # added up at a time


def column_sums(x: Tensor) -> Tensor:
    """The sums of the columns of (rows, columns), in float32; for tensors that Triton's kernels take.

    PyTorch's own sum takes three times as long where columns are few and rows many.
    """
    x = x.contiguous()
    rows, columns = x.shape
    sizes, run = column_sum_launch(rows, columns, devices.processors(x.device))
    parts = x.new_empty(sizes, dtype=torch.float32)
    if parts.numel() > 0:
        run(x, parts)
    return sum_of_parts(parts, (1,), torch.float32)


@functools.lru_cache(maxsize=1024)
def column_sum_launch(rows: int, columns: int, processors: int) -> tuple[tuple[int, int], Any]:
    """The sizes of the parts, and what writes them."""
    from softfree.ops.shared.kernels import column_sum_kernel
    from softfree.ops.shared.launching import Launch

    width = min(COLUMNS, power_of_two(columns))
    height = ELEMENTS // width
    tiles = tiles_of(columns, width)
    wanted = max(1, PROGRAMS_PER_PROCESSOR * processors // tiles)
    steps = max(1, tiles_of(rows, height * wanted))
    stretches = tiles_of(rows, height * steps)
    return (stretches, columns), Launch(
        column_sum_kernel, (stretches, tiles), (rows, columns, steps),
        ROWS=height, COLUMNS=width, num_warps=4,
    )  # fmt: skip


def sum_of_parts(
    parts: Tensor,
    kept: tuple[int, ...],
    dtype: torch.dtype,
    sizes: Sequence[int] | None = None,
    order: tuple[int, ...] | None = None,
) -> Tensor:
    """The sum over all dimensions of float32 parts but those ``kept``.

    Args:
        parts: contiguous.
        kept: up to three dimensions, rising.
        dtype: of the result.
        sizes: of the result; None: of the dimensions kept.
        order: of the dimensions of the result, as numbers of those kept; None: as they are.
    """
    found = parts.new_empty(sizes or [parts.shape[dim] for dim in kept], dtype=dtype)
    if parts.numel() == 0:
        return found.zero_()
    part_sum_launch(parts.shape, kept, order)(parts, parts, found)
    return found


@functools.lru_cache(maxsize=1024)
def part_sum_launch(
    sizes: tuple[int, ...],
    kept: tuple[int, ...],
    order: tuple[int, ...] | None = None,
    add: bool = False,
) -> Any:
    """Of :func:`sum_of_parts`, with the parts, what the sum is added to (only with ``add``), and the result."""
    from softfree.ops.shared.kernels import part_sum_kernel
    from softfree.ops.shared.launching import Launch

    strides = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
    summed = [dim for dim in range(len(sizes)) if dim not in kept]
    ordered = [kept[number] for number in order or range(len(kept))]
    to = {
        dim: math.prod(sizes[d] for d in ordered[place + 1 :]) for place, dim in enumerate(ordered)
    }
    missing = 3 - len(kept)
    _, middle, low = [1] * missing + [sizes[dim] for dim in kept]
    of_parts = [0] * missing + [strides[dim] for dim in kept]
    of_result = [0] * missing + [to[dim] for dim in kept]
    *first, second = [0] * (2 - len(summed)) + summed
    counts = [sizes[dim] for dim in summed]
    elements, parts = math.prod(sizes[dim] for dim in kept), math.prod(counts)
    at_once = min(PARTS, power_of_two(parts))
    wide = min(power_of_two(elements), ELEMENTS // max(4, at_once))
    return Launch(
        part_sum_kernel, (tiles_of(elements, wide),),
        (
            elements, middle, low, *of_parts, *of_result, parts, counts[-1],
            strides[first[0]], strides[second],
        ),
        ADD=add, ELEMENTS=wide, PARTS=at_once, num_warps=4,
    )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def token_sum_launch(
    batch: int,
    tokens: int,
    channels: int,
    to: tuple[int, int],
    source: tuple[int, int] | None,
    scale: float,
) -> Any:
    """What multiplies tokens by ``scale`` and adds others to them, with both; ``source`` None: none are added.

    Both are (batch, tokens, channels), with these strides of samples and tokens.
    """
    from softfree.ops.shared.kernels import token_sum_kernel
    from softfree.ops.shared.launching import Launch

    width = min(1024, power_of_two(channels))
    return Launch(
        token_sum_kernel, (batch * tokens, tiles_of(channels, width)),
        (tokens, channels, *to, *(source or to), float(scale)),
        ADD=source is not None, BLOCK_C=width, num_warps=4,
    )  # fmt: skip
