"""Save a model as a folder in the layout of timm and the Hugging Face Hub.

    FOLDER/  model.safetensors   weights
             config.json         architecture, arguments, classes, preparation of pictures
             README.md           the model card

``timm.create_model("local-dir:FOLDER", pretrained=True)`` loads it after ``import softfree``. Once pushed to
the Hub, ``timm.create_model("hf-hub:USER/NAME", pretrained=True)`` does.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models import save_for_hf
from torch import nn

from softfree.models.registry import is_ours


@torch.no_grad()
def save_for_timm(
    model: nn.Module, folder: Path, metadata: Mapping[str, Any], scores: Mapping[str, Any] = {}
) -> float:
    """Write a classifier into ``folder``; return the largest difference from the model that timm loads.

    Args:
        model: in evaluation mode, on the CPU.
        folder: created if it does not exist.
        metadata: a checkpoint's metadata: model, model_kwargs, class_names, img_size, mean, std, crop_pct,
            interpolation.
        scores: scores for the model card, by name.
    """
    network: Any = model
    side = metadata["img_size"]
    config = {
        key: metadata[key]
        for key in ("mean", "std", "crop_pct", "interpolation")
        if key in metadata
    }
    network.pretrained_cfg = {
        **network.pretrained_cfg,
        **config,
        "architecture": metadata["model"],
        "num_classes": network.num_classes,
        "input_size": (3, side, side),
        "tag": None,
    }
    arguments = json.loads(json.dumps(metadata.get("model_kwargs", {})))
    labels = {"label_names": list(metadata["class_names"])} if "class_names" in metadata else {}
    try:
        loaded = _save_and_load(network, folder, labels, {"img_size": side, **arguments})
    except TypeError as error:
        # Networks that take any size have no such argument.
        if "img_size" not in str(error):
            raise
        loaded = _save_and_load(network, folder, labels, arguments)
    (folder / "README.md").write_text(model_card(folder.name, metadata, scores), encoding="utf-8")
    image = torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(0))
    return (loaded(image) - model(image)).abs().max().item()


def _save_and_load(
    model: nn.Module, folder: Path, labels: dict[str, Any], arguments: dict[str, Any]
) -> nn.Module:
    save_for_hf(model, str(folder), dict(labels), arguments, safe_serialization=True)
    return timm.create_model(f"local-dir:{folder}", pretrained=True).eval()


def model_card(title: str, metadata: Mapping[str, Any], scores: Mapping[str, Any]) -> str:
    """The text of README.md: what the model is, what it scored, how to use it."""
    name, names = metadata["model"], metadata.get("class_names", [])
    lines = ["---", "tags:", "- image-classification", "- timm"]
    lines += ["- softfree"] * is_ours(name)
    lines += ["pipeline_tag: image-classification", "library_name: timm", "---", f"# {title}", ""]
    arguments = ", ".join(
        f"{key}={value}" for key, value in metadata.get("model_kwargs", {}).items()
    )
    lines.append(f"`{name}`" + (f" with {arguments}" if arguments else "") + ".")
    if names:
        shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
        lines.append(f"{len(names)} classes: {shown}.")
    side = metadata["img_size"]
    lines += [f"Pictures of {side} x {side} pixels.", ""]
    if scores:
        lines += ["| score | |", "|---|---:|"]
        lines += [f"| {key} | {value} |" for key, value in scores.items()]
    elif names:
        lines.append("No scores are known.")
    else:
        lines.append("Random weights: it was not trained.")
    lines += ["", "```python"]
    lines += ["import softfree  # registers the architecture"] * is_ours(name)
    lines += [
        "import timm",
        "",
        f'model = timm.create_model("hf-hub:USER/{title}", pretrained=True).eval()',
        "transform = timm.data.create_transform(**timm.data.resolve_data_config(model=model))",
        "```",
        "",
    ]
    return "\n".join(lines)
