"""Softmax-free attention with the interface of ``torch.nn.MultiheadAttention``."""

from typing import Any

import torch
from torch import Tensor, nn

from softfree.layers.attention import SoftHeads
from softfree.layers.landmarks import Landmarks

NOT_CAUSAL = (
    "softmax-free attention can't be causal, nor take a mask for pairs of tokens: every token attends through the "
    "landmarks, and these are made of all tokens. Tokens that nobody may attend to are named by key_padding_mask"
)
# As for our own attention in :data:`softfree.layers.factory.SETTINGS`. The landmarks differ, so that short
# inputs have enough of them: they are windows of single tokens, pooled.
DEFAULTS: dict[str, Any] = dict(query_norm=True, bandwidth="learned", inverse="solve")


class _Unfused(Tensor):
    """A tensor type that keeps torch's encoders from using their fused softmax attention instead."""


class MultiheadSoftAttention(SoftHeads):
    r"""Softmax-free attention with the constructor and the call of ``nn.MultiheadAttention``.

    Queries and keys share one projection, :math:`W_q = W_k`, unless the keys have a different number of
    channels (``kdim``). Landmarks are sampled from the keys. Causal attention is not possible: see
    ``attn_mask``.

    Args:
        embed_dim, num_heads, bias, batch_first, device, dtype: as in ``nn.MultiheadAttention``.
        dropout: dropout of the heads' outputs; there is no weight matrix whose entries could be dropped.
        add_bias_kv, add_zero_attn: not supported.
        kdim, vdim: channels of ``key`` and ``value``; None: ``embed_dim``.
        landmarks, stride, value_conv: as in :class:`softfree.SoftAttention`; by default at most 49 landmarks,
            means of equal stretches of the keys.
        options: further settings of :class:`softfree.SoftAttention`; by default those of the attention
            ``"softfree"``: normed queries, learned bandwidths, ``inverse="solve"``.

    Example:
        >>> import torch, softfree
        >>> attention = softfree.MultiheadSoftAttention(64, num_heads=4, batch_first=True)
        >>> x = torch.randn(2, 100, 64)
        >>> padded = torch.arange(100) >= torch.tensor([[80], [100]])
        >>> out, weights = attention(x, x, x, key_padding_mask=padded)
        >>> out.shape, weights
        (torch.Size([2, 100, 64]), None)
    """

    # Attributes that torch's encoders check before they bypass the layer with its weights. See _Unfused.
    _qkv_same_embed_dim = False
    in_proj_weight = in_proj_bias = torch.empty(0).as_subclass(_Unfused)
    bias_k = bias_v = None
    add_zero_attn = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        landmarks: Landmarks = "average:49",
        stride: int = 1,
        value_conv: int = 0,
        **options: Any,
    ):
        if add_bias_kv or add_zero_attn:
            raise ValueError("add_bias_kv and add_zero_attn add keys to a softmax: leave them out")
        super().__init__(
            embed_dim, num_heads, sequence=True, dropout=dropout, **{**DEFAULTS, **options}
        )
        self.embed_dim = embed_dim
        self.kdim = kdim or embed_dim
        self.vdim = vdim or embed_dim
        self.batch_first = batch_first
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias)
        self.k_proj = nn.Linear(self.kdim, embed_dim, bias) if self.kdim != embed_dim else None
        self.v_proj = nn.Linear(self.vdim, embed_dim, bias)
        self.create_sampler(landmarks, stride, value_conv, strict=False)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias)
        if device is not None or dtype is not None:
            self.to(device=device, dtype=dtype)

    @classmethod
    def of(cls, softmax: nn.MultiheadAttention, **options: Any) -> "MultiheadSoftAttention":
        """Replace a softmax layer, taking over its weights for queries, values and output.

        The weights for keys are taken over only if keys have a different number of channels.
        """
        if softmax.bias_k is not None or softmax.add_zero_attn:
            raise ValueError("it has add_bias_kv or add_zero_attn")
        weight = softmax.out_proj.weight
        layer = cls(
            softmax.embed_dim,
            softmax.num_heads,
            softmax.dropout,
            softmax.in_proj_bias is not None,
            kdim=softmax.kdim,
            vdim=softmax.vdim,
            batch_first=softmax.batch_first,
            device=weight.device,
            dtype=weight.dtype,
            **options,
        )
        together: Any = softmax.in_proj_weight
        if together is not None:
            weights: Any = together.detach().chunk(3)
        else:
            weights = (softmax.q_proj_weight, softmax.k_proj_weight, softmax.v_proj_weight)
        biases: Any = (None,) * 3
        if softmax.in_proj_bias is not None:
            biases = softmax.in_proj_bias.detach().chunk(3)
        for projection, weight, bias in zip(
            (layer.q_proj, layer.k_proj, layer.v_proj), weights, biases, strict=True
        ):
            if projection is not None:
                copy_linear(projection, weight, bias)
        copy_linear(layer.out_proj, softmax.out_proj.weight, softmax.out_proj.bias)
        return layer.train(softmax.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention as in ``nn.MultiheadAttention``, except for the kernel.

        Args:
            query: (n, batch, embed_dim), (batch, n, embed_dim) with ``batch_first``, or (n, embed_dim).
            key, value: the same with m tokens of ``kdim`` and ``vdim`` channels.
            key_padding_mask: (batch, m), or (m,): True, or minus infinity, at tokens to ignore.
            need_weights: also return the weight of each key for each query. That takes n x m numbers per
                head, which this attention otherwise avoids, so it is off by default, unlike in torch. The
                weights may be negative and need not add up to 1; the value convolution is not included.
            attn_mask, is_causal: not supported, because landmarks are made from all tokens.
            average_attn_weights: return the mean of the weights over heads.

        Returns:
            The output, with the shape of ``query``, and the weights or None. The weights are (batch, n, m),
            or (batch, heads, n, m) without averaging.
        """
        if attn_mask is not None or is_causal:
            given = "attn_mask" if attn_mask is not None else "is_causal=True"
            raise ValueError(f"{given}: {NOT_CAUSAL}")
        # Values may differ: detectors add positions only to queries and keys.
        itself = query is key and self.k_proj is None
        batched = query.ndim == 3
        tokens = [self._batch_first(t) for t in (query, key, value)]
        query, key, value = tokens
        self._check(query, key, value)
        mask = keys_to_keep(key_padding_mask, key)
        q = self.split(self.q_proj(query))
        k = q if itself else self.split((self.k_proj or self.q_proj)(key))
        v = self.split(self.v_proj(value))
        queries = None if itself else q
        out = self.out_proj(self.attend(queries, k, v, mask=mask))
        weights = None
        if need_weights:
            weights = self._weights(q, k, mask)
            weights = weights.mean(1) if average_attn_weights else weights
        if not batched:
            return out[0], None if weights is None else weights[0]
        return out if self.batch_first else out.transpose(0, 1), weights

    def _batch_first(self, x: Tensor) -> Tensor:
        if x.ndim == 2:
            return x[None]
        return x if self.batch_first else x.transpose(0, 1)

    def _weights(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """(batch, heads, n, m): the attention's output if each key's value is a unit vector of its own."""
        units = torch.eye(k.shape[2], dtype=k.dtype, device=k.device).expand(*k.shape[:2], -1, -1)
        training = self.training
        # Dropout applies to the output, not to the weights.
        self.training = False
        weights = self.attend(q, k, units, mask=mask)
        self.training = training
        return weights.unflatten(2, (self.num_heads, -1)).transpose(1, 2)

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        dims = dict(query=self.embed_dim, key=self.kdim, value=self.vdim)
        for (name, dim), x in zip(dims.items(), (query, key, value), strict=True):
            if x.ndim != 3 or x.shape[2] != dim or x.shape[1] == 0:
                form = "(batch, tokens, {})" if self.batch_first else "(tokens, batch, {})"
                given = x.shape if self.batch_first or x.ndim != 3 else x.transpose(0, 1).shape
                raise ValueError(
                    f"{name} must have shape {form.format(dim)} or (tokens, {dim}), with at least one token, got "
                    f"{tuple(given)}"
                )
        if key.shape[:2] != value.shape[:2] or key.shape[0] != query.shape[0]:
            raise ValueError(
                "key and value must have as many tokens, and all three as many samples: got (batch, tokens) "
                f"{tuple(query.shape[:2])}, {tuple(key.shape[:2])} and {tuple(value.shape[:2])}"
            )


def keys_to_keep(padding: Tensor | None, key: Tensor) -> Tensor | None:
    """(batch, m), True for tokens that may be attended to, from torch's mask of those that may not."""
    if padding is None:
        return None
    if padding.ndim == 1:
        padding = padding[None]
    if padding.shape != key.shape[:2]:
        raise ValueError(
            f"key_padding_mask must have shape {tuple(key.shape[:2])}, one value per key, got "
            f"{tuple(padding.shape)}"
        )
    if padding.dtype == torch.bool:
        return padding.logical_not()
    if not padding.is_floating_point():
        raise TypeError(
            f"key_padding_mask must be bool, True at tokens to ignore, or float, got {padding.dtype}"
        )
    keep = padding == 0
    # The check would have to wait for a GPU, and a traced program has no values to check.
    looked_at = padding.device.type == "cpu" and not torch.compiler.is_compiling()
    if looked_at and not (keep | (padding == -torch.inf)).all():
        raise ValueError(
            "key_padding_mask must be 0 or minus infinity: other numbers are added to the logits of a softmax, "
            "and there are none"
        )
    return keep


@torch.no_grad()
def copy_linear(layer: nn.Linear, weight: Tensor, bias: Tensor | None) -> None:
    """Copy weights into a linear layer; without a bias to copy, its own bias becomes 0."""
    layer.weight.copy_(weight)
    if layer.bias is not None:
        layer.bias.zero_() if bias is None else layer.bias.copy_(bias)
