"""Check data before training: classes, boxes, masks, missing and damaged files."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from torch.utils.data import DataLoader

from softfree.commands.common import PICTURE_ENDINGS, check_figure, command, make_table
from softfree.commands.settings import resolve
from softfree.data.classification import lacks_validation, load_images
from softfree.data.detection import load_detection
from softfree.data.drawing import save
from softfree.data.images import ImageData, ImageFiles, Unreadable, printable
from softfree.data.segmentation import load_segmentation
from softfree.models.checks import check_at_least
from softfree.training.classification import VAL_SPLIT
from softfree.training.loading import ignore_signals
from softfree.training.settings import WORKERS
from softfree.training.tasks import TASKS

# Of the largest class over the smallest: worth a word.
UNEVEN = 10
# Pictures a loading process takes at a time; the progress moves on after each lot.
CHUNK = 16


def check_data(
    task: Annotated[
        tyro.conf.Positional[Literal["classification", "detection", "segmentation"]],
        tyro.conf.arg(metavar="TASK"),
    ],
    /,
    data_dir: str | None = None,
    masks: bool = True,
    skip_bad_annotations: bool = False,
    ignore_label: int = 255,
    decode: bool = True,
    workers: int = WORKERS,
    preview: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
    recipe: str = "",
) -> int:
    """Run the checks that training begins with, decode every picture, and say what was found.

    Args:
        task: classification (class folders), detection (COCO, Roboflow, VOC, YOLO) or segmentation (class maps).
        data_dir: folder to check; otherwise the embedded digits or shapes.
        masks: detection: also check masks, where there are any.
        skip_bad_annotations: boxes and masks: leave out annotations that can't be used.
        ignore_label: segmentation: value in masks/ that stands for no class.
        decode: also decode every picture, to find damaged ones; training does not before it starts.
        workers: processes that decode pictures.
        preview: draw training samples as the model sees them, varied, with their classes, boxes or masks (.png, .jpg).
        recipe: with --preview: of `softfree train`, whose variations are drawn; '': the one it would choose.
    """
    check_at_least(0, workers=workers)
    check_figure("--preview", preview, PICTURE_ENDINGS)
    settings: Any = None
    if preview is not None:
        given = [] if data_dir is None else ["--data-dir", data_dir]
        given += ["--recipe", recipe] if recipe else []
        given += ["--detector", "mask-rcnn"] if task == "detection" and masks else []
        settings = resolve(given, TASKS[task])

    def draw_preview() -> None:
        if preview is not None:
            maker: Any = TASKS[task]
            page = maker(settings, data).preview(settings.run.seed, torch.device("cpu"))
            save(preview, page)
            print(f"training samples as the model sees them are drawn in {preview}")

    data: Any
    if task == "classification":
        data = load_classes(data_dir)
        check_classes(data, data_dir, decode, workers)
        draw_preview()
        print("no faults found")
        return 0
    if task == "detection":
        checked = None if masks else False
        data = load_detection(data_dir, masks=checked, skip_bad=skip_bad_annotations)
    else:
        data = load_segmentation(data_dir, ignore_label=ignore_label, skip_bad=skip_bad_annotations)
    splits, names = {"train": data.train, "val": data.val}, data.class_names
    for split, part in splits.items():
        what = " with class maps"
        if task == "detection":
            what = f", {len(part.annotations['annotations']):,} objects"
            if masks and not part.masks:
                what += ", boxes alone: for RetinaNet, not for Mask R-CNN"
            # Checked by now; to draw them would take longer than the pictures.
            part.masks = False
        print(f"{split}: {len(part):,} pictures{what}")
    if decode and data_dir is not None:
        check_pictures(splits, data_dir, workers)
    console = Console(highlight=False, markup=False)
    # Of many classes, in a terminal, no name is cut in two; lines of a file stay whole.
    console.print(f"{len(names)} classes: {', '.join(names)}", soft_wrap=not console.is_terminal)
    if task == "detection":
        data.train.masks = masks
    draw_preview()
    print("no faults found")
    return 0


main = command(check_data, __doc__)


def load_classes(data_dir: str | None) -> ImageData:
    """Class folders as training takes them."""
    split = 0.0 if data_dir is None or not lacks_validation(Path(data_dir)) else VAL_SPLIT
    if split:
        print(
            f"{data_dir} has no val/: training sets {split:.0%} of each class aside (--val-split)"
        )
    return load_images(data_dir, val_split=split)


def check_classes(data: ImageData, data_dir: str | None, decode: bool, workers: int) -> None:
    """Class folders: pictures of each class, and whether training could begin."""
    splits = {"train": data.train, "val": data.val}
    if decode and data_dir is not None:
        check_pictures(splits, data_dir, workers)
    counts = {
        name: Counter(part.labels) for name, part in splits.items() if isinstance(part, ImageFiles)
    }
    table = make_table(["class", *counts])
    for label, name in enumerate(data.class_names):
        table.add_row(escape(name), *(f"{counts[split][label]:,}" for split in counts))
    console = Console(highlight=False)
    if counts:
        console.print(table)
        of_train = counts["train"]
        most, fewest = max(of_train.values()), min(of_train.values())
        if most >= UNEVEN * fewest:
            print(f"classes are uneven: {fewest:,} to {most:,} pictures of a class to train on")
    sizes = ", ".join(f"{len(part):,} pictures in {name}" for name, part in splits.items())
    print(f"{len(data.class_names)} classes, {sizes}")


def check_pictures(splits: Mapping[str, Any], data_dir: str, workers: int) -> None:
    """Decode all pictures; print each that can't be used, then raise if there are any."""
    faults = []
    for split, data in splits.items():
        loader: DataLoader = DataLoader(
            data,
            batch_size=CHUNK,
            collate_fn=only_unreadable,
            num_workers=workers,
            worker_init_fn=ignore_signals,
        )
        console = Console(stderr=True)
        progress = track(
            loader,
            f"decoding {split}",
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        for files in progress:
            faults += [f"{split}: {printable(file.path)}: {file.reason}" for file in files]
    if faults:
        print("\n".join(faults))
        count = sum(map(len, splits.values()))
        raise ValueError(
            f"--data-dir {data_dir}: {len(faults):,} of {count:,} pictures can't be used, named above; "
            "replace them, or remove them together with what is said of them"
        )


def only_unreadable(items: Sequence[Any]) -> list[Unreadable]:
    """Of a data set's items those that can't be read: the pictures stay in the process that decoded them."""
    return [item for item in items if isinstance(item, Unreadable)]
