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
from softfree.ops.conv_mlp import Weights, conv_mlp, over_grid
from softfree.ops.mlp import mlp
from softfree.ops.norm import add_norm, add_norm_over
from softfree.ops.shared import devices
from softfree.ops.shared.registration import unseen


class TanhMlp(Mlp):
    """timm's MLP with the tanh form of GELU. On a GPU it trains with less memory and fewer passes over it."""

    def forward(self, x: Tensor) -> Tensor:
        weights = self.weights()
        return super().forward(x) if weights is None else mlp(x, *weights)

    def at_once(self, x: Tensor, size: Any, weights: Any) -> Tensor:
        """The result with :meth:`weights`, for a call that nothing observes (:func:`unseen`)."""
        return mlp(x, *weights, unseen=True)

    def weights(self) -> tuple[Tensor, ...] | None:
        """Weight and bias of both layers.

        None if the module does not compute :func:`softfree.ops.mlp.mlp` of them.
        """
        parts: Any = self._modules  # attribute access would search three places for each
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


class ConvMlp(TanhMlp):
    """An MLP whose hidden tokens see their neighbours: a depthwise convolution over the grid before GELU.

    Args:
        in_features, hidden_features: channels of the tokens and of the hidden tokens.
        kernel: side of the convolution, odd.
        dims: dimensions of the grid: 1 for a sequence, 2 for an image, 3 for a volume.
        act_layer, drop: as in timm's MLP.

    Example:
        >>> import torch
        >>> ConvMlp(8, 32, act_layer=nn.GELU)(torch.randn(2, 12, 8), (4, 3)).shape
        torch.Size([2, 12, 8])
    """

    def __init__(
        self, in_features: int, hidden_features: int, kernel: int = 3, dims: int = 2, **options: Any
    ):
        if kernel < 1 or kernel % 2 == 0:
            raise ValueError(f"mlp_conv must be 0 or odd, got {kernel}")
        super().__init__(in_features, hidden_features, **options)
        layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        self.conv = layer(
            hidden_features, hidden_features, kernel, padding=kernel // 2, groups=hidden_features
        )

    def forward(self, x: Tensor, size: AnySize = None, mask: Tensor | None = None) -> Tensor:
        """(batch, tokens, channels) to the same shape; ``size`` is as for the attention.

        Masked tokens count as 0.
        """
        weights = self.weights() if mask is None else None
        if weights is not None:
            return self.at_once(x, size, weights, unseen=False)
        hidden = self.fc1(x)
        if mask is not None:
            hidden = torch.where(mask[..., None], hidden, 0)
        hidden = over_grid(hidden, (x.shape[1],) if size is None else size, self.conv)
        hidden = self.norm(self.drop1(self.act(hidden)))
        return self.drop2(self.fc2(hidden))

    def at_once(self, x: Tensor, size: Any, weights: Any, unseen: bool = True) -> Tensor:
        return conv_mlp(x, Weights(*weights), size, unseen=unseen)

    def weights(self) -> tuple[Tensor, ...] | None:
        """Weight and bias of all three layers.

        None if the module does not compute :func:`softfree.ops.conv_mlp.conv_mlp` of them.
        """
        layers, conv = super().weights(), self._modules["conv"]
        if layers is None or conv is None or not is_plain(conv, nn.Conv2d):
            return None
        filters, bias = weight_and_bias(conv)
        return None if bias is None else (*layers[:2], filters, bias, *layers[2:])


class Block(nn.Module):
    """Any attention of :mod:`softfree.layers.attention` with an MLP.

    Post-norm, as in the papers: ``x = LN(x + attn(x)); x = LN(x + mlp(x))``; or pre-norm:
    ``x = x + attn(LN(x)); x = x + mlp(LN(x))``.

    Args:
        dim: channels.
        attention: called as ``attention(x, size, mask)``, followed by the context if there is one.
        mlp_dim: hidden channels of the MLP; None: four times ``dim``.
        mlp_conv: side of a depthwise convolution of the MLP's hidden tokens; 0: none.
        dims: dimensions of the tokens' grid, for ``mlp_conv``: 1 for a sequence, 2 for an image, 3 for a
            volume.
        drop_path: probability that a sample skips a branch in training (stochastic depth).
        attn_drop: dropout of the attention's output.
        proj_drop: dropout in the MLP.
        pre_norm: norm before the branch instead of after the sum.
        norm_eps: eps of both LayerNorms.
        exact_gelu: exact GELU, with the error function; otherwise its tanh form.
    """

    def __init__(
        self,
        dim: int,
        attention: nn.Module,
        *,
        mlp_dim: int | None = None,
        mlp_conv: int = 0,
        dims: int = 2,
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
        mlp_layer: Any = Mlp if exact_gelu else TanhMlp
        if mlp_conv:
            mlp_layer = partial(ConvMlp, kernel=mlp_conv, dims=dims)
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
        """(batch, tokens, dim) to the same shape.

        With a context, ``size`` and ``mask`` describe the context.
        """
        # Positional, as hooks on the attention expect. Without a context the argument is left out, because
        # some attentions do not take one.
        where = (size, mask) if context is None else (size, mask, context)
        parts: Any = self._modules  # attribute access would search three places for each
        attn, norm1, mlp_part, norm2 = parts["attn"], parts["norm1"], parts["mlp"], parts["norm2"]
        drop, path = parts["attn_drop"], parts["drop_path"]
        if mask is context is None and not self.pre_norm:
            out = _evaluate(x, size, attn, norm1, mlp_part, norm2, drop, path)
            if out is not None:
                return out
        # Modules that do nothing are not called, because a call costs as much as a kernel launch.
        drop = None if does_nothing(drop) else drop
        path = None if does_nothing(path) else path
        branch = attn(norm1(x) if self.pre_norm else x, *where)
        branch = branch if drop is None else drop(branch)
        branch = branch if path is None else path(branch)
        x = x + branch if self.pre_norm else _add_and_norm(x, branch, norm1)
        # Only a ConvMlp takes the grid.
        grid = (size, mask) if isinstance(mlp_part, ConvMlp) else ()
        branch = mlp_part(norm2(x) if self.pre_norm else x, *grid)
        branch = branch if path is None else path(branch)
        return x + branch if self.pre_norm else _add_and_norm(x, branch, norm2)


def _evaluate(
    x: Tensor, size: AnySize, attn: Any, norm1: Any, mlp_part: Any, norm2: Any,
    drop: Any, path: Any,
) -> Tensor | None:  # fmt: skip
    """A post-norm block without a gradient, with all checks made once; None if it must run module by module.

    For a single picture, checking and calling each module takes longer than the kernels.
    """
    if torch.is_grad_enabled() or torch.compiler.is_dynamo_compiling():
        return None
    if type(x) is not Tensor or x.dtype not in devices.SIXTEEN_BIT or not isinstance(size, tuple):
        return None
    if are_all_hooked() or not are_plain(
        (attn, SoftAttention),
        (norm1, nn.LayerNorm),
        (mlp_part, ConvMlp if type(mlp_part) is ConvMlp else TanhMlp),
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
    return add_norm_over(x, mlp_part.at_once(x, size, of_mlp), *second, norm2.eps)


def _add_and_norm(x: Tensor, branch: Tensor, norm: nn.LayerNorm) -> Tensor:
    """``norm(x + branch)`` in the dtype of ``x``.

    Half-precision tokens stay in half precision, as with pre-norm, although autocast computes the norm in
    float32.
    """
    if is_plain(norm, nn.LayerNorm):
        return add_norm(x, branch, *weight_and_bias(norm), norm.eps)
    return norm(x + branch).to(x.dtype)


BLOCK_OPTIONS = {
    "mlp_conv", "drop_path", "attn_drop", "proj_drop", "pre_norm", "norm_eps", "exact_gelu",
}  # fmt: skip


class SoftBlock(Block):
    """A :class:`Block` around :class:`SoftAttention`.

    Args:
        dim, num_heads: as in :class:`SoftAttention`.
        mlp_ratio: hidden channels of the MLP over ``dim``.
        options: keywords of :class:`Block`; all others are passed to the attention.

    Example:
        >>> import torch, softfree
        >>> block = softfree.SoftBlock(dim=64, num_heads=2, stride=4, value_conv=5)
        >>> block(torch.randn(1, 28 * 28, 64), size=(28, 28)).shape
        torch.Size([1, 784, 64])
    """

    def __init__(self, dim: int, num_heads: int = 8, *, mlp_ratio: float = 4.0, **options: Any):
        own = {name: options.pop(name) for name in BLOCK_OPTIONS & options.keys()}
        dims = 1 if options.get("sequence") else 3 if options.get("volume") else 2
        attention = SoftAttention(dim, num_heads, **options)
        super().__init__(dim, attention, mlp_dim=int(dim * mlp_ratio), dims=dims, **own)
