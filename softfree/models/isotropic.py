"""Backbones without a pyramid: one resolution from the first layer to the last.

image -> 16 x 16 patches -> positions -> 12 blocks -> mean of the tokens -> classifier
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import calculate_drop_path_rates
from timm.models import generate_default_cfgs
from torch import Tensor, nn

from softfree.layers.block import Block
from softfree.layers.embeddings import PositionEmbedding
from softfree.layers.factory import check_options, create_attention, default_mlp_ratio
from softfree.layers.landmarks import Landmarks
from softfree.models.backbone import Backbone, ImageSize, call_block, parse_img_size, to_tokens
from softfree.models.registry import default_cfg, register


class SoftVisionTransformer(Backbone):
    """A plain vision transformer of softmax-free blocks (Table 11a of the papers).

    Args:
        img_size: the size that its positions are learned for; they are resized for any other size.
        in_chans, num_classes: as in timm's models; ``global_pool`` is ``"avg"`` or ``""``.
        patch_size: side of a patch; images are padded to a multiple of it.
        embed_dim, num_heads, depth: channels and heads of the blocks, and their number.
        attention, mlp_ratio, attention_options: as in :class:`softfree.models.SoftPyramid`.
        landmarks: as in :class:`softfree.models.SoftPyramid`.
        stride, value_conv: as in :class:`softfree.SoftAttention`; stride 2 gives 49 landmarks at 224².
        mlp_conv: side of the depthwise convolution of the MLPs' hidden tokens; 0: none.
        drop_rate, proj_drop_rate, drop_path_rate: as in timm's models.
    """

    parts = "blocks"

    def __init__(
        self,
        img_size: ImageSize = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        patch_size: int = 16,
        embed_dim: int = 384,
        num_heads: int = 12,
        depth: int = 12,
        attention: str = "softpp",
        landmarks: Landmarks | None = None,
        stride: int = 2,
        value_conv: int = 3,
        mlp_conv: int = 0,
        mlp_ratio: float | None = None,
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        **attention_options: Any,
    ):
        super().__init__()
        check_options(attention, attention_options, type(self))
        height, width = parse_img_size(img_size)
        grid = (-(-height // patch_size), -(-width // patch_size))
        self.in_chans = in_chans
        self.patch_size = patch_size
        self.grad_checkpointing = False
        self.patch_embed = nn.Conv2d(in_chans, embed_dim, patch_size, stride=patch_size)
        self.pos_embed = PositionEmbedding(grid, embed_dim)
        rates: Any = calculate_drop_path_rates(drop_path_rate, depth)
        options: dict[str, Any] = dict(
            grid=grid, landmarks=landmarks, stride=stride, value_conv=value_conv
        )
        options |= {"strict_landmarks": False, **attention_options}
        if mlp_ratio is None:
            mlp_ratio = default_mlp_ratio(attention)
        self.blocks = nn.ModuleList(
            Block(
                embed_dim,
                create_attention(attention, embed_dim, num_heads, **options),
                mlp_dim=int(embed_dim * mlp_ratio),
                mlp_conv=mlp_conv,
                drop_path=rate,
                proj_drop=proj_drop_rate,
            )
            for rate in rates
        )
        self.feature_info = [
            dict(num_chs=embed_dim, reduction=patch_size, module=f"blocks.{i}")
            for i in range(depth)
        ]
        self.norm = nn.Identity()
        self.init_classifier(embed_dim, num_classes, global_pool, drop_rate)
        self.draw_linear_weights()

    def iterate_features(self, x: Tensor) -> Iterator[tuple[Tensor, tuple[int, int]]]:
        below, right = -x.shape[2] % self.patch_size, -x.shape[3] % self.patch_size
        x = F.pad(x, (0, right, 0, below)).contiguous(memory_format=torch.channels_last)
        x, size = to_tokens(self.patch_embed(x))
        x = self.pos_embed(x, size)
        for block in self.blocks:
            x = call_block(block, x, size, self.grad_checkpointing)
            yield x, size

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        return {"pos_embed.weight"}

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        return dict(stem=r"^patch_embed|^pos_embed", blocks=[(r"^blocks\.(\d+)", None)])


MODEL_ARGUMENTS = {
    f"{family}_vit_small": dict(attention=family) for family in ("softfree", "soft", "softpp")
}
default_cfgs = generate_default_cfgs(
    {f"{name}.untrained": default_cfg(first_conv="patch_embed") for name in MODEL_ARGUMENTS}
)
for _name, _arguments in MODEL_ARGUMENTS.items():
    register(SoftVisionTransformer, _name, _arguments, default_out_indices=3)
