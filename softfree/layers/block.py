"""Transformer blocks: an attention and an MLP, each with a residual and a norm."""

from functools import partial
from typing import Any

import torch
from timm.layers import DropPath, Mlp
from torch import Tensor, nn

from softfree.layers.attention import SoftAttention
from softfree.layers.landmarks import AnySize
from softfree.layers.plain import (
    are_all_hooked,
    are_plain,
    does_nothing,
    idle_kind,
    is_plain,
    weight_and_bias,
)
from softfree.ops.mlp import mlp
from softfree.ops.norm import add_norm, add_norm_over
from softfree.ops.shared import devices
from softfree.ops.shared.registration import unseen


class TanhMlp(Mlp):
    """timm's MLP with the tanh form of GELU, trained on a GPU in less memory and fewer passes over it."""

    def forward(self, x: Tensor) -> Tensor:
        weights = self.weights()
        return super().forward(x) if weights is None else mlp(x, *weights)

    def weights(self) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        """Weight and bias of both layers, if it is :func:`softfree.ops.mlp.mlp` of them."""
        parts: Any = self._modules  # as attributes they would be looked for in three places each
        fc1, act, fc2 = parts["fc1"], parts["act"], parts["fc2"]
        first, second = parts["drop1"], parts["drop2"]
        if (
            are_plain(
                (fc1, nn.Linear),
                (act, nn.GELU),
                (parts["norm"], nn.Identity),
                (fc2, nn.Linear),
                (first, nn.Dropout),
                (second, nn.Dropout),
            )
            and act.approximate == "tanh"
            and not (first.p and first.training)
            and not (second.p and second.training)
        ):
            weight1, bias1 = weight_and_bias(fc1)
            weight2, bias2 = weight_and_bias(fc2)
            if bias1 is not None and bias2 is not None:
                return weight1, bias1, weight2, bias2
        return None


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
        parts: Any = self._modules  # as attributes they would be looked for in three places each
        attn, norm1, mlp_part, norm2 = parts["attn"], parts["norm1"], parts["mlp"], parts["norm2"]
        drop, path = parts["attn_drop"], parts["drop_path"]
        if mask is context is None and not self.pre_norm:
            out = _evaluate(x, size, attn, norm1, mlp_part, norm2, drop, path)
            if out is not None:
                return out
        # What does nothing is not called, which would cost as much as a launch.
        drop = None if does_nothing(drop) else drop
        path = None if does_nothing(path) else path
        branch = attn(norm1(x) if self.pre_norm else x, *where)
        branch = branch if drop is None else drop(branch)
        branch = branch if path is None else path(branch)
        x = x + branch if self.pre_norm else _add_and_norm(x, branch, norm1)
        branch = mlp_part(norm2(x) if self.pre_norm else x)
        branch = branch if path is None else path(branch)
        return x + branch if self.pre_norm else _add_and_norm(x, branch, norm2)


def _evaluate(
    x: Tensor, size: AnySize, attn: Any, norm1: Any, mlp_part: Any, norm2: Any,
    drop: Any, path: Any,
) -> Tensor | None:  # fmt: skip
    """A post-norm block without a gradient, its questions asked once; None if it has to be taken in its parts.

    Of one picture, to ask and to call module by module takes longer than the kernels.
    """
    if torch.is_grad_enabled() or torch.compiler.is_dynamo_compiling():
        return None
    if type(x) is not Tensor or x.dtype not in devices.SIXTEEN_BIT or not isinstance(size, tuple):
        return None
    if are_all_hooked() or not are_plain(
        (attn, SoftAttention),
        (norm1, nn.LayerNorm),
        (mlp_part, TanhMlp),
        (norm2, nn.LayerNorm),
        (drop, idle_kind(drop)),
        (path, idle_kind(path)),
    ):
        return None
    of_mlp = mlp_part.weights()
    operands = None if of_mlp is None else attn.operands(x, size)
    if operands is None:
        return None
    first, second = weight_and_bias(norm1), weight_and_bias(norm2)
    if not unseen((x, *operands.weights, operands.pooling, *first, *of_mlp, *second)):
        return None
    x = add_norm_over(x, attn.attend_at_once(x, operands, unseen=True), *first, norm1.eps)
    return add_norm_over(x, mlp(x, *of_mlp, unseen=True), *second, norm2.eps)


def _add_and_norm(x: Tensor, branch: Tensor, norm: nn.LayerNorm) -> Tensor:
    """Tokens that came in half precision stay so, though autocast's norm is in float32: as pre-norm leaves them."""
    if is_plain(norm, nn.LayerNorm):
        return add_norm(x, branch, *weight_and_bias(norm), norm.eps)
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
