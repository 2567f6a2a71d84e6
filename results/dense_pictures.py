"""Draw pictures of a dense data set: the truth in the first row, then what each checkpoint sees.

    python results/dense_pictures.py --data-dir VOC --row SOFT++=soft/best --row softmax=softmax/best --draw voc.jpg

Checkpoints are of `softfree train detection` or `segmentation`, all of one kind; without --data-dir the embedded shapes.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from softfree.commands.predict.detector import ObjectDetector
from softfree.commands.predict.segmenter import Segmenter
from softfree.data.coco import encode_mask, encode_masks
from softfree.data.detection import load_detection
from softfree.data.drawing import rows_of_pictures
from softfree.data.segmentation import IGNORE, load_segmentation
from softfree.training.checkpoint import read_metadata
from softfree.training.devices import choose_device


def detection_truth(data: Any, index: int) -> tuple[Image.Image, dict[str, Any]]:
    """A picture, and its objects as a detector's result, without scores."""
    picture, entry = data.read(index)
    _, target = data.prepare(picture, entry)
    names = ["", *data.class_names]
    objects = [
        {"label": names[label], "box": box}
        for label, box in zip(target["labels"].tolist(), target["boxes"].tolist(), strict=True)
    ]
    if "masks" in target:
        codes = encode_masks(torch.as_tensor(target["masks"]).bool())
        objects = [{**entry, "mask": code} for entry, code in zip(objects, codes, strict=True)]
    return picture, {"objects": objects}


def segmentation_truth(
    data: Any, class_names: tuple[str, ...], index: int
) -> tuple[Image.Image, dict[str, Any]]:
    """A picture, and its class map as a segmenter's result."""
    picture, classes = data.read(index)
    found = [number for number in np.unique(classes).tolist() if number != IGNORE]
    return picture, {
        "classes": [
            {
                "label": class_names[number],
                "share": float((classes == number).mean()),
                "mask": encode_mask(classes == number),
            }
            for number in found
        ]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--row", action="append", required=True, metavar="NAME=CHECKPOINT")
    parser.add_argument("--data-dir")
    parser.add_argument("--pictures", type=int, nargs="+", default=[0, 1, 2, 3], metavar="NUMBER")
    parser.add_argument("--min-score", type=float, default=0.5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--draw", type=Path, required=True, metavar="FILE")
    given = parser.parse_args()
    device = choose_device(given.device)
    checkpoints = dict(row.split("=", 1) for row in given.row)
    task = read_metadata(Path(next(iter(checkpoints.values()))))["task"]
    predictors: dict[str, Any] = {}
    for name, path in checkpoints.items():
        options = {"min_score": given.min_score} if task == "detection" else {}
        kind: Any = ObjectDetector if task == "detection" else Segmenter
        predictors[name] = kind(Path(path), device, None, None, **options)
    first = next(iter(predictors.values()))
    if task == "detection":
        masks = read_metadata(Path(next(iter(checkpoints.values()))))["detector"] == "mask-rcnn"
        pictures = load_detection(given.data_dir, masks=masks).val
        samples = [detection_truth(pictures, index) for index in given.pictures]
    else:
        data = load_segmentation(given.data_dir)
        samples = [segmentation_truth(data.val, data.class_names, i) for i in given.pictures]
    rows: dict[str, list[Image.Image]] = {"truth": []}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "drawn.png"

        def drawn(predictor: Any, picture: Image.Image, result: dict[str, Any]) -> Image.Image:
            predictor.draw(file, picture, result)
            with Image.open(file) as opened:
                return opened.convert("RGB")

        for picture, truth in samples:
            rows["truth"].append(drawn(first, picture, truth))
            for name, predictor in predictors.items():
                (result,) = predictor.predict([predictor.prepare(picture)])
                rows.setdefault(name, []).append(drawn(predictor, picture, result))
    rows_of_pictures(rows).save(given.draw, quality=90)
    print(f"figure written to {given.draw}")


if __name__ == "__main__":
    main()
