"""UPerNet, segmentation-models-pytorch's, on any timm backbone with four maps; inference at any size."""

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import ConvNormAct, freeze_batch_norm_2d
from torch import Tensor, nn

from softfree.models.checks import check_at_least
from softfree.models.features import (
    Weights,
    available_reductions,
    backbone_arguments,
    pretrained_arguments,
    set_grad_checkpointing,
)
from softfree.ops.shared.devices import exporting
from softfree.ops.window_product import window_grid

STRIDE = 4
AUXILIARY_STRIDE = 16
LARGEST_STRIDE = 32


class UPerNet(nn.Module):
    """UPerNet with an auxiliary head. Use :func:`upernet`.

    In evaluation it gives logits at a quarter of the image's size; in training also those of the auxiliary
    head, at 1/16, which looks at the third map.
    """

    def __init__(self, network: Any, aux_channels: int, aux_width: int, num_classes: int):
        super().__init__()
        self.network = network
        self.num_classes = num_classes
        self.auxiliary = nn.Sequential(
            ConvNormAct(aux_channels, aux_width, 3),
            nn.Dropout2d(0.1),
            nn.Conv2d(aux_width, num_classes, 1),
        )

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the backbone's activations in the backward pass: less memory, more time."""
        network: Any = self.network
        set_grad_checkpointing(network.encoder.model, enable)

    def forward(self, image: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Normalised images (batch, 3, H, W) of any size to logits (batch, classes, H/4, W/4), rounded up."""
        height, width = image.shape[-2:]
        image = F.pad(image, (0, -width % LARGEST_STRIDE, 0, -height % LARGEST_STRIDE))
        network: Any = self.network
        features = network.encoder(image)
        logits = network.segmentation_head(network.decoder(features))
        logits = _crop(logits, height, width, STRIDE)
        if not self.training:
            return logits
        return logits, _crop(self.auxiliary(features[-2]), height, width, AUXILIARY_STRIDE)


def upernet(
    backbone: str,
    num_classes: int = 150,
    *,
    width: int = 512,
    backbone_checkpoint: Weights = None,
    frozen_bn: bool = False,
    backbone_kwargs: dict[str, Any] | None = None,
) -> UPerNet:
    """UPerNet on a timm backbone with maps at 1/4, 1/8, 1/16 and 1/32.

    Args:
        backbone: such as ``"softfree_small"``.
        num_classes: classes, the background one of them if it is one.
        width: channels of the decoder; the auxiliary head has half as many.
        backbone_checkpoint, frozen_bn, backbone_kwargs: see :func:`softfree.detection.retinanet`.

    Example:
        >>> import softfree, torch
        >>> model = softfree.segmentation.upernet("softfree_tiny", num_classes=19, width=64).eval()
        >>> model(torch.randn(1, 3, 100, 130)).shape
        torch.Size([1, 19, 25, 33])
        >>> softfree.segmentation.segment(model, torch.randn(1, 3, 100, 130)).shape
        torch.Size([1, 19, 100, 130])
    """
    import segmentation_models_pytorch as smp

    check_at_least(1, num_classes=num_classes)
    check_at_least(2, width=width)
    arguments = backbone_arguments(backbone, **(backbone_kwargs or {}))
    available_reductions(backbone, arguments)
    weights = pretrained_arguments(backbone, backbone_checkpoint, **arguments)
    pretrained = weights.pop("pretrained", None)
    network = smp.UPerNet(
        f"tu-{backbone}",
        encoder_weights=pretrained,
        decoder_channels=width,
        classes=num_classes,
        upsampling=1,
        **arguments,
        **weights,
    )
    if frozen_bn:
        network.encoder = freeze_batch_norm_2d(network.encoder)
    return UPerNet(network, network.encoder.out_channels[-2], width // 2, num_classes)


def segment(
    model: nn.Module, image: Tensor, window: int | None = None, step: int | None = None
) -> Tensor:
    """Logits (batch, classes, H, W) of normalised images (batch, 3, H, W).

    Args:
        model: gives logits at a quarter of the size, in evaluation mode.
        image: of any size.
        window: side of the windows that slide over the image; their logits are averaged where they
            overlap. None: the whole image at once.
        step: from window to window, at most ``window``; two thirds of it if not given.
    """
    if window is None:
        return resize_logits(model(image), image.shape[-2:])
    step = max(1, window * 2 // 3) if step is None else step
    if window < 1 or not 0 < step <= window:
        raise ValueError(
            f"window must be at least 1 and step from 1 to window, got {window} and {step}"
        )
    height, width = image.shape[-2:]
    total: Tensor | None = None
    count = image.new_zeros(1, 1, height, width)
    for top in _starts(height, window, step):
        for left in _starts(width, window, step):
            part = (..., slice(top, top + window), slice(left, left + window))
            logits = resize_logits(model(image[part]), image[part].shape[-2:])
            if total is None:
                total = logits.new_zeros(*logits.shape[:2], height, width)
            total[part] += logits
            count[part] += 1
    assert total is not None
    return total / count


def resize_logits(
    logits: Tensor, size: tuple[int, int] | torch.Size, stride: int = STRIDE
) -> Tensor:
    """Logits at 1/``stride`` of an image of this size, in float32 at its size."""
    resized = F.interpolate(logits.float(), scale_factor=stride, mode="bilinear")
    return resized[..., : size[0], : size[1]]


def _starts(length: int, window: int, step: int) -> list[int]:
    """Where windows begin that cover ``length``; the last ends with it."""
    last = max(0, length - window)
    return sorted({*range(0, last, step), last})


def _crop(logits: Tensor, height: int, width: int, stride: int) -> Tensor:
    """The part of padded logits that covers the image."""
    rows, columns = window_grid((height, width), (stride, stride))
    if exporting():
        # Whether a slice leaves anything out would become a constant of the program.
        for dim, count in ((2, rows), (3, columns)):
            logits = logits.index_select(dim, torch.arange(count, device=logits.device))
        return logits
    return logits[..., :rows, :columns]
