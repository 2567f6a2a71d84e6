"""COCO's average precision, from the predictions of all processes, each image counted once."""

import contextlib
import io
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchvision.ops import box_convert

from softfree.data.coco import Annotations, coco_api, encode_masks, result_entry
from softfree.training.distributed import Processes, gather

# Places of the figures in COCO's summary.
FIGURES = {"AP": 0, "AP50": 1, "AP75": 2, "APS": 3, "APM": 4, "APL": 5}
KINDS = {"box": "bbox", "mask": "segm"}
MASK_THRESHOLD = 0.5


class CocoMetrics:
    """Collects detections and computes AP for boxes and, with ``masks``, for masks.

    Args:
        annotations: the truth, content of a COCO file.
        category_ids: the category of label 1, 2, ...
        masks: whether detections have masks.
        package: "faster-coco-eval" or "pycocotools"; None: the first there is.
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

    def update(self, image_ids: Sequence[int], detections: Sequence[dict[str, Tensor]]) -> None:
        """Add what torchvision's detectors return for these images."""
        masks = [found["masks"][:, 0] > MASK_THRESHOLD for found in detections if self.masks]
        boxes = torch.cat([found["boxes"].float() for found in detections])
        boxes = box_convert(boxes, "xyxy", "xywh")
        areas = torch.cat([own.sum((1, 2)) for own in masks]) if masks else boxes[:, 2:].prod(1)
        scores, labels = (
            torch.cat([found[k] for found in detections]) for k in ("scores", "labels")
        )
        # All numbers come to the host at once: it waits for the device each time.
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
        """``{"box_AP": ..., "box_AP50": ..., ...}`` and the same for masks, in percent; the same everywhere.

        A figure for which there is no object, such as APL without large ones, is left out. From here on
        ``results`` has those of all processes.
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

    def entries(self) -> list[dict[str, Any]]:
        """The detections as COCO's results have them, for a file that ``loadRes`` of its tools takes."""
        # Only what the format has: its tools find the area themselves.
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
            # Not by loadRes, which decodes every mask for the area and the box that are known.
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
        return evaluation.stats

    def _entry(self, kind: str, number: int, row: dict[str, Any]) -> dict[str, Any]:
        """A detection as the packages want it; small, medium and large go by its area."""
        entry = {**row, "id": number, "iscrowd": 0}
        if kind == "bbox" and self.masks:
            _, _, width, height = row["bbox"]
            entry["area"] = width * height
            del entry["segmentation"]
        return entry


def _copy(annotations: Annotations) -> dict[str, Any]:
    # The packages write into the entries they are given. They take an object of id 0 for none, and of those
    # with the same id the last: ids are given anew.
    return {
        "images": [dict(image) for image in annotations["images"]],
        "annotations": [
            {**annotation, "id": number}
            for number, annotation in enumerate(annotations["annotations"], start=1)
        ],
        "categories": [dict(category) for category in annotations["categories"]],
    }
