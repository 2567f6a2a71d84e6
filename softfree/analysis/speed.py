"""Throughput and memory of networks: classifiers, and backbones in training as detectors use them."""

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softfree.analysis.complexity import count_macs, count_parameters
from softfree.analysis.measure import (
    Measured,
    Work,
    first_line,
    measure,
    relate,
    release,
    synchronize,
    time_in_turn,
)
from softfree.analysis.plots import LABELS, colour_of, draw_bars
from softfree.models import capture, fold_batch_norms
from softfree.models.features import PyramidFeatures
from softfree.models.graphs import WARM_UP
from softfree.training.detection import DETECTORS
from softfree.training.devices import AMP_DTYPES, DEFAULT_AMP, autocast

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-4, weight_decay=0.05, fused=True),
}
DEFAULT_BATCH = {"cpu": 4, "cuda": 256}
# A folded model computes the same sums in another order.
FOLDING_TOLERANCE = 1e-3
KINDS = {"train": "training", "infer": "inference"}
# How a model is called: from Python, compiled by torch.compile, replayed by softfree.capture.
MODES = ("eager", "compiled", "graph")
CLASSES = 81  # COCO's categories, and one for the background
OBJECTS = 8  # in a picture; COCO has 7 on average
LARGEST_STRIDE = 32  # detectors pad pictures to a multiple of it
# What is measured with a detector, by the word for it.
PARTS = {"backbone": "alone", "step": "step"}


@dataclass(frozen=True)
class ModelConditions:
    """How every model of a run is measured."""

    batch_size: int | None = None
    """images at a time; otherwise 4 on a CPU, 256 on a GPU"""
    img_size: int = 224
    """side of the square images"""
    amp_dtype: str = "auto"
    """autocast to bfloat16 or float16, or none; 'auto': bfloat16 on a GPU, none on a CPU"""
    opt: str = "adamw"
    """optimizer, adamw or sgd"""
    channels_last: bool = False
    """keep images and maps with the channels last in memory"""
    torchcompile: bool = False
    """compile the models with torch.compile"""
    fuse_bn: bool = False
    """for inference, fold batch norms into the convolutions before them"""
    cuda_graph: bool = False
    """replay every step from a CUDA graph, so that only the GPU's time counts"""

    def on(self, device: torch.device) -> "ModelConditions":
        """The same conditions, with what depends on the device filled in."""
        batch = DEFAULT_BATCH[device.type] if self.batch_size is None else self.batch_size
        amp_dtype = DEFAULT_AMP[device.type] if self.amp_dtype == "auto" else self.amp_dtype
        return dataclasses.replace(self, batch_size=batch, amp_dtype=amp_dtype)

    @property
    def images(self) -> int:
        """Images at a time, once the device is known."""
        assert self.batch_size is not None
        return self.batch_size


@dataclass(frozen=True)
class LatencyConditions:
    """How every model of a run is called."""

    img_size: int = 224
    """side of the square images"""
    amp_dtype: str = "auto"
    """autocast to bfloat16 or float16, or none; 'auto': bfloat16 on a GPU, none on a CPU"""
    half: bool = False
    """keep weights and images in the dtype of --amp-dtype instead of casting them in each call"""
    channels_last: bool = False
    """keep images and maps with the channels last in memory"""
    fuse_bn: bool = False
    """fold batch norms into the convolutions before them"""


@dataclass(frozen=True)
class DetectorConditions:
    """How every backbone of a run is measured with a detector."""

    detector: str
    batch_size: int
    height: int
    width: int
    amp_dtype: str
    channels_last: bool
    model_kwargs: str
    cuda_graph: bool


def new_row(
    kinds: Iterable[str],
    figures: Iterable[str] = ("img_per_s", "ratio_to_first", "peak_gib"),
    **known: Any,
) -> SimpleNamespace:
    """A row of a table, with None for ``{kind}_{figure}``; ``note`` says why one is not measured."""
    unknown = itertools.product(kinds, figures)
    return SimpleNamespace(
        **known, **{f"{kind}_{figure}": None for kind, figure in unknown}, note=""
    )


def measure_model(
    name: str,
    conditions: ModelConditions,
    device: torch.device,
    *,
    kinds: Iterable[str] = KINDS,
    seconds: float = 3.0,
    report: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> SimpleNamespace:
    """Measure one row, without its ratios; ``options`` are timm's keyword arguments of the model."""
    report(f"{name}: building")
    side = conditions.img_size
    try:
        network = build(name, side, **options)
        macs = try_count_macs(network, side)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        words = ", ".join(f"{key}={value}" for key, value in options.items())
        given = f" with {words}" if words else ""
        problem = f"{name}{given} can't take images of {side} x {side}: {first_line(error)}"
        raise ValueError(problem) from error
    row = new_row(KINDS, model=name, parameters=count_parameters(network), macs=macs)
    # Inference comes last, because folding changes the model.
    for kind in kinds:
        report(f"{name}: {KINDS[kind]}")
        torch.compiler.reset()
        if kind == "infer" and conditions.fuse_bn:
            row.note = fold_if_safe(network.eval(), side)
        prepare = functools.partial(
            training if kind == "train" else inference, network, conditions, device
        )
        found = measure(prepare, device, seconds=seconds, cuda_graph=conditions.cuda_graph)
        network.zero_grad(set_to_none=True)
        fill(row, kind, found, conditions.images)
        release(device)
    return row


def measure_latency(
    models: Mapping[str, tuple[str, dict[str, Any]]],
    batch_sizes: Iterable[int],
    modes: Sequence[str],
    conditions: LatencyConditions,
    device: torch.device,
    *,
    seconds: float = 1.0,
    report: Callable[[str], None] = lambda text: None,
) -> list[SimpleNamespace]:
    """Measure a row for each batch size and model, given by display name: timm's name and keyword arguments.

    Each call is waited for. Models take turns, so that other load on the machine affects all of them equally.
    """
    networks, notes = {}, {}
    for shown, (name, options) in models.items():
        report(f"{shown}: building")
        networks[shown] = build(name, conditions.img_size, **options).eval()
        notes[shown] = (
            fold_if_safe(networks[shown], conditions.img_size) if conditions.fuse_bn else ""
        )
        place(networks[shown], conditions.channels_last, device)
        if conditions.half:
            networks[shown].to(AMP_DTYPES[conditions.amp_dtype])
    rows = []
    for batch in batch_sizes:
        of_batch = [
            new_row(
                MODES, ("ms", "ratio_to_first"), model=shown, batch_size=batch,
                parameters=count_parameters(network),
            )
            for shown, network in networks.items()
        ]  # fmt: skip
        for mode in modes:
            report(f"batch {batch}, {mode}")
            torch.compiler.reset()
            calls = [
                answer(network, batch, mode, conditions, device) for network in networks.values()
            ]
            for _ in range(WARM_UP):
                for call in calls:
                    call()
            for row, took in zip(of_batch, time_in_turn(calls, seconds * len(calls)), strict=True):
                setattr(row, f"{mode}_ms", 1e3 * took)
                row.note = notes[row.model]
            calls.clear()
            release(device)
        ratios = {f"{mode}_ms": f"{mode}_ratio_to_first" for mode in modes}
        relate(of_batch, of_batch[0], ratios, lower_is_better=True)
        rows += of_batch
    return rows


def answer(
    network: nn.Module, batch: int, mode: str, conditions: LatencyConditions, device: torch.device
) -> Callable[[], None]:
    """A call of the network on a batch that returns when the result is there."""
    side, layout = conditions.img_size, channels(conditions.channels_last)
    images = torch.randn(batch, 3, side, side).to(device, memory_format=layout)
    if conditions.half:
        images = images.to(AMP_DTYPES[conditions.amp_dtype])
    amp_dtype = "none" if conditions.half else conditions.amp_dtype
    forward: Callable[[Tensor], object] = network
    if mode == "compiled":
        forward = torch.compile(network)
    elif mode == "graph":
        with autocast(amp_dtype, device):
            forward = capture(network, images)

    def call() -> None:
        with torch.inference_mode(), autocast(amp_dtype, device):
            forward(images)
        synchronize(device)

    return call


def measure_with_detector(
    row: SimpleNamespace,
    arguments: dict[str, Any],
    conditions: DetectorConditions,
    device: torch.device,
    *,
    seconds: float = 3.0,
    report: Callable[[str], None] = lambda text: None,
) -> None:
    """Fill in a row's figures and parameter counts; ``arguments`` are those of the backbone."""
    for part in PARTS:
        report(f"{row.backbone} {row.landmarks}: {part}")
        torch.manual_seed(0)
        alone = part == "backbone"
        prepare = backbone_pass if alone else detector_step
        network = build_part(part, row.backbone, arguments, conditions.detector)
        setattr(row, f"{'backbone' if alone else 'detector'}_parameters", count_parameters(network))
        found = measure(
            functools.partial(prepare, network, conditions, device),
            device,
            seconds=seconds,
            cuda_graph=conditions.cuda_graph and alone,
        )
        fill(row, part, found, conditions.batch_size)
        del network
        release(device)


def relate_to_first(rows: Sequence[Any], kinds: Iterable[str]) -> None:
    """Fill in the ratios of images per second to the first row's."""
    relate(rows, rows[0], {f"{kind}_img_per_s": f"{kind}_ratio_to_first" for kind in kinds})


def draw_speeds(
    rows: Sequence[Any], names: Sequence[str], kinds: Mapping[str, str], title: str
) -> Any:
    """Draw bars of images per second and of GiB, one for each kind of work, labelled by ``kinds``."""
    panels = {
        words: {
            label: [getattr(row, f"{kind}_{figure}") for row in rows]
            for kind, label in kinds.items()
        }
        for figure, words in (("img_per_s", "images per second"), ("peak_gib", "GiB"))
    }
    labels = [LABELS.get(name, name) for name in names]
    return draw_bars(labels, panels, title, [colour_of(name) for name in names])


def fill(row: Any, kind: str, found: Measured, images: int) -> None:
    """Write images per second, GiB and notes into a row's fields for this kind of work."""
    setattr(row, f"{kind}_img_per_s", found.per_second(images))
    if found.peak_bytes is not None:
        setattr(row, f"{kind}_peak_gib", found.peak_bytes / 2**30)
    row.note = "; ".join(filter(None, (row.note, found.note and f"{kind}: {found.note}")))


def build(name: str, img_size: int, **options: Any) -> nn.Module:
    """Create an untrained model for images of this size; pass it the size if it takes one."""
    torch.manual_seed(0)
    try:
        return timm.create_model(name, img_size=img_size, **options)
    except TypeError as error:
        # Networks that take any size have no such argument.
        if "img_size" not in str(error):
            raise
        return timm.create_model(name, **options)


def try_count_macs(network: nn.Module, img_size: int) -> int | None:
    """Count multiply-adds; None if a model runs, but its products can't be counted from shapes."""
    try:
        return count_macs(network, img_size)
    # Models from elsewhere may raise anything when tensors have no numbers.
    except Exception:
        with torch.inference_mode():
            network.eval()(torch.randn(1, 3, img_size, img_size))
        return None


def training(network: nn.Module, conditions: ModelConditions, device: torch.device) -> Work:
    """Forward, cross-entropy, backward and the optimizer's step."""
    images, forward = place_classifier(network.train(), conditions, device)
    labels: Tensor | None = None

    def loss() -> Tensor:
        nonlocal labels
        logits = forward(images)
        if labels is None:
            labels = torch.randint(logits.shape[-1], (len(images),), device=device)
        return F.cross_entropy(logits, labels)

    return training_step(
        network,
        loss,
        conditions.amp_dtype,
        device,
        opt=conditions.opt,
        capturable=conditions.cuda_graph,
        inputs=[images],
    )


def training_step(
    network: nn.Module,
    loss: Callable[[], Tensor],
    amp_dtype: str,
    device: torch.device,
    *,
    opt: str = "adamw",
    capturable: bool = False,
    inputs: Iterable[Tensor] = (),
) -> Work:
    """A step on the gradient of ``loss()``.

    If ``capturable`` by a CUDA graph, Adam counts steps on the GPU.
    """
    optimizer = OPTIMIZERS[opt](network.parameters())
    for group in optimizer.param_groups:
        group["capturable"] = capturable
    scaler = torch.amp.GradScaler(device.type, enabled=amp_dtype == "float16")

    def step() -> None:
        with autocast(amp_dtype, device):
            value = loss()
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    def held() -> int:
        state = [t for each in optimizer.state.values() for t in each.values()]
        return count_bytes(network, *inputs, *state)

    return Work(step, held)


def inference(network: nn.Module, conditions: ModelConditions, device: torch.device) -> Work:
    """Forward without gradients."""
    images, forward = place_classifier(network.eval(), conditions, device)

    def step() -> None:
        with torch.inference_mode(), autocast(conditions.amp_dtype, device):
            forward(images)

    return Work(step, lambda: count_bytes(network, images))


def place_classifier(
    network: nn.Module, conditions: ModelConditions, device: torch.device
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Images, and the model to call on them, on the device in the requested layout."""
    side = conditions.img_size
    layout = place(network, conditions.channels_last, device)
    images = torch.randn(conditions.images, 3, side, side).to(device, memory_format=layout)
    return images, torch.compile(network) if conditions.torchcompile else network


def build_part(part: str, name: str, arguments: dict[str, Any], detector: str) -> nn.Module:
    """A backbone with maps at 1/4 to 1/32, or the detector on it, for pictures that are already resized."""
    if part == "backbone":
        return PyramidFeatures(name, **arguments)
    return DETECTORS[detector](name, CLASSES, backbone_kwargs=arguments, _skip_resize=True)


def backbone_pass(network: nn.Module, conditions: DetectorConditions, device: torch.device) -> Work:
    """Forward and backward through the four maps."""
    sides = [side + -side % LARGEST_STRIDE for side in (conditions.height, conditions.width)]
    layout = place(network.train(), conditions.channels_last, device)
    images = torch.randn(conditions.batch_size, 3, *sides).to(device, memory_format=layout)

    def step() -> None:
        with autocast(conditions.amp_dtype, device):
            maps = network(images)
        # The gradient of sum(maps), in each map's own dtype.
        torch.autograd.backward(maps, [torch.ones_like(x) for x in maps])
        network.zero_grad(set_to_none=True)

    return Work(step, lambda: count_bytes(network, images))


def detector_step(network: nn.Module, conditions: DetectorConditions, device: torch.device) -> Work:
    """Forward with made-up objects, losses, backward and AdamW's step."""
    place(network.train(), conditions.channels_last, device)
    shape = (3, conditions.height, conditions.width)
    images = [torch.rand(shape, device=device) for _ in range(conditions.batch_size)]
    masks = conditions.detector == "mask-rcnn"
    targets = [make_target(*shape[1:], masks, device) for _ in images]

    def loss() -> Tensor:
        return sum(network(images, targets).values(), torch.zeros((), device=device))

    return training_step(network, loss, conditions.amp_dtype, device, inputs=images)


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


def place(network: nn.Module, channels_last: bool, device: torch.device) -> torch.memory_format:
    """Move a network to the device, with its weights in the requested layout.

    Returns the layout, for images.
    """
    layout = channels(channels_last)
    network.to(device=device, memory_format=layout)  # type: ignore[call-overload]
    return layout


def channels(last: bool) -> torch.memory_format:
    """The memory format, with the channels last or not."""
    return torch.channels_last if last else torch.contiguous_format


def count_bytes(network: nn.Module, *others: object) -> int:
    """Bytes of a network's weights and buffers, and of the tensors among ``others``."""
    held = (*others, *network.parameters(), *network.buffers())
    return sum(t.numel() * t.element_size() for t in held if isinstance(t, Tensor))


def fold_if_safe(network: nn.Module, img_size: int) -> str:
    """Fold batch norms into convolutions if the results stay the same; return a note on what was done.

    A norm that is listed after a convolution need not follow it in the computation. So a copy with random
    statistics is folded first and compared.
    """
    trial = copy.deepcopy(network).cpu().float().eval()
    norms = [module for module in trial.modules() if isinstance(module, nn.BatchNorm2d)]
    with torch.no_grad():
        for norm in norms:
            for least, tensors in (
                (0.5, (norm.running_var, norm.weight)),
                (-0.5, (norm.running_mean, norm.bias)),
            ):
                for tensor in tensors:
                    if tensor is not None:
                        tensor.uniform_(least, least + 1)
        image = torch.randn(1, 3, img_size, img_size)
        expected = trial(image)
        left = sum(isinstance(m, nn.BatchNorm2d) for m in fold_batch_norms(trial).modules())
        error = float((trial(image) - expected).norm() / expected.norm())
    if left == len(norms):
        return "no batch norm to fold"
    if not error <= FOLDING_TOLERANCE:
        return f"batch norms not folded: the result would change by {error:.0e}"
    fold_batch_norms(network)
    return f"{len(norms) - left} batch norms folded"
