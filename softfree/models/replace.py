"""Replace the softmax attention of existing models by ours, layer by layer."""

import fnmatch
import math
import re
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from timm.layers import Attention
from torch import Tensor, nn

from softfree.layers.attention import SoftAttention
from softfree.layers.torch_interface import (
    DEFAULTS,
    NOT_CAUSAL,
    MultiheadSoftAttention,
    copy_linear,
)

COLUMNS = 80
# Class names of other attentions match this.
ATTENTION_NAME = re.compile(r"attention|attn", re.IGNORECASE)


class Layer(NamedTuple):
    """One layer of a report: its name in the model, its class, and how it was replaced or why not."""

    name: str
    kind: str
    note: str


class Report(NamedTuple):
    """What :func:`replace_attention` did, layer by layer; printed, it fits 80 columns."""

    replaced: tuple[Layer, ...]
    left: tuple[Layer, ...]

    def __str__(self) -> str:
        lines = []
        for title, layers in (("replaced", self.replaced), ("left as they are", self.left)):
            lines.append(f"{title}: {len(layers)}")
            lines += [
                textwrap.fill(
                    text,
                    COLUMNS,
                    initial_indent="  ",
                    subsequent_indent="      ",
                    break_long_words=False,
                    break_on_hyphens=False,
                )
                for text in _grouped(layers)
            ]
        return "\n".join(lines if self.left else lines[:-1])


def replace_attention(
    model: nn.Module, *, grid: bool = True, skip: Iterable[str] = (), **options: Any
) -> Report:
    """Replace the softmax attentions of a model by softmax-free ones, in place.

    Supported are timm's ``Attention`` (ViT, DeiT, DINOv2 and others) and ``nn.MultiheadAttention``, including
    those in ``nn.TransformerEncoder``. The weights of queries, values and output are kept. Those of keys are
    dropped, because queries become the keys. Outputs change, so the model has to be trained further.

    Args:
        model: any module that contains such layers.
        grid: landmarks are means of image areas, and the image's size comes from the model's ``patch_embed``.
            If False, or for ``nn.MultiheadAttention`` and models without ``patch_embed``, they are means of
            stretches of the sequence.
        skip: layers to leave unchanged, as globs of their names: ``"blocks.0.*"``.
        options: settings of :class:`softfree.SoftAttention`. By default: normed queries, learned bandwidths,
            at most 49 means of tokens plus the prefix tokens as landmarks, ``inverse="solve"``.

    Returns:
        A report of what was replaced, what was not, and why.

    Raises:
        ValueError: there is nothing to replace; the message lists what was found instead.

    Example:
        >>> import softfree, timm
        >>> model = timm.create_model("vit_tiny_patch16_224", depth=2)
        >>> print(softfree.replace_attention(model))
        replaced: 2
          blocks.0-1.attn (Attention): landmarks over 14 x 14 patches, 1 prefix token
    """
    settings = {"landmarks": "average:49", "stride": 1, **options}
    patches = Patches(model) if grid else None
    skipped = list(skip)
    replaced: list[Layer] = []
    left: list[Layer] = []
    made: dict[nn.Module, nn.Module] = {}
    for name, layer in _attentions(model):
        kind = type(layer).__name__
        reason = "skip names it" if _named(name, skipped) else _why_not(model, name, layer)
        if not reason and not name:
            reason = "it is the model itself: replace it in a module that holds it"
        if reason:
            left.append(Layer(name or "(the model)", kind, reason))
            continue
        new = made.get(layer)
        if new is None:
            new = made[layer] = _replacement(layer, patches, settings)
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, new)
        replaced.append(Layer(name, kind, _note(layer, patches)))
    report = Report(tuple(replaced), tuple(left))
    if not replaced:
        found = f":\n{report}" if left else ""
        raise ValueError(
            f"model: {type(model).__name__} has no attention that can be replaced{found}"
        )
    if patches is not None:
        patches.watch()
    return report


class Patches:
    """The patch grid of a model: the (H, W) of the tokens that its attentions see.

    Each replaced layer holds it. It is also the hook that notes the image size, for models that take varying
    sizes. It is an object so that copies of the model get their own.
    """

    def __init__(self, model: nn.Module):
        self.embed: Any = getattr(model, "patch_embed", None)
        self.prefix = getattr(model, "num_prefix_tokens", 0)
        self.seen: tuple[int, int] | None = None

    @property
    def usual(self) -> tuple[int, int] | None:
        """The grid at the image size that the model was built for."""
        found = getattr(self.embed, "grid_size", None)
        return tuple(found) if found is not None and len(found) == 2 else None

    def watch(self) -> None:
        """Note the image size at each call, if it may change."""
        if hasattr(self.embed, "dynamic_feat_size") and not getattr(
            self.embed, "strict_img_size", True
        ):
            self.embed.register_forward_pre_hook(self)

    def __call__(self, embed: Any, inputs: tuple[Tensor, ...]) -> None:
        height, width = inputs[0].shape[-2:]
        self.seen = embed.dynamic_feat_size((height, width))

    def size(self, tokens: int) -> tuple[int, int]:
        """(H, W) for ``tokens`` tokens; a single row of those after the prefix if no known grid fits."""
        for size in (self.seen, self.usual):
            if size is not None and math.prod(size) == tokens - self.prefix:
                return size
        return 1, tokens - self.prefix


class TimmSoftAttention(nn.Module):
    """Softmax-free attention called like timm's ``Attention``, with tokens (batch, tokens, channels)."""

    def __init__(self, attention: SoftAttention, patches: Patches | None, proj_drop: nn.Module):
        super().__init__()
        self.attention = attention
        self.patches = patches
        self.proj_drop = proj_drop

    @classmethod
    def of(cls, softmax: Any, patches: Patches | None, options: dict[str, Any]) -> nn.Module:
        """Replace timm's layer, taking over its weights."""
        weight, bias = softmax.qkv.weight, softmax.qkv.bias
        dim = weight.shape[1]
        attention = SoftAttention(
            dim,
            softmax.num_heads,
            sequence=patches is None,
            qv_bias=bias is not None,
            dropout=softmax.attn_drop.p,
            strict_landmarks=False,
            **{**DEFAULTS, **options},
        ).to(device=weight.device, dtype=weight.dtype)
        q_and_v = [*range(dim), *range(2 * dim, 3 * dim)]
        copy_linear(attention.qv, weight[q_and_v], None if bias is None else bias[q_and_v])
        copy_linear(attention.proj, softmax.proj.weight, softmax.proj.bias)
        attention.qv.requires_grad_(weight.requires_grad)
        attention.proj.requires_grad_(softmax.proj.weight.requires_grad)
        return cls(attention, patches, softmax.proj_drop).train(softmax.training)

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """``attn_mask`` may select the keys to attend to, the same for all queries: (batch, 1, 1, tokens)."""
        if is_causal:
            raise ValueError(f"is_causal: {NOT_CAUSAL}")
        size = None if self.patches is None else self.patches.size(x.shape[1])
        return self.proj_drop(self.attention(x, size, _keys_to_keep(attn_mask, x)))


def _keys_to_keep(mask: Tensor | None, x: Tensor) -> Tensor | None:
    """A mask (batch, tokens) from timm's mask, which is True or 0 at keys to attend to."""
    if mask is None:
        return None
    if mask.ndim < 3 or math.prod(mask.shape[1:-1]) != 1:
        raise ValueError(f"attn_mask of shape {tuple(mask.shape)}: {NOT_CAUSAL}")
    keep = mask if mask.dtype == torch.bool else mask == 0
    return keep.flatten(1).expand(x.shape[0], -1)


def _replacement(layer: Any, patches: Patches | None, options: dict[str, Any]) -> nn.Module:
    if isinstance(layer, nn.MultiheadAttention):
        new = MultiheadSoftAttention.of(layer, **options)
        for part in (new.q_proj, new.v_proj, new.out_proj):
            part.requires_grad_(layer.out_proj.weight.requires_grad)
        return new
    return TimmSoftAttention.of(layer, patches, options)


def _note(layer: nn.Module, patches: Patches | None) -> str:
    """How a layer was replaced."""
    if isinstance(layer, nn.MultiheadAttention) or patches is None or patches.usual is None:
        where = "tokens as a sequence"
    else:
        rows, columns = patches.usual
        where = f"landmarks over {rows} x {columns} patches"
        if patches.prefix:
            where += f", {patches.prefix} prefix token{'s' * (patches.prefix > 1)}"
    if not isinstance(getattr(layer, "q_norm", nn.Identity()), nn.Identity):
        where += "; its norms of queries and keys gave way to the layer's own"
    return where


def _attentions(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Layers that are softmax attentions, judging by their class or its name; none inside another."""
    inside: tuple[str, ...] = ()
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        if name.startswith(inside) and inside:
            continue
        known = type(layer) in (Attention, nn.MultiheadAttention)
        named = (
            ATTENTION_NAME.search(type(layer).__name__)
            and next(layer.parameters(), None) is not None
        )
        ours = type(layer).__module__.startswith("softfree.")
        if ours and named:
            inside = (*inside, f"{name}.")
        elif known or (named and not _contains_known(layer)):
            inside = (*inside, f"{name}.")
            yield name, layer


def _contains_known(layer: nn.Module) -> bool:
    return any(type(part) in (Attention, nn.MultiheadAttention) for part in layer.modules())


def _why_not(model: nn.Module, name: str, layer: Any) -> str:
    """Why a layer can't be replaced; "" if it can."""
    if type(layer) is nn.MultiheadAttention:
        parent, _, attribute = name.rpartition(".")
        if attribute == "self_attn" and isinstance(
            model.get_submodule(parent), nn.TransformerDecoderLayer
        ):
            return "a decoder masks its own tokens causally, and landmarks are made of all tokens"
        if layer.bias_k is not None or layer.add_zero_attn:
            return "add_bias_kv and add_zero_attn add keys to a softmax"
        return ""
    if type(layer) is not Attention:
        if any(hasattr(layer, part) for part in ("rope", "rotate_half")):
            return "rotary positions of queries and keys"
        return "another kind of attention than timm's Attention or nn.MultiheadAttention"
    width = layer.proj.in_features
    if not layer.qkv.in_features == width == layer.proj.out_features:
        return "heads are wider or narrower together than the tokens"
    if getattr(layer, "gate", None) is not None:
        return "a gate of what is attended to"
    if not isinstance(getattr(layer, "norm", nn.Identity()), nn.Identity):
        return "a norm of what is attended to"
    return ""


def _named(name: str, globs: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, glob) for glob in globs)


def _grouped(layers: Iterable[Layer]) -> Iterator[str]:
    """One line for layers that differ only by a number: blocks.0-11.attn."""
    groups: dict[tuple[str, str, str], list[list[str]]] = {}
    for name, kind, note in layers:
        key = (re.sub(r"\d+", "{}", name), kind, note)
        groups.setdefault(key, []).append(re.findall(r"\d+", name))
    for (pattern, kind, note), numbers in groups.items():
        parts = [_span(list(map(int, column))) for column in zip(*numbers, strict=True)]
        yield f"{pattern.format(*parts)} ({kind}): {note}"


def _span(numbers: list[int]) -> str:
    """
    Example:
        >>> _span([0, 1, 2, 5]), _span([3])
        ('0-2,5', '3')
    """
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
