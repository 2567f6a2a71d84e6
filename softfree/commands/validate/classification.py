"""`softfree validate` for image classifiers."""

import dataclasses
from pathlib import Path

from softfree.commands.common import check_positive, make_table
from softfree.commands.validate.base import PictureValidation, Scores, check_classes
from softfree.commands.validate.classes import classes_of
from softfree.data.classification import load_images
from softfree.data.images import ImageDataset, Unreadable
from softfree.data.resident import ResidentImages
from softfree.training.classification import (
    Classification,
    load_validation_images,
    load_weights_file,
    parse_model_kwargs,
    score_classifier,
)
from softfree.training.distributed import Processes


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValidateClassification(PictureValidation):
    """Top-1 and top-5 accuracy, loss and throughput on the validation pictures."""

    checkpoint: Path
    """a checkpoint folder, such as OUT/best; or a weights file, with --model"""
    data_dir: str | None = None
    """folder with train/, val/ and perhaps test/; otherwise the data that the checkpoint was trained on"""
    dataset: str = ""
    """name of a data set in timm's notation, stored in --data-dir"""
    img_size: tuple[int, ...] = ()
    """one or several picture sizes; otherwise the training size"""
    crop_pct: float | None = None
    """share of the shorter side that the centre crop takes; otherwise the checkpoint's"""
    model: str = ""
    """for a weights file: the model it belongs to, e.g. softpp_tiny_release"""
    model_kwargs: tuple[str, ...] = ()
    """model arguments that differ from training, e.g. landmarks=conv:49"""
    strict_data: bool = False
    """stop at the first picture that can't be read"""
    data_on_device: bool = False
    """keep all pictures in the device's memory and resize them there; they must have the same size"""

    def score(self, processes: Processes) -> Scores:
        for size in self.img_size:
            check_positive("--img-size", size)
        if self.checkpoint.is_file() and not self.model:
            raise ValueError(
                f"--checkpoint {self.checkpoint} is a file: set the --model it belongs to"
            )
        kwargs = parse_model_kwargs(self.model_kwargs)
        from_folder = self.checkpoint.is_dir() or not self.model
        if from_folder:
            network, metadata = Classification.load(self.checkpoint, processes.device, kwargs)
        where = self.data_dir, self.dataset, self.strict_data, self.split
        if from_folder:
            data = load_validation_images(self.checkpoint, *where)
            check_classes(self.checkpoint, metadata["class_names"], data.class_names)
        else:
            if not self.data_dir and not self.dataset:
                raise ValueError(
                    f"--data-dir is needed: {self.checkpoint} is not a checkpoint folder that names its data"
                )
            data = load_images(
                self.data_dir, dataset=self.dataset, strict=self.strict_data, split=self.split
            )
            network, metadata = load_weights_file(
                self.checkpoint, self.model, len(data.class_names), kwargs, processes.device
            )
        if self.crop_pct is not None:
            metadata = {**metadata, "crop_pct": self.crop_pct}
        chosen = data.train if self.split == "train" else data.val
        pictures: ImageDataset | ResidentImages = chosen
        if self.data_on_device:
            pictures = ResidentImages(chosen, processes.device, self.workers)
        sizes = self.img_size or (metadata["img_size"],)
        if self.looks_at_classes and len(sizes) > 1:
            listed = " ".join(map(str, sizes))
            raise ValueError(f"--per-class and --draw take one --img-size, got {listed}")
        confusion = self.new_confusion(len(data.class_names), processes)
        rows, unreadable = [], list[Unreadable]()
        table = make_table(["img size", "top-1 %", "top-5 %", "loss", "pictures", "img/s"])
        for size in sizes:
            scores, skipped = score_classifier(
                network, metadata, pictures, size, processes, self.views, confusion, **self.reading
            )
            rows.append({**self.row, "img_size": size, **scores})
            unreadable += skipped
            table.add_row(
                str(size),
                f"{scores['top1']:.2f}",
                f"{scores['top5']:.2f}",
                f"{scores['loss']:.4f}",
                f"{scores['samples']:,}",
                f"{scores['img_per_s']:,.0f}",
            )
        classes = classes_of("pictures", data.class_names, confusion)
        title = f"{metadata['model']}, {self.subject}"
        return Scores(title, rows, table, unreadable=unreadable, classes=classes)
