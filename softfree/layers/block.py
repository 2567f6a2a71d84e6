"""Transformer blocks: an attention and an MLP, each with a residual and a norm."""

from functools import partial
from typing import Any

from timm.layers import DropPath, Mlp
from torch import Tensor, nn

from softfree.layers.attention import SoftAttention
from softfree.layers.landmarks import AnySize
from softfree.layers.plain import are_plain, is_plain
from softfree.ops.mlp import mlp
from softfree.ops.norm import add_norm


class TanhMlp(Mlp):
    """timm's MLP with the tanh form of GELU, trained on a GPU in less memory and fewer passes over it."""

    def forward(self, x: Tensor) -> Tensor:
        fc1: Any = self.fc1
        act: Any = self.act
        fc2: Any = self.fc2
        drops = [(drop, nn.Dropout) for drop in (self.drop1, self.drop2)]
        if (
            are_plain(
                (fc1, nn.Linear), (act, nn.GELU), (self.norm, nn.Identity), (fc2, nn.Linear), *drops
            )
            and act.approximate == "tanh"
            and not any(drop.p and drop.training for drop, _ in drops)
            and fc1.bias is not None
            and fc2.bias is not None
        ):
            return mlp(x, fc1.weight, fc1.bias, fc2.weight, fc2.bias)
        return super().forward(x)


class Block(nn.Module):
    """Any attention of :mod:`softfree.layers.attention` with an MLP.

    Post-norm, as in the papers: ``x = LN(x + attn(x)); x = LN(x + mlp(x))``; or pre-norm:
    ``x = x + attn(LN(x)); x = x + mlp(LN(x))``.

    Args:
        dim: channels.
        attention: called as ``attention(x, size, mask)``, with the context after them where there is one.
        mlp_dim: hidden channels of the MLP; None: four times ``dim``.
        drop_path: probability that a sample skips a branch in training (stochastic depth).
        attn_drop: dropout of what the attention adds.
        proj_drop: dropout in the MLP.
        pre_norm: norm before the branch instead of after the sum.
        norm_eps: of both LayerNorms.
        exact_gelu: GELU by the error function; otherwise its tanh form.
    """

    def __init__(
        self,
        dim: int,
        attention: nn.Module,
        *,
        mlp_dim: int | None = None,
        drop_path: float = 0.0,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        pre_norm: bool = False,
        norm_eps: float = 1e-5,
        exact_gelu: bool = False,
    ):
        super().__init__()
        act_layer: Any = partial(nn.GELU, approximate="none" if exact_gelu else "tanh")
        self.pre_norm = pre_norm
        self.attn = attention
        self.norm1 = nn.LayerNorm(dim, eps=norm_eps)
        mlp_layer = Mlp if exact_gelu else TanhMlp
        self.mlp = mlp_layer(dim, mlp_dim or 4 * dim, act_layer=act_layer, drop=proj_drop)
        self.norm2 = nn.LayerNorm(dim, eps=norm_eps)
        self.attn_drop = nn.Dropout(attn_drop) if attn_drop > 0 else nn.Identity()
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(
        self,
        x: Tensor,
        size: AnySize = None,
        mask: Tensor | None = None,
        context: Tensor | None = None,
    ) -> Tensor:
        """(batch, tokens, dim) to the same shape; ``size`` and ``mask`` are the context's where there is one."""
        # Positional, as hooks on the attention expect, and without a word on contexts to those that know none.
        where = (size, mask) if context is None else (size, mask, context)
        if self.pre_norm:
            x = x + self.drop_path(self.attn_drop(self.attn(self.norm1(x), *where)))
            return x + self.drop_path(self.mlp(self.norm2(x)))
        attended = self.attn_drop(self.attn(x, *where))
        x = _add_and_norm(x, self.drop_path(attended), self.norm1)
        return _add_and_norm(x, self.drop_path(self.mlp(x)), self.norm2)


def _add_and_norm(x: Tensor, branch: Tensor, norm: nn.LayerNorm) -> Tensor:
    """Tokens that came in half precision stay so, though autocast's norm is in float32: as pre-norm leaves them."""
    if is_plain(norm, nn.LayerNorm):
        return add_norm(x, branch, norm.weight, norm.bias, norm.eps)
    return norm(x + branch).to(x.dtype)


BLOCK_OPTIONS = {"drop_path", "attn_drop", "proj_drop", "pre_norm", "norm_eps", "exact_gelu"}


class SoftBlock(Block):
    """A :class:`Block` around :class:`SoftAttention`.

    Args:
        dim, num_heads: as in :class:`SoftAttention`.
        mlp_ratio: hidden channels of the MLP over ``dim``.
        options: keywords of :class:`Block`; all others are the attention's.

    Example:
        >>> import torch, softfree
        >>> block = softfree.SoftBlock(dim=64, num_heads=2, stride=4, value_conv=5)
        >>> block(torch.randn(1, 28 * 28, 64), size=(28, 28)).shape
        torch.Size([1, 784, 64])
    """

    def __init__(self, dim: int, num_heads: int = 8, *, mlp_ratio: float = 4.0, **options: Any):
        own = {name: options.pop(name) for name in BLOCK_OPTIONS & options.keys()}
        attention = SoftAttention(dim, num_heads, **options)
        super().__init__(dim, attention, mlp_dim=int(dim * mlp_ratio), **own)
