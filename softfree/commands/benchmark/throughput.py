"""`softfree benchmark throughput`: the columns of the papers' Table 2, every attention in one backbone."""

import dataclasses
from pathlib import Path

import timm
import torch

from softfree.analysis.model_speed import KINDS, ModelConditions, Throughput, measure_model
from softfree.analysis.plots import LABELS, draw_bars
from softfree.commands.benchmark.model import (
    DEFAULT_BATCH,
    check_cuda_graph,
    describe,
    legend,
    model_columns,
    relate_to_first,
)
from softfree.commands.common import (
    check_choices,
    check_figure,
    check_img_size,
    check_output,
    check_positive,
    choose_amp_dtype,
    progress,
    publish,
)
from softfree.models.checks import check_model_name, mistakes_in
from softfree.models.registry import is_ours
from softfree.training.classification import parse_model_kwargs
from softfree.training.devices import choose_device

# As in Table 2, softmax first: ratios are to it. Reformer is for sequences.
IMAGE_ATTENTIONS = ("softmax", "linformer", "performer", "nystromformer", "soft", "softpp")


def throughput(
    attentions: tuple[str, ...] = IMAGE_ATTENTIONS,
    model: str = "softpp_tiny",
    model_kwargs: tuple[str, ...] = (),
    batch_size: int | None = None,
    img_size: int = 224,
    amp_dtype: str = "auto",
    channels_last: bool = False,
    torchcompile: bool = False,
    cuda_graph: bool = False,
    device: str = "auto",
    seconds: float = 3.0,
    csv: Path | None = None,
    plot: Path | None = None,
) -> int:
    """Parameters, multiply-adds, throughput and memory of every attention in one backbone (Table 2).

    A training step is forward, cross-entropy, backward and AdamW's step.

    Args:
        attentions: among softmax, linformer, performer, nystromformer, soft, softpp; ratios are to the
            first.
        model: one of our backbones, whose attention is replaced.
        model_kwargs: further arguments of every backbone, such as landmarks=conv:49 for at most 49
            landmarks at any size; otherwise their number grows with the image, and an inverse's cost with its
            third power.
        batch_size: images at a time; otherwise 4 on a CPU, 256 on a GPU.
        img_size: side of the square images.
        amp_dtype: autocast to bfloat16 or float16, or none; 'auto': bfloat16 on a GPU, none on a CPU.
        channels_last: keep images and maps with the channels last in memory.
        torchcompile: compile the models with torch.compile.
        cuda_graph: replay every step from a CUDA graph: the GPU's time alone, however slow the host.
        device: 'cuda', 'cpu', or 'auto' for the GPU if there is one.
        seconds: time for each figure.
        csv: write the figures to this file, with date, device and versions in every row.
        plot: draw throughput and memory into this file (.png, .pdf or .svg).
    """
    where = choose_device(device)
    check_choices("--attentions", attentions, IMAGE_ATTENTIONS)
    check_model_name(model)
    if not is_ours(model):
        raise ValueError(f"--model must be one of `softfree models`, got {model!r}")
    amp = choose_amp_dtype(amp_dtype, where)
    batch = DEFAULT_BATCH[where.type] if batch_size is None else batch_size
    check_positive("--batch-size", batch)
    check_positive("--seconds", seconds)
    check_img_size(img_size)
    check_output("--csv", csv)
    check_figure("--plot", plot)
    check_cuda_graph(cuda_graph, amp, where)
    kwargs = parse_model_kwargs(model_kwargs)
    if "attention" in kwargs:
        raise ValueError("--model-kwargs can't have attention=...: --attentions names them")
    with mistakes_in("model_kwargs"), torch.device("meta"):
        for name in attentions:
            timm.create_model(model, **{"img_size": img_size, **kwargs, "attention": name})
    conditions = ModelConditions(
        batch,
        img_size,
        amp,
        channels_last=channels_last,
        torchcompile=torchcompile,
        cuda_graph=cuda_graph,
    )
    rows: list[Throughput] = []
    with progress() as report:
        for name in dict.fromkeys(attentions):
            row = measure_model(
                model,
                conditions,
                where,
                seconds=seconds,
                report=lambda text, name=name: report(f"{name} in {text}"),  # type: ignore[misc]
                **kwargs,
                attention=name,
            )
            rows.append(dataclasses.replace(row, model=name))
    relate_to_first(rows, tuple(KINDS))
    extra = {"model_kwargs": " ".join(model_kwargs), **dataclasses.asdict(conditions)}
    plain = [dataclasses.asdict(row) for row in rows]
    panels = {
        words: {
            label: [getattr(row, f"{kind}_{figure}") for row in rows]
            for kind, label in KINDS.items()
        }
        for figure, words in (("img_per_s", "images a second"), ("peak_gib", "GiB"))
    }
    publish(
        f"Attentions in {model}: {describe(conditions)}",
        rows,
        model_columns(tuple(KINDS), "attention"),
        legend(rows[0].model, conditions, tuple(KINDS)),
        where,
        records=[{"attention": row.pop("model"), "model": model, **row, **extra} for row in plain],
        csv=csv,
        plot=plot,
        draw=lambda title: draw_bars([LABELS[row.model] for row in rows], panels, title),
    )
    return 0
