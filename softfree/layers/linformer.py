r"""Linformer: keys and values are projected along the sequence to a fixed number of slots.

.. math:: X = \mathrm{softmax}(Q (E K)^T / \sqrt d)\, (E V), \qquad E: slots \times n \text{, learned}

Wang et al., Linformer: Self-Attention with Linear Complexity, 2020. In each layer one E is shared by all
heads and by keys and values (the paper's key-value sharing).
"""

import math

import torch
import torch.nn.functional as F
from timm.layers import trunc_normal_
from torch import Tensor, nn

from softfree.layers.embeddings import must_resize, resize
from softfree.layers.landmarks import Size
from softfree.layers.multihead import MultiHeadAttention, check_size

DEFAULT_GRID = (56, 56)
DEFAULT_LENGTH = 1024


class LinformerAttention(MultiHeadAttention):
    """Softmax attention to slots, which are learned mixtures of all tokens.

    E is learned for one sequence length or one image grid. For other inputs:

    - A shorter sequence uses the first columns of E, so padding does not change the result. For a longer one
      E repeats: token ``length + i`` is treated like token ``i``.
    - For an image of another size, E is resized bilinearly and scaled so that slots keep their magnitude.

    Prefix tokens (a class token) are separate keys and values. Masked tokens count as 0 in the mixtures.

    Args:
        dim, num_heads, qkv_bias: as in :class:`softfree.layers.multihead.MultiHeadAttention`.
        grid: (H, W) of the image, or length of the sequence, that E is learned for; None: (56, 56) or 1024.
        stride: one slot per ``stride`` x ``stride`` window of the grid (per ``stride`` tokens).
        slots: number of slots, instead of ``stride``.
        sequence: tokens are a sequence.

    Example:
        >>> import torch
        >>> layer = LinformerAttention(dim=64, num_heads=2, grid=(56, 56), stride=8)
        >>> layer(torch.randn(1, 40 * 60, 64), size=(40, 60)).shape
        torch.Size([1, 2400, 64])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        grid: int | tuple[int, int] | None = None,
        stride: int = 8,
        slots: int | None = None,
        sequence: bool = False,
        qkv_bias: bool = True,
    ):
        super().__init__(dim, num_heads, qkv_bias=qkv_bias)
        if grid is None:
            grid = DEFAULT_LENGTH if sequence else DEFAULT_GRID
        if isinstance(grid, int) != sequence:
            wanted = "a length with sequence=True" if sequence else "(H, W) for images"
            raise ValueError(f"grid must be {wanted}, got {grid!r}")
        if stride < 1:
            raise ValueError(f"stride must be >= 1, got {stride}")
        sides = (grid,) if isinstance(grid, int) else (grid[0], grid[1])
        if slots is None:
            slots = math.prod(-(-side // stride) for side in sides)
        if slots < 1 or min(sides) < 1:
            raise ValueError(f"grid and slots must be >= 1, got grid={grid!r}, slots={slots}")
        self.sequence = sequence
        self.projection = nn.Parameter(torch.empty(slots, *sides))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        # Mixtures of n tokens then have about the magnitude of one token.
        trunc_normal_(self.projection, std=self.projection[0].numel() ** -0.5)

    def extra_repr(self) -> str:
        slots, *grid = self.projection.shape
        return f"heads={self.num_heads}, slots={slots}, grid={tuple(grid)}"

    def matrix(self, tokens: int, size: Size) -> Tensor:
        """E for an input of ``tokens`` tokens without prefix: (slots, tokens)."""
        weight: Tensor = self.projection
        if size is None:
            repeats = (tokens - 1) // weight.shape[1] + 1
            return weight.repeat(1, repeats)[:, :tokens]
        grid = weight.shape[1:]
        if must_resize(grid, size):
            weight = resize(weight[None], size)[0] * (grid.numel() / tokens)
        return weight.flatten(1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, size: Size, mask: Tensor | None) -> Tensor:
        check_size(size, k.shape[2], self.sequence)
        prefix = 0 if size is None else k.shape[2] - size[0] * size[1]
        projection = self.matrix(k.shape[2] - prefix, size).to(k.dtype)
        keys, values = (self._slots(t, projection, prefix, mask) for t in (k, v))
        slot_mask = None
        if mask is not None and prefix:
            slot_mask = F.pad(mask[:, :prefix], (0, projection.shape[0]), value=True)
            slot_mask = slot_mask[:, None, None, :]
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=slot_mask)

    def _slots(
        self, tokens: Tensor, projection: Tensor, prefix: int, mask: Tensor | None
    ) -> Tensor:
        """(batch, heads, prefix + n, d) to (batch, heads, prefix + slots, d)."""
        if mask is not None:
            tokens = torch.where(mask[:, None, :, None], tokens, 0)
        # One product for all heads of a sample. Broadcasting with "@" would make a transposed copy of the
        # tokens.
        rows = tokens[:, :, prefix:].transpose(1, 2).flatten(2)
        mixed = torch.bmm(projection.expand(rows.shape[0], -1, -1), rows)
        mixed = mixed.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
        return torch.cat([tokens[:, :, :prefix], mixed], 2) if prefix else mixed
