"""What `softfree predict` does with detectors and segmentation networks."""

import colorsys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2.functional import pil_to_tensor, resize, to_pil_image
from torchvision.utils import draw_segmentation_masks

from softfree.commands.predict import LISTED, Listing
from softfree.data.coco import decode_mask, encode_mask, encode_masks
from softfree.training.classification import Normalize
from softfree.training.coco_metrics import MASK_THRESHOLD
from softfree.training.detection import detect, load_detector
from softfree.training.segmentation import load_segmenter, predict_classes

OPACITY = 0.55
LEAST_SIDE = 480  # of a drawing
LETTERS = 14  # height in pixels


class ObjectDetector:
    """Boxes, labels and scores, and masks where the detector gives them."""

    titles: Sequence[str] = ("objects", "most certain")

    def __init__(
        self,
        checkpoint: Path,
        device: torch.device,
        img_size: int | None,
        topk: int | None = None,
        min_score: float = 0.5,
    ):
        self.model, metadata = load_detector(checkpoint, device)
        self.min_score = min_score
        self.device = device
        self.class_names = ["background", *metadata["class_names"]]
        self.topk = topk
        if img_size is not None:
            # The longest side that the model sees grows with the shortest, or it would hold it down.
            arguments, transform = metadata["arguments"], self.model.transform
            transform.min_size = (img_size,)  # type: ignore[union-attr]
            transform.max_size = round(img_size * arguments["max_size"] / arguments["min_size"])  # type: ignore[union-attr]

    def prepare(self, picture: Image.Image) -> Tensor:
        return pil_to_tensor(picture)

    def predict(self, inputs: list[Tensor]) -> list[dict[str, Any]]:
        with torch.inference_mode():
            detections = detect(self.model, [image.to(self.device) for image in inputs])
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

    def draw(self, path: Path, picture: Image.Image, result: dict[str, Any]) -> None:
        objects = result["objects"]
        drawn = pil_to_tensor(enlarged(picture))
        colours = [colour(self.class_names.index(entry["label"])) for entry in objects]
        if objects and "mask" in objects[0]:
            masks = masks_at([entry["mask"] for entry in objects], drawn)
            # torchvision blackens what several masks claim: leave it to the most certain, which come first.
            masks &= masks.int().cumsum(0) == 1
            drawn = draw_segmentation_masks(drawn, masks, OPACITY, colours)
        page = to_pil_image(drawn)
        pen, font = ImageDraw.Draw(page), ImageFont.load_default(LETTERS)
        scale = page.width / picture.width
        # The most certain are drawn last, on top.
        for entry, fill in reversed(list(zip(objects, colours, strict=True))):
            box = [scale * number for number in entry["box"]]
            pen.rectangle(box, outline=fill, width=3)
            label = f"{entry['label']} {entry['score']:.0%}"
            # Above the box, or inside where there is no room above.
            top, width = max(0.0, box[1] - LETTERS - 4), font.getlength(label) + 6
            # Within the picture, also where the box begins at its right edge.
            left = max(0.0, min(box[0], page.width - width))
            pen.rectangle((left, top, left + width, top + LETTERS + 4), fill=fill)
            pen.text((left + 3, top), label, "white", font)
        save(path, page)


class Segmenter:
    """A class for every pixel."""

    titles: Sequence[str] = ("classes, share of the picture",)

    def __init__(
        self, checkpoint: Path, device: torch.device, img_size: int | None, topk: int | None = None
    ):
        self.model, metadata = load_segmenter(checkpoint, device)
        self.device = device
        self.class_names = metadata["class_names"]
        self.topk = topk
        self.short_side = metadata["short_side"] if img_size is None else img_size
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
                classes = predict_classes(
                    self.model, self.normalize(image[None].to(self.device)), size, self.window
                )
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

    def draw(self, path: Path, picture: Image.Image, result: dict[str, Any]) -> None:
        image = pil_to_tensor(enlarged(picture))
        entries = result["classes"]
        colours = [colour(self.class_names.index(entry["label"])) for entry in entries]
        masks = masks_at([entry["mask"] for entry in entries], image)
        drawn = to_pil_image(draw_segmentation_masks(image, masks, OPACITY, colours))
        labels = [f"{entry['label']} {entry['share']:.1%}" for entry in entries]
        save(path, with_legend(drawn, labels, colours))


def enlarged(picture: Image.Image) -> Image.Image:
    """A small picture at a size at which labels can be read."""
    factor = max(1, LEAST_SIDE // min(picture.size))
    return picture.resize((picture.width * factor, picture.height * factor))


def masks_at(codes: Sequence[dict[str, Any]], image: Tensor) -> Tensor:
    """Run-length codes as masks (n, H, W) bool at the size of ``image``."""
    masks = np.stack([decode_mask(code, *code["size"]) for code in codes])
    return resize(torch.from_numpy(masks), list(image.shape[1:]), InterpolationMode.NEAREST).bool()


def with_legend(
    picture: Image.Image, labels: Sequence[str], colours: Sequence[tuple[int, int, int]]
) -> Image.Image:
    """The picture with a list of colours to its right."""
    font = ImageFont.load_default(LETTERS)
    width = max(int(font.getlength(label)) for label in labels) + 3 * LETTERS
    rows = max(1, picture.height // (2 * LETTERS))
    page = Image.new("RGB", (picture.width + width, picture.height), "white")
    page.paste(picture)
    pen = ImageDraw.Draw(page)
    for row, (label, fill) in enumerate(list(zip(labels, colours, strict=True))[:rows]):
        left, top = picture.width + LETTERS // 2, 2 * LETTERS * row + LETTERS // 2
        pen.rectangle((left, top, left + LETTERS, top + LETTERS), fill=fill)
        pen.text((left + 3 * LETTERS // 2, top - 2), label, "black", font)
    return page


def colour(index: int) -> tuple[int, int, int]:
    """A colour for each class; neighbours in the list look different. Class 0 is grey."""
    if index == 0:
        return (110, 110, 110)
    hue = (0.61 * index) % 1
    red, green, blue = colorsys.hsv_to_rgb(hue, 0.85, 0.6 + 0.4 * (index % 2))
    return round(255 * red), round(255 * green), round(255 * blue)


def save(path: Path, picture: Image.Image) -> None:
    """Write a picture; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.save(path)
