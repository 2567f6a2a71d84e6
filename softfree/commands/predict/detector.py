"""`softfree predict` for detectors."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2.functional import pil_to_tensor

from softfree.commands.predict.base import LISTED, ONNX, Listing, load_model
from softfree.data.coco import encode_masks
from softfree.data.drawing import colour, draw_objects, enlarged, masks_at
from softfree.models.boxes import PreparedDetector
from softfree.models.metadata import REQUIRED, check_fields
from softfree.models.views import AS_IS, Views
from softfree.training.coco_metrics import MASK_THRESHOLD
from softfree.training.detection import Detection, detect, scaled_size, set_size


class ObjectDetector:
    """Boxes, labels and scores, and masks if the detector returns them."""

    titles: Sequence[str] = ("objects", "most certain")

    def __init__(
        self,
        checkpoint: Path,
        device: torch.device,
        img_size: int | None,
        topk: int | None = None,
        min_score: float = 0.5,
        views: Views = AS_IS,
    ):
        self.model, metadata = load_model(
            checkpoint, device, Detection.load, *REQUIRED["detection"]
        )
        if checkpoint.suffix == ONNX:
            check_fields(checkpoint, metadata, ("mean", "std"))
            self.model = PreparedDetector(self.model, metadata)
        self.min_score, self.views = min_score, views
        self.device = device
        self.class_names = ["background", *metadata["class_names"]]
        # Checkpoints of version 0.1 do not have them.
        ids = metadata.get("category_ids") or range(1, len(self.class_names))
        if len(ids) != len(self.class_names) - 1:
            raise ValueError(
                f"{checkpoint} has {len(ids)} category_ids for {len(self.class_names) - 1} class_names"
            )
        self.category_ids = dict(zip(self.class_names[1:], ids, strict=True))
        self.topk = topk
        arguments = metadata["arguments"]
        set_size(self.model, *scaled_size(arguments["min_size"], arguments["max_size"], img_size))

    def prepare(self, picture: Image.Image) -> Tensor:
        return pil_to_tensor(picture)

    def predict(self, inputs: list[Tensor]) -> list[dict[str, Any]]:
        with torch.inference_mode():
            images = [image.to(self.device) for image in inputs]
            detections = detect(self.model, images, self.views)
        return [self._result(found) for found in detections]

    def _result(self, found: dict[str, Tensor]) -> dict[str, Any]:
        sure = (found["scores"] >= self.min_score) & (found["labels"] > 0)
        objects: list[dict[str, Any]] = [
            {"label": self.class_names[label], "score": score, "box": box}
            for label, score, box in zip(
                found["labels"][sure].tolist(),
                found["scores"][sure].tolist(),
                found["boxes"][sure].tolist(),
                strict=True,
            )
        ]
        if "masks" in found:
            codes = encode_masks(found["masks"][sure, 0] > MASK_THRESHOLD)
            for entry, code in zip(objects, codes, strict=True):
                entry["mask"] = code
        # The most certain come first.
        return {"objects": objects[: self.topk]}

    def cells(self, result: dict[str, Any]) -> Sequence[Listing]:
        objects = result["objects"]
        counts = Counter(entry["label"] for entry in objects)
        found = [f"{count} {label}" for label, count in counts.most_common()]
        best = objects[: self.topk or LISTED]
        return (
            Listing(found or ["none"]),
            Listing([f"{entry['label']} {entry['score']:.0%}" for entry in best]),
        )

    def drawing(self, picture: Image.Image, result: dict[str, Any]) -> Image.Image:
        objects = result["objects"]
        page = enlarged(picture)
        colours = [colour(self.class_names.index(entry["label"])) for entry in objects]
        masks = None
        if objects and "mask" in objects[0]:
            masks = masks_at([entry["mask"] for entry in objects], pil_to_tensor(page))
        scale = page.width / picture.width
        boxes = [[scale * number for number in entry["box"]] for entry in objects]
        # Ground truth has no score.
        labels = [
            f"{entry['label']} {entry['score']:.0%}" if "score" in entry else entry["label"]
            for entry in objects
        ]
        # The most certain come first, and are drawn on top.
        return draw_objects(page, boxes, labels, colours, masks)
