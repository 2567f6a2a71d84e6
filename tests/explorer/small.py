"""A small explorer: three models with random weights, and two drawn photos."""

from io import BytesIO

import numpy as np
from PIL import Image
from torch import nn

from softfree.analysis.subject import Subject
from tests.analysis.small import small

PREPARATION = {"img_size": 64, "mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25)}
NAMES = ["ant", "bee", "cat", "dog", "<b>eel</b>"]


def subjects() -> list[Subject]:
    classifier = {"task": "classification", "class_names": NAMES, **PREPARATION}
    return [
        Subject("SOFT++ run", spread(small("softpp_tiny", strides=(2, 2, 1, 1))), classifier),
        Subject("softmax run", spread(small("softpp_tiny", attention="softmax")), classifier),
        Subject("softfree run", small("softfree_tiny"), classifier),
    ]


def spread(model: nn.Module) -> nn.Module:
    """Queries far enough apart for maps with contrast, which hardly two patches share."""
    for name, module in model.named_modules():
        if name.endswith((".qv", ".qkv")):
            nn.init.normal_(module.weight, std=2.0)
    return model


def photo(seed: int = 0, width: int = 90, height: int = 70) -> Image.Image:
    coarse = np.random.default_rng(seed).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def encoded(picture: Image.Image, kind: str = "PNG") -> bytes:
    file = BytesIO()
    picture.save(file, kind)
    return file.getvalue()
