"""A detector's results in the format of COCO's tools: one list, with images and categories by their ids."""

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from softfree.data.coco import read_annotations, result_entry
from softfree.data.images import some


class CocoResults:
    """Collects the detections in ``paths``.

    Args:
        category_ids: the ids of the training, by class name.
        annotations: a COCO file whose ids are used instead; it must have the pictures and the classes.
    """

    def __init__(
        self,
        paths: Sequence[str],
        category_ids: Mapping[str, int],
        annotations: Path | None = None,
    ):
        self.entries: list[dict[str, Any]] = []
        self.category_ids = category_ids
        self.image_ids = numbers_of(paths)
        if annotations is not None:
            content = read_annotations(annotations)
            known = {category["name"]: category["id"] for category in content["categories"]}
            if lacking := [name for name in category_ids if name not in known]:
                raise ValueError(
                    f"--annotations {annotations} has no category for {some(lacking)}, which the detector knows"
                )
            self.category_ids = known
            self.image_ids = ids_of(paths, content["images"], annotations)

    def add(self, path: str, objects: Sequence[Mapping[str, Any]]) -> None:
        """Add the objects of a picture, as ``predict`` returns them."""
        for found in objects:
            left, top, right, bottom = found["box"]
            entry = result_entry(
                self.image_ids[path],
                self.category_ids[found["label"]],
                [left, top, right - left, bottom - top],
                found["score"],
                found.get("mask"),
            )
            self.entries.append({**entry, "file_name": PurePath(path).name})


def numbers_of(paths: Sequence[str]) -> dict[str, int]:
    """The number that is the name of each picture, as in COCO; 1, 2, ... if not all have their own.

    Example:
        >>> numbers_of(["val/000000000139.jpg", "val/7.jpg"]), numbers_of(["cat.jpg", "7.jpg"])
        ({'val/000000000139.jpg': 139, 'val/7.jpg': 7}, {'cat.jpg': 1, '7.jpg': 2})
    """
    names = [PurePath(path).stem for path in paths]
    numbers = [int(name) for name in names if name.isascii() and name.isdigit()]
    if len(set(numbers)) < len(paths):
        numbers = list(range(1, len(paths) + 1))
    return dict(zip(paths, numbers, strict=True))


def ids_of(
    paths: Sequence[str], images: Sequence[Mapping[str, Any]], source: Path
) -> dict[str, int]:
    """For each picture, the id of the image whose file name its path ends with.

    If there are several, the one with the longest name is taken.
    """
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for image in sorted(images, key=lambda image: -len(image["file_name"])):
        by_name.setdefault(PurePath(image["file_name"]).name, []).append(image)
    found: dict[str, int] = {}
    for path in paths:
        parts = PurePath(path).parts
        for image in by_name.get(PurePath(path).name, ()):
            wanted = PurePath(image["file_name"]).parts
            if parts[-len(wanted) :] == wanted:
                found[path] = image["id"]
                break
    if lacking := [path for path in paths if path not in found]:
        raise ValueError(
            f"--annotations {source} has no image with the file name of {some(lacking)}"
        )
    return found
