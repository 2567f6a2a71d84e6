"""`softfree benchmark model`."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated

import torch
import tyro

from softfree.analysis.model_speed import (
    KINDS,
    OPTIMIZERS,
    ModelConditions,
    draw_speeds,
    measure_model,
    relate_to_first,
)
from softfree.commands.common import (
    REPORT,
    Columns,
    Report,
    check_choices,
    check_img_size,
    check_positive,
    field,
    progress,
)
from softfree.models.checks import check_model_name
from softfree.training.devices import AMP_DTYPES

BENCHES = (*KINDS, "both")
CONDITIONS = ModelConditions()
Names = Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="NAME [NAME ...]")]


def model(
    names: Names,
    /,
    bench: str = "both",
    seconds: float = 3.0,
    conditions: ModelConditions = CONDITIONS,
    report: Report = REPORT,
) -> int:
    """Throughput and memory of models, ours and any of timm's, in one run, untrained.

    A training step is forward, cross-entropy, backward and the optimizer's step.

    Args:
        names: models that timm knows; ratios are to the first.
        bench: train, infer or both.
        seconds: time for each figure.
    """
    where = report.check()
    check_names(names)
    check_choices("--bench", [bench], BENCHES)
    check_positive("--seconds", seconds)
    conditions = check_conditions(conditions, where)
    kinds = tuple(KINDS) if bench == "both" else (bench,)
    with progress() as say:
        rows = [
            measure_model(name, conditions, where, kinds=kinds, seconds=seconds, report=say)
            for name in dict.fromkeys(names)
        ]
    relate_to_first(rows, kinds)
    extra = dataclasses.asdict(conditions)
    report.publish(
        f"Models: {describe(conditions)}",
        rows,
        model_columns(kinds),
        legend(rows[0].model, conditions, kinds),
        lambda title: draw_speeds(
            rows, [row.model for row in rows], {kind: KINDS[kind] for kind in kinds}, title
        ),
        records=[{**dataclasses.asdict(row), **extra} for row in rows],
    )
    return 0


def check_conditions(conditions: ModelConditions, device: torch.device) -> ModelConditions:
    """Refuse conditions that can't be; otherwise what they are on this device."""
    check_choices("--opt", [conditions.opt], OPTIMIZERS)
    conditions = conditions.on(device)
    check_choices("--amp-dtype", [conditions.amp_dtype], AMP_DTYPES)
    check_positive("--batch-size", conditions.images)
    check_img_size(conditions.img_size)
    check_cuda_graph(conditions.cuda_graph, conditions.amp_dtype, device)
    return conditions


def check_cuda_graph(wanted: bool, amp_dtype: str, device: torch.device) -> None:
    """Refuse a CUDA graph where there can be none."""
    if wanted and device.type != "cuda":
        raise ValueError(f"--cuda-graph needs a CUDA device, got --device {device}")
    if wanted and amp_dtype == "float16":
        raise ValueError(
            "--cuda-graph can't hold float16's loss scaling, which asks the GPU whether to skip a step; "
            "--amp-dtype bfloat16 or none works"
        )


def check_names(names: Sequence[str]) -> None:
    """Refuse an empty list, and names that timm does not know."""
    if not names:
        raise ValueError("benchmark model needs a name, e.g. softpp_tiny pvt_v2_b1")
    for name in names:
        check_model_name(name, "NAME")


def describe(conditions: ModelConditions) -> str:
    """How the models of a table were measured, in words."""
    modes = {
        "channels last": conditions.channels_last,
        "compiled": conditions.torchcompile,
        "CUDA graph": conditions.cuda_graph,
        "batch norms folded for inference": conditions.fuse_bn,
    }
    said = [f"batch {conditions.batch_size}", f"{conditions.img_size}²"]
    said += [precision(conditions.amp_dtype)]
    return ", ".join(said + ([mode for mode, on in modes.items() if on] or ["eager"]))


def precision(amp_dtype: str) -> str:
    """A value of --amp-dtype in words."""
    return "float32" if amp_dtype == "none" else f"{amp_dtype} autocast"


def model_columns(kinds: Sequence[str], title: str = "model") -> Columns:
    """What the table says of a model."""
    return {
        title: lambda row: row.model,
        "params\nM": lambda row: f"{row.parameters / 1e6:.1f}",
        "GMACs": field("macs", 1e-9),
        **speed_columns({kind: kind for kind in kinds}),
    }


def speed_columns(kinds: Mapping[str, str]) -> Columns:
    """Images per second, ratio to the first row and GiB of each kind of work, with its word in the titles."""
    columns = {}
    for kind, word in kinds.items():
        columns[f"{word}\nimg/s"] = field(f"{kind}_img_per_s")
        columns[f"{word}\nratio"] = field(f"{kind}_ratio_to_first")
        columns[f"{word}\nGiB"] = field(f"{kind}_peak_gib")
    return columns


def legend(first: str, conditions: ModelConditions, kinds: Sequence[str]) -> str:
    """How to read the table."""
    step = f"train: forward, cross-entropy, backward and {conditions.opt}'s step.\n"
    return (
        (step if "train" in kinds else "") + f"ratio: images per second over those of {first}.\n"
        "GiB: the most that was held at once, weights and images included.\n"
        f"GMACs: billions of multiply-adds for one image of {conditions.img_size}²."
    )
