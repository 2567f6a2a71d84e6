"""Object detection and instance segmentation: settings and recipes, and the task that the engine trains.

Detection.run(settings)                 -> Outcome
Detection.load("OUTPUT/best", device)   -> model, metadata
"""

import copy
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from torch import Tensor, nn
from torch.utils.data import Subset
from torchvision.ops import batched_nms

from softfree.data.detection import (
    CocoDetection,
    DetectionBatch,
    DetectionData,
    aspect_ratio_order,
    collate_detection,
    load_detection,
    repeat_factors,
    repeat_indices,
    train_transform,
)
from softfree.data.drawing import Tile, in_turn, objects_tile
from softfree.data.images import part_readable
from softfree.data.layouts import count_pictures
from softfree.models.checks import check_at_least, check_grouped, check_model_name
from softfree.models.detection import mask_rcnn, padded_size, retinanet
from softfree.models.views import AS_IS, Views, mirror
from softfree.training.coco_metrics import MASK_THRESHOLD, CocoMetrics
from softfree.training.dense import (
    SMALL_BACKBONE,
    SMALL_JITTER,
    SMALL_OPTIM,
    BackboneSettings,
    DenseTask,
    check_variation,
    has_fewer_files,
)
from softfree.training.distributed import Processes
from softfree.training.parameters import parameter_groups
from softfree.training.settings import OptimSettings, RunSettings

DETECTORS = {"retinanet": retinanet, "mask-rcnn": mask_rcnn}
# Shorter names for torchvision's losses, the same for both detectors.
LOSSES = {
    "classification": "class",
    "bbox_regression": "box",
    "loss_classifier": "class",
    "loss_box_reg": "box",
    "loss_mask": "mask",
    "loss_objectness": "object",
    "loss_rpn_box_reg": "rpn_box",
}
# Objects with a lower score are not drawn.
DRAWN_SCORE = 0.3
DetectorName = Literal["retinanet", "mask-rcnn"]


@dataclasses.dataclass(frozen=True)
class DetectionDataSettings:
    """The data, and how pictures are resized, cropped and augmented."""

    data_dir: str | None = None
    """folder in the layout of COCO (annotations/instances_train2017.json, ...), Roboflow, PASCAL VOC or YOLO
    (data.yaml); none: the embedded shapes"""
    skip_bad_annotations: bool = False
    """skip annotations that can't be used, such as boxes without area, instead of raising an error"""
    short_sides: tuple[int, ...] = (800,)
    """training: the short side is resized to a random one of these"""
    short_side: int = 800
    """evaluation: short side"""
    max_size: int = 1333
    """no side becomes longer than this"""
    scales: tuple[float, float] = (1.0, 1.0)
    """training: range of the random factor that both sides are multiplied by"""
    crop: int = 0
    """training: side of a random square crop after that, with an object in it if there is one; 0: no crop"""
    color_jitter: float = 0.0
    """training: strength of random changes in brightness, contrast and saturation"""
    balance: float = 0.0
    """training: repeat pictures of rare classes, those in less than this share of the pictures; 0: show each
    picture once per epoch"""


@dataclasses.dataclass(frozen=True)
class DetectorSettings:
    """The detector on top of the backbone."""

    detector: DetectorName = "retinanet"
    """retinanet: boxes; mask-rcnn: boxes and masks"""
    width: int = 256
    """channels of the feature pyramid and the heads"""
    anchor_size: int = 32
    """side of the smallest anchors in pixels; it doubles from level to level"""
    head_norm: bool = False
    """retinanet: GroupNorm in the heads; helps training from scratch"""
    proposals: int = 512
    """mask-rcnn: number of regions per picture that train the box head"""


@dataclasses.dataclass(frozen=True)
class DetectionSettings:
    """Settings of `softfree train detection`."""

    recipe: Annotated[str, tyro.conf.Suppress] = ""
    data: DetectionDataSettings = dataclasses.field(default_factory=DetectionDataSettings)
    detector: DetectorSettings = dataclasses.field(default_factory=DetectorSettings)
    backbone: BackboneSettings = dataclasses.field(default_factory=BackboneSettings)
    optim: OptimSettings = dataclasses.field(default_factory=OptimSettings)
    run: RunSettings = dataclasses.field(default_factory=RunSettings)


# The paper's settings: AdamW, learning rate 1e-4, weight decay 0.01, batch 16; drops as in MMDetection.
_PAPER = OptimSettings(
    batch_size=16, lr=1e-4, weight_decay=0.01, sched="multistep", warmup_lr=1e-7, warmup_steps=500,
    clip_grad=35.0,
)  # fmt: skip
RECIPES = {
    settings.recipe: settings
    for settings in (
        DetectionSettings(
            "1x", optim=dataclasses.replace(_PAPER, epochs=12, decay_milestones=(8, 11))
        ),
        DetectionSettings(
            "3x",
            data=DetectionDataSettings(short_sides=tuple(range(480, 801, 32))),
            optim=dataclasses.replace(_PAPER, epochs=36, decay_milestones=(27, 33)),
        ),
        DetectionSettings(
            "small",
            data=DetectionDataSettings(
                short_sides=(512,), short_side=512, max_size=853, crop=512, balance=0.1, **SMALL_JITTER
            ),
            detector=DetectorSettings(head_norm=True),
            optim=SMALL_OPTIM,
            run=RunSettings(eval_every=300),
        ),
        DetectionSettings(
            "shapes",
            data=DetectionDataSettings(short_sides=(96,), short_side=96, max_size=192),
            detector=DetectorSettings(width=64, head_norm=True, proposals=64, anchor_size=20),
            backbone=BackboneSettings(model_kwargs=SMALL_BACKBONE),
            optim=OptimSettings(
                batch_size=8, steps=1200, warmup_steps=100, lr=2e-3, min_lr=1e-5, weight_decay=0.05,
                clip_grad=1.0,
            ),
            run=RunSettings(workers=0, eval_every=400),
        ),
    )
}  # fmt: skip
# A step of Mask R-CNN takes several times as long as one of RetinaNet, but the model learns more from it.
MASK_RCNN_SHAPES_STEPS = 800


class Detection(DenseTask):
    """Pictures to boxes, and to masks with Mask R-CNN."""

    name = "detection"
    recipes = RECIPES
    headline = ("box_AP", "mask_AP")
    make_batch = staticmethod(collate_detection)
    sizes_vary = True  # sizes of pictures, and the number of regions for the mask head

    @classmethod
    def usual_length(cls, settings: DetectionSettings) -> OptimSettings:
        length = super().usual_length(settings)
        if settings.recipe == "shapes" and settings.detector.detector == "mask-rcnn":
            return dataclasses.replace(length, steps=MASK_RCNN_SHAPES_STEPS)
        return length

    def __init__(self, settings: DetectionSettings, data: DetectionData | None = None):
        self.settings = settings
        given = settings.data
        check_model_name(settings.backbone.model)
        if not given.short_sides or min(given.short_sides) < 1:
            listed = ", ".join(map(str, given.short_sides)) or "none"
            raise ValueError(f"`short_sides` must be at least 1, got {listed}")
        check_at_least(1, short_side=given.short_side, max_size=given.max_size)
        check_variation(given.scales, given.color_jitter)
        check_at_least(0, crop=given.crop, balance=given.balance)
        detector = settings.detector
        check_at_least(1, width=detector.width, anchor_size=detector.anchor_size)
        # Half of them train the proposals themselves.
        check_at_least(2, proposals=detector.proposals)
        if detector.head_norm and detector.detector == "retinanet":
            check_grouped(width=detector.width)
        self.masks = detector.detector == "mask-rcnn"
        self.metric = "mask_AP" if self.masks else "box_AP"
        if data is None:
            data = load_detection(
                given.data_dir, masks=self.masks, skip_bad=given.skip_bad_annotations
            )
        self.data = data
        self.train_data = data.train
        self.eval_data = for_evaluation(data.val, given.short_side, given.max_size)
        self.train_data.transform = train_transform(
            given.short_sides,
            given.max_size,
            scales=given.scales,
            crop=given.crop,
            color_jitter=given.color_jitter,
        )

    @classmethod
    def has_fewer(cls, data_dir: str, count: int) -> bool:
        return has_fewer_files(data_dir, count)

    @classmethod
    def count_samples(cls, data_dir: str) -> int:
        return count_pictures(Path(data_dir), "train")

    @classmethod
    def build(cls, metadata: dict[str, Any], **kwargs: Any) -> nn.Module:
        return DETECTORS[metadata["detector"]](
            metadata["model"],
            # The background has a class of its own, 0.
            len(metadata["class_names"]) + 1,
            # Training pictures arrive resized, by the loading processes.
            _skip_resize=True,
            **metadata["arguments"],
            **kwargs,
        )

    def metadata(self) -> dict[str, Any]:
        detector, backbone = self.settings.detector, self.settings.backbone
        arguments: dict[str, Any] = dict(
            min_size=self.settings.data.short_side,
            max_size=self.settings.data.max_size,
            width=detector.width,
            anchor_size=detector.anchor_size,
            frozen_bn=backbone.frozen_bn,
            backbone_kwargs=backbone.arguments(),
        )
        if self.masks:
            # The same proportions as between torchvision's own numbers and its 512.
            arguments |= dict(
                box_batch_size_per_image=detector.proposals,
                rpn_batch_size_per_image=detector.proposals // 2,
                rpn_pre_nms_top_n_train=4 * detector.proposals,
                rpn_post_nms_top_n_train=4 * detector.proposals,
                rpn_pre_nms_top_n_test=2 * detector.proposals,
                rpn_post_nms_top_n_test=2 * detector.proposals,
            )
        else:
            arguments["head_norm"] = detector.head_norm
        return {
            "model": backbone.model,
            "detector": detector.detector,
            "arguments": arguments,
            "class_names": list(self.data.class_names),
            "category_ids": list(self.data.train.category_ids),
        }

    def order(self, samples: int, batch_size: int, generator: torch.Generator) -> Tensor:
        """The order of an epoch: all pictures of a batch are wide or all are tall.

        Rare classes are repeated.
        """
        data, share = self.data.train, self.settings.data.balance
        shown = [*range(samples)]
        if share:
            labels = [data.labels(index) for index in range(samples)]
            shown = repeat_indices(repeat_factors(labels, share), generator)
        ratios = [data.aspect_ratio(index % samples) for index in shown]
        order = aspect_ratio_order(ratios, batch_size, generator)
        return torch.tensor([shown[place] for place in order])

    def parameter_groups(self, model: nn.Module, optim: OptimSettings) -> list[dict[str, Any]]:
        return parameter_groups(model, optim, model.backbone.features.body)  # type: ignore[union-attr, arg-type]

    def train_step(
        self, model: nn.Module, batch: DetectionBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        losses = model(batch.unit_images, batch.targets)
        named = {LOSSES.get(name, name): loss for name, loss in losses.items()}
        return sum(losses.values(), torch.zeros(())), named

    def draw_batch(self, batch: DetectionBatch) -> list[Tile]:
        names = self.data.class_names
        pairs = zip(batch.images, batch.targets, strict=True)
        return [objects_tile(image, target, names) for image, target in pairs]

    def draw_predictions(
        self, model: nn.Module, indices: Sequence[int], device: torch.device
    ) -> list[Tile]:
        names, (readable, _) = (
            self.data.class_names,
            part_readable(self.data.val[index] for index in indices),
        )
        found = detect(model, [image.as_subclass(Tensor).to(device) for image, _ in readable])
        truths, guesses = [], []
        for (image, target), objects in zip(readable, found, strict=True):
            sure = (objects["scores"] >= DRAWN_SCORE) & (objects["labels"] > 0)
            shown = {name: values[sure].cpu() for name, values in objects.items()}
            if "masks" in shown:
                shown["masks"] = shown["masks"][:, 0] > MASK_THRESHOLD
            truths.append(objects_tile(image, target, names, "truth"))
            caption = f"predicted, {DRAWN_SCORE:.0%} and more"
            guesses.append(objects_tile(image, shown, names, caption))
        return in_turn(truths, guesses)

    def evaluate(
        self, model: nn.Module, batches: Iterable[DetectionBatch], processes: Processes
    ) -> dict[str, float]:
        return evaluate_detector(model, batches, self.data.val, self.masks, processes)


def for_evaluation(data: CocoDetection, short_side: int, max_size: int) -> Subset:
    """The pictures with only their ids, ordered so that those of equal size are adjacent: they share a pass.

    The ground truth is already in the metric, so no mask has to be decoded.
    """
    bare = copy.copy(data)
    bare.masks, bare.transform = False, _image_and_id
    sizes = [
        padded_size((image["height"], image["width"]), short_side, max_size)
        for image in data.images
    ]
    return Subset(bare, sorted(range(len(sizes)), key=sizes.__getitem__))


def _image_and_id(image: Tensor, target: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    return image.as_subclass(Tensor), {"image_id": target["image_id"]}


def evaluate_detector(
    model: nn.Module,
    batches: Iterable[DetectionBatch],
    data: CocoDetection,
    masks: bool,
    processes: Processes,
) -> dict[str, float]:
    """Compute COCO's metrics in percent over the batches of all processes, counting each picture once."""
    return collect_detections(model, batches, data, masks).compute(processes)


def collect_detections(
    model: nn.Module,
    batches: Iterable[DetectionBatch],
    data: CocoDetection,
    masks: bool,
    views: Views = AS_IS,
) -> CocoMetrics:
    """Run the detector on the batches of this process; return its detections, ready to be scored."""
    metrics = CocoMetrics(data.annotations, data.category_ids, masks=masks)
    for batch in batches:
        if batch.image_ids:
            metrics.update(batch.image_ids, detect(model, batch.images, views))
    return metrics


def detect(
    model: nn.Module, images: Sequence[Tensor], views: Views = AS_IS
) -> list[dict[str, Tensor]]:
    """Detect objects in 8-bit pictures (3, H, W).

    With several views of a picture, the most certain of overlapping detections is kept. The limits for this
    are the detector's own.
    """
    if views == AS_IS:
        return _detect_once(model, images)
    # One by one: masks of many views of many pictures would take gigabytes.
    return [_merge(model, _detect_views(model, image, views)) for image in images]


def _detect_views(model: nn.Module, image: Tensor, views: Views) -> Iterator[dict[str, Tensor]]:
    """The detections in each view of a picture, in the picture's own coordinates."""
    transform: Any = model.transform
    usual = transform.min_size[-1], transform.max_size
    try:
        for scale, mirrored in views:
            set_size(model, *(max(1, round(side * scale)) for side in usual))
            [found] = _detect_once(model, [mirror(image) if mirrored else image])
            yield mirror_objects(found, image.shape[-1]) if mirrored else found
    finally:
        set_size(model, *usual)


def mirror_objects(found: dict[str, Tensor], width: int) -> dict[str, Tensor]:
    """Map detections in the mirror image of a picture of this width back to the picture."""
    left, top, right, bottom = found["boxes"].unbind(1)
    turned = {"boxes": torch.stack([width - right, top, width - left, bottom], dim=1)}
    if "masks" in found:
        turned["masks"] = mirror(found["masks"])
    return {**found, **turned}


def _merge(model: nn.Module, views: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The objects of several views of a picture, each once, the most certain first."""
    parts = [*views]
    every = {name: torch.cat([found[name] for found in parts]) for name in parts[0]}
    limits: Any = getattr(model, "roi_heads", model)
    kept = batched_nms(every["boxes"].float(), every["scores"], every["labels"], limits.nms_thresh)[
        : limits.detections_per_img
    ]
    return {name: values[kept] for name, values in every.items()}


def scaled_size(min_size: int, max_size: int, short_side: int | None) -> tuple[int, int]:
    """Both sizes for another short side.

    The maximum grows with it; otherwise it would limit the short side.
    """
    if short_side is None:
        return min_size, max_size
    return short_side, round(short_side * max_size / min_size)


def set_size(model: nn.Module, short_side: int, max_size: int) -> None:
    """Make a detector resize pictures to this short side, with the longer side at most ``max_size``."""
    transform: Any = model.transform
    transform.min_size, transform.max_size = (short_side,), max_size


def _detect_once(model: nn.Module, images: Sequence[Tensor]) -> list[dict[str, Tensor]]:
    """Run the detector on pictures; those that it resizes to the same size go through it together.

    A batch is padded to its largest picture, and attention over the whole map sees the padding. If sizes were
    mixed, the detections in one picture would depend on the sizes of the others.
    """
    transform: Any = model.transform
    places: dict[tuple[int, int], list[int]] = {}
    for place, image in enumerate(images):
        height, width = image.shape[1:]
        seen = padded_size((height, width), transform.min_size[-1], transform.max_size)
        places.setdefault(seen, []).append(place)
    found: dict[int, dict[str, Tensor]] = {}
    for group in places.values():
        detections = model([images[place].float() / 255 for place in group])
        found.update(zip(group, detections, strict=True))
    return [found[place] for place in range(len(images))]
