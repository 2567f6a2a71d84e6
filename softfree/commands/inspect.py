"""Examine the attention layers of a model: condition, convergence, errors."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from softfree.analysis.capture import (
    CONVERGED,
    MOST_STEPS,
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

# Beyond this condition float32 leaves the smallest eigenvalues about one digit.
NEAR_SINGULAR = 1e6


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
    load_photo(photo)  # before a model is loaded for nothing
    subject = target.load()
    captured, words = look(subject, photo, img_size)
    rows = [describe(layer) for layer in captured.layers]
    if as_json:
        print(to_json(rows, indent=2))
    else:
        print_report(rows, f"{subject.title} at {words}")
    return 0


main = command(inspect, __doc__)


def look(
    subject: Subject, photo: Path | None = None, img_size: int | None = None
) -> tuple[AttentionCapture, str]:
    """The attention of a model on a photo, or on a sample of its own where it is one of sequences; and that in words."""
    if subject.metadata["task"] != LongRange.name:
        seen = subject.look(load_photo(photo), img_size)
        size = f"{seen.picture.width} x {seen.picture.height} pixels"
        return capture_attention(subject.model, seen.pixels), size
    if photo is not None or img_size is not None:
        raise ValueError("a model of sequences sees no photo; leave it and --img-size out")
    assert subject.checkpoint is not None
    tokens = first_sample(subject.checkpoint)
    return capture_sequence(subject.model, tokens), "a sample of its task"


def describe(layer: AttentionLayer) -> dict[str, Any]:
    """A layer's figures, of its worst head each, and what is wrong with it; those of A for softmax-free ones alone."""
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
    """What is wrong with a softmax-free layer's inverse, and what would help."""
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
    """The table for people, then the warnings."""
    console = message_console()
    console.print(f"[bold]{title}[/]; of each layer, the worst head")
    newton = any(row.get("inverse") == "newton" for row in rows)
    titles = ["stage\nblock", "kind", "m", "condition\nof A", "residual\nafter T", "T",
              *["T for\n1e-2"] * newton, "Nyström\nerror", "norm\nof Y'", "inverted"]  # fmt: skip
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
            "solve" if solve else str(row["steps"]),
            *[NOTHING if solve else needed] * newton,
            f"{row['nystrom_error']:.2f}",
            f"{row['spectral_norm']:.3g}",
            f"{row['kept_eigenvalues']}/{row['m']}",
            style="yellow" if row["warnings"] else "",
        )
    console.print(table, soft_wrap=False)
    warned = [(row["layer"], text) for row in rows for text in row["warnings"]]
    for layer, text in warned:
        console.print(f"[yellow]warning[/] {layer}: {text}")
    if any(row["judgement"] == "dead" for row in rows):
        console.print(
            "Convolution landmarks start far from all tokens; softfree_* (and --attention\n"
            "softfree) takes means of normed queries instead and attends from the start."
        )
    if not warned:
        console.print(
            "No warning: every layer attends and converges, and no matrix A is near-singular."
        )
    console.print(
        "residual: |AYA - A| / |A| after the T Newton steps that the layer takes, or of\n"
        "its solve.\n"
        "Nyström error: of the kernel between sampled tokens, rebuilt from the landmarks.\n"
        "norm of Y': of the matrix between the two kernels. inverted: eigenvalues of A\n"
        "that T steps invert by more than half; the others are cut off, which bounds Y'.",
        style="dim",
    )
