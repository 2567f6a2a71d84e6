"""Write a model as ONNX, as a torch.export program or in timm's layout, checked against PyTorch.

An ONNX or torch.export file does not need softfree. It takes any batch size, and any height and width of at
least 33 pixels; that of a RetinaNet takes one picture at a time. --format timm writes a folder that
`timm.create_model("local-dir:FOLDER", pretrained=True)` loads after `import softfree`, and that timm's and
Hugging Face's tools can push to the Hub.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from torch import nn

from softfree.analysis.subject import PREPARATION, Subject, load_subject
from softfree.commands.common import (
    check_img_size,
    check_output,
    command,
    elapsing,
    message_console,
)
from softfree.models.boxes import OUTPUTS, BoxProgram
from softfree.models.export import TOLERANCE, ExportError, export_onnx, export_pt2
from softfree.models.hub import save_for_timm
from softfree.models.inputs import SMALLEST_FREE, Pictures, inputs_of
from softfree.training.checkpoint import read_metadata
from softfree.training.tasks import load_for_inference
from softfree_cli import FAILED, fail


def export(
    output: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="PATH")],
    /,
    checkpoint: Path | None = None,
    model: str | None = None,
    format: Literal["onnx", "pt2", "timm"] = "onnx",
    features: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    img_size: int | None = None,
) -> int:
    """Export a model and check the file. If the check fails, no file is written and the exit code is 1.

    For a RetinaNet, the file returns the final boxes, scores and labels of one picture at a time. For a Mask
    R-CNN, only the backbone and the feature pyramid are exported (images to maps). The file of a sequence
    encoder takes tokens and a mask.

    Args:
        output: the file to write; a folder with --format timm.
        checkpoint: folder that `softfree train` wrote, such as OUT/best.
        model: name of a fresh model with random weights, see `softfree models`.
        format: ONNX, a torch.export program, or a folder in the layout of timm and the Hugging Face Hub.
        features: export feature maps at 1/4 to 1/32 of the image (every part of a model without a pyramid)
            instead of classes or boxes; for --model and detectors.
        img_size: side of the images to check with; otherwise the training size.
    """
    check_img_size(img_size)
    if format == "timm":
        if output.is_file():
            raise ValueError(f"PATH must name a folder with --format timm, but {output} is a file")
        check_output("PATH", output / "model.safetensors")
        if features or img_size is not None:
            raise ValueError("--features and --img-size are for --format onnx and pt2")
    else:
        check_output("PATH", output)
        if output.suffix != f".{format}":
            raise ValueError(f"PATH must end in .{format} with --format {format}, got {output}")
    if checkpoint is None and model is None:
        raise ValueError("export what? Use --checkpoint OUT/best, or --model for a fresh model")
    if features and checkpoint is not None and read_metadata(checkpoint)["task"] != "detection":
        raise ValueError(
            "--features is for --model and detectors; other checkpoints are exported as they were trained"
        )
    console = message_console(markup=False)
    with elapsing() as report:
        report("loading the model")
        kwargs: dict[str, Any] = {"features_only": True} if features and model else {}
        subject = load_subject(checkpoint, model, **kwargs)
        if format == "timm":
            return export_timm(subject, output)
        side = img_size or subject.metadata["img_size"]
        network, names, metadata = exported_part(subject, features)
        inputs = inputs_of(network, side)
        if img_size is not None and not isinstance(inputs, Pictures):
            raise ValueError(f"--img-size is for image models; {checkpoint} is a sequence model")
        report(f"exporting {subject.title} and checking it (takes minutes for large models)")
        try:
            if format == "onnx":
                error = export_onnx(
                    network, output, img_size=side, metadata=metadata, output_names=names
                )
            else:
                error = export_pt2(network, output, img_size=side, metadata=metadata)
        except ExportError as problem:
            return fail(str(problem), FAILED)
    checked = ", ".join(" x ".join(map(str, size)) for size in inputs.checked())
    console.print(
        f"{output}: {output.stat().st_size / 2**20:.1f} MiB, {', '.join(inputs.names)} to "
        f"{', '.join(names)}\n"
        f"differs from PyTorch by at most {error:.1e} (allowed: {TOLERANCE:.0e}), checked with "
        f"{inputs.axes} {checked}",
    )
    if isinstance(inputs, Pictures) and inputs.fixed:
        console.print(
            f"It only takes images of {side} x {side} pixels: sizes below {SMALLEST_FREE} are fixed."
        )
    return 0


main = command(export, __doc__)


def export_timm(subject: Subject, folder: Path) -> int:
    """Write the folder, check the model that timm loads from it, and print how to use it."""
    metadata = subject.metadata
    if metadata["task"] != "classification":
        raise ValueError(
            f"--checkpoint is for the task {metadata['task']!r}; --format timm is for classifiers"
        )
    error = save_for_timm(subject.model, folder, metadata, scores_of(metadata))
    if error > TOLERANCE:
        return fail(f"timm's model from {folder} is off by {error:.1e}", FAILED)
    size = sum(file.stat().st_size for file in folder.iterdir()) / 2**20
    print(
        f"{folder}: {size:.1f} MiB: model.safetensors, config.json, README.md\n"
        f"differs from PyTorch by at most {error:.1e} as timm loads it\n"
        f'use:  import softfree, timm\n      timm.create_model("local-dir:{folder}", pretrained=True)\n'
        f"push: hf upload USER/NAME {folder}"
    )
    return 0


def scores_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The scores of a checkpoint, recorded by the run that wrote it."""
    run = metadata.get("run", {})
    if run.get("best") is None:
        return {}
    return {
        "top-1 on the validation pictures (%)": f"{run['best']:.4g}",
        "at step": f"{run['best_step']:,}",
    }


def exported_part(subject: Subject, features: bool) -> tuple[nn.Module, list[str], dict[str, Any]]:
    """The part of a model to export, the names of its outputs, and its metadata."""
    model: Any = subject.model
    metadata = subject.metadata
    task = metadata["task"]
    if task == "detection":
        if metadata["detector"] == "retinanet" and not features:
            assert subject.checkpoint is not None  # a fresh model is a classifier
            detector: Any = load_for_inference(subject.checkpoint)[0]
            preparation = detector.transform
            picture = dict(mean=list(preparation.image_mean), std=list(preparation.image_std))
            return BoxProgram(detector), list(OUTPUTS), {**metadata, **picture}
        with torch.no_grad():
            names = [f"map_{name}" for name in model(torch.zeros(1, 3, 64, 64))]
    elif features:
        names = [f"map_{i}" for i, _ in enumerate(model.feature_info.reduction(), 1)]
    elif task == "longrange":
        known = {key: value for key, value in metadata.items() if key not in PREPARATION}
        return model, ["logits"], {**known, "length": model.length}
    else:
        return model, ["logits"], metadata
    return model, names, {**metadata, "task": "features"}
