r"""Reformer: softmax attention among tokens that a random hash puts into the same bucket.

Queries, scaled to unit length, are also the keys. A token attends only to those in its bucket :math:`h(q_i)`:

.. math:: x_i = \sum_{j: h(q_j) = h(q_i)} \mathrm{softmax}_j\!\left(\frac{q_i \cdot k_j}{\sqrt d}\right) v_j,
          \qquad k_j = \frac{q_j}{\|q_j\|}, \qquad h(x) = \arg\max\,[x R;\, -x R]

Kitaev et al., Reformer: The Efficient Transformer, ICLR 2020.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softfree.layers.landmarks import Size
from softfree.layers.multihead import check_heads, check_size, check_tokens
from softfree.ops.shared.precision import compute_dtype

# A token's score with itself. It only matters if there is no other token.
OWN_SCORE = -5e4


class ReformerAttention(nn.Module):
    """Attention by locality-sensitive hashing, for sequences.

    Tokens are sorted by bucket and cut into chunks. A token attends to those of its bucket in its own chunk
    and in the one before. It attends to itself only if it finds no other, because a query is always most
    similar to itself. Rounds with different hashes are averaged, weighted by the sum of their exponentials; a
    key that occurs in several rounds counts in each.

    With one bucket and a chunk as long as the sequence, this is softmax attention with unit-length queries
    as keys, in which no token attends to itself.

    New hashes are drawn at every training step; in evaluation they are fixed and saved with the state.

    Args:
        dim, num_heads: channels, a multiple of the heads.
        rounds: hashes per token.
        buckets: 1 or an even number. Fixed, so that padding does not change a token's bucket.
        chunk: tokens per chunk.
        sequence: must be True; images are not supported.
        qv_bias: whether the projections to queries and values have biases.

    Example:
        >>> import torch
        >>> layer = ReformerAttention(dim=64, num_heads=2, rounds=2, buckets=8, chunk=16)
        >>> layer(torch.randn(2, 100, 64), mask=torch.rand(2, 100) > 0.1).shape
        torch.Size([2, 100, 64])
    """

    rotations: Tensor

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        rounds: int = 2,
        buckets: int = 32,
        chunk: int = 64,
        sequence: bool = True,
        qv_bias: bool = True,
    ):
        super().__init__()
        check_heads(dim, num_heads)
        if not sequence:
            raise ValueError(
                "attention 'reformer' is for sequences (sequence=True); images can have 'soft', "
                "'softfree', 'softpp', 'softmax', 'linformer', 'performer', 'nystromformer', 'agent' or 'flatten'"
            )
        if buckets < 1 or (buckets > 1 and buckets % 2):
            raise ValueError(f"buckets must be 1 or an even number, got {buckets}")
        if rounds < 1 or chunk < 1:
            raise ValueError(f"rounds and chunk must be >= 1, got rounds={rounds}, chunk={chunk}")
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.rounds = rounds
        self.buckets = buckets
        self.chunk = chunk
        self.qv = nn.Linear(dim, 2 * dim, bias=qv_bias)
        self.proj = nn.Linear(dim, dim)
        self.register_buffer(
            "rotations", torch.randn(num_heads, rounds, self.head_dim, buckets // 2)
        )

    def extra_repr(self) -> str:
        return (
            f"heads={self.num_heads}, rounds={self.rounds}, buckets={self.buckets}, "
            f"chunk={self.chunk}"
        )

    def forward(self, x: Tensor, size: Size = None, mask: Tensor | None = None) -> Tensor:
        check_tokens(x, x, mask, self.proj.in_features)
        check_size(size, x.shape[1], sequence=True)
        if mask is not None:
            x = torch.where(mask[..., None], x, 0)
        q, v = self.qv(x).unflatten(-1, (2, self.num_heads, self.head_dim)).unbind(2)
        q, v = q.transpose(1, 2), v.transpose(1, 2)
        with torch.autocast(x.device.type, enabled=False):
            out = self._attend(q, v, self._hash(q, mask))
        return self.proj(out.transpose(1, 2).flatten(2))

    def _hash(self, q: Tensor, mask: Tensor | None) -> Tensor:
        """The bucket of each token in each round: (batch, heads, rounds, tokens).

        Masked tokens share an extra one.
        """
        if self.buckets == 1:
            bucket = q.new_zeros((*q.shape[:2], self.rounds, q.shape[2]), dtype=torch.long)
        else:
            dtype = compute_dtype(q.dtype)
            rotations = torch.randn_like(self.rotations) if self.training else self.rotations
            rotated = q.detach().to(dtype)[:, :, None] @ rotations.to(dtype)
            bucket = torch.cat([rotated, -rotated], -1).argmax(-1)
        if mask is not None:
            bucket = torch.where(mask[:, None, None, :], bucket, self.buckets)
        return bucket

    def _attend(self, q: Tensor, v: Tensor, bucket: Tensor) -> Tensor:
        """q, v (batch, heads, tokens, d) and buckets (batch, heads, rounds, tokens) to the shape of q."""
        tokens, dtype = q.shape[2], compute_dtype(q.dtype)
        chunk = min(self.chunk, tokens)
        # Sorted by bucket, then by position. Masked tokens have the last bucket, so they come last, followed
        # by the padding to whole chunks.
        order = bucket.argsort(stable=True, dim=-1)
        filling = -tokens % chunk
        in_order = F.pad(bucket.gather(-1, order), (0, filling), value=self.buckets + 1)

        def chunks(t: Tensor) -> Tensor:
            """(batch, heads, tokens, d) sorted in each round: (batch, heads, rounds, chunks, chunk, d)."""
            t = t[:, :, None].expand(-1, -1, self.rounds, -1, -1)
            t = t.take_along_dim(order[..., None], 3)
            return F.pad(t, (0, 0, 0, filling)).unflatten(3, (-1, chunk))

        queries, values = chunks(q), chunks(v)
        keys = F.normalize(queries.to(dtype), dim=-1).to(q.dtype)
        rows = in_order.unflatten(3, (-1, chunk))
        columns = _with_previous(rows, 4, fill=-1)
        scores = (queries @ _with_previous(keys, 4).mT).to(dtype) * self.head_dim**-0.5
        scores = scores.masked_fill(rows[..., None] != columns[..., None, :], -torch.inf)
        own = torch.eye(chunk, dtype=torch.bool, device=q.device)
        scores = scores.masked_fill(F.pad(own, (chunk, 0)), OWN_SCORE)
        total = scores.logsumexp(-1, keepdim=True)
        weights = (scores - total).exp().to(v.dtype)
        out = weights @ _with_previous(values, 4)

        back = order.argsort(-1)[..., None]
        out = out.flatten(3, 4).take_along_dim(back, 3)
        share = total.flatten(3, 4).take_along_dim(back, 3).softmax(2)
        return (out * share).sum(2).to(q.dtype)


def _with_previous(chunks: Tensor, dim: int, fill: int = 0) -> Tensor:
    """Each chunk (batch, heads, rounds, chunks, ...) with the one before it in front, along ``dim``."""
    before = torch.full_like(chunks[:, :, :, :1], fill)
    return torch.cat([torch.cat([before, chunks[:, :, :, :-1]], 3), chunks], dim)
