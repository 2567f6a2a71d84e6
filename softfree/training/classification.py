"""Image classification: settings and recipes, and the task that the engine trains.

Classification.run(settings)                         -> Outcome
Classification.load("OUTPUT/best", device)           -> model, metadata
evaluate_classifier(model, batches, normalize, ...)  -> {"top1": ..., "top5": ..., "loss": ...}
"""

import ast
import contextlib
import dataclasses
import functools
import itertools
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import timm
import torch
import torch.nn.functional as F
import tyro
from PIL import Image, ImageOps
from timm.data import Mixup, create_transform, resolve_data_config
from timm.data.random_erasing import RandomErasing
from torch import Tensor, nn

from softfree.data.classification import has_fewer, lacks_validation, load_images
from softfree.data.drawing import COLUMNS, RIGHT, WRONG, Tile, to_tile
from softfree.data.images import (
    Batch,
    ImageData,
    ImageDataset,
    Unreadable,
    collate_images,
    some,
)
from softfree.data.resident import INTERPOLATIONS, RandomCrops, ResidentImages
from softfree.layers.factory import check_attention
from softfree.models.checkpoints import filter_checkpoint, read_state_dict
from softfree.models.checks import (
    check_at_least,
    check_model_name,
    check_pretrained,
    fetching,
    mistakes_in,
)
from softfree.models.metadata import check_arguments, check_buildable
from softfree.models.registry import is_ours
from softfree.models.views import AS_IS, AveragedClassifier, Views
from softfree.training import checkpoint, distributed
from softfree.training.confusion import add_pairs
from softfree.training.distributed import Processes
from softfree.training.engine import PictureTask
from softfree.training.loading import evaluation
from softfree.training.parameters import freeze
from softfree.training.settings import (
    Given,
    OptimSettings,
    RunSettings,
    fit_batch,
    fit_length,
    override,
    say_fitted,
)

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class DataSettings:
    """What the run reads."""

    data_dir: str | None = None
    """folder with train/ and val/, each with one folder of pictures per class, or with these folders alone; none:
    the embedded digits"""
    dataset: str = ""
    """a data set as timm names it, in --data-dir: torch/cifar10, hfds/NAME, wds/NAME (tar shards)"""
    val_split: float = 0.0
    """a folder without val/, with train/ or with the classes themselves: validate on this share of each class
    (given none: 0.2)"""
    split_seed: int = 0
    """with --val-split: another number, another choice of pictures"""
    strict_data: bool = False
    """stop at the first picture that can't be read, instead of leaving it out"""
    data_on_device: bool = False
    """keep all pictures, of one size, in the device's memory; crop, resize and mirror them there"""


@dataclasses.dataclass(frozen=True)
class ModelSettings:
    """The network and where its weights come from."""

    model: str = "softfree_tiny"
    """any model that timm knows; `softfree models` lists ours"""
    img_size: int = 224
    """side of the pictures"""
    positions_at: int = 0
    """our backbones: side of the pictures their positions are laid out for, resized to others; 0: --img-size"""
    attention: str = ""
    """attention in our backbones: softfree, soft, softpp, softmax, linformer, performer, nystromformer, agent or flatten;
    '': their own"""
    model_kwargs: tuple[str, ...] = ()
    """further arguments of the model: embed_dims=32,64,96,128 landmarks=conv:49"""
    drop_path: float = 0.0
    """chance to leave out a block (stochastic depth), rising to this at the last block; 0: the model's own"""
    pretrained_checkpoint: str = ""
    """weights to start from: a checkpoint folder, whose model, arguments and image size are taken unless given, or
    a .safetensors or .pth file (timm's or the authors')"""
    pretrained: bool = False
    """start from the weights that timm fetches for --model, where it knows some"""
    freeze: tuple[str, ...] = ()
    """parameters to leave as they are, by globs: 'stem.*' 'stages.0.*'"""


@dataclasses.dataclass(frozen=True)
class AugmentSettings:
    """How training pictures and labels are varied, and how test pictures are cut."""

    scale: tuple[float, float] = (0.08, 1.0)
    """share of the picture that a random crop takes: least, most"""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """width over height of a random crop: least, most"""
    hflip: float = 0.5
    """chance to mirror a picture (0 for data whose classes mirroring changes, such as digits)"""
    color_jitter: float = 0.4
    """change of brightness, contrast and saturation"""
    aa: str = ""
    """AutoAugment or RandAugment in timm's words, e.g. rand-m9-mstd0.5-inc1"""
    reprob: float = 0.0
    """chance to erase a random rectangle"""
    train_interpolation: str = "random"
    """bilinear, bicubic, or random"""
    mixup: float = 0.0
    """alpha of mixup; 0: none"""
    cutmix: float = 0.0
    """alpha of cutmix; 0: none"""
    smoothing: float = 0.1
    """label smoothing"""
    crop_pct: float = 0.875
    """test: share of the shorter side that the centre crop takes"""


@dataclasses.dataclass(frozen=True)
class ClassificationSettings:
    """Settings of `softfree train classification`."""

    recipe: Annotated[str, tyro.conf.Suppress] = ""
    data: DataSettings = dataclasses.field(default_factory=DataSettings)
    model: ModelSettings = dataclasses.field(default_factory=ModelSettings)
    augment: AugmentSettings = dataclasses.field(default_factory=AugmentSettings)
    optim: OptimSettings = dataclasses.field(default_factory=OptimSettings)
    run: RunSettings = dataclasses.field(default_factory=RunSettings)


RECIPES = {
    settings.recipe: settings
    for settings in (
        ClassificationSettings(
            "digits",
            model=ModelSettings(
                img_size=32,
                model_kwargs=("embed_dims=32,64,96,128", "num_heads=1,2,3,4", "depths=1,1,1,1"),
            ),
            augment=AugmentSettings(
                scale=(0.7, 1.0), color_jitter=0.0, train_interpolation="bilinear", crop_pct=1.0
            ),
            optim=OptimSettings(
                batch_size=64, epochs=12, warmup_epochs=1, lr=2e-3, min_lr=2e-5, clip_grad=1.0
            ),
            run=RunSettings(workers=0, log_interval=10),
        ),
        # The papers': AdamW, 300 epochs, 10 of them warm-up, cosine, batch 1024, flip, mixup, cutmix; the rest
        # as timm has it.
        ClassificationSettings(
            "imagenet",
            augment=AugmentSettings(mixup=0.8, cutmix=1.0),
            optim=OptimSettings(
                batch_size=1024, epochs=300, warmup_epochs=10, warmup_lr=1e-5, lr=1e-3, min_lr=5e-5,
                weight_decay=0.05, clip_grad=1.0,
            ),
        ),
        # 20 epochs, for data the size of Tiny-ImageNet-100.
        ClassificationSettings(
            "short",
            # The positions stay those of 224 x 224, as in the authors' code.
            model=ModelSettings(img_size=128, positions_at=224),
            # Squares of 0.6 to 1 of the side: with that much of the area instead, objects are never seen large
            # enough for tests at larger sizes.
            augment=AugmentSettings(
                scale=(0.36, 1.0), ratio=(1.0, 1.0), color_jitter=0.0, train_interpolation="bicubic",
                crop_pct=1.0,
            ),
            optim=OptimSettings(
                batch_size=512, epochs=20, warmup_epochs=2, lr=1e-3, min_lr=5e-5, clip_grad=1.0
            ),
        ),
        ClassificationSettings(
            "finetune",
            model=ModelSettings(drop_path=0.1),
            augment=AugmentSettings(scale=(0.35, 1.0)),
            optim=OptimSettings(
                batch_size=256, epochs=30, warmup_epochs=3, warmup_lr=1e-6, lr=2e-4, min_lr=1e-6,
                layer_decay=0.75, clip_grad=1.0,
            ),
        ),
        # For hundreds of pictures: small batches, for many steps, and pictures that vary more. Not more than this: in so
        # few steps a model learns nothing from mixed pictures.
        ClassificationSettings(
            "small",
            model=ModelSettings(img_size=128, drop_path=0.1),
            augment=AugmentSettings(
                scale=(0.35, 1.0), aa="rand-m5-mstd0.5-inc1", reprob=0.1, crop_pct=1.0
            ),
            optim=OptimSettings(
                batch_size=16, epochs=50, warmup_epochs=5, warmup_lr=1e-6, lr=1e-3, min_lr=1e-5,
                clip_grad=1.0,
            ),
            run=RunSettings(log_interval=10),
        ),
    )
}  # fmt: skip
# The recipe `small` is taken for fewer training pictures than this.
FEW_PICTURES = 5000
VAL_SPLIT = 0.2


class Varied(NamedTuple):
    """Pictures (b, 3, H, W) as the model takes them, and labels (b,) or probabilities (b, classes)."""

    images: Tensor
    labels: Tensor


class Classification(PictureTask):
    """Pictures to classes, with cross-entropy."""

    name = "classification"
    recipes = RECIPES
    metric = "top1"
    capturable = True
    make_batch = staticmethod(collate_images)
    predicted = 4 * COLUMNS

    @classmethod
    def usual_recipe(cls, given: Given) -> str:
        if not given.keys() & {"data_dir", "dataset"}:
            return "digits"
        if "dataset" not in given and has_fewer(given["data_dir"], FEW_PICTURES):
            return "small"
        weights = given.keys() & {"pretrained", "pretrained_checkpoint"}
        return "finetune" if weights else "imagenet"

    @classmethod
    def adapt(cls, settings: Any, given: Given) -> Any:
        """Settings that fit the weights to start from, the length of the run and the number of pictures."""
        notes = []
        if "recipe" not in given and settings.recipe == "small":
            notes.append(f"`recipe` small, for fewer than {FEW_PICTURES:,} training pictures")
        settings, taken = fit_weights(settings, given)
        notes += taken
        data, optim = settings.data, settings.optim
        folder = Path(data.data_dir) if data.data_dir and not data.dataset else None
        if folder is not None and "val_split" not in given and lacks_validation(folder):
            data = dataclasses.replace(data, val_split=VAL_SPLIT)
            notes.append(f"`val_split` {VAL_SPLIT:g}, since {folder} has no val/")
        optim = fit_length(optim, RECIPES[settings.recipe].optim, given)
        if "batch_size" not in given and not data.dataset:
            optim, fitted = fit_batch(
                optim,
                lambda most: has_fewer(data.data_dir, most),
                lambda: len(load_settings_images(data).train),
            )
            notes += fitted
        say_fitted(notes)
        return dataclasses.replace(settings, data=data, optim=optim)

    def __init__(self, settings: ClassificationSettings, data: ImageData | None = None):
        self.settings = settings
        check_model_name(settings.model.model)
        weights = settings.model.pretrained_checkpoint, settings.model.pretrained
        if settings.recipe == "finetune" and not any(weights):
            raise ValueError(
                "`recipe` finetune needs `pretrained_checkpoint`, the weights to start from, or `pretrained`"
            )
        if all(weights):
            raise ValueError("`pretrained` and `pretrained_checkpoint` can't be used together")
        if settings.model.pretrained:
            check_pretrained(settings.model.model)
        if data is None:
            data = load_settings_images(settings.data)
        self.class_names = data.class_names
        self.train_data, self.eval_data = data.train, data.val
        augment, model = settings.augment, settings.model
        self.mixup = None
        if augment.mixup or augment.cutmix:
            if settings.optim.batch_size % 2:
                batch_size = settings.optim.batch_size
                raise ValueError(
                    f"`mixup` and `cutmix` need an even `batch_size`, got {batch_size}"
                )
            self.mixup = Mixup(
                augment.mixup,
                augment.cutmix,
                label_smoothing=augment.smoothing,
                num_classes=len(data.class_names),
            )
        self.model_kwargs = parse_model_kwargs(model.model_kwargs)
        if model.positions_at and is_ours(model.model):
            self.model_kwargs.setdefault("img_size", model.positions_at)
        check_at_least(1, img_size=model.img_size)
        if model.attention:
            with mistakes_in("attention"):
                check_attention(model.attention)
            self.model_kwargs["attention"] = model.attention
        network = create_network(
            model.model, len(data.class_names), model.img_size, self.model_kwargs, meta=True
        )
        self.preparation = preparation_of(network, model.img_size) | {"crop_pct": augment.crop_pct}
        self.normalize = Normalize(self.preparation["mean"], self.preparation["std"])
        channels_last = settings.run.channels_last
        self.layout = torch.channels_last if channels_last else torch.contiguous_format
        self.cropping: dict[str, Any] = dict(
            scale=augment.scale,
            ratio=augment.ratio,
            hflip=augment.hflip if data.mirrors else 0.0,
            interpolation=augment.train_interpolation,
        )
        data.train.transform = create_transform(
            model.img_size,
            is_training=True,
            color_jitter=augment.color_jitter or None,  # type: ignore[arg-type]
            auto_augment=augment.aa or None,
            normalize=False,
            **self.cropping,
        )
        keep_a_bit(data.train.transform)
        data.val.transform = eval_transform(self.preparation)
        self.files = data.train, data.val
        self.kept: dict[ImageDataset, ResidentImages] = {}
        if settings.data.data_on_device:
            check_resident(augment)
            self.train_data, self.eval_data = range(len(data.train)), range(len(data.val))

    @classmethod
    def build(cls, metadata: dict[str, Any], pretrained: bool = False) -> nn.Module:
        name, classes = metadata["model"], len(metadata["class_names"])
        size, kwargs = metadata["img_size"], metadata["model_kwargs"]
        return create_network(name, classes, size, kwargs, pretrained=pretrained)

    def build_model(self) -> nn.Module:
        given, metadata = self.settings.model, self.metadata()
        if given.drop_path:
            # Not every model of timm's has the argument.
            metadata["model_kwargs"] = self.model_kwargs | {"drop_path_rate": given.drop_path}
        fetched = given.pretrained and not self.resumes
        with fetching(given.model) if fetched else contextlib.nullcontext():
            model = self.build(metadata, pretrained=fetched)
        if given.pretrained_checkpoint and not self.resumes:
            path = Path(given.pretrained_checkpoint)
            loaded = load_pretrained(model, path, given.model, self.class_names)
            if os.environ.get("RANK", "0") == "0":
                logger.info(f"{path}: {loaded}")
        freeze(model, given.freeze)
        return model

    def prepare(self, batch: Batch | Tensor) -> Any:
        """The batch as it is; its pictures varied where that takes random numbers of the host."""
        reprob = self.settings.augment.reprob
        if self.mixup is None and not reprob:
            return batch
        images, labels = self.look_up(batch)
        if self.mixup is not None:
            images, labels = self.mixup(images, labels)
        if reprob:
            images = RandomErasing(reprob, mode="pixel", device=str(images.device))(images)
        return Varied(images, labels)

    def look_up(self, batch: Batch | Tensor) -> "Varied":
        """Pictures and labels of a batch, or of crops of pictures that are on the device."""
        if isinstance(batch, Tensor):
            return Varied(self.normalize(self.crops(batch[1:]), self.layout), batch[0])
        return Varied(self.normalize(batch.images), batch.labels)

    def train_step(
        self, model: nn.Module, batch: "Varied | Batch | Tensor"
    ) -> tuple[Tensor, dict[str, Tensor]]:
        images, labels = batch if isinstance(batch, Varied) else self.look_up(batch)
        logits = model(images)
        if labels.is_floating_point():  # probabilities, smoothed already
            return F.cross_entropy(logits, labels), {}
        return smoothed_cross_entropy(logits, labels, self.settings.augment.smoothing), {}

    def resident(self, files: ImageDataset, device: torch.device) -> ResidentImages:
        """The pictures on the device, where the first call puts them."""
        if files not in self.kept:
            self.kept[files] = ResidentImages(files, device, self.settings.run.workers)
        return self.kept[files]

    @functools.cached_property
    def crops(self) -> RandomCrops:
        """Random crops of the training pictures on the device."""
        pictures = self.kept[self.files[0]]
        return RandomCrops(pictures, self.settings.model.img_size, **self.cropping)

    def plan_epoch(self, order: Tensor) -> Tensor:
        """The labels of the pictures and their crops: (6, n)."""
        labels = self.resident(self.files[0], order.device).labels
        return torch.cat([labels[order][None], self.crops.draw(order)])

    def draw_batch(self, batch: Batch | Tensor) -> list[Tile]:
        varied = self.prepare(batch)
        images, labels = varied if isinstance(varied, Varied) else self.look_up(varied)
        images = self.normalize.undo(images)
        return [
            to_tile(image, self.describe(label))
            for image, label in zip(images, labels, strict=True)
        ]

    def describe(self, label: Tensor) -> str:
        """The name of a class, or the names of those that a label (classes,) of probabilities mixes."""
        if not label.is_floating_point():
            return self.class_names[int(label)]
        shares, classes = label.topk(min(2, len(label)))
        return " + ".join(
            f"{self.class_names[number]} ({share:.0%})"
            for share, number in zip(shares.tolist(), classes.tolist(), strict=True)
            # Smoothing gives every class a little.
            if share > max(0.05, 2 * label.min().item())
        )

    def draw_predictions(
        self, model: nn.Module, indices: Sequence[int], device: torch.device
    ) -> list[Tile]:
        batch = collate_images(self.files[1][index] for index in indices)
        if not len(batch.labels):
            return []
        logits = model(self.normalize(batch.images.to(device))).float()
        chances, classes = logits.softmax(-1).max(-1)
        tiles = []
        for image, label, chance, number in zip(
            batch.images, batch.labels.tolist(), chances.tolist(), classes.tolist(), strict=True
        ):
            caption, right = f"{self.class_names[number]} ({chance:.0%})", number == label
            caption += "" if right else f", is {self.class_names[label]}"
            tiles.append(to_tile(image, caption, RIGHT if right else WRONG))
        return tiles

    def evaluate(
        self, model: nn.Module, batches: Iterable[Any], processes: Processes
    ) -> dict[str, float]:
        if self.settings.data.data_on_device:
            size = self.settings.model.img_size
            resident = self.resident(self.files[1], processes.device)
            batches = resident_batches(resident, batches, size, self.preparation)
        return evaluate_classifier(model, batches, self.normalize, processes)

    def metadata(self) -> dict[str, Any]:
        return {
            "model": self.settings.model.model,
            "model_kwargs": self.model_kwargs,
            "class_names": list(self.class_names),
            **self.preparation,
        }


def fit_weights(
    settings: ClassificationSettings, given: Given
) -> tuple[ClassificationSettings, list[str]]:
    """Settings that take from the weights to start from what nobody gave, and a line on what that was.

    A checkpoint folder knows its model, arguments and image size, timm the size of its weights. Little data
    then changes them as slowly as the recipe `finetune` does.
    """
    model = settings.model
    start, changes = model.pretrained_checkpoint, dict[str, Any]()
    if start and Path(start).is_dir():
        file = checkpoint.locate(Path(start)) / checkpoint.METADATA
        metadata = checkpoint.read_metadata(Path(start))
        checkpoint.check_task(start, metadata, Classification.name)
        check_buildable(file, metadata)
        if given.get("model", metadata["model"]) == metadata["model"]:
            own = model.model_kwargs if "model_kwargs" in given else ()
            changes = dict(
                model=metadata["model"],
                img_size=metadata["img_size"],
                positions_at=0,
                model_kwargs=(*format_model_kwargs(metadata["model_kwargs"]), *own),
            )
    elif model.pretrained and timm.models.is_model_pretrained(model.model):
        start = "timm"
        size: Any = timm.models.get_pretrained_cfg_value(model.model, "input_size")
        changes["img_size"] = size[-1]
    changes = {
        name: value
        for name, value in changes.items()
        if name not in given or name == "model_kwargs"
    }
    settings = override(settings, {"model": changes})
    if settings.recipe == "small" and (start or model.pretrained):
        slow = RECIPES["finetune"].optim
        names = {"epochs", "lr", "min_lr", "layer_decay"}.difference(given)
        settings = override(settings, {"optim": {name: getattr(slow, name) for name in names}})
    if not changes:
        return settings, []
    name, size = settings.model.model, settings.model.img_size
    return settings, [f"`model` {name}, `img_size` {size}: as the weights of {start} have it"]


def load_settings_images(data: DataSettings) -> ImageData:
    """The pictures that the settings name."""
    return load_images(
        data.data_dir,
        dataset=data.dataset,
        strict=data.strict_data,
        val_split=data.val_split,
        split_seed=data.split_seed,
    )


def load_validation_images(
    path: Path,
    data_dir: str | None = None,
    dataset: str = "",
    strict: bool = False,
    split: str = "val",
) -> ImageData:
    """Pictures to score the checkpoint at ``path`` on: those of its training unless others are given.

    What its training set aside of a folder without val/ is set aside again; with the ``split`` test, the pictures of
    test/ stand in the place of these.
    """
    recorded = checkpoint.data_settings(path, DataSettings)
    if data_dir is None and not dataset:
        data_dir, dataset = recorded.data_dir, recorded.dataset
    aside: dict[str, Any] = {}
    if split != "test" and data_dir and not dataset and lacks_validation(Path(data_dir)):
        aside = dict(val_split=recorded.val_split, split_seed=recorded.split_seed)
    return load_images(data_dir, dataset=dataset, strict=strict, split=split, **aside)


def smoothed_cross_entropy(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """``F.cross_entropy`` of logits (b, classes) with ``label_smoothing``, in 7 of torch's calls instead of 21.

    The host starts each of them, forward and backward, and small models wait for the host.
    """
    # Said here, since autocast asks for it on GPUs alone.
    log_probabilities = logits.log_softmax(1, dtype=torch.float32)
    count, classes = logits.shape
    each = smoothing / classes
    weights = torch.full_like(log_probabilities, -each / count)
    weights.scatter_(1, labels[:, None], (smoothing - 1 - each) / count)
    return (log_probabilities * weights).sum()


def keep_a_bit(transform: Any) -> None:
    """Let timm's augmentations posterize to 1 bit at least: now and then they ask for 0, which Pillow 13 refuses."""
    for step in transform.transforms:
        ops = [*getattr(step, "ops", ()), *itertools.chain(*getattr(step, "policy", ()))]
        for op in ops:
            if op.name.startswith("Posterize"):
                op.aug_fn = _posterize


def _posterize(picture: Image.Image, bits: int, **_: Any) -> Image.Image:
    return ImageOps.posterize(picture, min(max(bits, 1), 8))


def check_resident(augment: AugmentSettings) -> None:
    """Raise if the settings want more than --data-on-device does."""
    if augment.color_jitter or augment.aa:
        raise ValueError(
            "`data_on_device` crops, resizes and mirrors alone; give `color_jitter` 0 and no `aa` "
            f"(got `color_jitter` {augment.color_jitter}, `aa` {augment.aa!r})"
        )
    if augment.train_interpolation not in INTERPOLATIONS:
        raise ValueError(
            f"`data_on_device` takes `train_interpolation` {', '.join(INTERPOLATIONS)}, "
            f"got {augment.train_interpolation!r}"
        )


def resident_batches(
    resident: ResidentImages, batches: Iterable[Tensor], size: int, preparation: dict[str, Any]
) -> Iterator[Batch]:
    """Batches of test pictures at ``size`` for batches of indices."""
    for indices in batches:
        images = resident.centre_crops(
            indices,
            size,
            crop_pct=preparation["crop_pct"],
            interpolation=preparation["interpolation"],
        )
        yield Batch(images, resident.labels[indices], [])


class Normalize(nn.Module):
    """8-bit pictures (b, 3, H, W) to floats with the mean and deviation the model wants.

    Done on the device: a quarter of the bytes travels there.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]):
        super().__init__()
        scale = 1 / (255 * torch.tensor(std)[:, None, None])
        self.scale, self.shift = scale, -255 * torch.tensor(mean)[:, None, None] * scale

    def forward(self, images: Tensor, layout: torch.memory_format | None = None) -> Tensor:
        """``layout``: that of the result, if not the pictures' own; they need not be copied for it."""
        if self.scale.device != images.device:
            self.scale, self.shift = self.scale.to(images.device), self.shift.to(images.device)
        images = images.float()
        out = None if layout is None else torch.empty_like(images, memory_format=layout)
        return torch.addcmul(self.shift, images, self.scale, out=out)

    def undo(self, images: Tensor) -> Tensor:
        """The 8-bit pictures that these were, as far as 8 bits hold what was made of them."""
        levels = (images.float() - self.shift) / self.scale
        return levels.round().clamp(0, 255).to(torch.uint8)


def preparation_of(model: nn.Module, img_size: int) -> dict[str, Any]:
    """How pictures are prepared for a model, as timm's configuration of it says."""
    config = resolve_data_config({}, model=model)
    return {
        "img_size": img_size,
        "crop_pct": config["crop_pct"],
        "interpolation": config["interpolation"],
        "mean": list(config["mean"]),
        "std": list(config["std"]),
    }


def eval_transform(preparation: dict[str, Any], img_size: int | None = None) -> Any:
    """From a picture to the 8-bit tensor (3, size, size) that a model is tested with.

    ``preparation`` is a checkpoint's metadata; ``img_size`` another size than it was trained at.
    """
    return create_transform(
        img_size or preparation["img_size"],
        is_training=False,
        interpolation=preparation["interpolation"],
        crop_pct=preparation["crop_pct"],
        normalize=False,
    )


def evaluate_classifier(
    model: nn.Module,
    batches: Iterable[Batch],
    normalize: Normalize,
    processes: Processes,
    confusion: Tensor | None = None,
) -> dict[str, float]:
    """Top-1 and top-5 in percent and the loss, over the batches of all processes.

    ``confusion``, zeros (classes, classes) int64, then counts what is taken for what: row the truth.
    """
    # loss, hits, hits among the first five, samples; float64 counts exactly.
    sums = torch.zeros(4, dtype=torch.float64, device=processes.device)
    for batch in batches:
        if not len(batch.labels):
            continue
        logits = model(normalize(batch.images)).float()
        hits = logits.topk(min(5, logits.shape[1])).indices == batch.labels[:, None]
        loss = F.cross_entropy(logits, batch.labels, reduction="sum")
        if confusion is not None:
            add_pairs(confusion, batch.labels, logits.argmax(1))
        sums += torch.stack([loss, hits[:, 0].sum(), hits.sum(), torch.full_like(loss, len(hits))])
    loss_sum, first, five, count = distributed.total(sums, processes).tolist()
    if confusion is not None:
        distributed.total(confusion, processes)
    if not count:
        raise ValueError("none of the validation pictures can be read")
    return {
        "top1": 100 * first / count,
        "top5": 100 * five / count,
        "loss": loss_sum / count,
        "samples": int(count),
    }


def score_classifier(
    network: nn.Module,
    preparation: dict[str, Any],
    data: ImageDataset | ResidentImages,
    img_size: int,
    processes: Processes,
    views: Views = AS_IS,
    confusion: Tensor | None = None,
    **reading: Any,
) -> tuple[dict[str, float], list[Unreadable]]:
    """Scores and throughput at one size, over the pictures of all processes, and what could not be read here.

    ``preparation`` is a checkpoint's metadata, ``confusion`` that of :func:`evaluate_classifier`; ``reading`` are
    keywords of :func:`evaluation`.
    """
    set_input_size(network, img_size)
    if views != AS_IS:
        network = AveragedClassifier(network, views)
    normalize = Normalize(preparation["mean"], preparation["std"])
    samples = data if isinstance(data, ImageDataset) else range(len(data))
    if isinstance(data, ImageDataset):
        data.transform = eval_transform(preparation, img_size)
    began = time.perf_counter()
    with evaluation(samples, collate_images, processes, **reading) as (batches, unreadable):
        if isinstance(data, ResidentImages):
            batches = resident_batches(data, batches, img_size, preparation)
        scores = evaluate_classifier(network, batches, normalize, processes, confusion)
    scores["img_per_s"] = scores["samples"] / (time.perf_counter() - began)
    scores["unreadable"] = len(distributed.gather(unreadable, processes))
    return scores, unreadable


def set_input_size(network: nn.Module, img_size: int) -> None:
    """Tell a network of a fixed size another one; ours take any."""
    tell = getattr(network, "set_input_size", None)
    if tell is not None:
        tell(img_size=img_size)


def load_weights_file(
    path: Path, name: str, num_classes: int, kwargs: dict[str, Any], device: torch.device
) -> tuple[nn.Module, dict[str, Any]]:
    """The model ``name`` with the weights of a file, and how its pictures are prepared."""
    network = create_network(name, num_classes, img_size=224, kwargs=kwargs)
    loaded = load_pretrained(network, path, name)
    if loaded.replaced or loaded.new:
        raise ValueError(f"`checkpoint` {path} has no head for the {num_classes} classes here")
    return network.eval().to(device), {"model": name, **preparation_of(network, 224)}


def create_network(
    name: str,
    num_classes: int,
    img_size: int,
    kwargs: dict[str, Any],
    meta: bool = False,
    pretrained: bool = False,
) -> nn.Module:
    """A model of timm's registry, told the size of the pictures if it wants to know."""
    check_model_name(name)
    with mistakes_in("model_kwargs"):
        check_arguments(name, kwargs)
    create = functools.partial(
        timm.create_model, name, num_classes=num_classes, pretrained=pretrained
    )
    with torch.device("meta") if meta else contextlib.nullcontext():
        try:
            return create(**{"img_size": img_size, **kwargs})
        except (TypeError, ValueError) as error:
            # Networks that take any size have no such argument.
            if isinstance(error, ValueError) or "img_size" not in str(error):
                raise ValueError(f"`model` {name} does not take `model_kwargs`: {error}") from error
            return create(**kwargs)


def parse_model_kwargs(
    words: Sequence[str], argument: str = "model_kwargs", example: str = "depths=1,1,2,1"
) -> dict[str, Any]:
    """Arguments of a model as the user types them; ``argument`` is their name in the message.

    Example:
        >>> parse_model_kwargs(["depths=1,1,2,1", "landmarks=conv:49", "mlp_ratio=2.0"])
        {'depths': (1, 1, 2, 1), 'landmarks': 'conv:49', 'mlp_ratio': 2.0}
    """
    arguments = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"`{argument}` must look like {example}, got {word!r}")
        try:
            arguments[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            arguments[name] = text
    return arguments


def format_model_kwargs(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """Arguments as :func:`parse_model_kwargs` reads them.

    Example:
        >>> format_model_kwargs({"depths": [1, 1, 2, 1], "landmarks": "conv:49", "mlp_ratio": 2.0})
        ('depths=1,1,2,1', 'landmarks=conv:49', 'mlp_ratio=2.0')
    """
    words = []
    for name, value in arguments.items():
        text = repr(value)
        if isinstance(value, str) and parse_model_kwargs([f"{name}={value}"])[name] == value:
            text = value
        elif isinstance(value, list | tuple):
            text = repr(tuple(value))
            numbers = len(value) > 1 and all(isinstance(item, int | float) for item in value)
            text = ",".join(map(str, value)) if numbers else text
        words.append(f"{name}={text}")
    return tuple(words)


@dataclasses.dataclass(frozen=True)
class Loaded:
    """What became of the tensors of a model that starts from a file's; as text, a line that says so.

    Attributes:
        taken: taken as they are.
        resized: position embeddings, resized to the model's.
        replaced: in the file for other classes, new in the model.
        new: not in the file.
    """

    taken: tuple[str, ...]
    resized: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    new: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [f"{len(self.taken)} tensors loaded"]
        for names, what in (
            (self.resized, "resized"),
            (self.replaced, "replaced, being for other classes"),
            (self.new, "left new"),
        ):
            if names:
                parts.append(f"{len(names)} {what} ({some(names)})")
        return "; ".join(parts)


def load_pretrained(
    model: nn.Module, path: Path, name: str, class_names: Sequence[str] | None = None
) -> Loaded:
    """Start from weights in a file or a checkpoint folder; return what became of them.

    Reads timm's and the authors' layouts, resizes position embeddings, and leaves the model its new head
    where the classes differ: their number, or the names ``class_names`` that a checkpoint folder has, too.
    """
    known = None
    if path.is_dir():
        saved = checkpoint.read_checkpoint(path)
        state, known = saved.weights, saved.metadata.get("class_names")
    else:
        state = read_state_dict(path)
    before = state
    if type(model).__module__.startswith("softfree."):
        state = filter_checkpoint(state, model)
    expected = model.state_dict()
    head = f"{getattr(model, 'pretrained_cfg', {}).get('classifier') or 'head'}."
    of_head = [key for key in expected if key.startswith(head)]
    fits = all(key in state and state[key].shape == expected[key].shape for key in of_head)
    fits &= class_names is None or known is None or list(class_names) == list(known)
    replaced = [] if fits else [key for key in of_head if key in state]
    new = [] if fits else [key for key in of_head if key not in state]
    if not fits:
        state = {key: value for key, value in state.items() if not key.startswith(head)}
        state |= {key: expected[key] for key in of_head}
    checkpoint.check_fits(path, state, expected, name)
    model.load_state_dict(state)
    resized = [key for key in expected if key in before and before[key].shape != state[key].shape]
    resized = [key for key in resized if key not in replaced]
    others = {*replaced, *new, *resized}
    taken = [key for key in expected if key not in others]
    return Loaded(*map(tuple, (taken, resized, replaced, new)))
