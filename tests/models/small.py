"""The registered names at a size that a test can afford."""

from typing import Any

import timm
from torch import nn

import softfree

OWN = [f"softfree_{size}" for size in ("tiny", "small", "medium", "large")]
PAPER = [
    f"{kind}_{size}" for kind in ("soft", "softpp") for size in ("tiny", "small", "medium", "large")
]
RELEASE = [
    f"{kind}_{size}_release"
    for kind in ("soft", "softpp")
    for size in ("tiny", "small", "medium", "large", "huge")
]
ISOTROPIC = ["softfree_vit_small", "soft_vit_small", "softpp_vit_small"]
ALL = [*OWN, *PAPER, *RELEASE, *ISOTROPIC]
# One name of each kind of network; made small, the sizes of a family are one and the same.
KINDS = [
    "softfree_tiny",
    "soft_tiny",
    "softpp_tiny",
    "softpp_tiny_release",
    "softfree_vit_small",
    "softpp_vit_small",
]

PYRAMID = dict(embed_dims=(16, 32, 48, 64), num_heads=(1, 2, 3, 4), depths=(1, 1, 1, 1))
PLAIN = dict(embed_dim=32, num_heads=2, depth=3, patch_size=8)


def small(name: str, **kwargs: Any) -> nn.Module:
    """``timm.create_model(name)`` with few channels and layers, for 64 x 64 images and 5 classes."""
    assert softfree.__version__  # the import registers the names
    shape = PLAIN if name in ISOTROPIC else PYRAMID
    features = kwargs.get("features_only", False)
    defaults: dict[str, Any] = dict(img_size=64, **({} if features else dict(num_classes=5)))
    return timm.create_model(name, **{**defaults, **shape, **kwargs})
