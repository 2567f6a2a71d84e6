"""`softfree benchmark detector`."""

import dataclasses
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from rich.console import Console
from rich.markup import escape
from torch import Tensor, nn

from softfree.analysis import (
    capture_graph,
    count_parameters,
    describe_environment,
    peak_extra_memory,
    time_queued,
)
from softfree.commands._benchmark_model import (
    OPTIMIZERS,
    check_cuda_graph,
    check_names,
    count_bytes,
    relate,
)
from softfree.commands._common import (
    NARROWEST,
    check_choices,
    check_output,
    check_positive,
    digits,
    heading,
    make_table,
    progress,
    save_rows,
)
from softfree.models.features import FIXED_LANDMARKS, PyramidFeatures, backbone_arguments
from softfree.training.classification import parse_model_kwargs
from softfree.training.detection import DETECTORS
from softfree.training.devices import AMP_DTYPES, DEFAULT_AMP, autocast, choose_device

# By what is measured, the count of its parameters.
PARAMETERS = {"backbone": "backbone_parameters", "step": "detector_parameters"}
PARTS = tuple(PARAMETERS)
CLASSES = 81  # COCO's categories, and one for the background
OBJECTS = 8  # in a picture; COCO has 7 on average
LARGEST_STRIDE = 32  # detectors pad pictures to a multiple of it


@dataclass(frozen=True)
class Settings:
    """How every backbone of a run is measured."""

    detector: str
    batch_size: int
    height: int
    width: int
    amp_dtype: str
    channels_last: bool
    model_kwargs: str
    cuda_graph: bool

    @property
    def layout(self) -> torch.memory_format:
        return torch.channels_last if self.channels_last else torch.contiguous_format


@dataclass
class Speed:
    """A backbone's figures, alone and under a detector; None where not measured, and ``note`` says why."""

    backbone: str
    landmarks: str
    backbone_parameters: int = 0
    detector_parameters: int = 0
    backbone_img_per_s: float | None = None
    backbone_ratio_to_first: float | None = None
    backbone_peak_gib: float | None = None
    step_img_per_s: float | None = None
    step_ratio_to_first: float | None = None
    step_peak_gib: float | None = None
    note: str = ""


def detector(
    names: Annotated[
        tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="NAME [NAME ...]")
    ],
    /,
    detector: str = "retinanet",
    landmarks: tuple[str, ...] = (FIXED_LANDMARKS,),
    model_kwargs: tuple[str, ...] = (),
    img_size: tuple[int, int] = (800, 1333),
    batch_size: int = 2,
    amp_dtype: str = "auto",
    channels_last: bool = False,
    cuda_graph: bool = False,
    device: str = "auto",
    seconds: float = 3.0,
    csv: Path | None = None,
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
        device: 'cuda', 'cpu', or 'auto' for the GPU if there is one.
        seconds: time for each figure.
        csv: write the figures to this file, with date, device and versions in every row.
    """
    where = choose_device(device)
    check_names(names)
    check_choices("--detector", [detector], DETECTORS)
    amp = DEFAULT_AMP[where.type] if amp_dtype == "auto" else amp_dtype
    check_choices("--amp-dtype", [amp], AMP_DTYPES)
    check_positive("--batch-size", batch_size)
    check_positive("--seconds", seconds)
    check_output("--csv", csv)
    if min(img_size) < NARROWEST:
        raise ValueError(f"--img-size must be at least {NARROWEST} each way, got {img_size}")
    if not landmarks:
        raise ValueError(f"--landmarks needs a value, e.g. {FIXED_LANDMARKS}")
    kwargs = parse_model_kwargs(model_kwargs)
    settings = Settings(
        detector, batch_size, *img_size, amp, channels_last, " ".join(model_kwargs), cuda_graph
    )
    check_cuda_graph(cuda_graph, amp, where)
    if where.type == "cuda":
        torch.set_float32_matmul_precision("high")  # as in training

    console = Console(highlight=False)
    rows: list[Speed] = []
    with progress() as report:
        for name in dict.fromkeys(names):
            takes_landmarks = "landmarks" in backbone_arguments(name)
            for choice in dict.fromkeys(landmarks) if takes_landmarks else ("",):
                arguments = {**kwargs, **({"landmarks": choice} if takes_landmarks else {})}
                rows.append(
                    measure(Speed(name, choice), arguments, settings, where, seconds, report)
                )
    relate(rows, PARTS)
    measured_in = describe_environment(where)
    print_rows(console, rows, settings, measured_in, where)
    extra = dataclasses.asdict(settings)
    save_rows(csv, [{**dataclasses.asdict(row), **extra} for row in rows], measured_in)
    return 0


def measure(
    row: Speed,
    arguments: dict[str, Any],
    settings: Settings,
    device: torch.device,
    seconds: float,
    report: Callable[[str], None],
) -> Speed:
    """Fill in a row's own figures; ``arguments`` are the backbone's."""
    for part, step_of in zip(PARTS, (backbone_step, detector_step), strict=True):
        report(f"{label(row)}: {part}")
        torch.manual_seed(0)
        try:
            network, step, held = step_of(row.backbone, arguments, settings, device)
            setattr(row, PARAMETERS[part], count_parameters(network))
            step()
            extra = peak_extra_memory(step, device)
            if settings.cuda_graph and part == "backbone":
                step = capture_graph(step)
            timing = time_queued(step, device, budget=seconds, max_repeats=1000)
            setattr(row, f"{part}_peak_gib", (held() + extra) / 2**30)
            setattr(row, f"{part}_img_per_s", settings.batch_size / timing.median)
        except torch.OutOfMemoryError:
            row.note = f"{part}: out of memory"
        network = step = held = None  # type: ignore[assignment]
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return row


Step = tuple[nn.Module, Callable[[], object], Callable[[], int]]


def backbone_step(
    name: str, arguments: dict[str, Any], settings: Settings, device: torch.device
) -> Step:
    """The backbone, forward and backward through its four maps, and the bytes held between calls."""
    network = place(PyramidFeatures(name, **arguments), settings, device)
    size = [side + -side % LARGEST_STRIDE for side in (settings.height, settings.width)]
    images = torch.randn(settings.batch_size, 3, *size).to(device, memory_format=settings.layout)

    def step() -> None:
        with autocast(settings.amp_dtype, device):
            maps = network(images)
        # The gradient is that of sum(maps) in each map's own type.
        torch.autograd.backward(maps, [torch.ones_like(x) for x in maps])
        network.zero_grad(set_to_none=True)

    return network, step, lambda: count_bytes([images, *network.parameters(), *network.buffers()])


def detector_step(
    name: str, arguments: dict[str, Any], settings: Settings, device: torch.device
) -> Step:
    """The detector, a step of its training, and the bytes held between steps."""
    network = DETECTORS[settings.detector](
        name, CLASSES, backbone_kwargs=arguments, _skip_resize=True
    )
    place(network, settings, device)
    optimizer = OPTIMIZERS["adamw"](network.parameters())
    shape = (3, settings.height, settings.width)
    images = [torch.rand(shape, device=device) for _ in range(settings.batch_size)]
    masks = settings.detector == "mask-rcnn"
    targets = [make_target(*shape[1:], masks, device) for _ in images]

    def step() -> None:
        with autocast(settings.amp_dtype, device):
            losses = network(images, targets)
            loss = sum(losses.values(), torch.zeros((), device=device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def held() -> int:
        state = [t for each in optimizer.state.values() for t in each.values()]
        return count_bytes([*images, *network.parameters(), *network.buffers(), *state])

    return network, step, held


def place(network: nn.Module, settings: Settings, device: torch.device) -> nn.Module:
    """The network on the device in the layout asked for, in training mode."""
    network.to(device=device, memory_format=settings.layout)  # type: ignore[call-overload]
    return network.train()


def make_target(height: int, width: int, masks: bool, device: torch.device) -> dict[str, Tensor]:
    """Objects with boxes of a tenth to a half of the picture's sides; a mask fills its box."""
    sides = torch.tensor([width, height])
    size = sides * (0.1 + 0.4 * torch.rand(OBJECTS, 2))
    corner = (sides - size) * torch.rand(OBJECTS, 2)
    boxes = torch.cat([corner, corner + size], 1)
    target = {"boxes": boxes, "labels": torch.randint(1, CLASSES, (OBJECTS,))}
    if masks:
        x, y = torch.arange(width), torch.arange(height)[:, None]
        left, top, right, bottom = boxes.T[..., None, None]
        target["masks"] = ((x >= left) & (x < right) & (y >= top) & (y < bottom)).to(torch.uint8)
    return {key: value.to(device) for key, value in target.items()}


def label(row: Speed) -> str:
    """The backbone, and its landmarks where it has any."""
    return f"{row.backbone} {row.landmarks}".strip()


def print_rows(
    console: Console,
    rows: Sequence[Speed],
    settings: Settings,
    measured_in: dict[str, object],
    device: torch.device,
) -> None:
    """The table and how to read it."""
    precision = "float32" if settings.amp_dtype == "none" else f"{settings.amp_dtype} autocast"
    size = f"{settings.height} x {settings.width}"
    said = f"Backbones in training: batch {settings.batch_size}, {size}, {precision}, eager"
    said += ", channels last" if settings.channels_last else ""
    said += ", alone in a CUDA graph" if settings.cuda_graph else ""
    heading(console, said, measured_in, threads=device.type == "cpu")
    titles = ["backbone", "params\nM"]
    for words in ("alone", "step"):
        titles += [f"{words}\nimg/s", f"{words}\nratio", f"{words}\nGiB"]
    table = make_table(titles)
    for row in rows:
        cells = [f"{row.detector_parameters / 1e6:.1f}"]
        for part in PARTS:
            cells += [digits(getattr(row, f"{part}_img_per_s"))]
            cells += [digits(getattr(row, f"{part}_ratio_to_first"))]
            cells += [digits(getattr(row, f"{part}_peak_gib"))]
        table.add_row(label(row), *cells)
    console.print(table)
    for row in rows:
        if row.note:
            console.print(f"{label(row)}: {escape(row.note)}", style="yellow")
    console.print(
        "params: of the whole detector.\n"
        "alone: the backbone's forward and backward through its four maps.\n"
        f"step: {settings.detector}'s forward, losses of {OBJECTS} objects a picture, backward and "
        "AdamW's step.\n"
        f"ratio: images a second over those of {label(rows[0])}.\n"
        "GiB: the most that was held at once, weights and images included.",
        style="dim",
    )
