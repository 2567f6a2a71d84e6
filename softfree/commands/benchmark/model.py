"""`softfree benchmark model`."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import torch
import tyro

from softfree.analysis.measure import relate
from softfree.analysis.model_speed import (
    KINDS,
    OPTIMIZERS,
    ModelConditions,
    measure_model,
)
from softfree.commands.common import (
    Columns,
    check_choices,
    check_img_size,
    check_output,
    check_positive,
    choose_amp_dtype,
    field,
    progress,
    publish,
)
from softfree.models.checks import check_model_name
from softfree.training.devices import choose_device

BENCHES = (*KINDS, "both")
DEFAULT_BATCH = {"cpu": 4, "cuda": 256}


def model(
    names: Annotated[
        tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="NAME [NAME ...]")
    ],
    /,
    bench: str = "both",
    batch_size: int | None = None,
    img_size: int = 224,
    amp_dtype: str = "auto",
    opt: str = "adamw",
    channels_last: bool = False,
    torchcompile: bool = False,
    fuse_bn: bool = False,
    cuda_graph: bool = False,
    device: str = "auto",
    seconds: float = 3.0,
    csv: Path | None = None,
) -> int:
    """Throughput and memory of models, ours and any of timm's, in one run, untrained.

    A training step is forward, cross-entropy, backward and the optimizer's step.

    Args:
        names: models that timm knows; ratios are to the first.
        bench: train, infer or both.
        batch_size: images at a time; otherwise 4 on a CPU, 256 on a GPU.
        img_size: side of the square images.
        amp_dtype: autocast to bfloat16 or float16, or none; 'auto': bfloat16 on a GPU, none on a CPU.
        opt: optimizer, adamw or sgd.
        channels_last: keep images and maps with the channels last in memory.
        torchcompile: compile the models with torch.compile.
        fuse_bn: for inference, fold batch norms into the convolutions before them.
        cuda_graph: replay every step from a CUDA graph: the GPU's time alone, however slow the host.
        device: 'cuda', 'cpu', or 'auto' for the GPU if there is one.
        seconds: time for each figure.
        csv: write the figures to this file, with date, device and versions in every row.
    """
    where = choose_device(device)
    check_names(names)
    check_choices("--bench", [bench], BENCHES)
    check_choices("--opt", [opt], OPTIMIZERS)
    amp = choose_amp_dtype(amp_dtype, where)
    batch = DEFAULT_BATCH[where.type] if batch_size is None else batch_size
    check_positive("--batch-size", batch)
    check_positive("--seconds", seconds)
    check_output("--csv", csv)
    check_img_size(img_size)
    check_cuda_graph(cuda_graph, amp, where)
    conditions = ModelConditions(
        batch, img_size, amp, opt, channels_last, torchcompile, fuse_bn, cuda_graph
    )
    kinds = tuple(KINDS) if bench == "both" else (bench,)
    with progress() as report:
        rows = [
            measure_model(name, conditions, where, kinds=kinds, seconds=seconds, report=report)
            for name in dict.fromkeys(names)
        ]
    relate_to_first(rows, kinds)
    extra = dataclasses.asdict(conditions)
    publish(
        f"Models: {describe(conditions)}",
        rows,
        model_columns(kinds),
        legend(rows[0].model, conditions, kinds),
        where,
        records=[{**dataclasses.asdict(row), **extra} for row in rows],
        csv=csv,
    )
    return 0


def relate_to_first(rows: Sequence[object], kinds: Sequence[str]) -> None:
    """Fill in the ratios of throughputs to the first row's."""
    relate(rows, rows[0], {f"{kind}_img_per_s": f"{kind}_ratio_to_first" for kind in kinds})


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
    """Refuse none, and names that timm does not know."""
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
    """Images a second, ratio to the first row and GiB of each kind of work, with its word in the titles."""
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
        (step if "train" in kinds else "") + f"ratio: images a second over those of {first}.\n"
        "GiB: the most that was held at once, weights and images included.\n"
        f"GMACs: billions of multiply-adds for one image of {conditions.img_size}²."
    )
