"""Check data before training: classes, boxes, masks, missing and damaged files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.console import Console
from rich.markup import escape
from torch.utils.data import DataLoader

from softfree.commands.common import (
    NOTHING,
    PICTURE_ENDINGS,
    check_figure,
    check_output,
    command,
    make_table,
    message_console,
    percent,
    to_json,
    with_bar,
)
from softfree.commands.settings import resolve
from softfree.data.classification import lacks_validation, load_images
from softfree.data.detection import load_detection
from softfree.data.drawing import save
from softfree.data.files import replace_durably
from softfree.data.images import ImageData, Unreadable, printable, some
from softfree.data.longrange import LongRangeData, load_longrange
from softfree.data.segmentation import load_segmentation
from softfree.data.statistics import (
    Description,
    Seen,
    describe_class_maps,
    describe_objects,
    describe_pictures,
    describe_sequences,
    items_of,
    look,
)
from softfree.models.checks import check_at_least
from softfree.training.classification import VAL_SPLIT
from softfree.training.loading import ignore_signals
from softfree.training.settings import WORKERS
from softfree.training.tasks import TASKS

# Warn if the largest class is this many times larger than the smallest.
UNEVEN = 10
# Pictures that a loading process takes at a time; the progress bar moves after each chunk.
CHUNK = 16
# If there are more classes, the table shows the most and the least frequent, this many of each.
SHOWN = 20
# What is counted for each class; for class maps, the pictures that have it.
COUNTED = {
    "classification": "pictures",
    "detection": "objects",
    "segmentation": "pictures with it, share of the pixels",
    "longrange": "samples",
}
# Rows of the table, by their field in a description.
ROWS = {
    "samples": "pictures",
    "width": "width",
    "height": "height",
    "length": "tokens",
    "empty": "empty pictures",
    "objects": "objects",
    "small": "  small (below 32 x 32 pixels)",
    "medium": "  medium",
    "large": "  large (96 x 96 and more)",
    "crowds": "crowds and difficult objects",
    "ignored": "pixels without a class",
}
# Rows that are only shown if they are not 0.
RARE = ("crowds", "ignored")
Kind = Literal["classification", "detection", "segmentation", "longrange"]


def check_data(
    kind: Annotated[tyro.conf.Positional[Kind], tyro.conf.arg(metavar="TASK")],
    /,
    data_dir: str | None = None,
    task: str = "listops",
    masks: bool = True,
    skip_bad_annotations: bool = False,
    ignore_label: int = 255,
    decode: bool = True,
    workers: int = WORKERS,
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
    preview: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
    recipe: str = "",
) -> int:
    """Run the checks of a training run, decode every picture, and report what was found.

    Args:
        kind: classification (class folders), detection (COCO, Roboflow, VOC, YOLO), segmentation (class maps
            or masks) or longrange.
        data_dir: folder to check; otherwise the embedded digits or shapes, or what is generated for --task.
        task: longrange: listops, text, retrieval, image, pathfinder or twins.
        masks: detection: also check masks, if there are any.
        skip_bad_annotations: boxes and masks: skip annotations that can't be used.
        ignore_label: segmentation: value in masks/ that stands for no class.
        decode: also decode every picture, to find damaged ones and to measure all of them; training does not
            do this before it starts.
        workers: processes that decode pictures.
        json: write the figures to this file, for all classes.
        preview: draw augmented training samples as the model sees them, with their classes, boxes or masks,
            into this file (.png, .jpg).
        recipe: with --preview: recipe of `softfree train` whose augmentation is drawn; '': the one it would
            choose.
    """
    check_at_least(0, workers=workers)
    check_output("--json", json)
    check_figure("--preview", preview, PICTURE_ENDINGS)
    settings: Any = None
    if preview is not None:
        if kind == "longrange":
            raise ValueError("--preview draws pictures; it is not available for longrange")
        given = [] if data_dir is None else ["--data-dir", data_dir]
        given += ["--recipe", recipe] if recipe else []
        given += ["--detector", "mask-rcnn"] if kind == "detection" and masks else []
        settings = resolve(given, TASKS[kind])
    data: Any
    described: dict[str, Description]
    if kind == "longrange":
        data = load_longrange(task, None if data_dir is None else Path(data_dir))
        described = describe_long_range(data)
    else:
        if kind == "classification":
            data = load_classes(data_dir)
        elif kind == "detection":
            checked = None if masks else False
            data = load_detection(data_dir, masks=checked, skip_bad=skip_bad_annotations)
        else:
            options = dict(ignore_label=ignore_label, skip_bad=skip_bad_annotations)
            data = load_segmentation(data_dir, **options)
        has_masks = kind == "detection" and data.train.masks
        splits = {"train": data.train, "val": data.val}
        if kind == "detection":
            for part in splits.values():
                # They have been checked by now, and decoding them would take longer than the pictures.
                part.masks = False
        seen = check_pictures(splits, data_dir, workers) if decode else {}
        described = {
            split: describe(kind, part, data.class_names, seen.get(split, []))
            for split, part in splits.items()
        }
    print_sizes(described, "samples" if kind == "longrange" else "pictures")
    per_token = kind == "longrange" and data.task.per_token
    print_classes(described, data.class_names, "tokens" if per_token else COUNTED[kind])
    print_warnings(kind, described)
    if kind == "detection" and masks and not has_masks:
        print("only boxes, no masks: usable for RetinaNet, not for Mask R-CNN")
    if json is not None:
        content: Description = {"task": task if kind == "longrange" else kind}
        content |= {"data_dir": data_dir, "splits": described}
        json.parent.mkdir(parents=True, exist_ok=True)
        replace_durably(json, to_json(content, indent=1).encode())
        print(f"figures written to {json}")
    if preview is not None:
        if kind == "detection":
            data.train.masks = has_masks
        maker: Any = TASKS[kind]
        page = maker(settings, data).preview(settings.run.seed, torch.device("cpu"))
        save(preview, page)
        print(f"training samples as the model sees them are drawn in {preview}")
    print("no faults found")
    return 0


main = command(check_data, __doc__)


def say(text: str) -> None:
    """Print a line."""
    message_console(markup=False).print(text)


def load_classes(data_dir: str | None) -> ImageData:
    """Load class folders as training does."""
    split = 0.0 if data_dir is None or not lacks_validation(Path(data_dir)) else VAL_SPLIT
    if split:
        say(
            f"{data_dir} has no val/: training validates on {split:.0%} of each class (--val-split)"
        )
    return load_images(data_dir, val_split=split)


def describe(kind: Kind, part: Any, names: Sequence[str], seen: Sequence[Seen]) -> Description:
    """Describe a split of pictures in numbers."""
    if kind == "classification":
        return describe_pictures(part.labels, names, seen)
    if kind == "detection":
        return describe_objects(part)
    return describe_class_maps(len(part), names, seen)


def describe_long_range(data: LongRangeData) -> dict[str, Description]:
    """Describe the splits of a long-range task in numbers; some splits may share their samples."""
    found: dict[str, Description] = {}
    for split in ("train", "dev", "test"):
        part = getattr(data, split)
        same = next((other for other in found if getattr(data, other) is part), None)
        if same is not None:
            print(f"{split} has the same samples as {same}")
            continue
        samples = with_bar(items_of(part), f"reading {split}", len(part))
        found[split] = describe_sequences(samples, data.class_names)
    return found


def print_sizes(described: Mapping[str, Description], unit: str) -> None:
    """Print a table of what each split has."""
    table = make_table(["min / median / max", *described])
    for field, title in {**ROWS, "samples": unit}.items():
        cells = [own.get(field) for own in described.values()]
        if any(cell is not None for cell in cells) and (any(cells) or field not in RARE):
            totals = [own.get("objects") for own in described.values()]
            of = totals if field in ("small", "medium", "large") else [None] * len(cells)
            table.add_row(escape(title), *map(_cell, cells, of))
    Console(highlight=False).print(table)


def _cell(value: Any, total: int | None) -> str:
    if value is None:
        return NOTHING
    if isinstance(value, dict) and value["min"] == value["max"]:
        return f"{value['min']:,}"
    if isinstance(value, dict):
        return " / ".join(f"{value[name]:,}" for name in ("min", "median", "max"))
    if isinstance(value, float):
        return percent(value)
    return f"{value:,}" + (f" ({percent(value / max(total, 1))})" if total is not None else "")


def print_classes(described: Mapping[str, Description], names: Sequence[str], what: str) -> None:
    """Print a table of the classes: counts, and shares of all."""
    console = Console(highlight=False)
    splits = {split: own["classes"] for split, own in described.items() if "classes" in own}
    if not splits:
        say(f"{len(names)} classes: {', '.join(names)}")
        return
    print(f"{len(names)} classes, for each: {what}")
    first = next(iter(splits.values()))
    order = sorted(range(len(names)), key=lambda place: -first[place]["share"])
    left_out = len(names) - 2 * SHOWN
    titles = [title for split in splits for title in (split, "%")]
    table = make_table(["class", *titles])
    for number, place in enumerate(order if left_out > 0 else range(len(names))):
        if left_out > 0 and number == SHOWN:
            table.add_row(f"... {left_out:,} more", *[""] * len(titles))
        if left_out > 0 and SHOWN <= number < len(names) - SHOWN:
            continue
        cells = []
        for classes in splits.values():
            own = classes[place]
            cells += [f"{own.get('pictures', own['count']):,}", f"{100 * own['share']:.1f}"]
        table.add_row(escape(printable(names[place])), *cells)
    console.print(table)


def print_warnings(kind: Kind, described: Mapping[str, Description]) -> None:
    """Warn about classes that do not occur, or occur far less than others."""
    for split, own in described.items():
        if unused := [of["name"] for of in own.get("classes", ()) if not of["count"]]:
            say(f"{split}: no {COUNTED[kind].split()[0]} of {some(unused)}")
    counts = [of["count"] for of in described["train"].get("classes", ()) if of["count"]]
    if counts and max(counts) >= UNEVEN * min(counts) and kind != "segmentation":
        say(
            f"classes are unbalanced: {min(counts):,} to {max(counts):,} {COUNTED[kind]} per class to train on"
        )


def check_pictures(
    splits: Mapping[str, Any], data_dir: str | None, workers: int
) -> dict[str, list[Seen]]:
    """Decode and check all pictures; print those that can't be used, then raise if there are any."""
    faults: list[str] = []
    found: dict[str, list[Seen]] = {}
    for split, data in splits.items():
        loader: DataLoader = DataLoader(
            data,
            batch_size=CHUNK,
            collate_fn=look_at_all,
            num_workers=workers,
            worker_init_fn=ignore_signals,
        )
        seen = [item for items in with_bar(loader, f"decoding {split}") for item in items]
        found[split] = [item for item in seen if isinstance(item, Seen)]
        faults += [
            f"{split}: {printable(item.path)}: {item.reason}"
            for item in seen
            if isinstance(item, Unreadable)
        ]
    if faults:
        print("\n".join(faults))
        count = sum(map(len, splits.values()))
        raise ValueError(
            f"--data-dir {data_dir}: {len(faults):,} of {count:,} pictures can't be used (listed above); "
            "replace them, or remove them together with their annotations"
        )
    return found


def look_at_all(items: Sequence[Any]) -> list[Seen | Unreadable]:
    """Summaries of a data set's items; the pictures themselves stay in the process that decoded them."""
    return [look(item) for item in items]
