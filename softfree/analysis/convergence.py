"""What the inverse of a model's layers does with A: the Newton iteration's convergence, a solve's spectrum."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from softfree.analysis.capture import CONVERGED, SoftLayer, capture_attention
from softfree.analysis.plots import new_figure

# Of every stage: one curve for each image, block and head.
Curves = dict[int, Tensor]


def residual_curves(model: nn.Module, images: Iterable[Tensor], steps: int) -> Curves:
    """Residuals ``||A Y_k A - A||_2 / ||A||_2`` of every softmax-free layer on images (3, H, W), normalised.

    Returns (curves, steps + 1) for each stage. Entry k is the residual after k steps, regardless of how many
    the layers use.
    """
    return _gather(model, images, lambda layer: layer.residuals(steps))


def share_curves(model: nn.Module, images: Iterable[Tensor]) -> Curves:
    """How far every softmax-free layer inverts the eigenvalues of its A: 1 fully, 0 not at all.

    Returns (curves, m) for each stage, in the order of the eigenvalues, the largest first.
    """
    return _gather(model, images, SoftLayer.inverted_share)


def _gather(
    model: nn.Module, images: Iterable[Tensor], read: Callable[[SoftLayer], Tensor]
) -> Curves:
    curves: dict[int, list[Tensor]] = {}
    for image in images:
        for layer in capture_attention(model, image).soft_layers:
            curves.setdefault(layer.stage, []).append(read(layer).cpu())
    if not curves:
        raise ValueError("the model has no softmax-free layer, so it inverts nothing")
    return {stage: torch.cat(found) for stage, found in sorted(curves.items())}


def draw_convergence(curves: Curves, taken: set[int], title: str, colour: str) -> Any:
    """Draw residual against step, one panel per stage, in the colour of the model's attention."""
    figure, panels = _draw(curves, 0, f"Convergence of the Newton iteration: {title}", colour)
    for axes in panels:
        axes.axhline(CONVERGED, color="black", linestyle=":", linewidth=1)
        for steps_taken in sorted(taken):
            axes.axvline(steps_taken, color="black", linestyle="--", linewidth=1)
        axes.set(yscale="log", ylim=(1e-9, 2), xlabel="Newton steps k")
    panels[0].set_ylabel(r"residual  $\|A Y_k A - A\|_2\ /\ \|A\|_2$")
    steps = ", ".join(map(str, sorted(taken)))
    _explain(figure, f"dotted: converged; dashed: the steps that the model takes ({steps})")
    return figure


def draw_shares(curves: Curves, title: str, colour: str) -> Any:
    """Draw how far each eigenvalue is inverted, one panel per stage, in the colour of the model's attention."""
    figure, panels = _draw(curves, 1, f"What the solve inverts: {title}", colour)
    for axes, found in zip(panels, curves.values(), strict=True):
        axes.axhline(0.5, color="black", linestyle=":", linewidth=1)
        axes.set(ylim=(0, 1.02), xlabel="number of the eigenvalue")
        kept = (found > 0.5).sum(-1).double().mean()
        axes.text(
            0.5, 0.04, f"{kept:.0f} of {found.shape[1]} above half", ha="center", fontsize=8,
            transform=axes.transAxes,
        )  # fmt: skip
    panels[0].set_ylabel("inverted share of the eigenvalue of A")
    _explain(figure, "dotted: inverted by half")
    return figure


def _draw(curves: Curves, first: int, title: str, colour: str) -> tuple[Any, Any]:
    """A figure with a panel for each stage: mean and range of its curves, against numbers from ``first``."""
    figure = new_figure(2.6 * len(curves) + 0.8, 4)
    panels = figure.subplots(1, len(curves), sharey=True, squeeze=False)[0]
    for axes, (stage, found) in zip(panels, curves.items(), strict=True):
        values = found.clamp(min=1e-16).numpy()
        number = np.arange(first, first + values.shape[1])
        mean, least, most = values.mean(0), values.min(0), values.max(0)
        if len(number) == 1:  # neither a line nor a band would show
            axes.plot(number, mean, "o", color=colour)
            axes.vlines(number, least, most, color=colour)
            axes.set(xlim=(first - 0.5, first + 0.5), xticks=number)
        else:
            axes.plot(number, mean, color=colour)
            axes.fill_between(number, least, most, color=colour, alpha=0.2, linewidth=0)
            axes.set(xlim=(first, number[-1]))
        axes.set_title(f"stage {stage}", fontsize=9)
        axes.grid(alpha=0.3)
    figure.suptitle(title, fontsize=10)
    return figure, panels


def _explain(figure: Any, lines: str) -> None:
    figure.supxlabel(
        f"line: mean; band: range over all images, blocks and heads; {lines}", fontsize=8
    )
