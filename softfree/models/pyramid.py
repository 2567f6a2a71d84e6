"""Pyramid backbones.

They are softfree's own, SOFT and SOFT++ (Table 1 of the papers), and the authors' released variant. Any
attention of :mod:`softfree.layers.factory` can be used instead of SOFT.

    image -> stem -> [positions -> blocks] -> downsample -> [positions -> blocks] -> ... four stages

An image of side s has maps of side s/4, s/8, s/16 and s/32. Stage 4 of the papers' models has a class token.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from timm.layers import calculate_drop_path_rates, trunc_normal_
from timm.models import generate_default_cfgs
from torch import Tensor, nn

from softfree.layers.attention import SoftmaxAttention
from softfree.layers.block import Block
from softfree.layers.embeddings import PositionEmbedding, downsample, stem
from softfree.layers.factory import check_options, create_attention, default_mlp_ratio
from softfree.layers.landmarks import Landmarks
from softfree.models.backbone import (
    Backbone,
    ImageSize,
    call_block,
    parse_img_size,
    to_map,
    to_tokens,
)
from softfree.models.registry import default_cfg, register

STAGES = 4


class Stage(nn.Module):
    """Positions, an optional class token, and blocks at one resolution."""

    def __init__(
        self, grid: tuple[int, int], dim: int, blocks: Sequence[nn.Module], class_token: bool
    ):
        super().__init__()
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim)) if class_token else None
        self.pos_embed = PositionEmbedding(grid, dim, prefix=int(class_token))
        self.blocks = nn.ModuleList(blocks)
        self.grad_checkpointing = False
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.cls_token is not None:
            trunc_normal_(self.cls_token, std=0.02)

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        """(batch, H * W, dim) to the same shape; a class token, if there is one, is added in front."""
        if self.cls_token is not None:
            x = torch.cat([self.cls_token.to(x.dtype).expand(x.shape[0], -1, -1), x], 1)
        x = self.pos_embed(x, size)
        for block in self.blocks:
            x = call_block(block, x, size, self.grad_checkpointing)
        return x


class SoftPyramid(Backbone):
    """A four-stage vision backbone of softmax-free attention.

    Args:
        img_size: the size that its positions are learned for; they are resized for any other size.
        in_chans: channels of the image.
        num_classes: outputs of the classifier; 0 for none.
        global_pool: ``"token"`` (class token), ``"avg"`` (mean of the image tokens) or ``""``.
        embed_dims, num_heads, depths: per stage.
        attention: ``"softfree"``, ``"softpp"``, ``"soft"``, or a rival for comparison: ``"softmax"``,
            ``"linformer"``, ``"performer"``, ``"nystromformer"``, ``"agent"``, ``"flatten"``. A rival uses
            those of the next three settings that it has.
        landmarks: sampler and count, e.g. ``"conv"`` (one landmark per window: 49 at 224², more at larger
            images), ``"conv:49"`` (never more than 49), ``"average"``, ``"random:49"``, ``"first:49"``. None:
            ``"average:128"`` for softfree, ``"conv"`` for SOFT and SOFT++.
        strides: side of a landmark's window per stage.
        value_convs: side of the depthwise convolution of V per stage.
        mlp_convs: side of the depthwise convolution of the MLPs' hidden tokens per stage; 0: none.
        overlap: 3x3 convolutions in stem and downsampling (Table 11b); False: windows that do not overlap.
        class_token: an additional token in stage 4, which ``global_pool="token"`` reads.
        softmax_last_stage: stage 4 consists of pre-norm softmax blocks, as in the authors' released models.
        pre_norm: norm before each branch, in all stages, instead of after the sum as in the papers.
        mlp_ratio: hidden channels of the MLPs over channels; None: 4, or 3.5 for rivals with separate keys,
            which take as many parameters, so that all attentions have the same budget.
        drop_rate, proj_drop_rate, drop_path_rate: as in timm's models.
        attention_options: every other keyword is passed to the attention of all stages, such as
            ``iterations=10`` or ``landmark_gain=0.25`` of :class:`softfree.SoftAttention`, ``kernel="relu"``
            of the Performer.
    """

    parts = "stages"

    def __init__(
        self,
        img_size: ImageSize = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "token",
        embed_dims: Sequence[int] = (64, 128, 320, 512),
        num_heads: Sequence[int] = (2, 4, 10, 16),
        depths: Sequence[int] = (2, 2, 5, 2),
        attention: str = "softpp",
        landmarks: Landmarks | None = None,
        strides: Sequence[int] = (8, 4, 2, 1),
        value_convs: Sequence[int] = (9, 5, 3, 3),
        mlp_convs: Sequence[int] = (0, 0, 0, 0),
        overlap: bool = True,
        class_token: bool = True,
        softmax_last_stage: bool = False,
        pre_norm: bool = False,
        mlp_ratio: float | None = None,
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        **attention_options: Any,
    ):
        super().__init__()
        check_options(attention, attention_options, type(self))
        per_stage = dict(
            embed_dims=embed_dims, num_heads=num_heads, depths=depths, strides=strides,
            value_convs=value_convs, mlp_convs=mlp_convs,
        )  # fmt: skip
        for name, values in per_stage.items():
            if len(values) != STAGES:
                raise ValueError(
                    f"{name} must have {STAGES} values, one per stage, got {tuple(values)}"
                )
        self.in_chans = in_chans
        self.num_prefix_tokens = int(class_token)
        self.stem = stem(in_chans, embed_dims[0], overlap=overlap)
        self.downsamples = nn.ModuleList(
            downsample(embed_dims[i], embed_dims[i + 1], overlap=overlap) for i in range(STAGES - 1)
        )
        rates: Any = calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True)
        height, width = parse_img_size(img_size)
        grid = (-(-height // 4), -(-width // 4))
        stages = []
        self.feature_info = []
        for i, (dim, heads, rate) in enumerate(zip(embed_dims, num_heads, rates, strict=True)):
            last = i == STAGES - 1
            softmax = last and softmax_last_stage
            ratio = mlp_ratio
            if ratio is None:
                ratio = 4.0 if softmax else default_mlp_ratio(attention)
            options: dict[str, Any] = dict(
                grid=grid, landmarks=landmarks, stride=strides[i], value_conv=value_convs[i]
            )
            options |= {"strict_landmarks": False, **attention_options}
            blocks = [
                Block(
                    dim,
                    SoftmaxAttention(dim, heads)
                    if softmax
                    else create_attention(attention, dim, heads, **options),
                    mlp_dim=int(dim * ratio),
                    mlp_conv=mlp_convs[i],
                    drop_path=drop_path,
                    proj_drop=proj_drop_rate,
                    pre_norm=softmax or pre_norm,
                    norm_eps=1e-6 if softmax else 1e-5,
                    exact_gelu=softmax,
                )
                for drop_path in rate
            ]
            stages.append(Stage(grid, dim, blocks, class_token=last and class_token))
            self.feature_info.append(dict(num_chs=dim, reduction=4 * 2**i, module=f"stages.{i}"))
            grid = (-(-grid[0] // 2), -(-grid[1] // 2))
        self.stages = nn.ModuleList(stages)
        # Post-norm blocks end in a norm of their own.
        ends_in_sum = softmax_last_stage or pre_norm
        self.norm = nn.LayerNorm(embed_dims[-1], eps=1e-6) if ends_in_sum else nn.Identity()
        self.init_classifier(embed_dims[-1], num_classes, global_pool, drop_rate)
        self.draw_linear_weights()

    def iterate_features(self, x: Tensor) -> Iterator[tuple[Tensor, tuple[int, int]]]:
        # Channels last in memory makes every change between map and tokens a view.
        x, size = to_tokens(self.stem(x.contiguous(memory_format=torch.channels_last)))
        for i, stage in enumerate(self.stages):
            if i > 0:
                x, size = to_tokens(self.downsamples[i - 1](to_map(x, size)))
            x = stage(x, size)
            yield x, size

    def prune_after(self, last: int) -> None:
        super().prune_after(last)
        self.downsamples = self.downsamples[:last]

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        for module in self.modules():
            if isinstance(module, Stage):
                module.grad_checkpointing = enable

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        names = (name for name, _ in self.named_parameters())
        return {name for name in names if "pos_embed" in name or "cls_token" in name}

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Parameter groups for layer-wise learning rates: stem, then stages or their blocks, then head."""
        # In timm, 99999 means the preceding group: downsampling i belongs to the end of stage i.
        downsamples = (r"^downsamples\.(\d+)", (99999,))
        if coarse:
            return dict(stem=r"^stem", blocks=[(r"^stages\.(\d+)", None), downsamples])
        return dict(
            stem=r"^stem",
            blocks=[
                (r"^stages\.(\d+)\.blocks\.(\d+)", None),
                (r"^stages\.(\d+)\.(?:pos_embed|cls_token)", (0,)),
                downsamples,
                (r"^norm", (99999,)),
            ],
        )


# Settings of our own models besides the attention: tokens see their neighbours in the MLP, not in the values.
OWN: dict[str, Any] = dict(
    attention="softfree", global_pool="avg", class_token=False,
    value_convs=(0, 0, 0, 0), mlp_convs=(3, 3, 3, 3),
)  # fmt: skip
# dims, heads, depths
PAPER_SIZES = {
    "tiny": ((64, 128, 320, 512), (2, 4, 10, 16), (2, 2, 5, 2)),
    "small": ((96, 192, 384, 768), (3, 6, 12, 24), (2, 2, 5, 2)),
    "medium": ((96, 192, 384, 768), (3, 6, 12, 24), (2, 2, 18, 2)),
    "large": ((128, 256, 512, 1024), (4, 8, 16, 32), (2, 2, 18, 2)),
}
RELEASE_SIZES = {
    "tiny": ((64, 128, 320, 512), (2, 4, 10, 16), (1, 2, 3, 2)),
    "small": ((64, 128, 320, 512), (2, 4, 10, 16), (1, 3, 20, 4)),
    "medium": ((64, 128, 288, 512), (2, 4, 9, 16), (1, 3, 29, 5)),
    "large": ((64, 128, 320, 512), (2, 4, 10, 16), (1, 3, 40, 5)),
    "huge": ((64, 128, 352, 512), (2, 4, 11, 16), (1, 5, 49, 5)),
}


def _model_arguments() -> dict[str, dict[str, Any]]:
    arguments = {
        f"softfree_{size}": dict(embed_dims=dims, num_heads=heads, depths=depths, **OWN)
        for size, (dims, heads, depths) in PAPER_SIZES.items()
    }
    for family in ("soft", "softpp"):
        for suffix, sizes in (("", PAPER_SIZES), ("_release", RELEASE_SIZES)):
            for size, (dims, heads, depths) in sizes.items():
                arguments[f"{family}_{size}{suffix}"] = dict(
                    embed_dims=dims,
                    num_heads=heads,
                    depths=depths,
                    attention=family,
                    softmax_last_stage=bool(suffix),
                )
    return arguments


MODEL_ARGUMENTS = _model_arguments()
default_cfgs = generate_default_cfgs(
    {f"{name}.untrained": default_cfg(first_conv="stem.0.conv") for name in MODEL_ARGUMENTS}
)
for _name, _arguments in MODEL_ARGUMENTS.items():
    register(SoftPyramid, _name, _arguments, default_out_indices=tuple(range(STAGES)))
