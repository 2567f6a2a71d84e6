"""`softfree predict` for segmentation networks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2.functional import pil_to_tensor, resize, to_pil_image
from torchvision.utils import draw_segmentation_masks

from softfree.commands.predict.base import LISTED, Listing, load_model
from softfree.data.coco import decode_mask, encode_mask
from softfree.data.drawing import (
    OPACITY,
    colour,
    enlarged,
    masks_at,
    with_legend,
)
from softfree.models.metadata import REQUIRED
from softfree.models.views import AS_IS, Views
from softfree.training.classification import Normalize
from softfree.training.segmentation import Segmentation, predict_classes

MOST_COLOURS = 256  # in a PNG file with a palette


class Segmenter:
    """A class for every pixel."""

    titles: Sequence[str] = ("classes, share of the picture",)

    def __init__(
        self,
        checkpoint: Path,
        device: torch.device,
        img_size: int | None,
        topk: int | None = None,
        views: Views = AS_IS,
    ):
        self.model, metadata = load_model(
            checkpoint, device, Segmentation.load, *REQUIRED["segmentation"]
        )
        self.device = device
        self.class_names = metadata["class_names"]
        self.topk = topk
        side = metadata["short_side"] if img_size is None else img_size
        self.short_side, self.views = views.loaded_at(side)
        self.window = metadata["window"]
        self.normalize = Normalize(metadata["mean"], metadata["std"])

    def prepare(self, picture: Image.Image) -> tuple[Tensor, tuple[int, int]]:
        image = pil_to_tensor(picture)
        size = (image.shape[1], image.shape[2])
        return (resize(image, [self.short_side]) if self.short_side else image), size

    def predict(self, inputs: list[tuple[Tensor, tuple[int, int]]]) -> list[dict[str, Any]]:
        results = []
        for image, size in inputs:
            with torch.inference_mode():
                pixels = self.normalize(image[None].to(self.device))
                classes = predict_classes(self.model, pixels, size, self.window, self.views)
            results.append(self._result(classes[0].cpu().numpy()))
        return results

    def _result(self, classes: np.ndarray) -> dict[str, Any]:
        values, counts = np.unique(classes, return_counts=True)
        order = np.argsort(-counts)
        return {
            "classes": [
                {
                    "label": self.class_names[values[i]],
                    "share": float(counts[i] / classes.size),
                    "mask": encode_mask(classes == values[i]),
                }
                for i in order[: self.topk]
            ]
        }

    def cells(self, result: dict[str, Any]) -> Sequence[Listing]:
        shown = result["classes"][: self.topk or LISTED]
        return (Listing([f"{entry['label']} {entry['share']:.1%}" for entry in shown]),)

    def drawing(self, picture: Image.Image, result: dict[str, Any]) -> Image.Image:
        image = pil_to_tensor(enlarged(picture))
        entries = result["classes"]
        colours = [colour(self.class_names.index(entry["label"])) for entry in entries]
        masks = masks_at([entry["mask"] for entry in entries], image)
        drawn = to_pil_image(draw_segmentation_masks(image, masks, OPACITY, colours))
        labels = [f"{entry['label']} {entry['share']:.1%}" for entry in entries]
        # The legend has the same size for all frames of a video.
        widest = [f"{name} {1:.1%}" for name in self.class_names]
        return with_legend(drawn, labels, colours, widest)

    def class_map(self, result: dict[str, Any]) -> Image.Image:
        """The class number of every pixel, from 0, in the colours of :meth:`drawing`.

        ``result`` has all classes.
        """
        if len(self.class_names) > MOST_COLOURS:
            raise ValueError(
                f"--class-maps supports at most {MOST_COLOURS} classes, but this model has {len(self.class_names)}"
            )
        height, width = result["classes"][0]["mask"]["size"]
        classes = np.zeros((height, width), np.uint8)
        for entry in result["classes"]:
            inside = decode_mask(entry["mask"], height, width).astype(bool)
            classes[inside] = self.class_names.index(entry["label"])
        page = Image.fromarray(classes)
        page.putpalette([part for index in range(len(self.class_names)) for part in colour(index)])
        return page
