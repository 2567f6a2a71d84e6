"""A checkpoint such as `softfree train` writes, of a model that a test can afford."""

import json
from pathlib import Path
from typing import Any

import timm
import torch

import softfree
from softfree.training.checkpoint import write_checkpoint

SHAPE = dict(embed_dims=(16, 32, 48, 64), num_heads=(1, 2, 3, 4), depths=(1, 1, 1, 1))


def classifier_checkpoint(
    folder: Path, classes: int = 10, img_size: int = 64, name: str = "softpp_tiny", **kwargs: Any
) -> Path:
    """A classifier with random weights; a pyramid is made small."""
    assert softfree.__version__  # the import registers the names
    torch.manual_seed(0)
    arguments = SHAPE | kwargs if name == "softpp_tiny" else kwargs
    model = timm.create_model(name, num_classes=classes, img_size=img_size, **arguments)
    metadata = dict(
        task="classification",
        model=name,
        model_kwargs=arguments,
        class_names=[str(number) for number in range(classes)],
        img_size=img_size,
        mean=(0.5, 0.5, 0.5),
        std=(0.25, 0.25, 0.25),
        crop_pct=1.0,
        interpolation="bilinear",
    )
    settings = json.dumps({"data": {"data_dir": None, "dataset": ""}})
    write_checkpoint(folder, model.state_dict(), metadata, settings)
    return folder
