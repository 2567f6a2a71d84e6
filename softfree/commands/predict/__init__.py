"""Predict what is in pictures, with a model that `softfree train` wrote."""

import glob
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import IO, Annotated, Any

import torch
import tyro
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from torch.utils.data import DataLoader

from softfree.commands.common import (
    RUNS,
    check_output,
    check_positive,
    command,
    make_table,
    newest_run,
    to_json,
    with_bar,
    write_json,
)
from softfree.commands.predict.base import ONNX, Predictor
from softfree.commands.predict.classifier import Classifier
from softfree.commands.predict.detector import ObjectDetector
from softfree.commands.predict.results import CocoResults
from softfree.commands.predict.segmenter import Segmenter
from softfree.commands.predict.video import predict_video
from softfree.data.drawing import save
from softfree.data.images import (
    EXTENSIONS,
    ImageFiles,
    Unreadable,
    as_utf8,
    image_files,
    open_image,
    printable,
)
from softfree.data.videos import count_frames, import_av, is_video
from softfree.models.export import load_onnx
from softfree.models.views import Views
from softfree.training.checkpoint import read_metadata
from softfree.training.devices import choose_device

MAX_LISTED = 10
# Columns that the table needs besides the names of the pictures, so that names are not broken.
BESIDE_NAMES = 40
MOST_WORKERS = 8
# The class for each task. It is called with the checkpoint folder (or ONNX file), the device, --img-size and
# --topk, with `views` (how pictures are shown, --tta) and, for detectors, with `min_score`.
PREDICTORS: dict[str, Callable[..., Predictor]] = {
    "classification": Classifier,
    "detection": ObjectDetector,
    "segmentation": Segmenter,
}


def predict(
    pictures: Annotated[
        tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="PICTURE [PICTURE ...]")
    ],
    /,
    checkpoint: Path | None = None,
    onnx: Path | None = None,
    topk: int | None = None,
    min_score: float | None = None,
    output: Path | None = None,
    results: Path | None = None,
    annotations: Path | None = None,
    draw: Path | None = None,
    class_maps: Path | None = None,
    img_size: int | None = None,
    tta: bool = False,
    tta_scales: tuple[float, ...] = (),
    batch_size: int = 16,
    device: str = "auto",
    as_json: Annotated[bool, tyro.conf.arg(name="json"), tyro.conf.FlagCreatePairsOff] = False,
) -> int:
    """Print what the model finds in each picture: likeliest classes, objects, or the classes of pixels.

    Files that can't be read are listed and counted. The exit code is 1 only if none could be read.

    Args:
        pictures: files, folders (including subfolders) or patterns like 'photos/*.png'; also videos, such as
            street.mp4, frame by frame (needs the extra `video`).
        checkpoint: folder that `softfree train` wrote, such as OUT/best; if neither it nor --onnx is given,
            the newest run under output/.
        onnx: instead, a file that `softfree export` wrote for a classifier, a segmenter or a RetinaNet; it
            runs on the CPU.
        topk: keep this many classes of each picture, or objects for a detector; otherwise the 5 likeliest
            classes of a classifier, or everything that is found.
        min_score: detectors: drop objects with a lower score; otherwise 0.5.
        output: also write the results to this file, one JSON object per line.
        results: detectors: also write the detections to this file, in the format of COCO's own tools; use
            --min-score 0 to keep all for average precision.
        annotations: take the ids in --results from this COCO file, by the names of pictures and classes;
            otherwise the id of a picture is its file name, if all names are different numbers, or else 1, 2,
            ..., and classes have the ids of the training.
        draw: also write each picture and each video, with the results drawn on it, into this folder.
        class_maps: segmenters: also write the class of every pixel into this folder, as PNG files of the
            pictures' sizes whose values are the class numbers, from 0.
        img_size: side of the square that a classifier sees, or the shorter side for the others; otherwise the
            training size.
        tta: test-time augmentation: also run each picture mirrored, and merge the results.
        tta_scales: test-time augmentation: run each picture at several multiples of its size, e.g. 0.75 1
            1.25.
        batch_size: pictures at a time.
        device: 'cuda', 'cpu', or 'auto' for the GPU if there is one.
        as_json: print JSON lines instead of a table, for programs.
    """
    check_positive("--batch-size", batch_size)
    for option, value in (("--topk", topk), ("--img-size", img_size)):
        if value is not None:
            check_positive(option, value)
    check_output("--output", output)
    check_output("--results", results)
    if annotations is not None and results is None:
        raise ValueError("--annotations sets the ids in --results FILE.json; use both")
    for option, folder in (("--draw", draw), ("--class-maps", class_maps)):
        if folder is not None:
            if folder.is_file():
                raise ValueError(f"{option} must name a folder, but {folder} is a file")
            check_output(option, folder / "drawing.png")
    if class_maps is not None and topk is not None:
        raise ValueError("--class-maps shows all classes; use it without --topk")
    source, task = find_model(checkpoint, onnx)
    where = torch.device("cpu") if onnx else choose_device(device)
    paths = find_pictures(pictures)
    photos = [path for path in paths if not is_video(path)]
    if len(photos) < len(paths):
        import_av()
        for option, file in (("--results", results), ("--class-maps", class_maps)):
            if file is not None:
                raise ValueError(f"{option} is only for pictures; remove the videos")
    if task not in PREDICTORS:
        raise ValueError(
            f"{source} is for the task {task!r}; predict supports {', '.join(PREDICTORS)}"
        )
    options: dict[str, Any] = {"views": Views.of(tta, tta_scales)}
    if min_score is not None:
        if task != "detection":
            raise ValueError(f"--min-score is for detectors; {source} is for the task {task!r}")
        if not 0 <= min_score <= 1:
            raise ValueError(f"--min-score must be from 0 to 1, got {min_score:g}")
        options["min_score"] = min_score
    if results is not None and task != "detection":
        raise ValueError(f"--results is for detectors; {source} is for the task {task!r}")
    if class_maps is not None and task != "segmentation":
        raise ValueError(f"--class-maps is for segmenters; {source} is for the task {task!r}")
    predictor = PREDICTORS[task](source, where, img_size, topk, **options)
    coco = None
    if isinstance(predictor, ObjectDetector) and results is not None:
        coco = CocoResults(photos, predictor.category_ids, annotations)

    console = Console(highlight=False)
    errors = Console(stderr=True, highlight=False)
    longest = max((cell_len(printable(path)) for path in photos), default=0)
    if not console.is_terminal:
        # Lines in a file have no maximum width, and programs look for names in them.
        console.width = max(console.width, longest + BESIDE_NAMES)
    table = make_table(["picture"])
    table.columns[0].no_wrap = longest + BESIDE_NAMES <= console.width
    for title in predictor.titles:
        table.add_column(title, overflow="fold")
    unreadable: list[Unreadable] = []
    seen: list[str] = []
    # A unique name for each picture, from its number and its file name.
    names = {
        path: f"{number:0{len(str(len(paths)))}d}_{Path(path).stem}"
        for number, path in enumerate(paths, 1)
    }
    with ExitStack() as stack:
        lines: IO[str] | None = None
        if output is not None:
            output.parent.mkdir(parents=True, exist_ok=True)
            lines = stack.enter_context(output.open("w", encoding="utf-8"))

        def emit(record: dict[str, Any]) -> None:
            line = to_json(record, ensure_ascii=False)
            if lines is not None:
                print(line, file=lines)
            if as_json:
                print(line)

        predicted = with_bar(
            predict_files(predictor, photos, batch_size), "predicting", len(photos)
        )
        for path, result in zip(photos, predicted, strict=True):
            if isinstance(result, Unreadable):
                unreadable.append(result)
                emit({"path": as_utf8(path), "error": result.reason})
            else:
                seen.append(path)
                emit({"path": as_utf8(path), **result})
                table.add_row(escape(printable(path)), *predictor.cells(result))
                if coco is not None:
                    coco.add(path, result["objects"])
                if draw is not None:
                    drawing = predictor.drawing(open_image(path), result)
                    save(draw / f"{names[path]}.png", drawing)
                if class_maps is not None and isinstance(predictor, Segmenter):
                    save(class_maps / f"{names[path]}.png", predictor.class_map(result))
        if not as_json and table.row_count:
            console.print(table)
        for path in filter(is_video, paths):
            target = None if draw is None else draw / f"{names[path]}.mp4"
            with Progress(console=errors, transient=True, disable=not errors.is_terminal) as bar:
                watching = bar.add_task(escape(printable(path)), total=count_frames(path))
                watched = predict_video(
                    predictor, path, batch_size, target, emit, partial(bar.advance, watching)
                )
            if watched.unreadable is not None:
                unreadable.append(watched.unreadable)
                emit({"path": as_utf8(path), "error": watched.unreadable.reason})
            if watched.frames:
                seen.append(path)
                if not as_json:
                    words = f"{watched.frames:,} frames, the last at {watched.seconds:.2f} s"
                    console.print(f"{escape(printable(path))}: {words}", soft_wrap=True)
    report_unreadable(errors, unreadable, len(paths))
    if coco is not None and results is not None:
        write_json(results, coco.entries)
    if not as_json:
        files = {"results": output, "COCO results": results}
        if seen:
            files |= {"drawings": draw, "class maps": class_maps}
        for what, written in files.items():
            if written is not None:
                console.print(f"{what} written to {escape(str(written))}", soft_wrap=True)
    return int(not seen)


main = command(predict, __doc__)


def find_model(checkpoint: Path | None, onnx: Path | None) -> tuple[Path, Any]:
    """Find the model's path and its task."""
    if checkpoint is None and onnx is None:
        checkpoint = newest_run(PREDICTORS)
    if checkpoint is not None and onnx is None:
        return checkpoint, read_metadata(checkpoint).get("task")
    if onnx is None or checkpoint is not None:
        raise ValueError(
            "use either --checkpoint OUT/best or --onnx model.onnx"
            + ("" if onnx else f"; there is no run under {RUNS}/")
        )
    if onnx.suffix != ONNX:
        raise ValueError(f"--onnx must name a file that ends in {ONNX}, got {onnx}")
    return onnx, load_onnx(onnx)[1].get("task")


def find_pictures(given: Sequence[str]) -> list[str]:
    """Paths of the pictures given by files, folders and patterns, each once, in their order."""
    if not given:
        raise ValueError("no picture given; name files, folders or patterns like 'photos/*.png'")
    found: dict[str, None] = {}
    for name in given:
        if Path(name).is_dir():
            files = image_files(Path(name))
            if not files:
                raise FileNotFoundError(
                    f"no picture in the folder {name}; looked for {', '.join(EXTENSIONS)}"
                )
        elif Path(name).is_file():
            files = [name]
        else:
            matches = sorted(glob.glob(name, recursive=True))
            files = [match for match in matches if Path(match).is_file()]
            if not files:
                raise FileNotFoundError(f"no picture at {name}")
        found.update(dict.fromkeys(files))
    return list(found)


def predict_files(
    predictor: Predictor, paths: Sequence[str], batch_size: int
) -> Iterator[dict[str, Any] | Unreadable]:
    """Yield a result for each path, in order."""
    files = ImageFiles(paths, range(len(paths)))
    files.transform = predictor.prepare
    workers = min(os.cpu_count() or 1, MOST_WORKERS, len(paths) // batch_size)
    loader = DataLoader(files, batch_size, num_workers=workers, collate_fn=list)
    for batch in loader:
        inputs = [item[0] for item in batch if not isinstance(item, Unreadable)]
        results = iter(predictor.predict(inputs) if inputs else [])
        for item in batch:
            yield item if isinstance(item, Unreadable) else next(results)


def report_unreadable(console: Console, unreadable: Sequence[Unreadable], count: int) -> None:
    """List the files that could not be read, at most the first few."""
    if not unreadable:
        return
    console.print(f"{len(unreadable):,} of {count:,} pictures could not be read:", style="yellow")
    for item in unreadable[:MAX_LISTED]:
        console.print(f"  {escape(printable(item.path))}: {escape(item.reason)}", soft_wrap=True)
    if len(unreadable) > MAX_LISTED:
        console.print(f"  and {len(unreadable) - MAX_LISTED:,} more", style="dim")
