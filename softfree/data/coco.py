"""COCO annotations: reading, checking, masks; from a file or as the embedded shapes."""

import contextlib
import json
import logging
import math
import os
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from softfree.data.images import MAX_PIXELS, some
from softfree.data.shapes import CLASSES, SIDE, draw_shapes

logger = logging.getLogger(__name__)
Annotations = dict[str, Any]
# What every entry of a COCO file must have.
FIELDS = {
    "images": ("id", "width", "height", "file_name"),
    "annotations": ("image_id", "category_id"),
    "categories": ("id", "name"),
}
# COCO's own boxes reach past the border by fractions of a pixel.
BORDER_TOLERANCE = 1.0


def _faster_coco_eval() -> SimpleNamespace:
    from faster_coco_eval import COCO, COCOeval_faster
    from faster_coco_eval.core import mask

    return SimpleNamespace(COCO=COCO, COCOeval=COCOeval_faster, mask=mask)


def _pycocotools() -> SimpleNamespace:
    from pycocotools import mask
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    return SimpleNamespace(COCO=COCO, COCOeval=COCOeval, mask=mask)


# The packages that compute COCO's metrics, the faster one first.
PACKAGES = {"faster-coco-eval": _faster_coco_eval, "pycocotools": _pycocotools}


def coco_api(package: str | None = None) -> SimpleNamespace:
    """``COCO``, ``COCOeval`` and ``mask`` of faster-coco-eval or pycocotools.

    If ``package`` is None, the first one installed is used.
    """
    for name in PACKAGES if package is None else (package,):
        with contextlib.suppress(ImportError):
            return PACKAGES[name]()
    raise ValueError(
        f"detection needs {package or ' or '.join(PACKAGES)}: pip install 'softfree[dense]'"
    )


def read_annotations(path: Path) -> Annotations:
    """Read a COCO json file; ``area`` and ``iscrowd`` are filled in where they are missing.

    Images, categories and annotations must have all required fields, and images and categories must be valid.
    The content of annotations is checked later, by :func:`check_annotations`.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(f"{path} is not valid json: it is nested too deeply") from None
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} is not valid json: {error}") from error
    return check_fields(content, str(path))


def check_fields(content: Any, source: str) -> Annotations:
    """Do the checks of :func:`read_annotations` on content from elsewhere; messages mention ``source``."""
    if not isinstance(content, dict):
        raise ValueError(f"{source} is not a COCO file: it must be a mapping, got {content!a:.60}")
    lacking = [key for key in FIELDS if key not in content]
    if lacking:
        raise ValueError(f"{source} is not a COCO file: it has no {', '.join(map(repr, lacking))}")
    for section, fields in FIELDS.items():
        if not isinstance(content[section], list):
            raise ValueError(f"{source} is not a COCO file: {section!r} must be a list")
        for number, entry in enumerate(content[section], 1):
            absent = [f for f in fields if not isinstance(entry, dict) or f not in entry]
            if absent:
                raise ValueError(
                    f"{source}: entry {number} of {section!r} has no {', '.join(map(repr, absent))}"
                )
    for section, check in (("images", _bad_image), ("categories", _bad_category)):
        for number, entry in enumerate(content[section], 1):
            if fault := check(entry):
                raise ValueError(f"{source}: entry {number} of {section!r} {fault}")
    for annotation in content["annotations"]:
        annotation.setdefault("iscrowd", 0)
        # An annotation without a valid box is rejected later.
        if "area" not in annotation and _is_box(annotation.get("bbox")):
            annotation["area"] = annotation["bbox"][2] * annotation["bbox"][3]
    return content


def _bad_image(image: dict[str, Any]) -> str | None:
    width, height, name = image["width"], image["height"], image["file_name"]
    if not _is_id(image["id"]):
        return f"must have a whole number as id, got {image['id']!a:.60}"
    if not (_is_id(width) and _is_id(height) and width > 0 and height > 0):
        got = f"{width!a:.60} and {height!a:.60}"
        return f"must have a width and a height in pixels, whole numbers, got {got}"
    if width * height > MAX_PIXELS:
        return f"is larger than the limit of {MAX_PIXELS:,} pixels: {width:,} x {height:,}"
    if not isinstance(name, str) or not name or "\0" in name:
        return f"must have a file name, got {name!a:.60}"
    parts = PureWindowsPath(name).parts  # understands both kinds of slashes
    if PurePosixPath(name).is_absolute() or PureWindowsPath(name).anchor or ".." in parts:
        return f"names a file outside of the picture folder, {name!a:.60}"
    return None


def _bad_category(category: dict[str, Any]) -> str | None:
    if not _is_id(category["id"]):
        return f"must have a whole number as id, got {category['id']!a:.60}"
    if not isinstance(category["name"], str):
        return f"must have a string as name, got {category['name']!a:.60}"
    return None


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def check_annotations(
    annotations: Annotations, source: str, *, masks: bool = False, skip_bad: bool = False
) -> Annotations:
    """Return the annotations, or raise an error that lists the invalid ones.

    Args:
        source: where they come from, for the message.
        masks: also check masks.
        skip_bad: skip invalid annotations and log how many, instead of raising.
    """
    for section in ("images", "categories"):
        ids = [entry["id"] for entry in annotations[section]]
        if len(set(ids)) < len(ids):
            raise ValueError(f"{source} has several {section} with the same id")
        if not ids:
            raise ValueError(f"{source} has no {section}")
    images = {image["id"]: image for image in annotations["images"]}
    categories = {category["id"] for category in annotations["categories"]}
    listed = annotations["annotations"]
    if masks and listed and not any(annotation.get("segmentation") for annotation in listed):
        raise ValueError(
            f"{source} has boxes but no masks in its {len(listed):,} annotations; only Mask R-CNN needs masks: "
            "train with `detector` retinanet"
        )
    bad, kept = [], []
    for annotation in listed:
        if fault := _fault(annotation, images, categories, masks):
            bad.append(f"annotation {annotation.get('id', '?')!a:.90}: {fault}")
        else:
            kept.append(annotation)
    if bad:
        count = len(bad) + len(kept)
        found = f"{source}: {len(bad):,} of {count:,} annotations can't be used ({some(bad)})"
        if not skip_bad:
            raise ValueError(f"{found}; correct them, or skip them with `skip_bad_annotations`")
        if os.environ.get("RANK", "0") == "0":
            logger.warning("%s; they are skipped", found)
    if not kept:
        raise ValueError(f"{source} has no annotations that can be used")
    return {**annotations, "annotations": kept}


def decode_mask(segmentation: Any, height: int, width: int) -> np.ndarray:
    """Decode polygons or a run-length code, compressed or not, to a mask (height, width) uint8 of 0 and 1."""
    mask = coco_api().mask
    if isinstance(segmentation, list):
        return mask.decode(mask.merge(mask.frPyObjects(segmentation, height, width)))
    if isinstance(segmentation["counts"], list):
        segmentation = mask.frPyObjects(segmentation, height, width)
    return mask.decode(segmentation)


def encode_mask(mask: np.ndarray) -> dict[str, Any]:
    """Encode a mask (height, width) as a compressed run-length code that json can hold."""
    return _plain(coco_api().mask.encode(np.asfortranarray(mask, dtype=np.uint8)))


def encode_masks(masks: Tensor) -> list[dict[str, Any]]:
    """Encode masks (n, height, width) bool as :func:`encode_mask` does, in a fraction of the time.

    Codes hold the lengths of runs down the columns. The ends of the runs are found on the device of the
    masks, perhaps a GPU. A mask has a few hundred ends, and only those are copied to the host.

    Example:
        >>> import torch
        >>> [code] = encode_masks(torch.ones(1, 4, 6, dtype=torch.bool))
        >>> code["size"]
        [4, 6]
    """
    count, height, width = masks.shape
    if count == 0:
        return []
    pixels = masks.mT.flatten(1)
    # The first run has zeros, so a mask that starts with a one has an end before its first pixel.
    last = torch.ones_like(pixels[:, :1])
    ends = torch.cat([pixels[:, :1], pixels[:, 1:] != pixels[:, :-1], last], dim=1)
    mask, place = ends.nonzero().cpu().numpy().T
    starts = np.searchsorted(mask, np.arange(1, count))
    lengths = np.diff(place, prepend=0)
    lengths[starts] += height * width
    runs = [dict(size=[height, width], counts=own.tolist()) for own in np.split(lengths, starts)]
    return [_plain(code) for code in coco_api().mask.frPyObjects(runs, height, width)]


def _plain(code: dict[str, Any]) -> dict[str, Any]:
    counts = code["counts"]
    return dict(
        size=list(map(int, code["size"])),
        counts=counts.decode() if isinstance(counts, bytes) else counts,
    )


def result_entry(
    image_id: int,
    category_id: int,
    bbox: list[float],
    score: float,
    segmentation: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A detection in COCO's results format.

    ``bbox`` is x, y, width, height; ``segmentation`` is a run-length code.

    Example:
        >>> result_entry(139, 3, [10.0, 20.0, 5.0, 8.0], 0.75)
        {'image_id': 139, 'category_id': 3, 'bbox': [10.0, 20.0, 5.0, 8.0], 'score': 0.75}
    """
    entry = dict(image_id=image_id, category_id=category_id, bbox=bbox, score=score)
    return entry if segmentation is None else {**entry, "segmentation": segmentation}


def shape_annotations(count: int, *, split: str, side: int = SIDE) -> Annotations:
    """Annotations of the first ``count`` embedded shapes; the image with the id i is ``draw_shapes(i)``."""
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for index in range(count):
        images.append(dict(id=index, width=side, height=side, file_name=f"shapes {index}"))
        picture = draw_shapes(index, split=split, side=side)
        for label, mask in zip(picture.labels, picture.masks, strict=True):
            rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
            left, top = int(columns[0]), int(rows[0])
            annotations.append(
                dict(
                    id=len(annotations) + 1,
                    image_id=index,
                    category_id=int(label),
                    bbox=[left, top, int(columns[-1]) + 1 - left, int(rows[-1]) + 1 - top],
                    area=int(mask.sum()),
                    iscrowd=0,
                    segmentation=encode_mask(mask),
                )
            )
    categories = [dict(id=i, name=name) for i, name in enumerate(CLASSES, start=1)]
    return dict(images=images, annotations=annotations, categories=categories)


def _is_box(box: Any) -> bool:
    return isinstance(box, list) and len(box) == 4 and _are_numbers(box)


def _are_numbers(values: list[Any]) -> bool:
    return all(
        isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf
        for value in values
    )


def _fault(
    annotation: dict[str, Any], images: dict[Any, dict[str, Any]], categories: set[Any], masks: bool
) -> str | None:
    """The fault of an annotation in its image, category, box or mask that prevents training.

    Returns None if it has none.
    """
    for name in ("image_id", "category_id"):
        if not _is_id(annotation[name]):
            return f"its {name} must be a whole number, got {annotation[name]!a:.60}"
    image = images.get(annotation["image_id"])
    if image is None:
        return f"there is no image {annotation['image_id']}"
    if annotation["category_id"] not in categories:
        return f"there is no category {annotation['category_id']}"
    if annotation.get("iscrowd", 0) not in (0, 1):
        return f"its iscrowd must be 0 or 1, got {annotation['iscrowd']!a:.60}"
    fault = _bad_box(annotation.get("bbox"), image)
    area = annotation.get("area", 0)
    if fault is None and not (_are_numbers([area]) and area >= 0):
        fault = f"an area of {area!a:.60}"
    if fault is None and masks:
        fault = _bad_mask(annotation.get("segmentation"), image)
    return fault and f"{fault} in {image['file_name']}"


def _bad_box(box: Any, image: dict[str, Any]) -> str | None:
    if not _is_box(box):
        return f"box {box!a:.60} is not [x, y, width, height]"
    left, top, width, height = box
    if not (width > 0 and height > 0):
        return f"box {box!a:.60} has no area"
    if not _inside([left, top, left + width, top + height], image):
        return f"box {box!a:.60} lies outside of {image['width']} x {image['height']} pixels"
    return None


def _inside(points: list[float], image: dict[str, Any]) -> bool:
    """Whether x, y, x, y, ... lie in an image."""
    return all(
        -BORDER_TOLERANCE <= min(values) and max(values) <= side + BORDER_TOLERANCE
        for values, side in ((points[::2], image["width"]), (points[1::2], image["height"]))
    )


def _bad_mask(segmentation: Any, image: dict[str, Any]) -> str | None:
    size = f"{image['width']} x {image['height']} pixels"
    if not segmentation:
        return "no mask (only RetinaNet trains without one)"
    if isinstance(segmentation, list):
        if not all(isinstance(polygon, list) and _are_numbers(polygon) for polygon in segmentation):
            return "a polygon that is not [x, y, x, y, ...] of finite numbers"
        if any(len(polygon) < 6 or len(polygon) % 2 for polygon in segmentation):
            return "a polygon of fewer than 3 points"
        # Drawing a polygon that reaches far outside would take unbounded memory.
        if not all(_inside(polygon, image) for polygon in segmentation):
            return f"a polygon that lies outside of {size}"
        return None
    if not isinstance(segmentation, dict):
        return "a mask that is neither polygons nor a run-length code"
    if not {"size", "counts"} <= segmentation.keys():
        return "a run-length code without 'size' or 'counts'"
    given = segmentation["size"]
    if not (isinstance(given, list) and len(given) == 2 and all(map(_is_id, given))):
        return f"a run-length code with the size {given!a:.60}"
    if given != [image["height"], image["width"]]:
        return f"a mask of {given[1]} x {given[0]} for an image of {size}"
    try:
        counts = segmentation["counts"]
        runs = _run_lengths(counts) if isinstance(counts, str) else counts
        if not isinstance(runs, list) or not all(_is_id(run) and run >= 0 for run in runs):
            raise ValueError("its runs must be whole numbers")
        if sum(runs) != image["height"] * image["width"]:
            raise ValueError(f"it has {sum(runs):,} pixels")
    except ValueError as error:
        return f"a run-length code that can't be decoded ({error})"
    return None


def _run_lengths(code: str) -> list[int]:
    """Decode the lengths in a compressed run-length code.

    Each letter has 5 bits. The fourth and later lengths are stored as differences from the one two before.

    Example:
        >>> _run_lengths("05X1")
        [0, 5, 40]
    """
    runs: list[int] = []
    value = shift = 0
    for letter in code:
        bits = ord(letter) - 48
        if not 0 <= bits < 64 or shift > 60:
            raise ValueError(f"{letter!a} is not a valid character")
        value |= (bits & 31) << shift
        shift += 5
        if bits & 32:
            continue
        if bits & 16:
            value -= 1 << shift
        runs.append(value + runs[-2] if len(runs) > 2 else value)
        value = shift = 0
    if shift:
        raise ValueError("it is truncated")
    return runs
