"""Adaptive average pooling, of grids and of the real tokens of sequences, as products with matrices.

Bin i of n values goes from floor(i n / bins) to ceil((i + 1) n / bins), as in ``F.adaptive_avg_pool1d``; as a
product it works with masks, and at sizes that an exporter does not know.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from softfree.ops.shared.shapes import certain

Sampled = tuple[Tensor, Tensor | None]


def averaging_matrix(length: int, bins: int, like: Tensor, used: int | None = None) -> Tensor:
    """Pooling of ``length`` values to ``bins``, as a matrix (bins, length).

    Of more bins than values several take the same value; with ``used`` the values go into so many bins, and the
    others stay empty.
    """
    first, last = _bounds(bins, length, bins if used is None else used, like.device)
    position = torch.arange(length, device=like.device)
    inside = (position >= first[:, None]) & (position < last[:, None])
    return inside.to(like.dtype) / (last - first)[:, None]


def pool_grid(x: Tensor, mask: Tensor | None, grid: tuple[int, ...], count: int) -> Sampled:
    """(batch, heads, rows * columns, d) pooled to at most ``count``, masked ones (batch, tokens) left out.

    ``grid`` is (rows, columns), or (times, rows, columns).
    """
    known = all(isinstance(side, int) for side in grid)
    target: Any = _sides(len(grid), count)
    if torch.jit.is_tracing() and len(grid) == 2:
        # Whether there is one row, as _target asks, is for the program to find out.
        single: Any = torch.as_tensor(grid[0] == 1).long()
        side, across = target
        target = (side + single * (1 - side), across + single * (count - across))
    if known:
        target = _target(grid, count)
        if _same(target, grid):
            return x, mask
    elif mask is None:
        # How many bins a size leaves empty is not known before an exported program runs.
        mask = torch.ones_like(x[:, 0, :, 0], dtype=torch.bool)
    if _is_row(grid) and mask is not None:
        return pool_segments(x, mask, count)
    return _pool(x, mask, grid, _side_matrices(grid, target, x))


def adaptive_pool(
    x: Tensor, mask: Tensor | None, grid: tuple[int, ...], target: tuple[int, ...]
) -> Sampled:
    """As :func:`pool_grid`, to ``target`` bins at any size: of a smaller grid several take the same tokens."""
    sides = [averaging_matrix(*side, x) for side in zip(grid, target, strict=True)]
    return _pool(x, mask, grid, sides)


def _pool(x: Tensor, mask: Tensor | None, grid: tuple[int, ...], sides: list[Tensor]) -> Sampled:
    *first, across = sides
    matrices, pooled_dims, source = _POOLING[len(grid)]
    x = x.unflatten(2, grid)
    average = f"{matrices},bn{source}d,cw->bn{pooled_dims}d"
    if mask is None:
        return torch.einsum(average, *first, x, across).flatten(2, -2), None
    mask = mask.unflatten(1, grid)
    x = torch.where(mask[:, None, ..., None], x, 0)
    pooled = torch.einsum(average, *first, x, across)
    share = f"{matrices},b{source},cw->b{pooled_dims}"
    present = torch.einsum(share, *first, mask.to(x.dtype), across)
    pooled = pooled / torch.where(present > 0, present, 1)[:, None, ..., None]
    return pooled.flatten(2, -2), (present > 0).flatten(1)


# By the number of dimensions: letters of the matrices but the last, of the pooled grid, of the grid.
_POOLING = {2: ("ah", "ac", "hw"), 3: ("et,ah", "eac", "thw")}


def pool_segments(
    x: Tensor, mask: Tensor, count: int, *, overlap: bool = True
) -> tuple[Tensor, Tensor]:
    """Each sequence's real tokens pooled to ``count``, so that padding changes nothing.

    Without ``overlap`` bins begin at ceil(i n / count), so that each token is in one alone.

    Args:
        x: (batch, heads, tokens, d).
        mask: (batch or 1, tokens), True for real tokens.
        count: bins; of more bins than real tokens the last stay empty.

    Returns:
        (batch, heads, count, d), and (batch or 1, count), False for empty bins.
    """
    real = mask.sum(1, keepdim=True).clamp(min=1)
    first, last = _bounds(count, real, real.clamp(max=count), x.device, overlap)
    rank = mask.cumsum(1)[:, None] - 1
    inside = mask[:, None] & (rank >= first[..., None]) & (rank < last[..., None])
    weights = inside.to(x.dtype) / (last - first)[..., None]
    return weights[:, None] @ torch.where(mask[:, None, :, None], x, 0), inside.any(-1)


def pooling_matrix(
    single: int, grid: tuple[int, ...], count: int, device: torch.device
) -> Tensor | None:
    """What :func:`pool_grid` does to a grid, after ``single`` values that stay, as a matrix.

    (landmarks, windows), float32; None if there are few enough.

    Example:
        >>> pooling_matrix(0, (2, 4), 4, torch.device("cpu"))
        tensor([[0.5000, 0.5000, 0.0000, 0.0000, 0.0000, 0.0000, 0.0000, 0.0000],
                [0.0000, 0.0000, 0.5000, 0.5000, 0.0000, 0.0000, 0.0000, 0.0000],
                [0.0000, 0.0000, 0.0000, 0.0000, 0.5000, 0.5000, 0.0000, 0.0000],
                [0.0000, 0.0000, 0.0000, 0.0000, 0.0000, 0.0000, 0.5000, 0.5000]])
    """
    target = _target(grid, count)
    if _same(target, grid):
        return None
    with torch.inference_mode(False):  # what is kept here may serve in training later
        down, across = _side_matrices(grid, target, torch.empty(0, device=device))
        # Not by torch.kron and block_diag, which fix a compiled program to a size.
        pooled = (down[:, None, :, None] * across[:, None, :]).flatten(2).flatten(0, 1)
        stay = F.pad(torch.eye(single, device=device), (0, pooled.shape[1]))
        return torch.cat([stay, F.pad(pooled, (single, 0))])


def smaller(a: Any, b: Any) -> Any:
    """The smaller of two sizes, also where an exporter knows neither."""
    # The compiler takes min alone, and the exporter sym_min alone without fixing the program to a size. Sizes are
    # tensors to torch.jit.trace.
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    if torch.jit.is_tracing():
        return torch.minimum(torch.as_tensor(a), torch.as_tensor(b))
    return torch.sym_min(a, b)


def _side_matrices(grid: tuple[int, ...], target: tuple[int, ...], like: Tensor) -> list[Tensor]:
    return [
        averaging_matrix(side, bins, like, used=smaller(side, bins))
        for side, bins in zip(grid, target, strict=True)
    ]


def _target(grid: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Sides of the grid to which at most ``count`` landmarks are pooled."""
    sides = (1, count) if _is_row(grid) else _sides(len(grid), count)
    return tuple(map(min, grid, sides))


def _is_row(grid: tuple[int, ...]) -> bool:
    """Whether a grid is a sequence; its length may be unknown."""
    return len(grid) == 2 and isinstance(grid[0], int) and grid[0] == 1


def _sides(dimensions: int, count: int) -> tuple[int, ...]:
    """Sides of a grid of at most ``count``, as equal as they can be."""
    if dimensions == 1:
        return (count,)
    side = math.isqrt(count) if dimensions == 2 else int(count ** (1 / dimensions) + 1e-9)
    return (side, *_sides(dimensions - 1, count // side))


def _same(target: tuple[int, ...], grid: tuple[int, ...]) -> bool:
    return all(certain(bins == side) for bins, side in zip(target, grid, strict=True))


def _bounds(
    bins: int,
    length: int | Tensor,
    used: int | Tensor,
    device: torch.device,
    overlap: bool = True,
) -> tuple[Tensor, Tensor]:
    """Where the bins begin and end of which ``used`` share ``length`` values; (..., bins)."""
    index = torch.arange(bins, device=device)
    last = ((index + 1) * length + used - 1) // used
    return (index * length + (0 if overlap else used - 1)) // used, last
