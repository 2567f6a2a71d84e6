r"""Focused linear attention (FLatten): linear attention whose features concentrate on a few channels.

.. math:: X = \frac{\phi(Q)\, (\phi(K)^T V)}{\phi(Q)\, (\phi(K)^T 1)} + conv(V), \qquad
    \phi(x) = \frac{\|r\|}{\|r^p\|}\, r^p, \quad r = \mathrm{ReLU}(x)

The element-wise power turns features towards their largest channel and keeps their length, so that similar
tokens move closer together and others further apart. The rank of the attention matrix is at most d; the
convolution raises it.

Han et al., FLatten Transformer: Vision Transformer using Focused Linear Attention, ICCV 2023.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softfree.layers.landmarks import Size
from softfree.layers.multihead import DepthwiseConv, MultiHeadAttention, check_size
from softfree.layers.performer import linear_attention
from softfree.ops.shared.precision import compute_dtype

OFFSET = 1e-6


class FocusedLinearAttention(MultiHeadAttention):
    """Linear attention by focused features, computed in float32 (float64 for float64).

    As in the authors' code, features are first divided by a learned scale per channel, their lengths are
    taken over the channels of all heads together, and the convolution has one filter per channel of a head,
    shared by all heads. The positions that the authors' code adds to the keys are left out, because the
    models here have their own.

    Args:
        dim, num_heads, qkv_bias: as in :class:`softfree.layers.multihead.MultiHeadAttention`.
        focus: the power p.
        value_conv: side of the depthwise convolution of V (its length, for sequences); 0: none; None: 5.
            Prefix tokens (a class token) are excluded.
        sequence: tokens are a sequence.

    Example:
        >>> import torch
        >>> layer = FocusedLinearAttention(dim=64, num_heads=2)
        >>> layer(torch.randn(1, 14 * 14, 64), size=(14, 14)).shape
        torch.Size([1, 196, 64])
    """

    cross_attention = False

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        focus: float = 3.0,
        value_conv: int | None = None,
        sequence: bool = False,
        qkv_bias: bool = True,
    ):
        super().__init__(dim, num_heads, qkv_bias=qkv_bias)
        if not focus > 0:
            raise ValueError(f"focus must be > 0, got {focus}")
        self.focus = focus
        self.sequence = sequence
        self.scale = nn.Parameter(torch.empty(num_heads, 1, self.head_dim))
        side = 5 if value_conv is None else value_conv
        self.value_conv = DepthwiseConv.create(self.head_dim, side, sequence)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.scale)

    def extra_repr(self) -> str:
        return f"heads={self.num_heads}, focus={self.focus:g}"

    def features(self, x: Tensor) -> Tensor:
        """The features of queries or keys (batch, heads, tokens, d): the same shape, all positive."""
        dtype = compute_dtype(x.dtype)
        scaled = (x.to(dtype).relu() + OFFSET) / F.softplus(self.scale.to(dtype))
        return focused(scaled, self.focus)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, size: Size, mask: Tensor | None) -> Tensor:
        check_size(size, k.shape[2], self.sequence)
        with torch.autocast(q.device.type, enabled=False):
            phi_q, phi_k = self.features(q), self.features(k)
            if mask is not None:
                phi_k = torch.where(mask[:, None, :, None], phi_k, 0)
            out = linear_attention(phi_q, phi_k, v)
        return out if self.value_conv is None else out + self.value_conv(v, size, mask)


def focused(x: Tensor, power: float) -> Tensor:
    """``|x| / |x^p| x^p`` of positive features (batch, heads, tokens, d), lengths over heads and channels.

    Example:
        >>> import torch
        >>> x = torch.tensor([3.0, 4.0]).view(1, 1, 1, 2)
        >>> turned = focused(x, 3)
        >>> round(turned.norm().item(), 4), turned.flatten().tolist()[1] > 4
        (5.0, True)
    """
    # Powers of numbers up to 1 do not overflow, and the result is the same.
    power_of = (x / x.amax((1, 3), keepdim=True)) ** power
    return power_of * (_length(x) / _length(power_of))


def _length(x: Tensor) -> Tensor:
    return x.square().sum((1, 3), keepdim=True).sqrt()
