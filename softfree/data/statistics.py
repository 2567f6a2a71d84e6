"""Statistics of a data set: the sizes of its samples, the shares of its classes, its objects.

A split is described by a mapping that json can hold:

    samples        number of samples
    width, height, length    {"min", "median", "max"}, in pixels for pictures, in tokens for sequences
    empty          pictures without an object, or without a pixel of a class other than the background
    objects, crowds, small, medium, large    detection: counts, with COCO's size ranges; crowds count
                   only as crowds
    ignored        segmentation: share of the pixels that have no class
    classes        for each its "name", "count" (pictures, objects, pixels or samples) and "share" of all;
                   for segmentation also the number of "pictures" that have it
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from torch import Tensor

from softfree.data.detection import CocoDetection
from softfree.data.images import MapData, Unreadable

# Smallest areas in pixels of objects that COCO calls medium and large.
MEDIUM, LARGE = 32**2, 96**2
# A first class with one of these names is the background.
BACKGROUNDS = ("background", "ground")
Description = dict[str, Any]


class Seen(NamedTuple):
    """What is kept of a decoded picture: its size and, for a class map, the pixel counts (256,) by value."""

    width: int
    height: int
    pixels: np.ndarray | None = None


def look(item: Any) -> Seen | Unreadable:
    """Summarize a decoded item of a data set of pictures."""
    if isinstance(item, Unreadable):
        return item
    picture, truth = item
    if isinstance(picture, Image.Image):
        return Seen(*picture.size)
    height, width = picture.shape[-2:]
    if isinstance(truth, Tensor):
        return Seen(width, height, np.bincount(truth.numpy().ravel(), minlength=256))
    return Seen(width, height)


def describe_pictures(
    labels: Iterable[int], names: Sequence[str], seen: Sequence[Seen]
) -> Description:
    """Describe pictures with one class each; ``seen`` are those that were decoded, if any."""
    counts = Counter(labels)
    return {
        "samples": counts.total(),
        **_sizes(seen),
        "classes": _shares(names, [counts[label] for label in range(len(names))]),
    }


def describe_objects(data: CocoDetection) -> Description:
    """Describe pictures with objects, from their annotations."""
    labels = {number: label for label, number in enumerate(data.category_ids)}
    found = data.annotations["annotations"]
    objects = [annotation for annotation in found if not annotation["iscrowd"]]
    counts = Counter(labels[annotation["category_id"]] for annotation in objects)
    areas = [annotation["area"] for annotation in objects]
    taken = {annotation["image_id"] for annotation in found}
    return {
        "samples": len(data),
        **_sizes([Seen(image["width"], image["height"]) for image in data.images]),
        "empty": sum(image["id"] not in taken for image in data.images),
        "objects": len(objects),
        "crowds": len(found) - len(objects),
        "small": sum(area < MEDIUM for area in areas),
        "medium": sum(MEDIUM <= area < LARGE for area in areas),
        "large": sum(area >= LARGE for area in areas),
        "classes": _shares(data.class_names, [counts[label] for label in labels.values()]),
    }


def describe_class_maps(count: int, names: Sequence[str], seen: Sequence[Seen]) -> Description:
    """Describe ``count`` pictures with class maps; ``seen`` are those that were decoded."""
    described: Description = {"samples": count, **_sizes(seen)}
    maps = [own.pixels for own in seen if own.pixels is not None]
    if not maps:
        return described
    pixels = np.stack(maps)
    of_class = pixels[:, : len(names)]
    ground = names[0] in BACKGROUNDS
    present = (of_class > 0).sum(0).tolist()
    classes = _shares(names, of_class.sum(0).tolist())
    return {
        **described,
        "empty": int((of_class[:, ground:].sum(1) == 0).sum()),
        "ignored": float(1 - of_class.sum() / pixels.sum()),
        "classes": [own | {"pictures": n} for own, n in zip(classes, present, strict=True)],
    }


def describe_sequences(samples: Iterable[Any], names: Sequence[str]) -> Description:
    """Describe items (tokens, label) of a long-range task.

    Both sequences of a pair count for the length. Each token may have a label.
    """
    count, labels = 0, Counter[int]()
    lengths: list[int] = []
    for tokens, label in samples:
        count += 1
        lengths += map(len, tokens) if isinstance(tokens, list) else [len(tokens)]
        labels.update(label.tolist() if isinstance(label, Tensor) else [label])
    return {
        "samples": count,
        "length": _extent(lengths),
        "classes": _shares(names, [labels[label] for label in range(len(names))]),
    }


def items_of(data: MapData) -> Iterable[Any]:
    """The items of a map-style data set in order."""
    return (data[index] for index in range(len(data)))


def _sizes(seen: Sequence[Seen]) -> Description:
    if not seen:
        return {}
    return {
        "width": _extent([own.width for own in seen]),
        "height": _extent([own.height for own in seen]),
    }


def _extent(values: Sequence[int]) -> Description:
    """Smallest, median and largest.

    Example:
        >>> _extent([3, 1, 8])
        {'min': 1, 'median': 3, 'max': 8}
    """
    return {"min": min(values), "median": int(np.median(values)), "max": max(values)}


def _shares(names: Sequence[str], counts: Sequence[int]) -> list[Description]:
    total = max(sum(counts), 1)
    return [
        {"name": name, "count": count, "share": count / total}
        for name, count in zip(names, counts, strict=True)
    ]
