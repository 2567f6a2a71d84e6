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
    """The data to train and validate on."""

    data_dir: str | None = None
    """folder with train/ and val/, each with one folder of pictures per class, or with just the class
    folders; none: the embedded digits"""
    dataset: str = ""
    """name of a data set in timm's notation, stored in --data-dir: torch/cifar10, hfds/NAME, wds/NAME (tar
    shards)"""
    val_split: float = 0.0
    """for a folder without val/ (with train/ or just the class folders): share of each class to validate on;
    if not given, 0.2 for such a folder"""
    split_seed: int = 0
    """with --val-split: seed that selects the validation pictures"""
    strict_data: bool = False
    """stop at the first picture that can't be read instead of skipping it"""
    data_on_device: bool = False
    """keep all pictures in the device's memory, and crop, resize and mirror them there; they must have the
    same size"""


@dataclasses.dataclass(frozen=True)
class ModelSettings:
    """The network and where its weights come from."""

    model: str = "softfree_tiny"
    """any model in timm's registry; `softfree models` lists ours"""
    img_size: int = 224
    """side of the pictures"""
    positions_at: int = 0
    """our backbones: picture size that the position embeddings are made for; they are resized for others;
    0: --img-size"""
    attention: str = ""
    """attention in our backbones: softfree, soft, softpp, softmax, linformer, performer, nystromformer, agent
    or flatten; '': the model's own"""
    model_kwargs: tuple[str, ...] = ()
    """further arguments of the model: embed_dims=32,64,96,128 landmarks=conv:49 inverse=solve (or newton)"""
    drop_path: float = 0.0
    """stochastic depth: chance to skip a block, rising to this value at the last block; 0: the model's own"""
    pretrained_checkpoint: str = ""
    """weights to start from: a checkpoint folder, or a .safetensors or .pth file (timm's or the authors'). A
    folder also sets the model, its arguments and the image size, unless given"""
    pretrained: bool = False
    """start from the pretrained weights that timm downloads for --model, if it has any"""
    freeze: tuple[str, ...] = ()
    """parameters not to train, as glob patterns: 'stem.*' 'stages.0.*'"""


@dataclasses.dataclass(frozen=True)
class AugmentSettings:
    """How training pictures and labels are augmented, and how test pictures are cropped."""

    scale: tuple[float, float] = (0.08, 1.0)
    """share of the picture's area that a random crop takes: minimum, maximum"""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """aspect ratio (width / height) of a random crop: minimum, maximum"""
    hflip: float = 0.5
    """chance to mirror a picture (0 if mirroring changes the class, as with digits)"""
    color_jitter: float = 0.4
    """strength of random changes in brightness, contrast and saturation"""
    aa: str = ""
    """AutoAugment or RandAugment policy in timm's notation, e.g. rand-m9-mstd0.5-inc1"""
    reprob: float = 0.0
    """chance to erase a random rectangle"""
    train_interpolation: str = "random"
    """interpolation for training: bilinear, bicubic or random"""
    mixup: float = 0.0
    """alpha of mixup; 0: none"""
    cutmix: float = 0.0
    """alpha of cutmix; 0: none"""
    smoothing: float = 0.1
    """label smoothing"""
    crop_pct: float = 0.875
    """test pictures: share of the shorter side that the centre crop takes"""


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
        # The papers' recipe: AdamW, 300 epochs, 10 of them warm-up, cosine, batch 1024, flip, mixup, cutmix;
        # the rest is timm's default.
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
            # Square crops with 0.6 to 1 of the side. With 0.6 to 1 of the area instead, objects are never
            # seen large enough for tests at larger sizes.
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
        # For hundreds of pictures: small batches, for many steps, and stronger augmentation. No mixup or
        # cutmix: in so few steps a model learns nothing from mixed pictures.
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
        """Fit the settings to the weights to start from, the length of the run and the number of pictures."""
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
                "`recipe` finetune needs weights to start from: `pretrained_checkpoint` or `pretrained`"
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
            # Not every timm model has the argument.
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
        """Return the batch unchanged, or augmented if that needs random numbers from the host."""
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
        """Pictures and labels of a batch, or of crops of pictures that are kept on the device."""
        if isinstance(batch, Tensor):
            return Varied(self.normalize(self.crops(batch[1:]), self.layout), batch[0])
        return Varied(self.normalize(batch.images), batch.labels)

    def train_step(
        self, model: nn.Module, batch: "Varied | Batch | Tensor"
    ) -> tuple[Tensor, dict[str, Tensor]]:
        images, labels = batch if isinstance(batch, Varied) else self.look_up(batch)
        logits = model(images)
        if labels.is_floating_point():  # probabilities, already smoothed
            return F.cross_entropy(logits, labels), {}
        return smoothed_cross_entropy(logits, labels, self.settings.augment.smoothing), {}

    def resident(self, files: ImageDataset, device: torch.device) -> ResidentImages:
        """The pictures on the device; the first call copies them there."""
        if files not in self.kept:
            self.kept[files] = ResidentImages(files, device, self.settings.run.workers)
        return self.kept[files]

    @functools.cached_property
    def crops(self) -> RandomCrops:
        """Random crops of the training pictures on the device."""
        pictures = self.kept[self.files[0]]
        return RandomCrops(pictures, self.settings.model.img_size, **self.cropping)

    def plan_epoch(self, order: Tensor) -> Tensor:
        """Labels and crops of the pictures: (6, n)."""
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
    """Fill in settings that the user did not give from the weights to start from; also return notes on them.

    A checkpoint folder sets the model, its arguments and the image size. timm's weights set the image size.
    With little data (the recipe `small`), epochs and learning rates are then those of `finetune`.
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
    return settings, [f"`model` {name}, `img_size` {size}: taken from the weights of {start}"]


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
    """Pictures for scoring the checkpoint at ``path``: its own validation pictures unless others are given.

    If training split them off a folder without val/, the same pictures are split off again. With the
    ``split`` "test", the pictures in test/ take their place.
    """
    recorded = checkpoint.data_settings(path, DataSettings)
    if data_dir is None and not dataset:
        data_dir, dataset = recorded.data_dir, recorded.dataset
    aside: dict[str, Any] = {}
    if split != "test" and data_dir and not dataset and lacks_validation(Path(data_dir)):
        aside = dict(val_split=recorded.val_split, split_seed=recorded.split_seed)
    return load_images(data_dir, dataset=dataset, strict=strict, split=split, **aside)


def smoothed_cross_entropy(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """``F.cross_entropy`` of logits (b, classes) with ``label_smoothing``, in 7 torch calls instead of 21.

    The host launches each of them, forward and backward, and small models wait for the host.
    """
    # The dtype is explicit because autocast only sets it on GPUs.
    log_probabilities = logits.log_softmax(1, dtype=torch.float32)
    count, classes = logits.shape
    each = smoothing / classes
    weights = torch.full_like(log_probabilities, -each / count)
    weights.scatter_(1, labels[:, None], (smoothing - 1 - each) / count)
    return (log_probabilities * weights).sum()


def keep_a_bit(transform: Any) -> None:
    """Make timm's augmentations posterize to at least 1 bit.

    They sometimes use 0, which Pillow 13 refuses.
    """
    for step in transform.transforms:
        ops = [*getattr(step, "ops", ()), *itertools.chain(*getattr(step, "policy", ()))]
        for op in ops:
            if op.name.startswith("Posterize"):
                op.aug_fn = _posterize


def _posterize(picture: Image.Image, bits: int, **_: Any) -> Image.Image:
    return ImageOps.posterize(picture, min(max(bits, 1), 8))


def check_resident(augment: AugmentSettings) -> None:
    """Raise if the settings ask for augmentation that --data-on-device does not support."""
    if augment.color_jitter or augment.aa:
        raise ValueError(
            "`data_on_device` can only crop, resize and mirror; use `color_jitter` 0 and no `aa` "
            f"(got `color_jitter` {augment.color_jitter}, `aa` {augment.aa!r})"
        )
    if augment.train_interpolation not in INTERPOLATIONS:
        raise ValueError(
            f"`data_on_device` takes as `train_interpolation` {', '.join(INTERPOLATIONS)}; "
            f"got {augment.train_interpolation!r}"
        )


def resident_batches(
    resident: ResidentImages, batches: Iterable[Tensor], size: int, preparation: dict[str, Any]
) -> Iterator[Batch]:
    """Turn batches of indices into batches of test pictures at ``size``."""
    for indices in batches:
        images = resident.centre_crops(
            indices,
            size,
            crop_pct=preparation["crop_pct"],
            interpolation=preparation["interpolation"],
        )
        yield Batch(images, resident.labels[indices], [])


class Normalize(nn.Module):
    """Convert 8-bit pictures (b, 3, H, W) to floats with the mean and deviation that the model expects.

    This is done on the device, so that only a quarter of the bytes is copied there.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]):
        super().__init__()
        scale = 1 / (255 * torch.tensor(std)[:, None, None])
        self.scale, self.shift = scale, -255 * torch.tensor(mean)[:, None, None] * scale

    def forward(self, images: Tensor, layout: torch.memory_format | None = None) -> Tensor:
        """Normalize; ``layout`` is the memory format of the result (default: that of the pictures).

        It costs no extra copy.
        """
        if self.scale.device != images.device:
            self.scale, self.shift = self.scale.to(images.device), self.shift.to(images.device)
        images = images.float()
        out = None if layout is None else torch.empty_like(images, memory_format=layout)
        return torch.addcmul(self.shift, images, self.scale, out=out)

    def undo(self, images: Tensor) -> Tensor:
        """Convert normalized pictures back to 8 bits, as far as 8 bits can represent them."""
        levels = (images.float() - self.shift) / self.scale
        return levels.round().clamp(0, 255).to(torch.uint8)


def preparation_of(model: nn.Module, img_size: int) -> dict[str, Any]:
    """How pictures are prepared for a model, according to its timm configuration."""
    config = resolve_data_config({}, model=model)
    return {
        "img_size": img_size,
        "crop_pct": config["crop_pct"],
        "interpolation": config["interpolation"],
        "mean": list(config["mean"]),
        "std": list(config["std"]),
    }


def eval_transform(preparation: dict[str, Any], img_size: int | None = None) -> Any:
    """The transform from a picture to the 8-bit tensor (3, size, size) that a model is tested with.

    ``preparation`` is a checkpoint's metadata; ``img_size`` is a size other than that of its training.
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

    ``confusion``, zeros (classes, classes) int64, is filled with counts: rows are true classes, columns
    predicted ones.
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
    """Scores and throughput at one size over all processes, and this process's unreadable files.

    ``preparation`` is a checkpoint's metadata. ``confusion`` is as in :func:`evaluate_classifier`.
    ``reading`` are keyword arguments of :func:`evaluation`.
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
    """Set another input size for a network that has a fixed one; ours take any size."""
    tell = getattr(network, "set_input_size", None)
    if tell is not None:
        tell(img_size=img_size)


def load_weights_file(
    path: Path, name: str, num_classes: int, kwargs: dict[str, Any], device: torch.device
) -> tuple[nn.Module, dict[str, Any]]:
    """Create the model ``name`` with the weights of a file; also return how its pictures are prepared."""
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
    """Create a model of timm's registry; pass it the size of the pictures if it takes one."""
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
    """Parse arguments of a model as the user types them; error messages call them ``argument``.

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
    """Format arguments as :func:`parse_model_kwargs` reads them.

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
    """How the tensors of a model were loaded from a file; ``str()`` gives a one-line summary.

    Attributes:
        taken: tensors loaded unchanged.
        resized: position embeddings, resized to the model's size.
        replaced: tensors that are for other classes in the file, and new in the model.
        new: tensors that are not in the file.
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
    """Load weights to start from, out of a file or a checkpoint folder; return which tensors were loaded.

    Reads timm's and the authors' layouts and resizes position embeddings. The model keeps its new head if the
    classes differ in number, or in their names (``class_names``) where a checkpoint folder records them.
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
