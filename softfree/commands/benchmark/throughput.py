"""`softfree benchmark throughput`: the columns of the papers' Table 2, every attention in one backbone."""

import dataclasses

import timm
import torch

from softfree.analysis.model_speed import (
    KINDS,
    ModelConditions,
    Throughput,
    draw_speeds,
    measure_model,
    relate_to_first,
)
from softfree.analysis.plots import LABELS
from softfree.commands.benchmark.model import (
    CONDITIONS,
    check_conditions,
    describe,
    legend,
    model_columns,
)
from softfree.commands.common import REPORT, Report, check_choices, check_positive, progress
from softfree.models.checks import check_model_name, mistakes_in
from softfree.models.registry import is_ours
from softfree.training.classification import parse_model_kwargs

# As in Table 2, softmax first: ratios are to it. Reformer is for sequences.
IMAGE_ATTENTIONS = ("softmax", "linformer", "performer", "nystromformer", "soft", "softpp")


def throughput(
    attentions: tuple[str, ...] = IMAGE_ATTENTIONS,
    model: str = "softpp_tiny",
    model_kwargs: tuple[str, ...] = (),
    seconds: float = 3.0,
    conditions: ModelConditions = CONDITIONS,
    report: Report = REPORT,
) -> int:
    """Parameters, multiply-adds, throughput and memory of every attention in one backbone (Table 2).

    A training step is forward, cross-entropy, backward and the optimizer's step.

    Args:
        attentions: among softmax, linformer, performer, nystromformer, soft, softpp; ratios are to the
            first.
        model: one of our backbones, whose attention is replaced.
        model_kwargs: further arguments of every backbone, such as landmarks=conv:49 for at most 49
            landmarks at any size; otherwise their number grows with the image, and an inverse's cost with its
            third power.
        seconds: time for each figure.
    """
    where = report.check()
    check_choices("--attentions", attentions, IMAGE_ATTENTIONS)
    check_model_name(model)
    if not is_ours(model):
        raise ValueError(f"--model must be one of `softfree models`, got {model!r}")
    check_positive("--seconds", seconds)
    conditions = check_conditions(conditions, where)
    kwargs = parse_model_kwargs(model_kwargs)
    if "attention" in kwargs:
        raise ValueError("--model-kwargs can't have attention=...: --attentions names them")
    with mistakes_in("model_kwargs"), torch.device("meta"):
        for name in attentions:
            arguments = {"img_size": conditions.img_size, **kwargs, "attention": name}
            timm.create_model(model, **arguments)
    rows: list[Throughput] = []
    with progress() as say:
        for name in dict.fromkeys(attentions):
            row = measure_model(
                model,
                conditions,
                where,
                seconds=seconds,
                report=lambda text, name=name: say(f"{name} in {text}"),  # type: ignore[misc]
                **kwargs,
                attention=name,
            )
            rows.append(dataclasses.replace(row, model=name))
    kinds = tuple(KINDS)
    relate_to_first(rows, kinds)
    extra = {"model_kwargs": " ".join(model_kwargs), **dataclasses.asdict(conditions)}
    plain = [dataclasses.asdict(row) for row in rows]
    report.publish(
        f"Attentions in {model}: {describe(conditions)}",
        rows,
        model_columns(kinds, "attention"),
        legend(rows[0].model, conditions, kinds),
        lambda title: draw_speeds(rows, [LABELS[row.model] for row in rows], KINDS, title),
        records=[{"attention": row.pop("model"), "model": model, **row, **extra} for row in plain],
    )
    return 0
