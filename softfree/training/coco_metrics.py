"""COCO's average precision, from the predictions of all processes, each image counted once."""

import contextlib
import io
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchvision.ops import box_convert

from softfree.data.coco import Annotations, coco_api, encode_masks
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
        # All numbers come to the host at once: it waits for the device each time.
        boxes = torch.cat([found["boxes"] for found in detections]).float()
        rows = torch.cat(
            [
                box_convert(boxes, "xyxy", "xywh"),
                torch.cat([found["scores"] for found in detections])[:, None],
                torch.cat([found["labels"] for found in detections])[:, None],
            ],
            dim=1,
        )
        numbers = iter(rows.tolist())
        for image_id, found in zip(image_ids, detections, strict=True):
            results: list[dict[str, Any]] = [
                dict(
                    image_id=image_id,
                    category_id=self.category_ids[int(label) - 1],
                    bbox=box,
                    score=score,
                )
                for *box, score, label in itertools.islice(numbers, len(found["boxes"]))
                # RetinaNet has an output for the background, which never learns to fire.
                if label > 0
            ]
            if self.masks:
                codes = encode_masks(found["masks"][:, 0] > MASK_THRESHOLD)
                for result, code in zip(results, codes, strict=True):
                    result["segmentation"] = code
            self.results[image_id] = results

    def compute(self, processes: Processes) -> dict[str, float]:
        """``{"box_AP": ..., "box_AP50": ..., ...}`` and the same for masks, in percent; the same everywhere.

        A figure for which there is no object, such as APL without large ones, is left out.
        """
        merged = dict(gather(list(self.results.items()), processes))
        results = [row for image_id in sorted(merged) for row in merged[image_id]]
        figures: dict[str, float] = {}
        for kind in ("box", "mask") if self.masks else ("box",):
            stats = self._stats(KINDS[kind], results, sorted(merged))
            figures |= {
                f"{kind}_{name}": 100 * float(stats[place])
                for name, place in FIGURES.items()
                if stats[place] >= 0
            }
        return figures

    def _stats(
        self, kind: str, results: list[dict[str, Any]], image_ids: list[int]
    ) -> Sequence[float]:
        if not results:
            return [0.0] * len(FIGURES)
        if kind == "segm":
            # Small, medium and large then go by the area of the mask, not of the box.
            results = [{k: v for k, v in row.items() if k != "bbox"} for row in results]
        else:
            results = [{k: v for k, v in row.items() if k != "segmentation"} for row in results]
        api = coco_api(self.package)
        # Both packages print as they go.
        with contextlib.redirect_stdout(io.StringIO()):
            truth = api.COCO()
            truth.dataset = dict(info={}, licenses=[], **_copy(self.annotations))
            truth.createIndex()
            evaluation = api.COCOeval(truth, truth.loadRes(results), kind)
            evaluation.params.imgIds = image_ids
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
        return evaluation.stats


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
