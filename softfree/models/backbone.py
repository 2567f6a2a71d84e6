"""What every softfree backbone offers timm besides its own layers: a classifier and intermediate maps."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from timm.layers import to_2tuple, trunc_normal_
from timm.models import checkpoint
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from softfree.layers.attention import SoftAttention
from softfree.layers.plain import does_nothing

POOLS = ("token", "avg", "")
ImageSize = int | tuple[int, int]


class Backbone(nn.Module):
    """Base class of the backbones.

    A subclass implements :meth:`iterate_features` and calls :meth:`init_classifier`. ``parts`` names the list
    of modules whose results are the features. ``num_prefix_tokens`` is the number of tokens before the image
    tokens of the last feature. ``norm`` is the final norm (an identity for post-norm blocks).
    """

    num_prefix_tokens = 0
    parts: str
    norm: nn.Module
    feature_info: list[dict[str, Any]]

    def init_classifier(
        self, num_features: int, num_classes: int, global_pool: str, drop_rate: float
    ) -> None:
        self.num_features = self.head_hidden_size = self.embed_dim = num_features
        self.head_drop = nn.Dropout(drop_rate)
        self.reset_classifier(num_classes, global_pool)

    def init_weights(self) -> None:
        """Initialise every parameter and buffer as in a new model, even after ``to_empty``."""
        for module in self.modules():
            reset: Any = getattr(module, "reset_parameters", None)
            if reset is not None:
                reset()
        self.draw_linear_weights()

    def draw_linear_weights(self) -> None:
        """Initialise linear layers: truncated normals of deviation 0.02, zero biases; apply the gains."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for module in self.modules():
            if isinstance(module, SoftAttention):
                module.apply_gains()

    def iterate_features(self, x: Tensor) -> Iterator[tuple[Tensor, tuple[int, int]]]:
        """Yield (tokens, size) after each part that counts as a feature, in order."""
        raise NotImplementedError

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the head by a new one for ``num_classes`` classes (0: no head).

        Optionally change the pooling.
        """
        if num_classes < 0:
            raise ValueError(f"num_classes must be >= 0, got {num_classes}")
        if global_pool is not None:
            choices = [pool for pool in POOLS if pool != "token" or self.num_prefix_tokens]
            if global_pool not in choices:
                raise ValueError(f"global_pool must be one of {choices}, got {global_pool!r}")
            self.global_pool = global_pool
        self.num_classes = num_classes
        self.head: nn.Module = nn.Identity()
        if num_classes > 0:
            example = next(self.parameters(), torch.empty(0))
            self.head = nn.Linear(
                self.num_features, num_classes, device=example.device, dtype=example.dtype
            )
            trunc_normal_(self.head.weight, std=0.02)
            nn.init.zeros_(self.head.bias)
        self.head.train(self.training)

    def forward_features(self, x: Tensor) -> Tensor:
        """Image (batch, in_chans, H, W) to the last tokens, (batch, prefix + h * w, channels)."""
        for tokens_and_size in self.iterate_features(x):
            tokens = tokens_and_size[0]
        return call_unless_idle(self.norm, tokens)

    def pool(self, tokens: Tensor) -> Tensor:
        """Tokens to one vector per sample, as ``global_pool`` says; unchanged for ``""``."""
        if self.global_pool == "token":
            return tokens[:, 0]
        if self.global_pool == "avg":
            prefix = self.num_prefix_tokens
            return (tokens[:, prefix:] if prefix else tokens).mean(1)
        return tokens

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        x = call_unless_idle(self.head_drop, self.pool(x))
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        return_prefix_tokens: bool = False,
    ) -> list[Any] | tuple[Tensor, list[Any]]:
        """Features along the way, without prefix tokens.

        Args:
            x: image, (batch, in_chans, H, W).
            indices: which features: a list, an int for the last n, or None for all.
            norm: apply the final norm to the last one.
            stop_early: skip everything after the last requested feature.
            output_fmt: ``"NCHW"`` maps or ``"NLC"`` tokens.
            intermediates_only: return only the list instead of (final tokens, list).
            return_prefix_tokens: if the model has prefix tokens, return pairs of a feature and its prefix
                tokens (None if it has none).
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"output_fmt must be 'NCHW' or 'NLC', got {output_fmt!r}")
        parts = len(getattr(self, self.parts))
        take, last = feature_take_indices(parts, indices)  # type: ignore[arg-type]
        found: dict[int, Any] = {}
        tokens = x
        for index, (tokens, size) in enumerate(self.iterate_features(x)):
            if index in take:
                feature = self.norm(tokens) if norm and index == parts - 1 else tokens
                prefix = feature.shape[1] - size[0] * size[1]
                first, feature = feature[:, :prefix], feature[:, prefix:]
                if output_fmt == "NCHW":
                    feature = to_map(feature, size)
                pairs = return_prefix_tokens and self.num_prefix_tokens
                found[index] = (feature, first if prefix else None) if pairs else feature
            if index == last and (stop_early or intermediates_only):
                break
        intermediates = [found[index] for index in take]
        if intermediates_only:
            return intermediates
        return self.norm(tokens) if last == parts - 1 or not stop_early else tokens, intermediates

    def get_intermediate_layers(
        self, x: Tensor, n: int | Sequence[int] = 1, reshape: bool = False, norm: bool = False
    ) -> tuple[Tensor, ...]:
        """The last ``n`` features (or those listed): tokens, or maps with ``reshape``."""
        _, intermediates = self.forward_intermediates(
            x, n, norm=norm, stop_early=True, output_fmt="NCHW" if reshape else "NLC"
        )
        return tuple(intermediates)

    def prune_intermediate_layers(
        self,
        indices: int | Sequence[int] = 1,
        prune_norm: bool = False,
        prune_head: bool = True,
    ) -> list[int]:
        """Drop what features at ``indices`` do not need, so that no parameter stays unused."""
        parts = len(getattr(self, self.parts))
        take, last = feature_take_indices(parts, indices)  # type: ignore[arg-type]
        self.prune_after(last)
        # The norm belongs to the last part and is of no use to the others.
        if prune_norm or last < parts - 1:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return take

    def __prepare_scriptable__(self) -> None:
        raise RuntimeError(
            f"{type(self).__name__} can't be a TorchScript program; torch.export and `softfree export` can "
            "hold it"
        )

    def prune_after(self, last: int) -> None:
        """Drop the parts after number ``last``."""
        setattr(self, self.parts, getattr(self, self.parts)[: last + 1])


def call_unless_idle(module: nn.Module, x: Tensor) -> Tensor:
    """``module(x)``, or ``x`` without a call if the module does nothing."""
    return x if does_nothing(module) else module(x)


def call_block(block: nn.Module, x: Tensor, size: tuple[int, int], recompute: bool) -> Tensor:
    """``block(x, size)``; with ``recompute``, activations are computed again in the backward pass."""
    if recompute and torch.is_grad_enabled():
        return checkpoint(block, x, size)
    return block(x, size)


def parse_img_size(img_size: ImageSize) -> tuple[int, int]:
    """``img_size`` as (height, width)."""
    size = to_2tuple(img_size)
    if len(size) != 2 or min(size) < 1:
        raise ValueError(f"img_size must be a side or (height, width), at least 1, got {img_size}")
    return size


def to_map(tokens: Tensor, size: tuple[int, int]) -> Tensor:
    """Tokens (batch, H * W, channels) as a map (batch, channels, H, W), channels last in memory."""
    return tokens.unflatten(1, size).permute(0, 3, 1, 2)


def to_tokens(image: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """A map as tokens, and its size."""
    return image.flatten(2).mT, (image.shape[2], image.shape[3])
