"""Sums over all tokens, such as the gradient of a bias: partial sums first, then the sum of these parts."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from softfree.ops.shared import devices
from softfree.ops.shared.shapes import power_of_two, tiles_of

ELEMENTS = 8192  # per tile
COLUMNS = 128
PROGRAMS_PER_PROCESSOR = 4
PARTS = 256  # added up at a time


def column_sums(x: Tensor) -> Tensor:
    """The column sums of a (rows, columns) tensor, in float32; for tensors that the Triton kernels accept.

    PyTorch's own sum takes three times as long when there are few columns and many rows.
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
    """The sizes of the partial sums, and the launch that writes them."""
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
    """Sum float32 parts over all dimensions except those in ``kept``.

    Args:
        parts: contiguous tensor.
        kept: up to three dimensions, in ascending order.
        dtype: dtype of the result.
        sizes: shape of the result; None: the sizes of the kept dimensions.
        order: order of the result's dimensions, as indices into ``kept``; None: unchanged.
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
    """The launch behind :func:`sum_of_parts`.

    It is called with the parts, the tensor that the sum is added to (read only with ``add``), and the result.
    """
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
    """The launch that multiplies tokens by ``scale`` in place and adds other tokens to them.

    It is called with both tensors, (batch, tokens, channels). ``to`` and ``source`` are their strides along
    samples and tokens; with ``source=None`` nothing is added.
    """
    from softfree.ops.shared.kernels import token_sum_kernel
    from softfree.ops.shared.launching import Launch

    width = min(1024, power_of_two(channels))
    return Launch(
        token_sum_kernel, (batch * tokens, tiles_of(channels, width)),
        (tokens, channels, *to, *(source or to), float(scale)),
        ADD=source is not None, BLOCK_C=width, num_warps=4,
    )  # fmt: skip
