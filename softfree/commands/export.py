"""Write a model as ONNX or as a torch.export program, checked against PyTorch.

The file needs no softfree. One file serves any batch, and any height and width of at least 33 pixels.
"""

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.console import Console

from softfree.analysis.subject import Subject, load_subject
from softfree.commands.common import check_img_size, check_output, command, progress
from softfree.models.export import (
    SMALLEST_FREE,
    TOLERANCE,
    ExportError,
    check_shapes,
    export_onnx,
    export_pt2,
)


def export(
    output: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE")],
    /,
    checkpoint: Path | None = None,
    model: str | None = None,
    format: Literal["onnx", "pt2"] = "onnx",
    features: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    img_size: int | None = None,
) -> int:
    """Export a model and check the file. The exit code is 1, and no file is written, if it is off.

    Of a detector, its backbone and feature pyramid are exported: images to maps.

    Args:
        output: the file to write.
        checkpoint: folder that `softfree train` wrote, such as OUT/best.
        model: name of a fresh model with random weights, see `softfree models`.
        format: ONNX, or a torch.export program.
        features: maps at 1/4 to 1/32 of the image (every part of a model without a pyramid), not classes;
            for --model.
        img_size: side of the images to check with; otherwise that of the training.
    """
    check_img_size(img_size)
    check_output("FILE", output)
    if output.suffix != f".{format}":
        raise ValueError(f"FILE must end in .{format} with --format {format}, got {output}")
    if checkpoint is None and model is None:
        raise ValueError("export what? Give --checkpoint OUT/best, or --model for a fresh model")
    if features and checkpoint is not None:
        raise ValueError("--features is for --model; a checkpoint is exported as it was trained")
    console = Console(highlight=False)
    with progress() as report:
        report("loading the model")
        kwargs: dict[str, Any] = {"features_only": True} if features else {}
        subject = load_subject(checkpoint, model, **kwargs)
        side = img_size or subject.metadata["img_size"]
        names, metadata = exported_part(subject, features)
        report(f"exporting {subject.title} and checking it: minutes for the larger ones")
        try:
            if format == "onnx":
                error = export_onnx(
                    subject.model, output, img_size=side, metadata=metadata, output_names=names
                )
            else:
                error = export_pt2(subject.model, output, img_size=side, metadata=metadata)
        except ExportError as problem:
            print(f"softfree: {problem}", file=sys.stderr)
            return 1
    checked = ", ".join(f"{b} x {h} x {w}" for b, h, w in check_shapes(side))
    console.print(
        f"{output}: {output.stat().st_size / 2**20:.1f} MiB, image to {', '.join(names)}\n"
        f"differs from PyTorch by at most {error:.1e} (allowed: {TOLERANCE:.0e}), checked with "
        f"batch x height x width {checked}",
        soft_wrap=True,
        markup=False,
    )
    if side < SMALLEST_FREE:
        console.print(
            f"It takes images of {side} x {side} pixels alone: below {SMALLEST_FREE} sizes are fixed."
        )
    return 0


main = command(export, __doc__)


def exported_part(subject: Subject, features: bool) -> tuple[list[str], dict[str, Any]]:
    """Names of what an exported file gives, and its metadata."""
    model: Any = subject.model
    task = subject.metadata["task"]
    if features:
        names = [f"map_{i}" for i, _ in enumerate(model.feature_info.reduction(), 1)]
    elif task == "detection":
        with torch.no_grad():
            names = [f"map_{name}" for name in model(torch.zeros(1, 3, 64, 64))]
    elif task in ("classification", "segmentation"):
        return ["logits"], subject.metadata
    else:
        raise ValueError(
            f"--checkpoint is of the task {task!r}; models of images alone can be exported"
        )
    return names, {**subject.metadata, "task": "features"}
