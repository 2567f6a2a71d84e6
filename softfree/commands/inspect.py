"""Examine the attention layers of a model: condition, convergence, errors."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.markup import escape

from softfree.analysis.capture import (
    CONVERGED,
    MOST_STEPS,
    OWN,
    AttentionCapture,
    AttentionLayer,
    SoftLayer,
    capture_attention,
    capture_sequence,
)
from softfree.analysis.judgement import judge_layer
from softfree.analysis.pictures import load_photo
from softfree.analysis.subject import Subject
from softfree.commands.common import (
    NOTHING,
    SUBJECT,
    OneSubject,
    Photo,
    check_img_size,
    command,
    make_table,
    message_console,
    to_json,
)
from softfree.training.longrange import LongRange, first_sample

# Beyond this condition number, the smallest eigenvalues have only about one correct digit in float32.
NEAR_SINGULAR = 1e6


def inspect(
    photo: Photo = None,
    /,
    img_size: int | None = None,
    as_json: Annotated[bool, tyro.conf.arg(name="json"), tyro.conf.FlagCreatePairsOff] = False,
    target: OneSubject = SUBJECT,
) -> int:
    """Print a table of the layers, and warnings about problems.

    Args:
        photo: one of your photos; otherwise one is drawn.
        img_size: side of the square the model sees; otherwise the training size.
        as_json: print JSON, for programs.
    """
    check_img_size(img_size)
    load_photo(photo)  # checked before a model is loaded in vain
    subject = target.load()
    captured, words = look(subject, photo, img_size)
    rows = [describe(layer) for layer in captured.layers]
    if as_json:
        print(to_json(rows, indent=2))
    else:
        print_report(rows, f"{subject.title} on {words}")
    return 0


main = command(inspect, __doc__)


def look(
    subject: Subject, photo: Path | None = None, img_size: int | None = None
) -> tuple[AttentionCapture, str]:
    """Capture the attention of a model on a photo, or of a sequence model on a sample.

    Also returns a description of the input.
    """
    if subject.metadata["task"] != LongRange.name:
        seen = subject.look(load_photo(photo), img_size)
        what = "a drawn picture" if photo is None else "a photo"
        size = f"{what} of {seen.picture.width} x {seen.picture.height} pixels"
        return capture_attention(subject.model, seen.pixels), size
    if photo is not None or img_size is not None:
        raise ValueError("a sequence model takes no photo; don't use a photo or --img-size with it")
    assert subject.checkpoint is not None
    tokens = first_sample(subject.checkpoint)
    return capture_sequence(subject.model, tokens), "a sample of its task"


def describe(layer: AttentionLayer) -> dict[str, Any]:
    """A layer's figures and its faults.

    Only softmax-free layers have figures of A, each for the worst head.
    """
    judged = judge_layer(layer)
    row: dict[str, Any] = {
        "layer": layer.name,
        "stage": layer.stage,
        "block": layer.block,
        "kind": layer.kind,
        "total_weight": judged.total,
        "contrast": judged.contrast,
    }
    if isinstance(layer, SoftLayer):
        condition = layer.condition().max().item()
        row |= {
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
        }
    warnings = faults_of_inverse(row) if "m" in row else []
    return {
        **row,
        "judgement": judged.word,
        "warnings": warnings + [judged.text] * bool(judged.text),
    }


def faults_of_inverse(row: dict[str, Any]) -> list[str]:
    """The faults of a softmax-free layer's inverse, and what would help."""
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
    return found


def print_report(rows: Sequence[dict[str, Any]], title: str) -> None:
    """Print the table, then the warnings."""
    console = message_console()
    console.print(f"[bold]{escape(title)}[/]")
    newton = any(row.get("inverse") == "newton" for row in rows)
    titles = ["stage\nblock", "kind", "total", "con-\ntrast", "cond.\nof A", "resid.\nafter T", "T",
              *["T for\n1e-2"] * newton, "Nyström\nerror", "in-\nverted"]  # fmt: skip
    table = make_table(titles)
    for row in rows:
        place = f"{row['stage']}.{row['block']}"
        total = row["total_weight"]
        attends = f"{total:.2g}" if total >= 0.01 else f"{total:.0e}", f"{row['contrast']:.0%}"
        if "m" not in row:
            table.add_row(place, row["kind"], *attends, *[NOTHING] * (len(titles) - 4))
            continue
        needed = f"> {MOST_STEPS}" if row["steps_needed"] is None else str(row["steps_needed"])
        steps = ["solve", *[NOTHING] * newton]
        if row["inverse"] == "newton":
            steps = [str(row["steps"]), needed]
        table.add_row(
            place,
            row["kind"],
            *attends,
            "inf" if row["condition"] is None else f"{row['condition']:.1e}",
            f"{row['residual']:.1e}",
            *steps,
            f"{row['nystrom_error']:.2f}",
            f"{row['kept_eigenvalues']}/{row['m']}",
            style="yellow" if row["warnings"] else "",
        )
    console.print(table, soft_wrap=False)
    warned = [(row["layer"], text) for row in rows for text in row["warnings"]]
    for layer, text in warned:
        console.print(f"[yellow]warning[/] {layer}: {text}")
    if any(row["judgement"] == "dead" and row["kind"] != OWN for row in rows):
        console.print(
            "Convolution landmarks start far from all tokens; softfree_* (and --attention\n"
            "softfree) uses means of normed queries instead and attends from the start."
        )
    if not warned:
        console.print(
            "No warning: every layer attends and converges, and no matrix A is near-singular."
        )
    console.print(
        "total: sum of a token's absolute weights; contrast: their range relative to the\n"
        "largest. Both are of the head with the most, other figures of the worst head.\n"
        "cond.: condition number of A. resid.: |AYA - A| / |A| after the T Newton steps\n"
        "that the layer takes, or of its solve. Nyström error: of the kernel between\n"
        "sampled tokens, rebuilt from the landmarks. inverted: eigenvalues of A, one per\n"
        "landmark, that are inverted by more than half; Newton steps cut the others off.\n"
        "--json has more figures.",
        style="dim",
    )
