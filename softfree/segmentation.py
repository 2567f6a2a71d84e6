"""UPerNet, or a linear head, on any timm backbone with four maps: ``softfree.segmentation.upernet("softfree_tiny", ...)``."""

from softfree.models.segmentation import (
    Segmenter,
    UPerNet,
    linear,
    resize_logits,
    segment,
    upernet,
)

__all__ = ["Segmenter", "UPerNet", "linear", "resize_logits", "segment", "upernet"]
