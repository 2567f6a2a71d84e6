"""torchvision's RetinaNet and Mask R-CNN on any timm backbone with four maps.

    image -> backbone -> feature pyramid (FPN) -> heads -> boxes, labels, scores (and masks)

Both are called like torchvision's detectors: with a list of images (3, H, W) in 0..1, of any sizes, which
they normalise and resize themselves. In training they also take a list of targets and return the losses.
Label 0 is the background, so ``num_classes`` is one more than the number of categories.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torchvision.models.detection import MaskRCNN, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.retinanet import RetinaNetHead
from torchvision.models.detection.roi_heads import expand_boxes, expand_masks
from torchvision.models.detection.rpn import RPNHead
from torchvision.models.detection.transform import GeneralizedRCNNTransform
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import ExtraFPNBlock, LastLevelMaxPool, LastLevelP6P7

from softfree.models.checks import check_at_least, check_grouped
from softfree.models.features import REDUCTIONS, PyramidFeatures, Weights
from softfree.models.regions import RegionAlign, RegionHeads, RegionProposals, dense_losses
from softfree.ops.shared.precision import full_precision

ASPECT_RATIOS = (0.5, 1.0, 2.0)
ROI_SIZE = 7


class FeaturePyramid(nn.Module):
    """Backbone and FPN: an image (batch, 3, H, W) to an ordered dict of maps with ``out_channels`` channels.

    The names are "0" to "3" for the maps at 1/4 to 1/32, followed by those of ``extra``. The maps are float32
    even under autocast: torchvision gives anchors the dtype of the maps, and bfloat16 has steps of 8 at
    coordinates beyond 1024.
    """

    def __init__(self, features: PyramidFeatures, out_channels: int, extra: ExtraFPNBlock):
        super().__init__()
        self.features = features
        self.out_channels = out_channels
        self.fpn = FeaturePyramidNetwork(features.channels, out_channels, extra_blocks=extra)
        self.names = [str(i) for i in range(len(REDUCTIONS))][-len(features.channels) :]

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        maps = self.fpn(OrderedDict(zip(self.names, self.features(image), strict=True)))
        return OrderedDict((name, x.float()) for name, x in maps.items())


class _Detector:
    """Additions to torchvision's detectors.

    Training steps that take all pictures at once (softfree.models.regions), and timm's switch for recomputing
    the backbone's activations.
    """

    backbone: FeaturePyramid
    training: bool
    transform: GeneralizedRCNNTransform

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        _batch_pictures(self.transform)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.backbone.features.set_grad_checkpointing(enable)

    def forward(
        self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None
    ) -> dict[str, Tensor] | list[dict[str, Tensor]]:
        if not self.training:
            return super().forward(images, targets)  # type: ignore[misc]
        batch, targets = self.transform(images, targets)
        check_boxes(targets)
        return self.losses(batch, targets)

    def losses(self, batch: ImageList, targets: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """The losses of prepared pictures."""
        raise NotImplementedError


class _RetinaNet(_Detector, RetinaNet):
    def losses(self, batch: ImageList, targets: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        features = list(self.backbone(batch.tensors).values())
        return self.compute_loss(
            targets, self.head(features), self.anchor_generator(batch, features)
        )

    def compute_loss(
        self,
        targets: list[dict[str, Tensor]],
        head_outputs: dict[str, Tensor],
        anchors: list[Tensor],
    ) -> dict[str, Tensor]:
        if self.head.regression_head._loss_type != "l1":
            return super().compute_loss(targets, head_outputs, anchors)
        # All pictures have the same anchors.
        return dense_losses(
            targets,
            head_outputs,
            anchors[0],
            self.proposal_matcher,
            self.head.regression_head.box_coder,
        )


class _MaskRCNN(_Detector, MaskRCNN):
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # Our classes use the attributes set by torchvision's constructors and only replace methods.
        self.rpn.__class__ = RegionProposals
        self.roi_heads.__class__ = RegionHeads

    def losses(self, batch: ImageList, targets: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        features = self.backbone(batch.tensors)
        proposals, losses = self.rpn(batch, features, targets)
        _, more_losses = self.roi_heads(features, proposals, batch.image_sizes, targets)
        return {**more_losses, **losses}


def check_boxes(targets: list[dict[str, Tensor]] | None) -> None:
    """Refuse a training step without targets, and boxes without an area."""
    if targets is None:
        raise ValueError("training needs targets")
    boxes = torch.cat([target["boxes"] for target in targets])
    flat = (boxes[:, 2:] <= boxes[:, :2]).any(1)
    # Checked once for all pictures, because the host waits for the result.
    if flat.any():
        raise ValueError(f"boxes must have a width and a height, got {boxes[flat][0].tolist()}")


def _batch_pictures(transform: Any) -> None:
    """Make torchvision's transform take all pictures at once; its attributes stay the same."""
    transform.__class__ = _Transform
    for name, values in (("mean", transform.image_mean), ("std", transform.image_std)):
        transform.register_buffer(name, torch.tensor(values)[:, None, None], persistent=False)


class _Transform(GeneralizedRCNNTransform):
    """torchvision's transform for all pictures at once.

    One by one, each would wait for the GPU several times.
    """

    mean: Tensor
    std: Tensor

    def normalize(self, image: Tensor) -> Tensor:
        # Floating-point pictures are normalised in their batch; torchvision refuses others.
        return image if image.is_floating_point() else super().normalize(image)

    def batch_images(self, images: list[Tensor], size_divisible: int = 32) -> Tensor:
        height, width = (
            math.ceil(max(image.shape[axis] for image in images) / size_divisible) * size_divisible
            for axis in (1, 2)
        )
        mean, std = self.mean.to(images[0]), self.std.to(images[0])
        # The mean becomes 0 after normalisation, as torchvision pads.
        batch = mean.repeat(len(images), 1, height, width)
        for own, image in zip(batch, images, strict=True):
            own[:, : image.shape[1], : image.shape[2]] = image
        return (batch - mean) / std

    def postprocess(
        self,
        result: list[dict[str, Tensor]],
        image_shapes: list[tuple[int, int]],
        original_image_sizes: list[tuple[int, int]],
    ) -> list[dict[str, Tensor]]:
        if self.training:
            return result
        lengths = [len(found["boxes"]) for found in result]
        boxes = torch.cat([found["boxes"] for found in result])
        scales = [
            (size[1] / seen[1], size[0] / seen[0]) * 2
            for seen, size in zip(image_shapes, original_image_sizes, strict=True)
        ]
        boxes = boxes * boxes.new_tensor(scales).repeat_interleave(
            torch.tensor(lengths).to(boxes.device), dim=0, output_size=len(boxes)
        )
        boxes_of = boxes.split(lengths)
        for found, own_boxes in zip(result, boxes_of, strict=True):
            found["boxes"] = own_boxes
        if not all("masks" in found for found in result):
            return result
        placed = place_masks([found["masks"] for found in result], boxes_of, original_image_sizes)
        for found, own_masks in zip(result, placed, strict=True):
            found["masks"] = own_masks
        return result


def padded_size(size: tuple[int, int], min_size: int, max_size: int) -> tuple[int, int]:
    """Height and width at which detectors see a single picture: resized, then padded to multiples of 32.

    Example:
        >>> padded_size((480, 640), 800, 1333), padded_size((500, 640), 800, 1333)
        ((800, 1088), (800, 1024))
    """
    scale = min(min_size / min(size), max_size / max(size))
    height, width = (math.ceil(math.floor(side * scale) / 32) * 32 for side in size)
    return height, width


def place_masks(
    masks: Sequence[Tensor], boxes: Sequence[Tensor], sizes: Sequence[tuple[int, int]]
) -> list[Tensor]:
    """Place the masks (n, 1, S, S) of each picture's boxes (n, 4) into the whole picture, (n, 1, H, W).

    They are bilinear inside and 0 outside, as from torchvision's ``paste_masks_in_image``. Bilinear
    interpolation is a product with a matrix on either side, (H, S) and (W, S), so all masks of a picture take
    two batched products. The matrices are computed for all pictures at once.

    Example:
        >>> import torch
        >>> boxes = torch.tensor([[2.0, 3.0, 9.0, 8.0]])
        >>> [placed] = place_masks([torch.ones(1, 1, 28, 28)], [boxes], [(12, 16)])
        >>> placed.shape
        torch.Size([1, 1, 12, 16])
    """
    lengths = [len(own) for own in boxes]
    heights, widths = zip(*sizes, strict=True)
    small, scale = expand_masks(torch.cat(list(masks))[:, 0].float(), padding=1)
    left, top, right, bottom = expand_boxes(torch.cat(list(boxes)), scale).to(torch.int64).unbind(1)
    rows = _interpolation(top, bottom, max(heights), small)
    columns = _interpolation(left, right, max(widths), small)
    factors = zip(*(x.split(lengths) for x in (rows, small, columns)), strict=True)
    # These products determine where exactly a mask ends, so they use neither autocast's dtype nor TF32.
    with torch.autocast(small.device.type, enabled=False), full_precision(small.device):
        return [
            (above[:, :height] @ own @ across[:, :width].mT)[:, None]
            for (above, own, across), (height, width) in zip(factors, sizes, strict=True)
        ]


def _interpolation(first: Tensor, last: Tensor, length: int, masks: Tensor) -> Tensor:
    """Weights of a mask's rows at ``length`` pixels, (n, length, S).

    A mask covers the pixels ``first`` to ``last``.
    """
    side = masks.shape[-1]
    pixel = torch.arange(length, device=masks.device)[None, :]
    covered = (last - first + 1).clamp(min=1)[:, None]
    place = (pixel - first[:, None] + 0.5) * side / covered - 0.5
    place = place.clamp(0, side - 1)[..., None].to(masks.dtype)
    weights = (1 - (place - torch.arange(side, device=masks.device)).abs()).clamp(min=0)
    inside = (pixel >= first[:, None]) & (pixel <= last[:, None])
    return weights * inside[..., None]


def retinanet(
    backbone: str,
    num_classes: int = 91,
    *,
    min_size: int | Sequence[int] = 800,
    max_size: int = 1333,
    width: int = 256,
    anchor_size: int = 32,
    head_norm: bool = False,
    backbone_checkpoint: Weights = None,
    frozen_bn: bool = False,
    backbone_kwargs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> RetinaNet:
    """RetinaNet with maps P3 to P7: an FPN on the maps at 1/8, 1/16 and 1/32, and two more convolutions.

    Args:
        backbone: a timm model with four maps, such as ``"softfree_tiny"``.
        num_classes: number of categories plus one for the background.
        min_size, max_size: an image is resized to the short side ``min_size`` (in training, to one of those
            given), or to a smaller one if its long side would exceed ``max_size``.
        width: channels of the FPN and the heads.
        anchor_size: side of the smallest anchors; it doubles from level to level.
        head_norm: GroupNorm in the heads (also called RetinaNet v2), which helps training from scratch.
        backbone_checkpoint: weights to start the backbone from: a file, a run's checkpoint folder, or True
            for those that timm downloads.
        frozen_bn: keep the backbone's BatchNorms unchanged.
        backbone_kwargs: keywords of the backbone, such as ``dict(landmarks="conv")``. By default softfree's
            backbones get a fixed number of landmarks (:func:`softfree.models.features.backbone_arguments`).
        kwargs: keywords of torchvision's ``RetinaNet``, such as ``detections_per_img``.

    Example:
        >>> import softfree, torch
        >>> model = softfree.detection.retinanet("softfree_tiny", num_classes=91, min_size=64).eval()
        >>> [detections] = model([torch.rand(3, 96, 128)])
        >>> sorted(detections)
        ['boxes', 'labels', 'scores']
    """
    check_at_least(1, num_classes=num_classes, width=width, anchor_size=anchor_size)
    check_grouped(**{"width": width} if head_norm else {})
    features = PyramidFeatures(
        backbone,
        checkpoint=backbone_checkpoint,
        reductions=REDUCTIONS[1:],
        frozen_bn=frozen_bn,
        **(backbone_kwargs or {}),
    )
    pyramid = FeaturePyramid(features, width, LastLevelP6P7(features.channels[-1], width))
    sizes = tuple(
        tuple(int(anchor_size * 2**level * 2 ** (step / 3)) for step in range(3))
        for level in range(5)
    )
    anchors = AnchorGenerator(sizes, (ASPECT_RATIOS,) * len(sizes))
    head = RetinaNetHead(
        width,
        anchors.num_anchors_per_location()[0],
        num_classes,
        norm_layer=partial(nn.GroupNorm, min(32, width // 8)) if head_norm else None,
    )
    _float32_outputs(head)
    return _RetinaNet(
        pyramid, num_classes, min_size=min_size, max_size=max_size, anchor_generator=anchors, head=head,
        **kwargs,
    )  # fmt: skip


def mask_rcnn(
    backbone: str,
    num_classes: int = 91,
    *,
    min_size: int | Sequence[int] = 800,
    max_size: int = 1333,
    width: int = 256,
    anchor_size: int = 32,
    backbone_checkpoint: Weights = None,
    frozen_bn: bool = False,
    backbone_kwargs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> MaskRCNN:
    """Mask R-CNN on an FPN of all four maps.

    Args:
        width: channels of the FPN and the mask head; the box head has four times as many.
        anchor_size: side of the anchors at 1/4 of the image; it doubles from level to level.
        kwargs: keywords of torchvision's ``MaskRCNN``, such as ``box_detections_per_img``.
        backbone, num_classes, min_size, max_size, backbone_checkpoint, frozen_bn, backbone_kwargs: see
            :func:`retinanet`.

    Example:
        >>> import softfree, torch
        >>> model = softfree.detection.mask_rcnn("softfree_tiny", num_classes=91, min_size=64).eval()
        >>> [detections] = model([torch.rand(3, 96, 128)])
        >>> sorted(detections)
        ['boxes', 'labels', 'masks', 'scores']
    """
    check_at_least(1, num_classes=num_classes, width=width, anchor_size=anchor_size)
    features = PyramidFeatures(
        backbone, checkpoint=backbone_checkpoint, frozen_bn=frozen_bn, **(backbone_kwargs or {})
    )
    pyramid = FeaturePyramid(features, width, LastLevelMaxPool())
    sizes = tuple((anchor_size * 2**level,) for level in range(5))
    anchors = AnchorGenerator(sizes, (ASPECT_RATIOS,) * len(sizes))
    model = _MaskRCNN(
        pyramid,
        min_size=min_size,
        max_size=max_size,
        rpn_anchor_generator=anchors,
        rpn_head=RPNHead(width, len(ASPECT_RATIOS)),
        box_roi_pool=RegionAlign(pyramid.names, ROI_SIZE, sampling_ratio=2),
        box_head=TwoMLPHead(width * ROI_SIZE**2, 4 * width),
        box_predictor=FastRCNNPredictor(4 * width, num_classes),
        mask_roi_pool=RegionAlign(pyramid.names, 2 * ROI_SIZE, sampling_ratio=2),
        mask_head=MaskRCNNHeads(width, [width] * 4, dilation=1),
        mask_predictor=MaskRCNNPredictor(width, width, num_classes),
        **kwargs,
    )
    heads = model.roi_heads
    for module in (model.rpn.head, heads.box_predictor, heads.mask_predictor):
        _float32_outputs(module)
    return model


def _float32_outputs(module: nn.Module) -> None:
    # Boxes are decoded in the dtype of the heads' outputs, and bfloat16 can't place them to the pixel.
    module.register_forward_hook(_to_float32)


def _to_float32(module: nn.Module, inputs: Any, output: Any) -> Any:
    return tree_map(Tensor.float, output)
