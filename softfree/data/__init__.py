"""Data sets: image folders, timm's data sets, tar shards, and the embedded digits."""

from softfree.data.classification import load_images
from softfree.data.images import (
    Batch,
    ImageData,
    ImageDataset,
    Unreadable,
    UnreadableImageError,
    collate_images,
    open_image,
    seeded,
)

__all__ = [
    "Batch",
    "ImageData",
    "ImageDataset",
    "Unreadable",
    "UnreadableImageError",
    "collate_images",
    "load_images",
    "open_image",
    "seeded",
]
