"""Semantic segmentation: settings and recipes, and the task that the engine trains.

Segmentation.run(settings)               -> Outcome
Segmentation.load("OUTPUT/best", device) -> model, metadata
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
import tyro
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor, nn

from softfree.data.drawing import Tile, class_map_tile, in_turn
from softfree.data.layouts import count_pictures
from softfree.data.segmentation import (
    IGNORE,
    Embedded,
    EvalTransform,
    SegmentationBatch,
    SegmentationData,
    balanced_weights,
    collate_pictures,
    collate_segmentation,
    has_class_maps,
    load_segmentation,
    load_split,
    train_transform,
)
from softfree.models.checks import check_at_least, check_model_name
from softfree.models.segmentation import (
    AUXILIARY_STRIDE,
    linear,
    resize_logits,
    segment,
    upernet,
)
from softfree.models.views import AS_IS, Views
from softfree.training.classification import Normalize
from softfree.training.confusion import class_scores
from softfree.training.dense import (
    SMALL_BACKBONE,
    SMALL_JITTER,
    SMALL_OPTIM,
    BackboneSettings,
    DenseTask,
    any_sizes,
    check_variation,
    has_fewer_files,
    is_pyramid,
)
from softfree.training.distributed import Processes
from softfree.training.parameters import parameter_groups
from softfree.training.settings import Given, OptimSettings, RunSettings

AUXILIARY_WEIGHT = 0.4


@dataclasses.dataclass(frozen=True)
class SegmentationDataSettings:
    """The data, how pictures are cropped and augmented, and the weights of classes."""

    data_dir: str | None = None
    """folder in the layout of ADE20K, Cityscapes or PASCAL VOC, with images/train, images/val, masks/train,
    masks/val and classes.txt, or with masks of objects (COCO, Roboflow, YOLO); none: an embedded set"""
    dataset: Embedded = "shapes"
    """without --data-dir: shapes on a textured background, or twins (which of 64 cells occur twice?)"""
    ignore_label: int = IGNORE
    """value in masks/ that stands for no class"""
    skip_bad_annotations: bool = False
    """with masks of objects: skip those that can't be used instead of raising an error"""
    check_data: bool = True
    """check every class map before training"""
    crop: int = 512
    """training: side of the random square crop"""
    short_side: int = 512
    """short side that pictures are resized to, in training before the crop; 0: not resized"""
    scales: tuple[float, float] = (1.0, 1.0)
    """training: range of the random factor that the short side is multiplied by; needs --short-side"""
    color_jitter: float = 0.0
    """training: strength of random changes in brightness, contrast and saturation"""
    class_weights: Literal["none", "balanced"] = "none"
    """balanced: rare classes count more in the loss, by one over the square root of their share of the
    pixels"""
    window: int = 0
    """evaluation: side of the sliding windows; 0: the whole picture at once"""


@dataclasses.dataclass(frozen=True)
class DecoderSettings:
    """The head on top of the backbone."""

    head: Literal["upernet", "linear"] = "upernet"
    """UPerNet, or a linear layer on each feature map of the backbone"""
    width: int = 512
    """channels of UPerNet"""


@dataclasses.dataclass(frozen=True)
class SegmentationSettings:
    """Settings of `softfree train segmentation`."""

    recipe: Annotated[str, tyro.conf.Suppress] = ""
    data: SegmentationDataSettings = dataclasses.field(default_factory=SegmentationDataSettings)
    decoder: DecoderSettings = dataclasses.field(default_factory=DecoderSettings)
    backbone: BackboneSettings = dataclasses.field(default_factory=BackboneSettings)
    optim: OptimSettings = dataclasses.field(default_factory=OptimSettings)
    run: RunSettings = dataclasses.field(default_factory=RunSettings)


# The paper's settings: AdamW, learning rate 6e-4, no random scaling. MMSegmentation's "poly" of power 1 is a
# straight line; its warm-up takes 1500 steps.
_PAPER = OptimSettings(
    lr=6e-4, min_lr=0.0, sched="linear", warmup_steps=1500, warmup_lr=1e-6, weight_decay=0.01,
    clip_grad=1.0,
)  # fmt: skip
RECIPES = {
    settings.recipe: settings
    for settings in (
        SegmentationSettings(
            "ade20k",
            optim=dataclasses.replace(_PAPER, batch_size=16, steps=160_000),
            run=RunSettings(eval_every=16_000),
        ),
        SegmentationSettings(
            "cityscapes",
            data=SegmentationDataSettings(crop=768, short_side=1024),
            optim=dataclasses.replace(_PAPER, batch_size=8, steps=40_000),
            run=RunSettings(eval_every=4_000),
        ),
        SegmentationSettings(
            "small",
            data=SegmentationDataSettings(class_weights="balanced", **SMALL_JITTER),
            optim=SMALL_OPTIM,
            run=RunSettings(eval_every=300),
        ),
        SegmentationSettings(
            "shapes",
            data=SegmentationDataSettings(crop=96, short_side=0),
            decoder=DecoderSettings(width=64),
            backbone=BackboneSettings(model_kwargs=SMALL_BACKBONE),
            optim=OptimSettings(
                batch_size=8, steps=1500, warmup_steps=50, lr=2e-3, min_lr=1e-5, weight_decay=0.05,
                clip_grad=1.0,
            ),
            run=RunSettings(workers=0, eval_every=500),
        ),
        # Each token of the second stage is a cell, and a landmark. There are neither overlapping windows nor
        # convolutions, so up to there only attention carries information from cell to cell.
        SegmentationSettings(
            "twins",
            data=SegmentationDataSettings(dataset="twins", crop=64, short_side=0),
            decoder=DecoderSettings(head="linear"),
            backbone=BackboneSettings(
                model_kwargs=(
                    "embed_dims=32,64,64,64", "num_heads=1,2,2,2", "depths=1,2,1,1", "img_size=64",
                    "overlap=False", "strides=4,1,1,1", "value_convs=0,0,0,0", "mlp_convs=0,0,0,0",
                ),
            ),
            optim=OptimSettings(
                batch_size=16, steps=400, warmup_steps=50, lr=2e-3, min_lr=1e-5, weight_decay=0.0,
                clip_grad=1.0,
            ),
            run=RunSettings(workers=0, eval_every=200),
        ),
    )
}  # fmt: skip
HEADS: dict[str, Callable[..., nn.Module]] = {"upernet": upernet, "linear": linear}


class Segmentation(DenseTask):
    """Classification of every pixel, with cross-entropy and an auxiliary head."""

    name = "segmentation"
    recipes = RECIPES
    metric = "mIoU"
    make_batch = staticmethod(collate_segmentation)

    def __init__(self, settings: SegmentationSettings, data: SegmentationData | None = None):
        self.settings = settings
        given = settings.data
        check_model_name(settings.backbone.model)
        check_at_least(0, short_side=given.short_side, window=given.window)
        check_at_least(1, crop=given.crop)
        check_at_least(2, width=settings.decoder.width)
        upernet_head = settings.decoder.head == "upernet"
        if settings.optim.batch_size == 1 and upernet_head and not settings.run.sync_bn:
            raise ValueError(
                "`batch_size` must be at least 2, got 1: UPerNet has a batch norm that sees only one value per "
                "picture"
            )
        if given.dataset == "twins" and given.data_dir is not None:
            raise ValueError(
                f"`dataset` twins is generated and reads no files, got `data_dir` {given.data_dir}; use one of the "
                "two"
            )
        check_variation(given.scales, given.color_jitter)
        if not given.short_side and given.scales != (1.0, 1.0):
            low, high = given.scales
            raise ValueError(
                f"`scales` {low:g} {high:g} multiply the short side, but with `short_side` 0 pictures are not resized; "
                f"set it, for example to the size of the crop (`short_side` {given.crop}), or drop `scales`"
            )
        if data is None:
            data = load_segmentation(
                given.data_dir,
                dataset=given.dataset,
                ignore_label=given.ignore_label,
                skip_bad=given.skip_bad_annotations,
                check=given.check_data,
            )
        self.data = data
        self.class_names = data.class_names
        self.train_data, self.eval_data = data.train, data.val
        short_side = given.short_side or None
        self.train_data.transform = train_transform(
            given.crop,
            short_side=short_side,
            scales=given.scales,
            color_jitter=given.color_jitter,
        )
        self.eval_data.transform = EvalTransform(short_side)
        self.normalize = Normalize(IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)

    @classmethod
    def has_fewer(cls, data_dir: str, count: int) -> bool:
        with contextlib.suppress(ValueError, FileNotFoundError):
            if not has_class_maps(Path(data_dir)):
                return has_fewer_files(data_dir, count)
            return cls.count_samples(data_dir) < count
        return False

    @classmethod
    def count_samples(cls, data_dir: str) -> int:
        if not has_class_maps(Path(data_dir)):
            return count_pictures(Path(data_dir), "train")
        # Only lists the files, without opening them.
        return len(load_split(data_dir, "train", check=False)[0])

    @classmethod
    def usual_recipe(cls, given: Given) -> str:
        return "twins" if given.get("dataset") == "twins" else super().usual_recipe(given)

    @classmethod
    def adapt(cls, settings: Any, given: Given) -> Any:
        """As for all dense tasks; arguments given for a pyramid on twins are added to those of the recipe.

        Without the recipe's, cells would see each other by convolutions.
        """
        settings = super().adapt(settings, given)
        backbone = settings.backbone
        if settings.recipe == "twins" and is_pyramid(backbone.model):
            usual = RECIPES["twins"].backbone.model_kwargs
            merged = {each.partition("=")[0]: each for each in (*usual, *backbone.model_kwargs)}
            backbone = dataclasses.replace(backbone, model_kwargs=tuple(merged.values()))
        return dataclasses.replace(settings, backbone=backbone)

    @classmethod
    def build(cls, metadata: dict[str, Any], **kwargs: Any) -> nn.Module:
        arguments = dict(metadata["arguments"])
        head = arguments.pop("head", "upernet")
        if head not in tuple(HEADS):
            raise ValueError(f"head must be one of {', '.join(HEADS)}, got {head!r}")
        return HEADS[head](metadata["model"], len(metadata["class_names"]), **arguments, **kwargs)

    def metadata(self) -> dict[str, Any]:
        backbone, decoder = self.settings.backbone, self.settings.decoder
        head = dict(head="linear") if decoder.head == "linear" else dict(width=decoder.width)
        return {
            "model": backbone.model,
            "arguments": dict(
                **head,
                frozen_bn=backbone.frozen_bn,
                backbone_kwargs=backbone.arguments(),
            ),
            "class_names": list(self.class_names),
            "short_side": self.settings.data.short_side,
            "window": self.settings.data.window,
            "mean": list(IMAGENET_DEFAULT_MEAN),
            "std": list(IMAGENET_DEFAULT_STD),
        }

    def collate_eval(self, samples: list[Any]) -> SegmentationBatch:
        return collate_pictures(samples)

    def parameter_groups(self, model: nn.Module, optim: OptimSettings) -> list[dict[str, Any]]:
        return parameter_groups(model, optim, model.network.encoder.model)  # type: ignore[union-attr, arg-type]

    def train_step(
        self, model: nn.Module, batch: SegmentationBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        logits, auxiliary = model(self.normalize(batch.images))
        size = batch.class_maps.shape[-2:]
        weights = self.weights(logits.device)
        main = _cross_entropy(resize_logits(logits, size), batch.class_maps, weights)
        if auxiliary is None:
            return main, {"main": main}
        auxiliary = resize_logits(auxiliary, size, AUXILIARY_STRIDE)
        aux = _cross_entropy(auxiliary, batch.class_maps, weights)
        return main + AUXILIARY_WEIGHT * aux, {"main": main, "auxiliary": aux}

    @functools.cache  # noqa: B019, a task lives as long as its run
    def weights(self, device: torch.device) -> Tensor | None:
        """The weights of the classes in the loss, (classes,); None if all are equal."""
        if self.settings.data.class_weights == "none":
            return None
        return balanced_weights(self.data.train, len(self.class_names)).to(device)

    def draw_batch(self, batch: SegmentationBatch) -> list[Tile]:
        pairs = zip(batch.images, batch.class_maps, strict=True)
        return [class_map_tile(image, classes, self.class_names) for image, classes in pairs]

    def draw_predictions(
        self, model: nn.Module, indices: Sequence[int], device: torch.device
    ) -> list[Tile]:
        batch = self.collate_eval([self.eval_data[index] for index in indices])
        truths, guesses = [], []
        for image, truth in zip(batch.images, batch.class_maps, strict=True):
            seen = self.normalize(image[None].to(device))
            classes = predict_classes(model, seen, truth.shape, self.settings.data.window)[0]
            truths.append(class_map_tile(image, truth, self.class_names, "truth"))
            guesses.append(class_map_tile(image, classes, self.class_names, "predicted"))
        return in_turn(truths, guesses)

    def evaluate(
        self, model: nn.Module, batches: Iterable[SegmentationBatch], processes: Processes
    ) -> dict[str, float]:
        scores, _ = evaluate_segmenter(
            model,
            batches,
            self.normalize,
            len(self.class_names),
            processes,
            window=self.settings.data.window,
        )
        return scores


def evaluate_segmenter(
    model: nn.Module,
    batches: Iterable[SegmentationBatch],
    normalize: Normalize,
    num_classes: int,
    processes: Processes,
    window: int = 0,
    views: Views = AS_IS,
) -> tuple[dict[str, float], Tensor]:
    """mIoU and pixel accuracy in percent over the pictures of all processes, and the confusion matrix.

    The matrix, (classes, classes) int64, counts pixels: rows are the truth, columns the predictions.
    Intersections and unions are summed over all pictures before they are divided. A class that occurs neither
    in the truth nor in the predictions is not part of the mean.
    """
    from torchmetrics.classification import MulticlassConfusionMatrix

    confusion = MulticlassConfusionMatrix(num_classes, ignore_index=IGNORE, validate_args=False)
    confusion.to(processes.device)
    with any_sizes():
        for batch in batches:
            for images, class_maps in _same_sizes(batch):
                size = class_maps.shape[1:]
                classes = predict_classes(model, normalize(images), size, window, views)
                confusion.update(classes, class_maps)
    counts = confusion.compute().cpu()
    miou = torch.tensor(class_scores(counts)["IoU"], dtype=torch.float64).nanmean()
    accuracy = 100 * counts.diag().sum() / counts.sum().clamp(min=1)
    return {"mIoU": miou.item(), "accuracy": accuracy.item()}, counts


def _same_sizes(batch: SegmentationBatch) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the pictures of a batch and their class maps, stacked where both have the same size."""
    groups: dict[Any, list[tuple[Tensor, Tensor]]] = {}
    for image, class_map in zip(batch.images, batch.class_maps, strict=True):
        groups.setdefault((image.shape, class_map.shape), []).append((image, class_map))
    for group in groups.values():
        images, class_maps = zip(*group, strict=True)
        yield torch.stack(images), torch.stack(class_maps)


def predict_classes(
    model: nn.Module, image: Tensor, size: Sequence[int], window: int = 0, views: Views = AS_IS
) -> Tensor:
    """Predict the class of every pixel, (batch, *size) int64, of normalised pictures (batch, 3, H, W).

    Over several views the probabilities are averaged, as MMSegmentation does.
    """
    total: Tensor | None = None
    for shown, turn_back in views.show(image):
        scores = turn_back(segment(model, shown, window or None))
        if scores.shape[-2:] != tuple(size):
            scores = F.interpolate(scores, size=tuple(size), mode="bilinear")
        if len(views) > 1:
            scores = scores.softmax(1)
        total = scores if total is None else total + scores
    assert total is not None
    return total.argmax(1)


def _cross_entropy(logits: Tensor, classes: Tensor, weights: Tensor | None = None) -> Tensor:
    """Mean cross-entropy over the pixels that have a class; 0 if none has one, where a plain mean gives NaN.

    The mean of ``weights`` (classes,) over the pixels of the data is 1.
    """
    total = F.cross_entropy(logits.float(), classes, weights, ignore_index=IGNORE, reduction="sum")
    return total / (classes != IGNORE).sum().clamp(min=1)
