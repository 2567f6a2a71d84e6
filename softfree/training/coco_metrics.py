"""COCO's average precision, from the predictions of all processes, each image counted once."""

import contextlib
import io
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.ops import box_convert

from softfree.data.coco import Annotations, coco_api, encode_masks, result_entry
from softfree.training.distributed import Processes, gather

# Positions of the figures in COCO's summary.
FIGURES = {"AP": 0, "AP50": 1, "AP75": 2, "APS": 3, "APM": 4, "APL": 5}
KINDS = {"box": "bbox", "mask": "segm"}
MASK_THRESHOLD = 0.5


class CocoMetrics:
    """Collects detections and computes AP for boxes and, with ``masks``, for masks.

    Args:
        annotations: the ground truth, the content of a COCO file.
        category_ids: the category of label 1, 2, ...
        masks: whether detections have masks.
        package: "faster-coco-eval" or "pycocotools"; None: the first that is installed.
    """

    def __init__(
        self,
        annotations: Annotations,
        category_ids: Sequence[int],
        *,
        masks: bool = False,
        package: str | None = None,
    ):
        self.annotations = annotations
        self.category_ids = list(category_ids)
        self.masks = masks
        self.package = package
        self.results: dict[int, list[dict[str, Any]]] = {}
        # Results of COCO's evaluation by kind: precision (10, 101, categories) and recall (10, categories).
        self.curves: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def update(self, image_ids: Sequence[int], detections: Sequence[dict[str, Tensor]]) -> None:
        """Add what torchvision's detectors return for these images."""
        masks = [found["masks"][:, 0] > MASK_THRESHOLD for found in detections if self.masks]
        boxes = torch.cat([found["boxes"].float() for found in detections])
        boxes = box_convert(boxes, "xyxy", "xywh")
        areas = torch.cat([own.sum((1, 2)) for own in masks]) if masks else boxes[:, 2:].prod(1)
        scores, labels = (
            torch.cat([found[k] for found in detections]) for k in ("scores", "labels")
        )
        # All numbers are copied to the host at once, because each copy waits for the device.
        columns = [boxes, *(x[:, None] for x in (areas, scores, labels))]
        rows = iter(torch.cat(columns, dim=1).tolist())
        for place, image_id in enumerate(image_ids):
            results: list[dict[str, Any]] = [
                {
                    **result_entry(image_id, self.category_ids[int(label) - 1], box, score),
                    "area": area,
                }
                for *box, area, score, label in itertools.islice(
                    rows, len(detections[place]["boxes"])
                )
                # RetinaNet has an output for the background, which never learns to fire.
                if label > 0
            ]
            if self.masks:
                for result, code in zip(results, encode_masks(masks[place]), strict=True):
                    result["segmentation"] = code
            self.results[image_id] = results

    def compute(self, processes: Processes) -> dict[str, float]:
        """``{"box_AP": ..., "box_AP50": ..., ...}`` and the same for masks, in percent.

        Equal in all processes. A figure without any objects, such as APL if there are no large ones, is left
        out. After this call ``results`` has the detections of all processes.
        """
        merged = dict(gather(list(self.results.items()), processes))
        self.results = {image_id: merged[image_id] for image_id in sorted(merged)}
        results = [row for rows in self.results.values() for row in rows]
        figures: dict[str, float] = {}
        for kind in ("box", "mask") if self.masks else ("box",):
            stats = self._stats(KINDS[kind], results, list(self.results))
            figures |= {
                f"{kind}_{name}": 100 * float(stats[place])
                for name, place in FIGURES.items()
                if stats[place] >= 0
            }
        return figures

    def objects(self) -> list[int]:
        """The number of objects of each category in the evaluated pictures, not counting crowds."""
        counts = Counter(
            annotation["category_id"]
            for annotation in self.annotations["annotations"]
            if annotation["image_id"] in self.results and not annotation["iscrowd"]
        )
        return [counts[category] for category in self.category_ids]

    def of_classes(self, kind: str) -> dict[str, list[float | None]]:
        """AP, AP50, AP75 and AR (of 100 detections) of each category in percent; None if it has no objects.

        These are results of :meth:`compute`, which must be called first; ``kind`` is "box" or "mask".
        """
        objects = self.objects()
        precision, recall = self.curves.get(
            KINDS[kind], (np.zeros((10, 1, len(objects))), np.zeros((10, len(objects))))
        )
        figures = {
            "AP": precision.mean((0, 1)),
            "AP50": precision[0].mean(0),
            "AP75": precision[5].mean(0),
            "AR": recall.mean(0),
        }
        return {
            name: [100 * float(x) if n else None for x, n in zip(values, objects, strict=True)]
            for name, values in figures.items()
        }

    def confusion(self, min_score: float, least_overlap: float = 0.5) -> np.ndarray:
        """Confusion matrix (n + 1, n + 1): rows are the objects' categories, columns the detections'.

        The last row and column are the background. Boxes are matched regardless of their categories.
        Detections with at least ``min_score`` are taken in order of decreasing score. Each is matched to the
        free object that it overlaps most, with an IoU of at least ``least_overlap``. Unmatched objects are in
        the last column and unmatched detections in the last row. Unmatched detections inside a crowd are not
        counted.
        """
        place = {category: number for number, category in enumerate(self.category_ids)}
        background = len(place)
        counts = np.zeros((background + 1, background + 1), np.int64)
        truth: dict[int, list[dict[str, Any]]] = {image_id: [] for image_id in self.results}
        for annotation in self.annotations["annotations"]:
            truth.get(annotation["image_id"], []).append(annotation)
        for image_id, rows in self.results.items():
            found = [row for row in rows if row["score"] >= min_score]
            found.sort(key=lambda row: -row["score"])
            objects = [annotation for annotation in truth[image_id] if not annotation["iscrowd"]]
            crowds = [annotation for annotation in truth[image_id] if annotation["iscrowd"]]
            shared, areas = _overlaps(found, objects)
            overlap = shared / (areas[0][:, None] + areas[1] - shared)
            inside = np.any(
                _overlaps(found, crowds)[0] >= least_overlap * areas[0][:, None], axis=1
            )
            free = np.ones(len(objects), bool)
            for number, row in enumerate(found):
                own = np.where(free, overlap[number], 0.0)
                best = int(own.argmax()) if len(own) else -1
                if best >= 0 and own[best] >= least_overlap:
                    free[best] = False
                    counts[place[objects[best]["category_id"]], place[row["category_id"]]] += 1
                elif not inside[number]:
                    counts[background, place[row["category_id"]]] += 1
            for index in np.flatnonzero(free):
                counts[place[objects[index]["category_id"]], background] += 1
        return counts

    def entries(self) -> list[dict[str, Any]]:
        """The detections in COCO's results format, which its tools read with ``loadRes``."""
        # Only the fields of the format: its tools compute the area themselves.
        return [
            {name: value for name, value in row.items() if name != "area"}
            for rows in self.results.values()
            for row in rows
        ]

    def _stats(
        self, kind: str, results: list[dict[str, Any]], image_ids: list[int]
    ) -> Sequence[float]:
        if not results:
            return [0.0] * len(FIGURES)
        api = coco_api(self.package)
        # Both packages print as they go.
        with contextlib.redirect_stdout(io.StringIO()):
            truth = api.COCO()
            truth.dataset = dict(info={}, licenses=[], **_copy(self.annotations))
            truth.createIndex()
            # loadRes is not used: it decodes every mask to find its area and box, which are known here.
            found = api.COCO()
            found.dataset = {
                **truth.dataset,
                "annotations": [self._entry(kind, *row) for row in enumerate(results, start=1)],
            }
            found.createIndex()
            evaluation = api.COCOeval(truth, found, kind)
            evaluation.params.imgIds = image_ids
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
        # Objects of all sizes, and the highest limit on detections per picture: 100.
        precision, recall = (np.asarray(evaluation.eval[name]) for name in ("precision", "recall"))
        self.curves[kind] = precision[:, :, :, 0, -1], recall[:, :, 0, -1]
        return evaluation.stats

    def _entry(self, kind: str, number: int, row: dict[str, Any]) -> dict[str, Any]:
        """A detection in the form that the packages take; its area decides on small, medium or large."""
        entry = {**row, "id": number, "iscrowd": 0}
        if kind == "bbox" and self.masks:
            _, _, width, height = row["bbox"]
            entry["area"] = width * height
            del entry["segmentation"]
        return entry


def _overlaps(
    one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """Areas of the intersections (n, m) of boxes (x, y, width, height), and the areas of the boxes."""
    a, b = (np.array([row["bbox"] for row in rows], float).reshape(-1, 4) for rows in (one, other))
    low = np.maximum(a[:, None, :2], b[:, :2])
    high = np.minimum(a[:, None, :2] + a[:, None, 2:], b[:, :2] + b[:, 2:])
    return (high - low).clip(min=0).prod(-1), (a[:, 2:].prod(1), b[:, 2:].prod(1))


def _copy(annotations: Annotations) -> dict[str, Any]:
    # The packages modify the entries they are given. They treat an object with id 0 as missing, and keep only
    # the last of several with the same id, so new ids are assigned here.
    return {
        "images": [dict(image) for image in annotations["images"]],
        "annotations": [
            {**annotation, "id": number}
            for number, annotation in enumerate(annotations["annotations"], start=1)
        ],
        "categories": [dict(category) for category in annotations["categories"]],
    }
