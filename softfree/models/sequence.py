"""The sequence encoder of the Long Range Arena, with any attention.

tokens -> embedding + learned positions -> pre-norm blocks -> mean of the real tokens -> MLP -> classes

It is the encoder of the Nyströmformer's comparison, which the SOFT papers used: 2 blocks with 64 channels, 2
heads and an MLP of 128. One difference: there the mean includes the padding, so that logits depend on it.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from softfree.layers import Block, create_attention
from softfree.layers.factory import check_options
from softfree.models.checks import check_at_least

Pooling = Literal["mean", "cls", "none"]
POOLINGS: tuple[Pooling, ...] = ("mean", "cls", "none")
EmbedDropout = Literal["auto", "tokens", "channels"]
EMBED_DROPOUTS: tuple[EmbedDropout, ...] = ("auto", "tokens", "channels")
# The SOFT papers' settings for sequences, and those of the Nyströmformer's comparison for the rivals. SOFT's
# gain is ours: without it the layer's output is large and nearly the same for all tokens, and it hardly
# learns ListOps.
DEFAULTS: dict[str, dict[str, Any]] = {
    "softfree": dict(landmarks="average:256", stride=4, landmark_norm=True),
    "soft": dict(landmarks="average", stride=4, query_gain=2),
    "softpp": dict(landmarks="average", stride=4),
    "linformer": dict(slots=256),
    "performer": dict(features=256, kernel="relu"),
    "nystromformer": dict(landmarks=128, value_conv=35),
    "reformer": dict(rounds=2),
    "agent": dict(landmarks=128),
    "flatten": dict(focus=3),
}


class ChannelDropout(nn.Dropout1d):
    """Dropout of tokens (batch, n, channels) that drops the same channels of all tokens of a sequence.

    Equal tokens stay equal, and others differ in all channels but those that are dropped for all. Where channels
    are dropped token by token, a kernel sees tokens in training that are farther from each other than in
    evaluation, where all its weights are then larger than any that were trained.

    Example:
        >>> import torch
        >>> dropped = ChannelDropout(0.5)(torch.ones(2, 5, 8))
        >>> torch.equal(dropped[:, :1].expand(-1, 5, -1), dropped)
        True
    """

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mT).mT


class SequenceClassifier(nn.Module):
    """Classify token sequences, pairs of them, or each of their tokens.

    Both sequences of a pair go through one encoder; their features a and b become ``[a, b, a * b, a - b]``.

    Args:
        vocab_size: number of different tokens, padding included; 0 with ``channels``.
        length: length of the longest sequence; one position is learned for each of its tokens.
        num_classes: number of classes.
        attention: any name that :func:`softfree.layers.create_attention` takes.
        dim, depth, num_heads, mlp_dim: channels, number, heads and hidden channels of the blocks.
        mlp_conv: length of a depthwise convolution of the MLPs' hidden tokens; 0: none.
        dropout: dropout after the embedding, after the attention, and twice in the MLP.
        embed_dropout: what the first of these drops: ``"tokens"``, channels of each token by itself; or
            ``"channels"``, see :class:`ChannelDropout`. ``"auto"``: channels for ``softfree``, which has normed
            queries, otherwise tokens, as in the papers.
        pooling: ``"mean"`` of the real tokens; ``"cls"``, a class token before them; or ``"none"``, classes
            for each token.
        pair: samples are pairs, (batch, 2, tokens).
        channels: if above 0, a token consists of this many numbers: (batch, tokens, channels).
        attention_options: every other keyword is passed to the attention; the defaults are in ``DEFAULTS``.
            There SOFT has one landmark per window of 4 tokens, which is 500 for 2000 tokens; ``stride=32``
            gives fewer.

    Example:
        >>> import torch
        >>> from softfree.models.sequence import SequenceClassifier
        >>> model = SequenceClassifier(vocab_size=32, length=100, num_classes=10, attention="softpp")
        >>> tokens = torch.randint(1, 32, (2, 80))
        >>> model(tokens, mask=torch.arange(80) < torch.tensor([[80], [55]])).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        vocab_size: int,
        length: int,
        num_classes: int,
        attention: str = "softpp",
        dim: int = 64,
        depth: int = 2,
        num_heads: int = 2,
        mlp_dim: int = 128,
        mlp_conv: int = 0,
        dropout: float = 0.1,
        embed_dropout: EmbedDropout = "auto",
        pooling: Pooling = "mean",
        pair: bool = False,
        channels: int = 0,
        **attention_options: Any,
    ):
        super().__init__()
        if pooling not in POOLINGS:
            raise ValueError(f"pooling must be one of {', '.join(POOLINGS)}, got {pooling!r}")
        if embed_dropout not in EMBED_DROPOUTS:
            raise ValueError(
                f"embed_dropout must be one of {', '.join(EMBED_DROPOUTS)}, got {embed_dropout!r}"
            )
        check_options(attention, attention_options)
        check_at_least(0, channels=channels)
        if pair and (pooling == "none" or channels):
            raise ValueError(
                "pair is for pooled sequences of a vocabulary, "
                f"got pooling={pooling!r}, channels={channels}"
            )
        sizes = dict(length=length, num_classes=num_classes, depth=depth, mlp_dim=mlp_dim)
        check_at_least(1, **sizes if channels else dict(vocab_size=vocab_size, **sizes))
        self.length = length
        self.pair = pair
        self.channels = channels
        self.pooling = pooling
        self.embedding = nn.Linear(channels, dim) if channels else nn.Embedding(vocab_size, dim)
        self.class_token = nn.Parameter(torch.empty(1, 1, dim)) if pooling == "cls" else None
        positions = length + (pooling == "cls")
        options = {"grid": positions, **DEFAULTS.get(attention, {}), **attention_options}
        self.positions = nn.Parameter(torch.empty(1, positions, dim))
        if embed_dropout == "auto":
            embed_dropout = "channels" if attention == "softfree" else "tokens"
        kind = ChannelDropout if embed_dropout == "channels" else nn.Dropout
        self.dropout = kind(dropout)
        self.blocks = nn.ModuleList(
            Block(
                dim,
                create_attention(attention, dim, num_heads, sequence=True, **options),
                mlp_dim=mlp_dim,
                mlp_conv=mlp_conv,
                dims=1,
                attn_drop=dropout,
                proj_drop=dropout,
                pre_norm=True,
                exact_gelu=True,
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(dim)
        features = 4 * dim if pair else dim
        self.head = nn.Sequential(
            nn.Linear(features, mlp_dim), nn.ReLU(), nn.Linear(mlp_dim, num_classes)
        )
        embedding = None if channels else self.embedding.weight
        for weight in (embedding, self.positions, self.class_token):
            if weight is not None:
                nn.init.normal_(weight, std=0.02)

    def no_weight_decay(self) -> set[str]:
        return {"embedding.weight", "positions", "class_token"}

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Tokens and mask (batch, n), or (batch, 2, n) for pairs, to logits (batch, num_classes).

        Without pooling the logits are (batch, n, num_classes).
        """
        shape = "(batch, 2, tokens)" if self.pair else "(batch, tokens)"
        if self.channels:
            shape = f"(batch, tokens, {self.channels})"
        fits = tokens.ndim == shape.count(",") + 1
        if not fits or (self.channels and tokens.shape[-1] != self.channels):
            raise ValueError(f"tokens must have shape {shape}, got {tuple(tokens.shape)}")
        if not self.pair:
            return self.head(self.forward_features(tokens, mask))
        mask = None if mask is None else mask.flatten(0, 1)
        a, b = self.forward_features(tokens.flatten(0, 1), mask).unflatten(0, (-1, 2)).unbind(1)
        return self.head(torch.cat([a, b, a * b, a - b], -1))

    def forward_features(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Tokens (batch, n) to one vector per sequence, (batch, dim).

        Without pooling, per token, (batch, n, dim).
        """
        if tokens.shape[1] > self.length:
            raise ValueError(
                f"tokens: the model takes sequences of at most {self.length}, got {tokens.shape[1]}"
            )
        x = self.embedding(tokens)
        if self.class_token is not None:
            x = torch.cat([self.class_token.expand(x.shape[0], -1, -1).to(x.dtype), x], 1)
            if mask is not None:
                mask = torch.cat([mask.new_ones(mask.shape[0], 1), mask], 1)
        x = self.dropout(x + self.positions[:, : x.shape[1]])
        for block in self.blocks:
            x = block(x, None, mask)
        x = self.norm(x)
        if self.class_token is not None:
            return x[:, 0]
        if self.pooling == "none":
            return x
        if mask is None:
            return x.mean(1)
        total = torch.where(mask[..., None], x, 0).sum(1)
        return total / mask.sum(1, keepdim=True).clamp(min=1)
