"""`softfree benchmark throughput`: the columns of the papers' Table 2, every attention in one backbone."""

import dataclasses
import gc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from rich.console import Console

from softfree.analysis import describe_environment
from softfree.commands._benchmark_memory import LABELS
from softfree.commands._benchmark_model import (
    DEFAULT_BATCH,
    Settings,
    Throughput,
    check_cuda_graph,
    measure,
    print_rows,
    relate,
)
from softfree.commands._common import (
    NARROWEST,
    check_choices,
    check_figure,
    check_output,
    check_positive,
    new_figure,
    progress,
    save_figure,
    save_rows,
)
from softfree.models.checks import check_at_least, check_model_name, mistakes_in
from softfree.models.registry import is_ours
from softfree.training.classification import parse_model_kwargs
from softfree.training.devices import AMP_DTYPES, DEFAULT_AMP, choose_device

# As in Table 2, softmax first: ratios are to it. Reformer is for sequences.
ATTENTIONS = ("softmax", "linformer", "performer", "nystromformer", "soft", "softpp")


def throughput(
    attentions: tuple[str, ...] = ATTENTIONS,
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
    check_choices("--attentions", attentions, ATTENTIONS)
    check_model_name(model)
    if not is_ours(model):
        raise ValueError(f"--model must be one of `softfree models`, got {model!r}")
    amp = DEFAULT_AMP[where.type] if amp_dtype == "auto" else amp_dtype
    check_choices("--amp-dtype", [amp], AMP_DTYPES)
    batch = DEFAULT_BATCH[where.type] if batch_size is None else batch_size
    check_positive("--batch-size", batch)
    check_positive("--seconds", seconds)
    check_at_least(NARROWEST, **{"--img-size": img_size})
    check_output("--csv", csv)
    check_figure("--plot", plot)
    kwargs = parse_model_kwargs(model_kwargs)
    if "attention" in kwargs:
        raise ValueError("--model-kwargs can't have attention=...: --attentions names them")
    with mistakes_in("--model-kwargs"), torch.device("meta"):
        for name in attentions:
            timm.create_model(model, **{"img_size": img_size, **kwargs, "attention": name})
    settings = Settings(
        batch, img_size, amp, "adamw", channels_last, torchcompile, False, cuda_graph
    )
    check_cuda_graph(cuda_graph, amp, where)

    console = Console(highlight=False)
    rows: list[Throughput] = []
    with progress() as report:
        for name in dict.fromkeys(attentions):
            row = measure(
                model,
                settings,
                "both",
                where,
                seconds,
                lambda text, name=name: report(f"{name} in {text}"),  # type: ignore[misc]
                **kwargs,
                attention=name,
            )
            rows.append(dataclasses.replace(row, model=name))
            gc.collect()
            if where.type == "cuda":
                torch.cuda.empty_cache()
    relate(rows)
    measured_in = describe_environment(where)
    console.print(f"[bold]Attentions in {model}[/]")
    print_rows(console, rows, settings, "both", measured_in, where)
    extra = {"model_kwargs": " ".join(model_kwargs), **dataclasses.asdict(settings)}
    plain = [dataclasses.asdict(row) for row in rows]
    named = [{"attention": row.pop("model"), "model": model, **row, **extra} for row in plain]
    save_rows(csv, named, measured_in)
    if plot is not None:
        title = f"Attentions in {model}, {img_size}², batch {batch}"
        words = f"{title}\n{measured_in['device']}, {measured_in['date']}"
        save_figure(draw(rows, words), plot, "plot")
    return 0


def draw(rows: Sequence[Throughput], title: str) -> Any:
    """Images a second and GiB, in training and in inference."""
    panels = {
        words: {
            label: [getattr(row, f"{kind}_{figure}") for row in rows]
            for kind, label in (("train", "training"), ("infer", "inference"))
        }
        for figure, words in (("img_per_s", "images a second"), ("peak_gib", "GiB"))
    }
    return draw_bars([LABELS[row.model] for row in rows], panels, title)


def draw_bars(
    names: Sequence[str],
    panels: Mapping[str, Mapping[str, Sequence[float | None]]],
    title: str,
) -> Any:
    """A panel a figure, in it a group of bars a name; None leaves a gap.

    Args:
        panels: by the panel's words, and then by the legend's, one value for each of ``names``.
    """
    picture = new_figure(2 + 3 * len(panels), 1.4 + 0.5 * len(names))
    row = picture.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (words, bars) in zip(row, panels.items(), strict=True):
        for number, (label, values) in enumerate(bars.items()):
            height = 0.8 / len(bars)
            places = [index - 0.4 + (number + 0.5) * height for index in range(len(names))]
            lengths = [value or 0.0 for value in values]
            axes.barh(places, lengths, height, color=f"C{number}", label=label)
        axes.set_xlabel(words)
        axes.locator_params(axis="x", nbins=4)  # numbers such as 0.0025 are wide
        axes.grid(axis="x", alpha=0.3)
    row[0].set_yticks(range(len(names)), names)
    row[0].invert_yaxis()
    handles, labels = max(
        (axes.get_legend_handles_labels() for axes in row), key=lambda found: len(found[1])
    )
    if len(labels) > 1:
        picture.legend(
            handles, labels, loc="outside lower center", ncols=2, fontsize=8, frameon=False
        )
    picture.suptitle(title, fontsize=9)
    return picture
