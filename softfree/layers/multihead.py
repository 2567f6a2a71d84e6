"""What the attentions share: input checks, and the base class of those with queries, keys and values."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softfree.layers.landmarks import AnySize, Size
from softfree.ops.shared.memo import computed_once


class MultiHeadAttention(nn.Module):
    """Projections to queries, keys and values, heads, masks. A subclass implements :meth:`attend`.

    Masked tokens are replaced by 0 before anything else, so their contents do not matter, not even NaN. A
    sample without real tokens attends to all of these zeros, which keeps it finite.

    Args:
        dim: channels; a multiple of ``num_heads``.
        num_heads: heads.
        qkv_bias: whether the three projections have biases.
    """

    cross_attention = True

    def __init__(self, dim: int, num_heads: int = 8, *, qkv_bias: bool = True):
        super().__init__()
        check_heads(dim, num_heads)
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, size: Size, mask: Tensor | None) -> Tensor:
        """q (batch, heads, n_q, d), k and v (batch, heads, n_k, d) to (batch, heads, n_q, d).

        ``size`` and ``mask`` (batch, n_k) describe the keys. Every sample has at least one key to attend to.
        """
        raise NotImplementedError

    def forward(
        self,
        x: Tensor,
        size: Size = None,
        mask: Tensor | None = None,
        context: Tensor | None = None,
    ) -> Tensor:
        if context is not None and not self.cross_attention:
            raise ValueError(f"context: {type(self).__name__} has no cross-attention")
        source = x if context is None else context
        check_tokens(x, source, mask, self.proj.in_features)
        if mask is not None:
            source = torch.where(mask[..., None], source, 0)
            mask = mask | ~mask.any(1, keepdim=True)
        q, k, v = self.qkv(source).chunk(3, -1)
        if context is not None:
            q = query_projection(self.qkv, x)
        heads = (self.num_heads, self.head_dim)
        q, k, v = (t.unflatten(-1, heads).transpose(1, 2) for t in (q, k, v))
        return self.proj(self.attend(q, k, v, size, mask).transpose(1, 2).flatten(2))


class DepthwiseConv(nn.Module):
    """Depthwise convolution of values with a filter and a bias for each of ``channels``.

    ``channels`` is the number of channels of one head, in which case the heads share filters, or of all heads
    together. The result is 0 at prefix tokens (a class token). Masked tokens count as 0.
    """

    def __init__(self, channels: int, kernel_size: int, sequence: bool):
        super().__init__()
        side = (kernel_size,) if sequence else (kernel_size, kernel_size)
        self.weight = nn.Parameter(torch.empty(channels, 1, *side))
        self.bias = nn.Parameter(torch.empty(channels))
        self.reset_parameters()

    @classmethod
    def create(cls, channels: int, kernel_size: int, sequence: bool) -> "DepthwiseConv | None":
        """The convolution of an attention's values; None for 0."""
        if kernel_size < 0 or (kernel_size and kernel_size % 2 == 0):
            raise ValueError(f"value_conv must be 0 or an odd number, got {kernel_size}")
        return cls(channels, kernel_size, sequence) if kernel_size else None

    def reset_parameters(self) -> None:
        # The default initialisation of torch's convolutions.
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)
        bound = self.weight[0].numel() ** -0.5
        nn.init.uniform_(self.bias, -bound, bound)

    def extra_repr(self) -> str:
        return f"channels={len(self.weight)}, kernel_size={self.weight.shape[-1]}"

    def forward(self, v: Tensor, size: Size, mask: Tensor | None = None) -> Tensor:
        """(batch, heads, tokens, d) to the same shape."""
        if mask is not None:
            v = torch.where(mask[:, None, :, None], v, 0)
        grid = (v.shape[2],) if size is None else tuple(size)
        prefix = 0 if size is None else v.shape[2] - size[0] * size[1]
        channels = len(self.weight)
        image = v[:, :, prefix:].mT.reshape(-1, channels, *grid)
        conv = F.conv1d if size is None else F.conv2d
        padding = self.weight.shape[-1] // 2
        out = conv(image, self.weight, self.bias, padding=padding, groups=channels)
        out = out.reshape(*v.shape[:2], v.shape[3], -1).mT
        return F.pad(out, (0, 0, prefix, 0)) if prefix else out


def query_projection(projection: nn.Linear, x: Tensor) -> Tensor:
    """Only the queries from a projection to queries and more, by its first ``in_features`` rows."""
    dim = projection.in_features
    bias = None if projection.bias is None else projection.bias[:dim]
    return F.linear(x, projection.weight[:dim], bias)


def check_heads(dim: int, num_heads: int) -> None:
    """Raise if ``dim`` channels can't be divided among ``num_heads``."""
    if dim < 1 or num_heads < 1 or dim % num_heads:
        raise ValueError(
            f"dim must be a multiple of num_heads, got dim={dim}, num_heads={num_heads}"
        )


def check_tokens(
    x: Tensor, source: Tensor, mask: Tensor | None, dim: int, context_dim: int | None = None
) -> None:
    """Raise if ``x``, the tokens attended to (``x`` itself or a context) or their mask is invalid."""
    for name, tokens, channels in (("x", x, dim), ("context", source, context_dim or dim)):
        if not isinstance(tokens, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tokens).__name__}")
        _check_shape(name, tokens.shape, channels)
    if source.shape[0] != x.shape[0]:
        raise ValueError(f"context must have x's batch {x.shape[0]}, got {source.shape[0]}")
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        given = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"mask must be a bool tensor, True for real tokens, got {given}")
    if mask.shape != source.shape[:2]:
        raise ValueError(
            f"mask must have shape {tuple(source.shape[:2])}, one value per token, "
            f"got {tuple(mask.shape)}"
        )


@computed_once
def check_image(
    shape: torch.Size, size: AnySize, channels: int, sequence: bool, volume: bool
) -> None:
    """:func:`check_tokens` and :func:`check_size`, from shapes: for self-attention without a mask."""
    _check_shape("x", shape, channels)
    check_size(size, shape[1], sequence, volume)


def _check_shape(name: str, shape: torch.Size, channels: int) -> None:
    if len(shape) != 3 or shape[2] != channels or shape[1] == 0:
        raise ValueError(
            f"{name} must have shape (batch, tokens, {channels}) with at least one token, "
            f"got {tuple(shape)}"
        )


def refuse_keys_and_values(size: Any) -> None:
    """Raise if a layer is called as layer(q, k, v), as other attention layers are."""
    if isinstance(size, Tensor):
        raise TypeError(
            "size must be a tuple or None, got a tensor. The layer projects queries, keys and values itself: "
            "layer(x) attends to x, layer(x, context=tokens) to other tokens; "
            "softfree.MultiheadSoftAttention is called with (query, key, value)"
        )


def check_size(size: AnySize, tokens: int, sequence: bool, volume: bool = False) -> None:
    """Raise unless ``size`` fits an image or a volume of at most ``tokens``, or is None for sequences."""
    form, things = ("(T, H, W)", "volumes") if volume else ("(H, W)", "images")
    if sequence:
        if size is not None:
            raise ValueError(f"size must be None with sequence=True, got {size!r}")
        return
    if size is None:
        raise ValueError(
            f"size must be {form} for {things}; build the layer with sequence=True for none"
        )
    if len(size) != (3 if volume else 2):
        hint = "" if len(size) != 3 else "; build the layer with volume=True for (T, H, W)"
        raise ValueError(f"size must be {form}, got {size!r}{hint}")
    # Sizes that an exporter does not know are not compared, because that would specialize the program to
    # them.
    if all(isinstance(n, int) for n in (*size, tokens)) and not (
        min(size) > 0 and math.prod(size) <= tokens
    ):
        raise ValueError(
            f"size must be {form} of at most the {tokens} tokens given, got {tuple(size)}"
        )
