"""`softfree benchmark model`, `latency`, `detector` and `throughput`: comparisons of whole networks."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import timm
import torch
import tyro

from softfree.analysis import speed
from softfree.analysis.plots import colour_of, draw_bars
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
from softfree.models.checks import SMALLEST_IMAGE, check_model_name, mistakes_in
from softfree.models.features import backbone_arguments
from softfree.models.registry import is_ours
from softfree.training.classification import parse_model_kwargs
from softfree.training.detection import DETECTORS
from softfree.training.devices import AMP_DTYPES, DEFAULT_AMP

CONDITIONS, LATENCY = speed.ModelConditions(), speed.LatencyConditions()
# As in Table 2; softmax is first, since ratios are to it. Reformer is for sequences.
IMAGE_ATTENTIONS = (
    "softmax", "linformer", "performer", "nystromformer", "agent", "flatten", "soft", "softpp",
    "softfree",
)  # fmt: skip
GIB = "GiB: peak memory, including weights and images."
Names = Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="NAME [NAME ...]")]


def model(
    names: Names,
    /,
    bench: str = "both",
    seconds: float = 3.0,
    conditions: speed.ModelConditions = CONDITIONS,
    report: Report = REPORT,
) -> int:
    """Measure throughput and memory of untrained models, ours and any of timm's, in one run.

    A training step is forward, cross-entropy, backward and the optimizer's step.

    Args:
        names: models in timm's registry; ratios are to the first.
        bench: train, infer or both.
        seconds: time for each figure.
    """
    where = report.check()
    check_names(names)
    check_choices("--bench", [bench], (*speed.KINDS, "both"))
    check_positive("--seconds", seconds)
    conditions = check_conditions(conditions, where)
    kinds = {kind: word for kind, word in speed.KINDS.items() if bench in (kind, "both")}
    with progress() as say:
        rows = [
            speed.measure_model(name, conditions, where, kinds=kinds, seconds=seconds, report=say)
            for name in dict.fromkeys(names)
        ]
    publish_models(report, "Models", "model", rows, conditions, kinds)
    return 0


def throughput(
    attentions: tuple[str, ...] = IMAGE_ATTENTIONS,
    model: str = "softpp_tiny",
    model_kwargs: tuple[str, ...] = (),
    seconds: float = 3.0,
    conditions: speed.ModelConditions = CONDITIONS,
    report: Report = REPORT,
) -> int:
    """Compare parameters, multiply-adds, throughput and memory of attentions in one backbone (Table 2).

    A training step is forward, cross-entropy, backward and the optimizer's step.

    Args:
        attentions: one or more of softmax, linformer, performer, nystromformer, agent, flatten, soft, softpp,
            softfree; ratios are to the first.
        model: one of our backbones, whose attention is replaced.
        model_kwargs: further arguments of every backbone, such as landmarks=conv:49 for at most 49 landmarks
            at any size; otherwise their number grows with the image, and the cost of the inverse with the
            third power of that number.
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
        raise ValueError("--model-kwargs can't have attention=...; use --attentions instead")
    with mistakes_in("model_kwargs"), torch.device("meta"):
        for name in attentions:
            arguments = {"img_size": conditions.img_size, **kwargs, "attention": name}
            timm.create_model(model, **arguments)
    rows = []
    with progress() as say:
        for name in dict.fromkeys(attentions):
            row = speed.measure_model(
                model,
                conditions,
                where,
                seconds=seconds,
                report=lambda text, name=name: say(f"{name} in {text}"),  # type: ignore[misc]
                **kwargs,
                attention=name,
            )
            row.model = name
            rows.append(row)
    title, extra = f"Attentions in {model}", {"model_kwargs": " ".join(model_kwargs)}
    publish_models(
        report, title, "attention", rows, conditions, speed.KINDS, {"model": model}, extra
    )
    return 0


def latency(
    names: Names,
    /,
    batch_sizes: tuple[int, ...] = (1, 8),
    modes: tuple[str, ...] = (),
    seconds: float = 1.0,
    conditions: speed.LatencyConditions = LATENCY,
    report: Report = REPORT,
) -> int:
    """Measure the latency of one call of untrained models, ours and any of timm's.

    Args:
        names: models in timm's registry, with arguments after a plus: softpp_tiny+inverse=solve; ratios are
            to the first.
        batch_sizes: numbers of pictures in a call.
        modes: one or more of eager, compiled (torch.compile) and graph (softfree.capture, on a GPU);
            otherwise all that the device supports.
        seconds: time for each figure.
    """
    where = report.check()
    check_names([given.partition("+")[0] for given in names])
    models = {}
    for given in names:
        name, *words = given.split("+")
        models[given] = name, parse_model_kwargs(words, "NAME", "softpp_tiny+inverse=solve")
    possible = speed.MODES if where.type == "cuda" else speed.MODES[:2]
    check_choices("--modes", modes or possible, speed.MODES)
    if "graph" in modes and where.type != "cuda":
        raise ValueError(f"--modes graph needs a CUDA device, got --device {where}")
    if not batch_sizes:
        raise ValueError("--batch-sizes needs a number, e.g. 1")
    amp = DEFAULT_AMP[where.type] if conditions.amp_dtype == "auto" else conditions.amp_dtype
    for batch_size in batch_sizes:
        check_run(batch_size, amp, False, where)
    if conditions.half and amp == "none":
        raise ValueError("--half needs --amp-dtype bfloat16 or float16, got none")
    check_img_size(conditions.img_size)
    check_positive("--seconds", seconds)
    conditions = dataclasses.replace(conditions, amp_dtype=amp)
    with progress() as say:
        rows = speed.measure_latency(
            models, batch_sizes, modes or possible, conditions, where, seconds=seconds, report=say
        )
    said = [f"{conditions.img_size}²", amp if conditions.half else precision(amp)]
    said += ["channels last"] if conditions.channels_last else []
    said += ["batch norms folded"] if conditions.fuse_bn else []
    shown = modes or possible
    report.publish(
        f"Latency: {', '.join(said)}",
        rows,
        {
            "model": lambda row: row.model,
            "params\nM": lambda row: f"{row.parameters / 1e6:.1f}",
            **{
                f"{mode}\n{unit}": field(f"{mode}_{figure}")
                for mode in shown
                for unit, figure in (("ms", "ms"), ("ratio", "ratio_to_first"))
            },
        },
        "ms: median time of a call until its result is there.\n"
        f"ratio: how many times faster than {rows[0].model}.",
        lambda title: draw_bars(
            [f"{row.model}, {row.batch_size}" for row in rows],
            {
                "milliseconds": {
                    mode: [getattr(row, f"{mode}_ms") for row in rows] for mode in shown
                }
            },
            title,
            [colour_of(row.model) for row in rows],
        ),
        section=lambda row: f"batch {row.batch_size}",
        extra=dataclasses.asdict(conditions),
    )
    return 0


def publish_models(
    report: Report,
    title: str,
    first: str,
    rows: Sequence[Any],
    conditions: speed.ModelConditions,
    kinds: Mapping[str, str],
    before: Mapping[str, str] = {},
    after: Mapping[str, str] = {},
) -> None:
    """Table, CSV and plot of classifiers, named in the column ``first``.

    The CSV also has ``before`` and ``after``.
    """
    speed.relate_to_first(rows, kinds)
    modes = {
        "channels last": conditions.channels_last,
        "compiled": conditions.torchcompile,
        "CUDA graph": conditions.cuda_graph,
        "batch norms folded for inference": conditions.fuse_bn,
    }
    said = [f"batch {conditions.batch_size}", f"{conditions.img_size}²"]
    said += [precision(conditions.amp_dtype)]
    said += [mode for mode, on in modes.items() if on] or ["eager"]
    step = f"train: forward, cross-entropy, backward and {conditions.opt}'s step.\n"
    report.publish(
        f"{title}: {', '.join(said)}",
        rows,
        {
            first: lambda row: row.model,
            "params\nM": lambda row: f"{row.parameters / 1e6:.1f}",
            "GMACs": field("macs", 1e-9),
            **speed_columns({kind: kind for kind in kinds}),
        },
        (step if "train" in kinds else "")
        + f"ratio: images per second over those of {rows[0].model}.\n{GIB}\n"
        f"GMACs: billions of multiply-adds for one image of {conditions.img_size}².",
        lambda title: speed.draw_speeds(rows, [row.model for row in rows], kinds, title),
        records=[{first: row.model, **vars(row), **before} for row in rows],
        extra={**after, **dataclasses.asdict(conditions)},
    )


def detector(
    names: Names,
    /,
    detector: str = "retinanet",
    landmarks: tuple[str, ...] = ("",),
    model_kwargs: tuple[str, ...] = (),
    img_size: tuple[int, int] = (800, 1333),
    batch_size: int = 2,
    amp_dtype: str = "auto",
    channels_last: bool = False,
    cuda_graph: bool = False,
    seconds: float = 3.0,
    report: Report = REPORT,
) -> int:
    """Measure throughput and memory of backbones in the training of a detector, alone and in a whole step.

    Alone: forward and backward through the maps at 1/4 to 1/32. Step: forward with made-up objects, losses,
    backward and AdamW's step. Weights are untrained.

    Args:
        names: backbones in timm's registry, with four feature maps; ratios are to the first.
        detector: retinanet or mask-rcnn.
        landmarks: landmarks of our backbones, each of which is measured with each value: conv:49 gives at
            most 49 at any size, conv is the papers' fixed stride; '': conv:49, or average:128 for softfree_*.
        model_kwargs: further arguments of every backbone, such as drop_path_rate=0.
        img_size: height and width of the pictures, which are padded to multiples of 32 as in detectors.
        batch_size: pictures at a time.
        amp_dtype: autocast to bfloat16 or float16, or none; 'auto': bfloat16 on a GPU, none on a CPU.
        channels_last: keep weights and images in channels-last memory format.
        cuda_graph: replay the backbone alone from a CUDA graph, so that only the GPU's time counts. A whole
            step reads numbers from the GPU and can't be replayed.
        seconds: time for each figure.
    """
    where = report.check()
    check_names(names)
    check_choices("--detector", [detector], DETECTORS)
    amp = DEFAULT_AMP[where.type] if amp_dtype == "auto" else amp_dtype
    check_run(batch_size, amp, cuda_graph, where)
    check_positive("--seconds", seconds)
    if min(img_size) < SMALLEST_IMAGE:
        raise ValueError(f"--img-size must be at least {SMALLEST_IMAGE} each way, got {img_size}")
    if not landmarks:
        raise ValueError("--landmarks needs a value, e.g. conv:49")
    kwargs = parse_model_kwargs(model_kwargs)
    conditions = speed.DetectorConditions(
        detector, batch_size, *img_size, amp, channels_last, " ".join(model_kwargs), cuda_graph
    )
    if where.type == "cuda":
        torch.set_float32_matmul_precision("high")  # as in training
    rows = []
    with progress() as say:
        for name in dict.fromkeys(names):
            own = backbone_arguments(name, **kwargs).get("landmarks")
            choices = [choice or own for choice in landmarks] if own else [""]
            for choice in dict.fromkeys(choices):
                counts: Any = {"backbone_parameters": 0, "detector_parameters": 0}
                row = speed.new_row(speed.PARTS, backbone=name, landmarks=choice, **counts)
                rows.append(row)
                arguments: dict[str, Any] = {"landmarks": choice} if own else {}
                speed.measure_with_detector(
                    row, kwargs | arguments, conditions, where, seconds=seconds, report=say
                )
    speed.relate_to_first(rows, speed.PARTS)
    labels = [f"{row.backbone} {row.landmarks}".strip() for row in rows]
    title = f"Backbones in training: batch {batch_size}, {' x '.join(map(str, img_size))}"
    title += f", {precision(amp)}, eager" + (", channels last" if channels_last else "")
    title += ", alone in a CUDA graph" if cuda_graph else ""
    report.publish(
        title,
        rows,
        {
            "backbone": lambda row: labels[rows.index(row)],
            "params\nM": lambda row: f"{row.detector_parameters / 1e6:.1f}",
            **speed_columns(speed.PARTS),
        },
        "params: parameters of the whole detector.\n"
        "alone: the backbone's forward and backward through its four maps.\n"
        f"step: {detector}'s forward, losses of {speed.OBJECTS} objects per picture, backward and AdamW's step.\n"
        f"ratio: images per second over those of {labels[0]}.\n{GIB}",
        lambda title: speed.draw_speeds(rows, labels, speed.PARTS, title),
        extra=dataclasses.asdict(conditions),
    )
    return 0


def check_conditions(
    conditions: speed.ModelConditions, device: torch.device
) -> speed.ModelConditions:
    """Raise if the conditions are impossible; otherwise fill in what depends on the device."""
    check_choices("--opt", [conditions.opt], speed.OPTIMIZERS)
    conditions = conditions.on(device)
    check_img_size(conditions.img_size)
    check_run(conditions.images, conditions.amp_dtype, conditions.cuda_graph, device)
    return conditions


def check_run(batch_size: int, amp_dtype: str, cuda_graph: bool, device: torch.device) -> None:
    """Raise if batch size, dtype or CUDA graph are impossible."""
    check_choices("--amp-dtype", [amp_dtype], AMP_DTYPES)
    check_positive("--batch-size", batch_size)
    if cuda_graph and device.type != "cuda":
        raise ValueError(f"--cuda-graph needs a CUDA device, got --device {device}")
    if cuda_graph and amp_dtype == "float16":
        raise ValueError(
            "--cuda-graph does not support float16's loss scaling, which reads from the GPU whether to skip a step; "
            "use --amp-dtype bfloat16 or none"
        )


def check_names(names: Sequence[str]) -> None:
    """Raise if the list is empty or has names that timm does not know."""
    if not names:
        raise ValueError("benchmark model needs a name, e.g. softfree_tiny pvt_v2_b1")
    for name in names:
        check_model_name(name, "NAME")


def precision(amp_dtype: str) -> str:
    """Describe a value of --amp-dtype."""
    return "float32" if amp_dtype == "none" else f"{amp_dtype} autocast"


def speed_columns(kinds: Mapping[str, str]) -> Columns:
    """Columns with images per second, ratio to the first row and GiB for each kind of work."""
    figures = {"img/s": "img_per_s", "ratio": "ratio_to_first", "GiB": "peak_gib"}
    return {
        f"{word}\n{unit}": field(f"{kind}_{figure}")
        for kind, word in kinds.items()
        for unit, figure in figures.items()
    }
