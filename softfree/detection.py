"""Detectors on any timm backbone with four maps: ``softfree.detection.mask_rcnn("softfree_tiny", ...)``."""

from softfree.models.detection import mask_rcnn, place_masks, retinanet

__all__ = ["mask_rcnn", "place_masks", "retinanet"]
