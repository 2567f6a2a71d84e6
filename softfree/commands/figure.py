"""Draw the papers' figures for a model and a photo of yours.

`softfree figure heatmap` shows where a patch attends to, `convergence` how fast the Newton iteration
converges, `spectrum` the eigenvalues behind it and what the normalisation does, and `resolution` the accuracy
against the size of the images.
"""

from collections.abc import Callable, Sequence

import tyro

from softfree.commands._figure_convergence import convergence
from softfree.commands._figure_heatmap import heatmap
from softfree.commands._figure_resolution import resolution
from softfree.commands._figure_spectrum import spectrum

FIGURES: dict[str, Callable[..., int]] = {
    "heatmap": heatmap,
    "convergence": convergence,
    "spectrum": spectrum,
    "resolution": resolution,
}


def main(argv: Sequence[str]) -> int:
    """Run ``softfree figure`` with these arguments; return the exit code."""
    if not argv or argv[0] not in (*FIGURES, "-h", "--help"):
        given = f"got {argv[0]!r}" if argv else "e.g. `softfree figure heatmap`"
        raise ValueError(f"which figure? One of {', '.join(FIGURES)}; {given}")
    return tyro.extras.subcommand_cli_from_dict(
        FIGURES, args=argv, prog="softfree figure", description=__doc__
    )
