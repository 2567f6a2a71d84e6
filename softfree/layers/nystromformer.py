r"""Nyströmformer: softmax attention approximated with landmarks.

.. math:: X = \sigma(Q \tilde K^T)\; \sigma(\tilde Q \tilde K^T)^+\; \sigma(\tilde Q K^T) V + conv(V)

with :math:`\sigma` the softmax of the scores divided by :math:`\sqrt d`, landmarks :math:`\tilde Q, \tilde K`
that are means of neighbouring queries and keys, and six steps of a fourth-order iteration for the inverse.

Xiong et al., Nyströmformer: A Nyström-based Algorithm for Approximating Self-Attention, AAAI 2021.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softfree.layers.attention import create_value_conv
from softfree.layers.landmarks import AverageLandmarks, Landmarks, LandmarkSpec, Size
from softfree.layers.multihead import MultiHeadAttention, check_size
from softfree.layers.pooling import Sampled, pool_segments
from softfree.ops.shared.precision import compute_dtype

DEFAULT_SEGMENTS = 64


class NystromformerAttention(MultiHeadAttention):
    """Softmax attention through landmarks, linear in the tokens.

    The products with softmaxes use torch's fused attention, so no n x m matrix is kept. The m x m inverse
    is computed in float32 (float64 for float64).

    Args:
        dim, num_heads, qkv_bias: as in :class:`softfree.layers.multihead.MultiHeadAttention`.
        landmarks: largest number of landmarks. The forms of :class:`softfree.SoftAttention` are also
            accepted, but the sampler is ignored: landmarks are always means. Without a number, images have
            one landmark per window and sequences 64.
        stride: side of a landmark's window, for images.
        inverse_steps: steps of the iteration.
        value_conv: side of the depthwise convolution of V (its length, for sequences), one filter per head;
            0: none; None: 33 for sequences, 9 for images.
        sequence: tokens are a sequence. The landmarks are means of equal stretches of the real tokens.

    Example:
        >>> import torch
        >>> layer = NystromformerAttention(dim=64, num_heads=2, landmarks=32, sequence=True)
        >>> layer(torch.randn(2, 100, 64), mask=torch.rand(2, 100) > 0.1).shape
        torch.Size([2, 100, 64])
    """

    cross_attention = False

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        landmarks: Landmarks | None = None,
        stride: int = 8,
        inverse_steps: int = 6,
        value_conv: int | None = None,
        sequence: bool = False,
        qkv_bias: bool = True,
    ):
        super().__init__(dim, num_heads, qkv_bias=qkv_bias)
        count = None if landmarks is None else LandmarkSpec.parse(landmarks).count
        if value_conv is None:
            value_conv = 33 if sequence else 9
        if stride < 1:
            raise ValueError(f"stride must be >= 1, got {stride}")
        if inverse_steps < 0:
            raise ValueError(f"inverse_steps must be >= 0, got {inverse_steps}")
        self.sequence = sequence
        self.inverse_steps = inverse_steps
        self.sampler: nn.Module
        if sequence:
            self.sampler = SegmentMeans(count or DEFAULT_SEGMENTS)
        else:
            self.sampler = AverageLandmarks(stride, count)
        self.value_conv = create_value_conv(num_heads, value_conv, sequence)

    def extra_repr(self) -> str:
        return f"heads={self.num_heads}, inverse_steps={self.inverse_steps}"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, size: Size, mask: Tensor | None) -> Tensor:
        check_size(size, k.shape[2], self.sequence)
        landmark_queries, landmark_mask = self.sampler(q, size, mask)
        landmark_keys, _ = self.sampler(k, size, mask)
        landmark_queries, landmark_keys = landmark_queries.to(v.dtype), landmark_keys.to(v.dtype)
        summaries = F.scaled_dot_product_attention(
            landmark_queries, k, v, attn_mask=None if mask is None else mask[:, None, None, :]
        )
        with torch.autocast(q.device.type, enabled=False):
            dtype = compute_dtype(v.dtype)
            kernel = _landmark_kernel(
                landmark_queries.to(dtype), landmark_keys.to(dtype), landmark_mask
            )
            inverse = iterative_inverse(kernel, self.inverse_steps)
            summaries = (inverse @ summaries.to(dtype)).to(v.dtype)
        out = F.scaled_dot_product_attention(
            q,
            landmark_keys,
            summaries,
            attn_mask=None if landmark_mask is None else landmark_mask[:, None, None, :],
        )
        if self.value_conv is not None:
            values = v.transpose(1, 2).flatten(2)
            convolved = self.value_conv(values, size, mask)
            out = out + convolved.unflatten(2, (self.num_heads, -1)).transpose(1, 2)
        return out


class SegmentMeans(nn.Module):
    """Means of ``count`` stretches of a sequence, of lengths as equal as possible.

    The stretches divide up only the real tokens of a sample. If these are fewer than ``count``, each is a
    landmark. Called like the samplers of :mod:`softfree.layers.landmarks`.
    """

    def __init__(self, count: int):
        super().__init__()
        self.count = count

    def extra_repr(self) -> str:
        return f"count={self.count}"

    def forward(self, q: Tensor, size: Size = None, mask: Tensor | None = None) -> Sampled:
        tokens = q.shape[2]
        count = min(self.count, tokens)
        if mask is None and tokens % count == 0:
            return q.unflatten(2, (count, tokens // count)).mean(3), None
        real = q.new_ones(1, tokens, dtype=torch.bool) if mask is None else mask
        means, present = pool_segments(q, real, count, overlap=False)
        return means, None if mask is None else present


def _landmark_kernel(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax of the landmarks' scores, (batch, heads, m, m); a masked landmark is similar only to itself."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if mask is None:
        return scores.softmax(-1)
    columns = mask[:, None, None, :]
    kernel = scores.masked_fill(~columns, torch.finfo(scores.dtype).min).softmax(-1)
    identity = torch.eye(kernel.shape[-1], dtype=kernel.dtype, device=kernel.device)
    return torch.where(columns & columns.mT, kernel, identity)


def iterative_inverse(a: Tensor, steps: int = 6) -> Tensor:
    r"""Approximate pseudoinverse of (..., m, m) matrices by the iteration of Razavi et al.

    :math:`Z_{i+1} = \tfrac14 Z_i (13 I - A Z_i (15 I - A Z_i (7 I - A Z_i)))`, which starts at
    :math:`Z_0 = A^T / (\|A\|_1 \|A\|_\infty)`. Both norms are computed per matrix, so that no sample depends
    on the others in its batch.

    Example:
        >>> import torch
        >>> a = torch.tensor([[0.9, 0.1], [0.2, 0.8]])
        >>> torch.allclose(iterative_inverse(a) @ a, torch.eye(2), atol=1e-4)
        True
    """
    size = a.abs()
    norms = size.sum(-2).amax(-1) * size.sum(-1).amax(-1)
    z = a.mT / norms[..., None, None]
    identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    for _ in range(steps):
        az = a @ z
        z = 0.25 * z @ (13 * identity - az @ (15 * identity - az @ (7 * identity - az)))
    return z
