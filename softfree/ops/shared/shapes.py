"""Block sizes, the memory layout of tokens, and checks of sizes. None of this needs Triton."""

import torch
from torch import Tensor


# Triton has such functions too. They also work inside kernels, but outside they take 5 microseconds per call.
def tiles_of(length: int, tile: int) -> int:
    """The number of tiles that cover a length."""
    return -(-length // tile)


def power_of_two(length: int) -> int:
    """The smallest power of two that is at least ``length``."""
    return 1 << max(0, length - 1).bit_length()


def block(length: int) -> int:
    """A length padded to a block size that the matrix units accept."""
    return max(16, power_of_two(length))


def certain(condition: bool | Tensor) -> bool:
    """Whether a comparison of sizes holds for every size that a traced program may see; in eager mode, now.

    Evaluating a comparison of symbolic sizes directly would specialize the program to the answer.
    """
    if isinstance(condition, Tensor):  # torch.jit.trace makes sizes tensors
        return False
    if isinstance(condition, bool) and not torch.compiler.is_compiling():
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def token_tensor(like: Tensor, channels: int) -> Tensor:
    """An empty (batch, heads, n, channels) tensor whose heads are adjacent in memory.

    Merging the heads of such a tensor, ``transpose(1, 2).flatten(2)``, is a view.
    """
    batch, heads, tokens, _ = like.shape
    return like.new_empty_strided(*token_layout(batch, heads, tokens, channels))


def token_layout(
    batch: int, heads: int, tokens: int, channels: int
) -> tuple[tuple[int, int, int, int], tuple[int, int, int, int]]:
    """Size and strides of :func:`token_tensor`."""
    row = heads * channels
    return (batch, heads, tokens, channels), (tokens * row, channels, row, 1)
