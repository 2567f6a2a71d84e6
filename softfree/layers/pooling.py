"""Adaptive average pooling of grids, and of the real tokens of sequences, as matrix products.

Bin i of n values goes from floor(i n / bins) to ceil((i + 1) n / bins), as in ``F.adaptive_avg_pool1d``. As a
matrix product it also works with masks, and with sizes that an exporter does not know.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from softfree.ops.shared.shapes import certain

Sampled = tuple[Tensor, Tensor | None]


def averaging_matrix(length: int, bins: int, like: Tensor, used: int | None = None) -> Tensor:
    """The matrix (bins, length) that pools ``length`` values to ``bins``.

    If there are more bins than values, several bins take the same value. With ``used``, the values go into
    that many bins, and the others stay empty.
    """
    first, last = _bounds(bins, length, bins if used is None else used, like.device)
    position = torch.arange(length, device=like.device)
    inside = (position >= first[:, None]) & (position < last[:, None])
    return inside.to(like.dtype) / (last - first)[:, None]


def pool_grid(x: Tensor, mask: Tensor | None, grid: tuple[int, ...], count: int) -> Sampled:
    """Pool (batch, heads, rows * columns, d) to at most ``count``, without tokens masked in (batch, tokens).

    ``grid`` is (rows, columns), or (times, rows, columns).
    """
    known = all(isinstance(side, int) for side in grid)
    target: Any = _sides(len(grid), count)
    if torch.jit.is_tracing() and len(grid) == 2:
        # The traced program has to find out itself whether there is only one row, as _target does.
        single: Any = torch.as_tensor(grid[0] == 1).long()
        side, across = target
        target = (side + single * (1 - side), across + single * (count - across))
    if known:
        target = _target(grid, count)
        if _same(target, grid):
            return x, mask
    elif mask is None:
        # How many bins stay empty at a size is only known when the exported program runs.
        mask = torch.ones_like(x[:, 0, :, 0], dtype=torch.bool)
    if _is_row(grid) and mask is not None:
        return pool_segments(x, mask, count)
    return _pool(x, mask, grid, _side_matrices(grid, target, x))


def adaptive_pool(
    x: Tensor, mask: Tensor | None, grid: tuple[int, ...], target: tuple[int, ...]
) -> Sampled:
    """As :func:`pool_grid`, but always to ``target`` bins: in a small grid several take the same tokens."""
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


# Keyed by the number of dimensions: einsum letters of all matrices except the last, of the pooled grid, of
# the grid.
_POOLING = {2: ("ah", "ac", "hw"), 3: ("et,ah", "eac", "thw")}


def pool_segments(
    x: Tensor, mask: Tensor, count: int, *, overlap: bool = True
) -> tuple[Tensor, Tensor]:
    """Pool each sequence's real tokens to ``count`` bins, so that padding changes nothing.

    Without ``overlap``, bins start at ceil(i n / count), so that each token is in exactly one.

    Args:
        x: (batch, heads, tokens, d).
        mask: (batch or 1, tokens), True for real tokens.
        count: number of bins; if there are fewer real tokens, the last bins stay empty.

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
    """The matrix that pools a grid as :func:`pool_grid` does, after ``single`` values that are not pooled.

    It is (landmarks, windows), float32; None if there is nothing to pool.

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
    with torch.inference_mode(False):  # the cached matrix may be used in training later
        down, across = _side_matrices(grid, target, torch.empty(0, device=device))
        # Not torch.kron and block_diag, which specialize a compiled program to a size.
        pooled = (down[:, None, :, None] * across[:, None, :]).flatten(2).flatten(0, 1)
        stay = F.pad(torch.eye(single, device=device), (0, pooled.shape[1]))
        return torch.cat([stay, F.pad(pooled, (single, 0))])


def smaller(a: Any, b: Any) -> Any:
    """The smaller of two sizes, even if an exporter knows neither."""
    # The compiler only accepts min. The exporter needs sym_min, because min would specialize the program to a
    # size. Under torch.jit.trace sizes are tensors.
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
    """The sides of the pooled grid, with at most ``count`` landmarks."""
    sides = (1, count) if _is_row(grid) else _sides(len(grid), count)
    return tuple(map(min, grid, sides))


def _is_row(grid: tuple[int, ...]) -> bool:
    """Whether a grid is a sequence; its length may be unknown."""
    return len(grid) == 2 and isinstance(grid[0], int) and grid[0] == 1


def _sides(dimensions: int, count: int) -> tuple[int, ...]:
    """The sides of a grid with at most ``count`` cells, as equal as possible."""
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
    """The starts and ends of bins, (..., bins), of which the first ``used`` share ``length`` values."""
    index = torch.arange(bins, device=device)
    last = ((index + 1) * length + used - 1) // used
    return (index * length + (0 if overlap else used - 1)) // used, last
