"""Examine the attention layers of a model: condition, convergence, errors."""

import math
from collections.abc import Sequence
from typing import Annotated, Any

import tyro
from rich.console import Console
from torch import Tensor, nn

from softfree.analysis.capture import CONVERGED, MOST_STEPS, SoftLayer, capture_attention
from softfree.analysis.pictures import load_photo
from softfree.commands.common import (
    NOTHING,
    SUBJECT,
    OneSubject,
    Photo,
    check_img_size,
    command,
    make_table,
    to_json,
)

# Beyond this condition float32 leaves the smallest eigenvalues about one digit.
NEAR_SINGULAR = 1e6
# Weights of a token that add up to less than this change the sum that follows in its third digit.
NEXT_TO_NOTHING = 1e-2


def inspect(
    photo: Photo = None,
    /,
    img_size: int | None = None,
    as_json: Annotated[bool, tyro.conf.arg(name="json"), tyro.conf.FlagCreatePairsOff] = False,
    target: OneSubject = SUBJECT,
) -> int:
    """Print a table of the layers, and what deserves attention.

    Args:
        photo: a photo of yours; otherwise one is drawn.
        img_size: side of the square the model sees; otherwise that of its training.
        as_json: print JSON, for programs.
    """
    check_img_size(img_size)
    picture = load_photo(photo)
    subject = target.load()
    seen = subject.look(picture, img_size)
    rows = examine(subject.model, seen.pixels)
    if as_json:
        print(to_json(rows, indent=2))
    else:
        print_report(
            rows, f"{subject.title} at {seen.picture.width} x {seen.picture.height} pixels"
        )
    return 0


main = command(inspect, __doc__)


def examine(model: nn.Module, image: Tensor) -> list[dict[str, Any]]:
    """A row for each attention layer, in their order; figures of the softmax-free ones."""
    return [
        {"layer": layer.name, "stage": layer.stage, "block": layer.block, "kind": layer.kind}
        | (describe(layer) if isinstance(layer, SoftLayer) else {})
        for layer in capture_attention(model, image).layers
    ]


def describe(layer: SoftLayer) -> dict[str, Any]:
    """The figures of a layer, of its worst head each, and what is wrong with it."""
    condition = layer.condition().max().item()
    row: dict[str, Any] = {
        "m": layer.m,
        # JSON has no infinity.
        "condition": condition if math.isfinite(condition) else None,
        "inverse": layer.method,
        "steps": layer.iterations if layer.method == "newton" else None,
        "residual": layer.residual().max().item(),
        "nystrom_error": layer.nystrom_error().max().item(),
        "spectral_norm": layer.spectral_norm().max().item(),
        "kept_eigenvalues": int(layer.kept_eigenvalues().min()),
        "steps_needed": layer.steps_needed(),
        "total_weight": layer.total_weight().max().item(),
    }
    return {**row, "warnings": warnings_of(row)}


def warnings_of(row: dict[str, Any]) -> list[str]:
    """What is wrong with a layer, and what would help."""
    found = []
    newton = row["inverse"] == "newton"
    if newton and row["residual"] > CONVERGED:
        needed = row["steps_needed"]
        would = (
            f"iterations={needed} would bring it to {CONVERGED:g}"
            if needed is not None
            else f"not even {MOST_STEPS} would bring it to {CONVERGED:g}"
        )
        found.append(
            f"too few Newton steps: the residual is {row['residual']:.2g} after {row['steps']}; {would}"
        )
    condition = row["condition"]
    if condition is None or condition > NEAR_SINGULAR:
        how = "A is singular" if condition is None else f"A is near-singular ({condition:.1e})"
        kept = f"{row['kept_eigenvalues']} of {row['m']} eigenvalues"
        found.append(
            f"{how}: landmarks (nearly) coincide; "
            + (
                f"the {row['steps']} steps invert {kept} and cut the others off"
                if newton
                else f"the solve inverts {kept} by more than half"
            )
        )
    if row["total_weight"] < NEXT_TO_NOTHING:
        found.append(
            f"attends to next to nothing: a token's weights add up to {row['total_weight']:.2g} at most; "
            "landmarks are far from all tokens"
        )
    return found


def print_report(rows: Sequence[dict[str, Any]], title: str) -> None:
    """The table for people, then the warnings."""
    console = Console(highlight=False)
    console.print(f"[bold]{title}[/]; of each layer, the worst head")
    titles = ("stage\nblock", "attention", "m", "condition\nof A", "residual\nafter T", "T",
              "T for\n1e-2", "Nyström\nerror", "norm\nof Y'", "inverted")  # fmt: skip
    table = make_table(titles)
    for row in rows:
        place = f"{row['stage']}.{row['block']}"
        if "m" not in row:
            table.add_row(place, row["kind"], *[NOTHING] * (len(titles) - 2))
            continue
        needed = f"> {MOST_STEPS}" if row["steps_needed"] is None else str(row["steps_needed"])
        solve = row["inverse"] == "solve"
        table.add_row(
            place,
            row["kind"],
            str(row["m"]),
            "inf" if row["condition"] is None else f"{row['condition']:.1e}",
            f"{row['residual']:.1e}",
            *(("solve", NOTHING) if solve else (str(row["steps"]), needed)),
            f"{row['nystrom_error']:.2f}",
            f"{row['spectral_norm']:.3g}",
            f"{row['kept_eigenvalues']}/{row['m']}",
            style="yellow" if row["warnings"] else "",
        )
    console.print(table)
    warned = [(row["layer"], text) for row in rows for text in row.get("warnings", [])]
    for layer, text in warned:
        console.print(f"[yellow]warning[/] {layer}: {text}", soft_wrap=not console.is_terminal)
    if any(row.get("total_weight", 1) < NEXT_TO_NOTHING for row in rows):
        console.print(
            "Training with landmark_gain=0.25 or landmarks=average starts landmarks among the tokens."
        )
    if not warned:
        console.print(
            "No warning: every layer attends and converges, and no matrix A is near-singular."
        )
    console.print(
        "residual: |AYA - A| / |A| after the T Newton steps that the layer takes, or of its solve.\n"
        "Nyström error: of the kernel between sampled tokens, rebuilt from the landmarks.\n"
        "norm of Y': of the matrix between the two kernels. inverted: eigenvalues of A\n"
        "that T steps invert by more than half; the others are cut off, which bounds Y'.",
        style="dim",
    )
