"""Throughput and memory of backbones in training as detectors use them, alone and in a whole step."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from softfree.analysis.complexity import count_parameters
from softfree.analysis.measure import Work, measure, release
from softfree.analysis.model_speed import count_bytes, fill, layout, place, training_step
from softfree.models.features import PyramidFeatures
from softfree.training.detection import DETECTORS
from softfree.training.devices import autocast

CLASSES = 81  # COCO's categories, and one for the background
OBJECTS = 8  # in a picture; COCO has 7 on average
LARGEST_STRIDE = 32  # detectors pad pictures to a multiple of it
# By what is measured, the count of its parameters.
PARTS = {"backbone": "backbone_parameters", "step": "detector_parameters"}


@dataclass(frozen=True)
class DetectorConditions:
    """How every backbone of a run is measured under a detector."""

    detector: str
    batch_size: int
    height: int
    width: int
    amp_dtype: str
    channels_last: bool
    model_kwargs: str
    cuda_graph: bool


@dataclass
class DetectorSpeed:
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

    @property
    def name(self) -> str:
        """The backbone, and its landmarks where it has any."""
        return f"{self.backbone} {self.landmarks}".strip()


def measure_under_detector(
    row: DetectorSpeed,
    arguments: dict[str, Any],
    conditions: DetectorConditions,
    device: torch.device,
    *,
    seconds: float = 3.0,
    report: Callable[[str], None] = lambda text: None,
) -> DetectorSpeed:
    """Fill in a row's own figures; ``arguments`` are the backbone's."""
    for part, parameters in PARTS.items():
        report(f"{row.name}: {part}")
        torch.manual_seed(0)
        build_part = build_backbone if part == "backbone" else build_detector
        network = build_part(row.backbone, arguments, conditions)
        setattr(row, parameters, count_parameters(network))
        prepare = backbone_pass if part == "backbone" else detector_step
        found = measure(
            functools.partial(prepare, network, conditions, device),
            device,
            seconds=seconds,
            cuda_graph=conditions.cuda_graph and part == "backbone",
        )
        fill(row, part, found, conditions.batch_size)
        del network
        release(device)
    return row


def build_backbone(
    name: str, arguments: dict[str, Any], conditions: DetectorConditions
) -> nn.Module:
    """A backbone's maps at 1/4 to 1/32, as a detector takes them."""
    return PyramidFeatures(name, **arguments)


def build_detector(
    name: str, arguments: dict[str, Any], conditions: DetectorConditions
) -> nn.Module:
    """The detector on this backbone, for pictures that have their size already."""
    make = DETECTORS[conditions.detector]
    return make(name, CLASSES, backbone_kwargs=arguments, _skip_resize=True)


def backbone_pass(network: nn.Module, conditions: DetectorConditions, device: torch.device) -> Work:
    """Forward and backward through the four maps."""
    place(network, conditions.channels_last, device).train()
    size = [side + -side % LARGEST_STRIDE for side in (conditions.height, conditions.width)]
    images = torch.randn(conditions.batch_size, 3, *size)
    images = images.to(device, memory_format=layout(conditions.channels_last))

    def step() -> None:
        with autocast(conditions.amp_dtype, device):
            maps = network(images)
        # The gradient is that of sum(maps) in each map's own type.
        torch.autograd.backward(maps, [torch.ones_like(x) for x in maps])
        network.zero_grad(set_to_none=True)

    return Work(step, lambda: count_bytes([images, *network.parameters(), *network.buffers()]))


def detector_step(network: nn.Module, conditions: DetectorConditions, device: torch.device) -> Work:
    """Forward with made-up objects, losses, backward and AdamW's step."""
    place(network, conditions.channels_last, device).train()
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
