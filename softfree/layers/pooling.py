"""Adaptive average pooling, of grids and of the real tokens of sequences, as products with matrices.

Bin i of n values goes from floor(i n / bins) to ceil((i + 1) n / bins), as in ``F.adaptive_avg_pool1d``; as a
product it works with masks, and at sizes that an exporter does not know.
"""

import functools
import math
from typing import Any

import torch
from torch import Tensor

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


def pool_grid(x: Tensor, mask: Tensor | None, grid: tuple[int, int], count: int) -> Sampled:
    """(batch, heads, rows * columns, d) pooled to at most ``count``, masked ones (batch, tokens) left out."""
    rows, columns = grid
    known = isinstance(rows, int) and isinstance(columns, int)
    side = math.isqrt(count)
    target = (side, count // side)
    if torch.jit.is_tracing():
        # Whether there is one row, as _target asks, is for the program to find out.
        single: Any = torch.as_tensor(rows == 1).long()
        target = (side + single * (1 - side), target[1] + single * (count - target[1]))
    if known:
        target = _target(grid, count)
        if target == grid:
            return x, mask
        if rows == 1 and mask is not None:
            return pool_segments(x, mask, count)
    elif mask is None:
        # How many bins a size leaves empty is not known before an exported program runs.
        mask = torch.ones_like(x[:, 0, :, 0], dtype=torch.bool)
    down, across = _side_matrices(grid, target, x)
    x = x.unflatten(2, grid)
    if mask is None:
        return torch.einsum("ah,bnhwd,cw->bnacd", down, x, across).flatten(2, 3), None
    mask = mask.unflatten(1, grid)
    x = torch.where(mask[:, None, ..., None], x, 0)
    pooled = torch.einsum("ah,bnhwd,cw->bnacd", down, x, across)
    present = torch.einsum("ah,bhw,cw->bac", down, mask.to(x.dtype), across)
    pooled = pooled / torch.where(present > 0, present, 1)[:, None, ..., None]
    return pooled.flatten(2, 3), (present > 0).flatten(1)


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


@functools.lru_cache(maxsize=64)
def pooling_matrix(
    single: int, grid: tuple[int, int], count: int, device: torch.device
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
    if target == grid:
        return None
    with torch.inference_mode(False):  # what is kept here may serve in training later
        down, across = _side_matrices(grid, target, torch.empty(0, device=device))
        return torch.block_diag(torch.eye(single, device=device), torch.kron(down, across))


def smaller(a: Any, b: Any) -> Any:
    """The smaller of two sizes, also where an exporter knows neither."""
    # The compiler takes min alone, and the exporter sym_min alone without fixing the program to a size. Sizes are
    # tensors to torch.jit.trace.
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    if torch.jit.is_tracing():
        return torch.minimum(torch.as_tensor(a), torch.as_tensor(b))
    return torch.sym_min(a, b)


def _side_matrices(grid: tuple[int, int], target: tuple[int, int], like: Tensor) -> list[Tensor]:
    return [
        averaging_matrix(side, bins, like, used=smaller(side, bins))
        for side, bins in zip(grid, target, strict=True)
    ]


def _target(grid: tuple[int, int], count: int) -> tuple[int, int]:
    """Sides of the grid to which at most ``count`` landmarks are pooled."""
    rows, columns = grid
    down, across = (1, count) if rows == 1 else (math.isqrt(count), count // math.isqrt(count))
    return min(rows, down), min(columns, across)


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
