"""`softfree benchmark detector`."""

import dataclasses

import torch

from softfree.analysis.detector_speed import (
    OBJECTS,
    PARTS,
    DetectorConditions,
    DetectorSpeed,
    measure_under_detector,
)
from softfree.analysis.model_speed import draw_speeds, relate_to_first
from softfree.commands.benchmark.model import (
    Names,
    check_cuda_graph,
    check_names,
    precision,
    speed_columns,
)
from softfree.commands.common import REPORT, Report, check_choices, check_positive, progress
from softfree.models.checks import SMALLEST_IMAGE
from softfree.models.features import FIXED_LANDMARKS, backbone_arguments
from softfree.training.classification import parse_model_kwargs
from softfree.training.detection import DETECTORS
from softfree.training.devices import AMP_DTYPES, DEFAULT_AMP

# By what is measured, the word for it.
WORDS = {"backbone": "alone", "step": "step"}


def detector(
    names: Names,
    /,
    detector: str = "retinanet",
    landmarks: tuple[str, ...] = (FIXED_LANDMARKS,),
    model_kwargs: tuple[str, ...] = (),
    img_size: tuple[int, int] = (800, 1333),
    batch_size: int = 2,
    amp_dtype: str = "auto",
    channels_last: bool = False,
    cuda_graph: bool = False,
    seconds: float = 3.0,
    report: Report = REPORT,
) -> int:
    """Throughput and memory in training of backbones as detectors use them, alone and in a whole step.

    Alone: forward and backward through the maps at 1/4 to 1/32. A step: forward with made-up objects, losses,
    backward and AdamW's step. Weights are untrained.

    Args:
        names: backbones that timm knows, with four maps; ratios are to the first.
        detector: retinanet or mask-rcnn.
        landmarks: of SOFT backbones, each of which is measured with each of these: conv:49 is at most 49
            at any size, conv the papers' fixed stride.
        model_kwargs: further arguments of every backbone, such as drop_path_rate=0.
        img_size: height and width of the pictures; like a detector's they are padded to multiples of 32.
        batch_size: pictures at a time.
        amp_dtype: autocast to bfloat16 or float16, or none; 'auto': bfloat16 on a GPU, none on a CPU.
        channels_last: keep weights and images with the channels last in memory.
        cuda_graph: replay the backbone alone from a CUDA graph: the GPU's time, however slow the host. A
            whole step asks the GPU for numbers, so it can't be.
        seconds: time for each figure.
    """
    where = report.check()
    check_names(names)
    check_choices("--detector", [detector], DETECTORS)
    amp = DEFAULT_AMP[where.type] if amp_dtype == "auto" else amp_dtype
    check_choices("--amp-dtype", [amp], AMP_DTYPES)
    check_positive("--batch-size", batch_size)
    check_positive("--seconds", seconds)
    if min(img_size) < SMALLEST_IMAGE:
        raise ValueError(f"--img-size must be at least {SMALLEST_IMAGE} each way, got {img_size}")
    if not landmarks:
        raise ValueError(f"--landmarks needs a value, e.g. {FIXED_LANDMARKS}")
    check_cuda_graph(cuda_graph, amp, where)
    kwargs = parse_model_kwargs(model_kwargs)
    conditions = DetectorConditions(
        detector, batch_size, *img_size, amp, channels_last, " ".join(model_kwargs), cuda_graph
    )
    if where.type == "cuda":
        torch.set_float32_matmul_precision("high")  # as in training
    rows: list[DetectorSpeed] = []
    with progress() as say:
        for name in dict.fromkeys(names):
            takes_landmarks = "landmarks" in backbone_arguments(name)
            for choice in dict.fromkeys(landmarks) if takes_landmarks else ("",):
                row = DetectorSpeed(name, choice)
                arguments = {**kwargs, **({"landmarks": choice} if takes_landmarks else {})}
                measure_under_detector(
                    row, arguments, conditions, where, seconds=seconds, report=say
                )
                rows.append(row)
    relate_to_first(rows, tuple(PARTS))
    size = f"{conditions.height} x {conditions.width}"
    title = f"Backbones in training: batch {batch_size}, {size}, {precision(amp)}, eager"
    title += ", channels last" if channels_last else ""
    title += ", alone in a CUDA graph" if cuda_graph else ""
    extra = dataclasses.asdict(conditions)
    report.publish(
        title,
        rows,
        {
            "backbone": lambda row: row.name,
            "params\nM": lambda row: f"{row.detector_parameters / 1e6:.1f}",
            **speed_columns(WORDS),
        },
        "params: of the whole detector.\n"
        "alone: the backbone's forward and backward through its four maps.\n"
        f"step: {detector}'s forward, losses of {OBJECTS} objects per picture, backward and AdamW's step.\n"
        f"ratio: images per second over those of {rows[0].name}.\n"
        "GiB: the most that was held at once, weights and images included.",
        lambda title: draw_speeds(rows, [row.name for row in rows], WORDS, title),
        records=[{**dataclasses.asdict(row), **extra} for row in rows],
    )
    return 0
