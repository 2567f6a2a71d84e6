"""UPerNet on any timm backbone with four maps: ``softfree.segmentation.upernet("softfree_tiny", ...)``."""

from softfree.models.segmentation import UPerNet, resize_logits, segment, upernet

__all__ = ["UPerNet", "resize_logits", "segment", "upernet"]
