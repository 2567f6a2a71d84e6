"""Draw the papers' figures for a model and a photo of yours.

`softfree figure heatmap` shows where a patch attends to, `convergence` how fast the Newton iteration
converges, `spectrum` the eigenvalues behind it and what the normalisation does, and `resolution` the accuracy
against the size of the images.
"""

from collections.abc import Callable, Sequence

from softfree.commands.common import run_subcommand
from softfree.commands.figure import convergence, heatmap, resolution, spectrum

FIGURES: dict[str, Callable[..., int]] = {
    "heatmap": heatmap.heatmap,
    "convergence": convergence.convergence,
    "spectrum": spectrum.spectrum,
    "resolution": resolution.resolution,
}


def main(argv: Sequence[str]) -> int:
    """Run ``softfree figure`` with these arguments; return the exit code."""
    return run_subcommand("figure", FIGURES, argv, question="which figure?", description=__doc__)
