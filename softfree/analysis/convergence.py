"""How fast the Newton iteration of a model's layers converges on images (Fig. 5 of the papers)."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from softfree.analysis.capture import capture_attention


def residual_curves(model: nn.Module, images: Iterable[Tensor], steps: int) -> dict[int, Tensor]:
    """Residuals ``||A Y_k A - A||_2 / ||A||_2`` of every softmax-free layer, by stage.

    Args:
        model: any model with softmax-free layers.
        images: normalised, (3, H, W) each.
        steps: Newton steps to follow, whatever number the layers take.

    Returns:
        stage to (curves, steps + 1): one curve for each image, block and head; entry k is after k steps.
    """
    curves: dict[int, list[Tensor]] = {}
    for image in images:
        for layer in capture_attention(model, image).soft_layers:
            curves.setdefault(layer.stage, []).append(layer.residuals(steps).cpu())
    if not curves:
        raise ValueError("the model has no softmax-free layer, and so no Newton iteration")
    return {stage: torch.cat(found) for stage, found in sorted(curves.items())}
