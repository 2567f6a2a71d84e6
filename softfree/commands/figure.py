"""Draw the papers' figures for a model and a photo of yours.

`softfree figure heatmap` shows where a patch attends to, `convergence` how fast the Newton iteration
converges, `spectrum` the eigenvalues behind it and what the normalisation does, and `resolution` the accuracy
against the size of the images.
"""

from collections.abc import Callable, Sequence

from softfree.commands._figure_convergence import convergence
from softfree.commands._figure_heatmap import heatmap
from softfree.commands._figure_resolution import resolution
from softfree.commands._figure_spectrum import spectrum
from softfree.commands._subcommands import run_subcommand

FIGURES: dict[str, Callable[..., int]] = {
    "heatmap": heatmap,
    "convergence": convergence,
    "spectrum": spectrum,
    "resolution": resolution,
}


def main(argv: Sequence[str]) -> int:
    """Run ``softfree figure`` with these arguments; return the exit code."""
    return run_subcommand("figure", FIGURES, argv, question="which figure?", description=__doc__)
