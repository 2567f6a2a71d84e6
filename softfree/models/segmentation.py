"""segmentation-models-pytorch's UPerNet, or a linear head, on any timm backbone with four maps.

Inference works at any size.
"""

from collections.abc import Sequence
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


class Segmenter(nn.Module):
    """A backbone and a decoder that turns its maps into logits. Use :func:`upernet` or :func:`linear`.

    In evaluation it returns logits at a quarter of the image's size. In training it also returns those of the
    auxiliary head at 1/16, or None if there is no such head.

    Args:
        network: has ``encoder`` (image to maps), ``decoder`` (maps to a map at 1/4) and
            ``segmentation_head``.
        num_classes: number of classes.
        auxiliary: head from the third map, at 1/16, to logits.
    """

    def __init__(self, network: Any, num_classes: int, auxiliary: nn.Module | None = None):
        super().__init__()
        self.network = network
        self.num_classes = num_classes
        self.auxiliary = auxiliary

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the backbone's activations in the backward pass: less memory, more time."""
        network: Any = self.network
        set_grad_checkpointing(network.encoder.model, enable)

    def forward(self, image: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        """Normalised images (batch, 3, H, W) of any size to logits (batch, classes, H/4, W/4), rounded up."""
        height, width = image.shape[-2:]
        image = F.pad(image, (0, -width % LARGEST_STRIDE, 0, -height % LARGEST_STRIDE))
        network: Any = self.network
        features = network.encoder(image)
        logits = network.segmentation_head(network.decoder(features))
        logits = _crop(logits, height, width, STRIDE)
        if not self.training:
            return logits
        if self.auxiliary is None:
            return logits, None
        return logits, _crop(self.auxiliary(features[-2]), height, width, AUXILIARY_STRIDE)


class UPerNet(Segmenter):
    """UPerNet with an auxiliary head that looks at the third map. Use :func:`upernet`."""

    def __init__(self, network: Any, aux_channels: int, aux_width: int, num_classes: int):
        auxiliary = nn.Sequential(
            ConvNormAct(aux_channels, aux_width, 3),
            nn.Dropout2d(0.1),
            nn.Conv2d(aux_width, num_classes, 1),
        )
        super().__init__(network, num_classes, auxiliary)


class LinearDecoder(nn.Module):
    """Maps at 1/4, 1/8, ... to logits at 1/4: the sum of a linear layer on each map, upsampled to 1/4."""

    def __init__(self, channels: Sequence[int], num_classes: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(width, num_classes, 1) for width in channels)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        maps = maps[-len(self.layers) :]
        logits = self.layers[0](maps[0])
        for layer, each in zip(self.layers[1:], maps[1:], strict=True):
            logits = logits + F.interpolate(layer(each), size=logits.shape[-2:], mode="nearest")
        return logits


class LinearNetwork(nn.Module):
    """A backbone with a :class:`LinearDecoder`, in the form that a :class:`Segmenter` needs."""

    def __init__(self, encoder: Any, num_classes: int):
        super().__init__()
        self.encoder = encoder
        self.decoder = LinearDecoder(encoder.out_channels[-4:], num_classes)
        self.segmentation_head = nn.Identity()


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
        num_classes: number of classes, including the background if it is a class.
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
    network = smp.UPerNet(
        f"tu-{backbone}",
        decoder_channels=width,
        classes=num_classes,
        upsampling=1,
        **_encoder_arguments(backbone, backbone_checkpoint, backbone_kwargs),
    )
    if frozen_bn:
        network.encoder = freeze_batch_norm_2d(network.encoder)
    return UPerNet(network, network.encoder.out_channels[-2], width // 2, num_classes)


def linear(
    backbone: str,
    num_classes: int = 150,
    *,
    backbone_checkpoint: Weights = None,
    frozen_bn: bool = False,
    backbone_kwargs: dict[str, Any] | None = None,
) -> Segmenter:
    """A linear layer on each of a timm backbone's maps at 1/4, 1/8, 1/16 and 1/32, added up.

    It shows what the maps contain by themselves.

    Args:
        backbone, num_classes, backbone_checkpoint, frozen_bn, backbone_kwargs: see :func:`upernet`.

    Example:
        >>> import softfree, torch
        >>> model = softfree.segmentation.linear("softfree_tiny", num_classes=19).eval()
        >>> model(torch.randn(1, 3, 100, 130)).shape
        torch.Size([1, 19, 25, 33])
    """
    from segmentation_models_pytorch.encoders import get_encoder

    check_at_least(1, num_classes=num_classes)
    arguments = _encoder_arguments(backbone, backbone_checkpoint, backbone_kwargs)
    encoder = get_encoder(f"tu-{backbone}", weights=arguments.pop("encoder_weights"), **arguments)
    if frozen_bn:
        encoder = freeze_batch_norm_2d(encoder)
    return Segmenter(LinearNetwork(encoder, num_classes), num_classes)


def _encoder_arguments(
    backbone: str, checkpoint: Weights, kwargs: dict[str, Any] | None
) -> dict[str, Any]:
    """The checked arguments of the backbone, as segmentation-models-pytorch takes them."""
    arguments = backbone_arguments(backbone, **(kwargs or {}))
    available_reductions(backbone, arguments)
    weights = pretrained_arguments(backbone, checkpoint, **arguments)
    return {"encoder_weights": weights.pop("pretrained", None), **arguments, **weights}


def segment(
    model: nn.Module, image: Tensor, window: int | None = None, step: int | None = None
) -> Tensor:
    """Logits (batch, classes, H, W) of normalised images (batch, 3, H, W).

    Args:
        model: returns logits at a quarter of the size; in evaluation mode.
        image: of any size.
        window: side of the windows that slide over the image; their logits are averaged where they
            overlap. None: the whole image at once.
        step: distance between windows, at most ``window``; None: two thirds of it.
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
    """Upsample logits from 1/``stride`` of the image to its full ``size``, in float32."""
    resized = F.interpolate(logits.float(), scale_factor=stride, mode="bilinear")
    return resized[..., : size[0], : size[1]]


def _starts(length: int, window: int, step: int) -> list[int]:
    """The starts of windows that cover ``length``; the last one ends with it."""
    last = max(0, length - window)
    return sorted({*range(0, last, step), last})


def _crop(logits: Tensor, height: int, width: int, stride: int) -> Tensor:
    """The part of padded logits that covers the image."""
    rows, columns = window_grid((height, width), (stride, stride))
    if exporting():
        # With a slice, whether it leaves anything out would become a constant of the program.
        for dim, count in ((2, rows), (3, columns)):
            logits = logits.index_select(dim, torch.arange(count, device=logits.device))
        return logits
    return logits[..., :rows, :columns]
