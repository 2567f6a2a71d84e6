"""Models at a size that a test can afford."""

from typing import Any

import timm
from torch import nn

import softfree

PYRAMID = dict(embed_dims=(16, 32, 48, 64), num_heads=(1, 2, 3, 4), depths=(1, 1, 1, 1))
PLAIN = dict(embed_dim=32, num_heads=2, depth=2, patch_size=8)


def small(name: str, **kwargs: Any) -> nn.Module:
    """``timm.create_model(name)`` with few channels and layers, for 64 x 64 images and 5 classes."""
    assert softfree.__version__  # the import registers the names
    shape = PLAIN if "vit" in name else PYRAMID
    classes = {} if kwargs.get("features_only") else dict(num_classes=5)
    return timm.create_model(name, **dict(img_size=64, **classes) | shape | kwargs)
