"""Sizes of blocks and the layout of tokens, which need no Triton; questions about sizes."""

import torch
from torch import Tensor


# Triton's own functions for these also work inside kernels, and take 5 microseconds a call outside.
def tiles_of(length: int, tile: int) -> int:
    """How many tiles cover a length."""
    return -(-length // tile)


def power_of_two(length: int) -> int:
    """The least power of two that is not below a length."""
    return 1 << max(0, length - 1).bit_length()


def block(length: int) -> int:
    """A length padded to a block that the matrix units take."""
    return max(16, power_of_two(length))


def certain(condition: bool | Tensor) -> bool:
    """Whether a comparison of sizes holds at every size that a traced program may meet; in eager mode: at these.

    To ask a symbolic size itself would fix the program to the answer.
    """
    if isinstance(condition, Tensor):  # of sizes under torch.jit.trace
        return False
    if isinstance(condition, bool) and not torch.compiler.is_compiling():
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def token_tensor(like: Tensor, channels: int) -> Tensor:
    """An empty (batch, heads, n, channels) whose heads lie next to each other in memory.

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
