r"""Agent attention: a few agents, pooled from the queries, collect the values and distribute them.

.. math:: X = \sigma(Q A^T + B_q)\; \sigma(A K^T + B_k) V + conv(V), \qquad A = pool(Q)

with :math:`\sigma` the softmax of the scores divided by :math:`\sqrt d`, and learned position biases.

Han et al., Agent Attention: On the Integration of Softmax and Linear Attention, ECCV 2024.
"""

import math

import torch
import torch.nn.functional as F
from timm.layers import trunc_normal_
from torch import Tensor, nn

from softfree.layers.embeddings import must_resize, resize
from softfree.layers.landmarks import Landmarks, LandmarkSpec, Size
from softfree.layers.linformer import DEFAULT_GRID
from softfree.layers.multihead import DepthwiseConv, MultiHeadAttention, check_size
from softfree.layers.nystromformer import SegmentMeans
from softfree.layers.pooling import Sampled, adaptive_pool

DEFAULT_AGENTS = 49
COARSE = (7, 7)  # the grid of the coarse biases


class AgentAttention(MultiHeadAttention):
    """Softmax attention through agents, linear in the tokens.

    Both products use torch's fused attention, so no n x m matrix is kept.

    Args:
        dim, num_heads, qkv_bias: as in :class:`softfree.layers.multihead.MultiHeadAttention`.
        landmarks: number of agents; None: 49. The forms of :class:`softfree.SoftAttention` are also accepted,
            but the sampler is ignored: agents are always means. For an image they form a square or nearly
            square grid.
        agent_bias: position biases, for images: for each agent over a 7 x 7 grid, over rows and over columns.
            All are resized to other image sizes. Prefix tokens (a class token) have none.
        grid: (H, W) of the image that the biases of rows and columns are learned for; None: (56, 56).
        value_conv: side of the depthwise convolution of V (its length, for sequences), one filter per
            channel; 0: none; None: 3. Prefix tokens are excluded.
        sequence: tokens are a sequence. The agents are means of equal stretches of the real tokens, without
            biases.

    Example:
        >>> import torch
        >>> layer = AgentAttention(dim=64, num_heads=2, landmarks=16)
        >>> layer(torch.randn(1, 14 * 14, 64), size=(14, 14)).shape
        torch.Size([1, 196, 64])
    """

    cross_attention = False

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        landmarks: Landmarks | None = None,
        agent_bias: bool = True,
        grid: int | tuple[int, int] | None = None,
        value_conv: int | None = None,
        sequence: bool = False,
        qkv_bias: bool = True,
    ):
        super().__init__(dim, num_heads, qkv_bias=qkv_bias)
        count = None if landmarks is None else LandmarkSpec.parse(landmarks).count
        count = count or DEFAULT_AGENTS
        self.sequence = sequence
        self.segments = SegmentMeans(count) if sequence else None
        self.agents = (math.isqrt(count), count // math.isqrt(count))
        self.value_conv = DepthwiseConv.create(
            dim, 3 if value_conv is None else value_conv, sequence
        )
        self.biased = agent_bias and not sequence
        if self.biased:
            rows, columns = DEFAULT_GRID if grid is None else grid  # type: ignore[misc]
            agents = (2, num_heads, math.prod(self.agents))  # 2: for queries and for keys
            self.coarse_bias = nn.Parameter(torch.empty(*agents, *COARSE))
            self.row_bias = nn.Parameter(torch.empty(*agents, rows, 1))
            self.column_bias = nn.Parameter(torch.empty(*agents, 1, columns))
            self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.biased:
            for bias in (self.coarse_bias, self.row_bias, self.column_bias):
                trunc_normal_(bias, std=0.02)

    def extra_repr(self) -> str:
        count = self.segments.count if self.segments is not None else math.prod(self.agents)
        return f"heads={self.num_heads}, agents={count}"

    def biases(self, tokens: int, size: Size) -> Tensor | None:
        """The biases for queries and for keys, (2, heads, agents, tokens); 0 for prefix tokens."""
        if not self.biased:
            return None
        assert size is not None
        rows, columns = self.row_bias.shape[-2], self.column_bias.shape[-1]
        bias = resize(self.coarse_bias.flatten(0, 1), size)
        lines = self.row_bias.flatten(0, 1), self.column_bias.flatten(0, 1)
        for line, learned, wanted in zip(
            lines, ((rows, 1), (1, columns)), ((size[0], 1), (1, size[1])), strict=True
        ):
            bias = bias + (resize(line, wanted) if must_resize(learned, wanted) else line)
        bias = bias.flatten(2).unflatten(0, (2, self.num_heads))
        return F.pad(bias, (tokens - size[0] * size[1], 0))

    def pool(self, q: Tensor, size: Size, mask: Tensor | None) -> Sampled:
        """The agents (batch, heads, m, d), and which of them have real tokens, (batch, m)."""
        if self.segments is not None:
            return self.segments(q, None, mask)
        assert size is not None
        prefix = q.shape[2] - size[0] * size[1]
        real = None if mask is None else mask[:, prefix:]
        agents, present = adaptive_pool(q[:, :, prefix:], real, size, self.agents)
        # A sample whose only real tokens are prefix tokens still has agents.
        return agents, None if present is None else present | ~present.any(1, keepdim=True)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, size: Size, mask: Tensor | None) -> Tensor:
        check_size(size, k.shape[2], self.sequence)
        agents, present = self.pool(q, size, mask)
        agents = agents.to(v.dtype)
        bias = self.biases(k.shape[2], size)
        to_queries, to_keys = (None, None) if bias is None else bias.to(v.dtype)
        collected = F.scaled_dot_product_attention(agents, k, v, attn_mask=_masked(to_keys, mask))
        if to_queries is not None:
            to_queries = to_queries.mT
        out = F.scaled_dot_product_attention(
            q, agents, collected, attn_mask=_masked(to_queries, present)
        )
        return out if self.value_conv is None else out + self.value_conv(v, size, mask)


def _masked(bias: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """Combine a bias (heads, queries, keys) and a mask (batch, keys) into one mask for torch's attention."""
    if mask is None:
        return bias
    mask = mask[:, None, None, :]
    return mask if bias is None else torch.where(mask, bias, -torch.inf)
