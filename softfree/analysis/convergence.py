"""How fast the Newton iteration of a model's layers converges on images (Fig. 5 of the papers)."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from softfree.analysis.capture import CONVERGED, capture_attention
from softfree.analysis.plots import new_figure


def residual_curves(model: nn.Module, images: Iterable[Tensor], steps: int) -> dict[int, Tensor]:
    """Residuals ``||A Y_k A - A||_2 / ||A||_2`` of every softmax-free layer on images (3, H, W), normalised.

    Returns (curves, steps + 1) for each stage: one curve for each image, block and head. Entry k is the
    residual after k steps, regardless of how many the layers use.
    """
    curves: dict[int, list[Tensor]] = {}
    for image in images:
        for layer in capture_attention(model, image).soft_layers:
            curves.setdefault(layer.stage, []).append(layer.residuals(steps).cpu())
    if not curves:
        raise ValueError("the model has no softmax-free layer, so it has no Newton iteration")
    return {stage: torch.cat(found) for stage, found in sorted(curves.items())}


def draw_convergence(curves: dict[int, Tensor], taken: set[int], title: str, colour: str) -> Any:
    """Draw residual against step, one panel per stage, in the colour of the model's attention."""
    figure = new_figure(2.6 * len(curves) + 0.8, 4)
    panels = figure.subplots(1, len(curves), sharey=True, squeeze=False)[0]
    for axes, (stage, found) in zip(panels, curves.items(), strict=True):
        values = found.clamp(min=1e-16).numpy()
        steps = np.arange(values.shape[1])
        axes.plot(steps, values.mean(0), color=colour)
        axes.fill_between(steps, values.min(0), values.max(0), color=colour, alpha=0.2, linewidth=0)
        axes.axhline(CONVERGED, color="black", linestyle=":", linewidth=1)
        for steps_taken in sorted(taken):
            axes.axvline(steps_taken, color="black", linestyle="--", linewidth=1)
        axes.set(yscale="log", ylim=(1e-9, 2), xlim=(0, steps[-1]), xlabel="Newton steps k")
        axes.set_title(f"stage {stage}", fontsize=9)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel(r"residual  $\|A Y_k A - A\|_2\ /\ \|A\|_2$")
    what = "Convergence of the Newton iteration" if taken else "Residual of the solve"
    figure.suptitle(f"{what}: {title}", fontsize=10)
    model = ", ".join(map(str, sorted(taken)))
    figure.supxlabel(
        "line: mean; band: range over all images, blocks and heads; dotted: converged"
        + (f"; dashed: the steps that the model takes ({model})" if taken else ""),
        fontsize=8,
    )
    return figure
