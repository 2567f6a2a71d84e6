"""Common folder layouts of pictures with boxes and masks; each is converted to the content of a COCO file.

    COCO       annotations/instances_train2017.json, ...; pictures in train2017/, train/, images/, ...
    Roboflow   train/_annotations.coco.json, valid/, each next to its pictures
    VOC        Annotations/*.xml, JPEGImages/, ImageSets/Main/train.txt and val.txt
    YOLO       data.yaml with names, train and val; labels/*.txt next to images/

Objects are not checked here. An invalid class, box or mask is copied as it is in the file, and
:func:`softfree.data.coco.check_annotations` reports it. The id of an object says where it is in the file.
"""

import contextlib
import logging
import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PureWindowsPath
from typing import Any, NamedTuple
from xml.etree import ElementTree

import yaml

from softfree.data.coco import Annotations, check_fields, read_annotations
from softfree.data.images import (
    EXTENSIONS,
    UnreadableImageError,
    image_files,
    printable,
    some,
    upright_size,
)

logger = logging.getLogger(__name__)
ANNOTATION_FILES = (
    "annotations/instances_{split}2017.json",
    "annotations/instances_{split}.json",
    "annotations/instances_{split}2014.json",
    "annotations/{split}.json",
)
IMAGE_FOLDERS = (
    "{split}2017", "{split}", "{split}2014", "images/{split}2017", "images/{split}", "images",
    "JPEGImages", ".",
)  # fmt: skip
ROBOFLOW_FILE = "_annotations.coco.json"
ROBOFLOW_FOLDERS = {"train": ("train",), "val": ("valid", "val", "test"), "test": ("test",)}
VOC_LISTS = {"train": ("train", "trainval"), "val": ("val", "test"), "test": ("test",)}
VOC_CLASSES = (
    "background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow",
    "diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train",
    "tvmonitor",
)  # fmt: skip
YOLO_FILES = ("data.yaml", "dataset.yaml", "data.yml", "dataset.yml")
LAYOUTS = f"""\
  COCO      annotations/instances_train2017.json and instances_val2017.json, or without 2017
  Roboflow  train/{ROBOFLOW_FILE}, valid/{ROBOFLOW_FILE}
  VOC       Annotations, JPEGImages, ImageSets/Main/train.txt and val.txt
  YOLO      data.yaml with names, train and val; images/train, labels/train, ..."""
YAML_OPENING = (
    yaml.FlowSequenceStartToken, yaml.FlowMappingStartToken, yaml.BlockSequenceStartToken, yaml.BlockMappingStartToken,
)  # fmt: skip
YAML_CLOSING = (yaml.FlowSequenceEndToken, yaml.FlowMappingEndToken, yaml.BlockEndToken)
YAML_DEPTH = 20
# Limit for a file that describes pictures; those of VOC have kilobytes.
MAX_BYTES = 16 * 2**20


class Found(NamedTuple):
    """Annotations of a split as they were found.

    Neither they nor the existence of the pictures is checked yet.
    """

    layout: str
    source: str
    annotations: Annotations
    folder: Path


def read_layout(root: Path, split: str) -> Found | None:
    """Read the annotations of a split, "train", "val" or "test", in any known layout.

    Returns None if the folder has none of them.
    """
    if has_coco(root):
        return _read_coco(root, split)
    if any(roboflow_file(root, other) for other in ROBOFLOW_FOLDERS):
        return _read_roboflow(root, split)
    if (voc := find_voc(root, "Annotations")) is not None:
        return _read_voc(voc, split)
    if (description := yolo_file(root)) is not None:
        return _read_yolo(root, description, split)
    if (root / "images").is_dir() and (root / "labels").is_dir():
        raise FileNotFoundError(
            f"`data_dir` {root} has images/ and labels/, but no data.yaml with the class names, train and val"
        )
    return None


def count_pictures(root: Path, split: str) -> int:
    """Count the pictures of a split as :func:`read_layout` does, even if their objects are invalid."""
    found = read_layout(root, split)
    if found is None:
        raise FileNotFoundError(f"{root} has none of the supported layouts")
    return len(found.annotations["images"])


def announce(layout: str, counts: Sequence[int], classes: int) -> None:
    """Log once the layout, the number of pictures in each split, and the number of classes."""
    if layout and os.environ.get("RANK", "0") == "0":
        pictures = " + ".join(f"{count:,}" for count in counts)
        logger.info("%s layout: %s pictures, %s classes", layout, pictures, classes)


def read_text(path: Path) -> str:
    """Read a text file of limited size."""
    try:
        return _read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not readable as text: {error}") from error


def _read_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}") from error
    if len(content) > MAX_BYTES:
        raise ValueError(f"{path} is larger than the limit of {MAX_BYTES // 2**20} MiB")
    return content


# COCO and Roboflow


def has_coco(root: Path) -> bool:
    """Whether a folder has a COCO json in annotations/."""
    return any(coco_file(root, split) for split in ("train", "val", "test"))


def coco_file(root: Path, split: str) -> Path | None:
    """The COCO json of a split, if there is one."""
    paths = (root / name.format(split=split) for name in ANNOTATION_FILES)
    return next((path for path in paths if path.is_file()), None)


def roboflow_file(root: Path, split: str) -> Path | None:
    """The json of a split that Roboflow exported next to the pictures, if there is one."""
    paths = (root / name / ROBOFLOW_FILE for name in ROBOFLOW_FOLDERS[split])
    return next((path for path in paths if path.is_file()), None)


def _read_coco(root: Path, split: str) -> Found:
    path = coco_file(root, split)
    if path is None:
        names = ", ".join(name.format(split=split) for name in ANNOTATION_FILES)
        raise FileNotFoundError(f"`data_dir` {root} has no annotations of {split}: none of {names}")
    annotations = read_annotations(path)
    folders = [name.format(split=split) for name in IMAGE_FOLDERS]
    first = next((image["file_name"] for image in annotations["images"]), None)
    if first is None:
        raise ValueError(f"{path} has no images")
    folder = next((root / name for name in folders if os.path.isfile(root / name / first)), None)
    if folder is None:
        raise FileNotFoundError(
            f"{printable(first)}, the first image in {path}, is in none of the folders {', '.join(folders)} of {root}"
        )
    return Found("COCO", str(path), annotations, folder)


def _read_roboflow(root: Path, split: str) -> Found:
    path = roboflow_file(root, split)
    if path is None:
        names = ", ".join(f"{name}/{ROBOFLOW_FILE}" for name in ROBOFLOW_FOLDERS[split])
        raise FileNotFoundError(f"`data_dir` {root} has no annotations of {split}: none of {names}")
    annotations = read_annotations(path)
    return Found("Roboflow", str(path), _without_group(annotations), path.parent)


def _without_group(annotations: Annotations) -> Annotations:
    """Remove the supercategory that Roboflow lists as a category, if no object has it: it is not a class."""
    categories = annotations["categories"]
    used = [annotation["category_id"] for annotation in annotations["annotations"]]
    for group in categories:
        others = [category for category in categories if category is not group]
        above = all(other.get("supercategory") == group["name"] for other in others)
        if others and above and group.get("supercategory") == "none" and group["id"] not in used:
            return {**annotations, "categories": others}
    return annotations


# PASCAL VOC


def find_voc(root: Path, folder: str) -> Path | None:
    """Find the folder with JPEGImages/ and ``folder``: ``root`` itself, or the only VOC... in VOCdevkit/."""
    candidates = [root, *sorted(root.glob("VOC*")), *sorted(root.glob("VOCdevkit/VOC*"))]
    found = [
        path for path in candidates if (path / "JPEGImages").is_dir() and (path / folder).is_dir()
    ]
    if len(found) > 1 and found[0] != root:
        raise ValueError(
            f"`data_dir` {root} has several data sets, {some([str(p.relative_to(root)) for p in found])}; "
            "use one of them"
        )
    return found[0] if found else None


def voc_names(root: Path, split: str, kind: str) -> tuple[Path, list[str]]:
    """Read the list of a split in ImageSets/ and the names in it; ``kind`` is Main or Segmentation."""
    folders = (root / "ImageSets" / kind, root / "ImageSets")
    paths = [folder / f"{name}.txt" for name in VOC_LISTS[split] for folder in folders]
    found = [path for path in paths if path.is_file()]
    if not found:
        raise FileNotFoundError(f"neither {paths[0]} nor {paths[1]} exists")
    path = found[0]
    if path.stem == "trainval" and any((folder / "val.txt").is_file() for folder in folders):
        raise FileNotFoundError(
            f"{paths[0]} is missing, and {path} also has the pictures of val.txt"
        )
    # In the list of a single class, a number follows each name.
    names = [line.split()[0] for line in read_text(path).splitlines() if line.strip()]
    if not names:
        raise ValueError(f"{path} names no pictures")
    if outside := [name for name in names if name != PureWindowsPath(name).name]:
        raise ValueError(f"{path} must have picture names without folders, got {some(outside)}")
    return path, names


def voc_pictures(root: Path, listed: Path, names: Sequence[str]) -> list[str]:
    """Paths of the pictures with these names and any extension."""
    found = {Path(path).stem: path for path in image_files(root / "JPEGImages")}
    if missing := [name for name in names if name not in found]:
        raise FileNotFoundError(f"{root / 'JPEGImages'} lacks {some(missing)}, listed in {listed}")
    return [found[name] for name in names]


class _Tree(ElementTree.TreeBuilder):
    """Rejects document types, since their entities could grow without bounds or refer to other files."""

    def doctype(self, name: str, pubid: str | None, system: str | None) -> None:
        raise ValueError(f"it has a document type (<!DOCTYPE {name!a:.30}), which is not allowed")


def _parse_xml(path: Path) -> ElementTree.Element:
    try:
        content = _read_bytes(path)
        return ElementTree.fromstring(content, ElementTree.XMLParser(target=_Tree()))
    except ElementTree.ParseError as error:
        raise ValueError(f"{path} is not valid xml: {error}") from error
    except (ValueError, LookupError) as error:
        text = str(error)
        named = text.startswith(str(path))
        raise ValueError(text if named else f"{path} is not valid xml: {text}") from error


def _read_voc(root: Path, split: str) -> Found:
    listed, names = voc_names(root, split, "Main")
    pictures = voc_pictures(root, listed, names)
    trees, classes = _voc_trees(root, names), set()
    others = set[str]()
    for other in {"train", "val"}.difference([split]):
        # Faults of the other split are reported when that split is read.
        with contextlib.suppress(FileNotFoundError, ValueError):
            others.update(voc_names(root, other, "Main")[1])
    there = [name for name in others if (root / "Annotations" / f"{name}.xml").is_file()]
    for tree in [*trees, *_voc_trees(root, there)]:
        classes |= {_text(entry, "name") for entry in tree.findall("object")}
    classes.discard("")
    known = VOC_CLASSES[1:]
    ordered = known if classes <= set(known) else sorted(classes)
    numbers = {name: number for number, name in enumerate(ordered, start=1)}
    images, objects = [], []
    for number, (name, tree, picture) in enumerate(zip(names, trees, pictures, strict=True), 1):
        width, height = _voc_size(tree, picture)
        file_name = Path(picture).relative_to(root / "JPEGImages").as_posix()
        images.append(dict(id=number, width=width, height=height, file_name=file_name))
        for place, entry in enumerate(tree.findall("object"), start=1):
            objects.append(
                dict(
                    id=f"object {place} of Annotations/{name}.xml",
                    image_id=number,
                    category_id=numbers.get(_text(entry, "name")),
                    bbox=_voc_box(entry),
                    # Difficult objects are neither used for training nor counted in evaluation.
                    iscrowd=int(_text(entry, "difficult") == "1"),
                )
            )
    categories = [dict(id=number, name=name) for name, number in numbers.items()]
    content = dict(images=images, annotations=objects, categories=categories)
    return Found("VOC", str(listed), check_fields(content, str(listed)), root / "JPEGImages")


def _voc_trees(root: Path, names: Sequence[str]) -> list[ElementTree.Element]:
    """Parse the files in Annotations/; raise one error with all faults."""
    trees, missing, faults = [], [], []
    for name in names:
        path = root / "Annotations" / f"{name}.xml"
        if not path.is_file():
            missing.append(f"{name}.xml")
            continue
        try:
            trees.append(_parse_xml(path))
        except ValueError as error:
            faults.append(str(error))
    if missing:
        raise FileNotFoundError(f"{root / 'Annotations'} lacks {some(missing)}")
    if faults:
        raise ValueError(some(faults))
    return trees


def _text(entry: ElementTree.Element, name: str) -> str:
    return (entry.findtext(name) or "").strip()


def _voc_size(tree: ElementTree.Element, picture: str) -> tuple[int, int]:
    """Width and height from the file, or from the picture if they are missing or (with some tools) zero."""
    size = [_text(tree, f"size/{side}") for side in ("width", "height")]
    if all(re.fullmatch("0*[1-9][0-9]{0,8}", side) for side in size):
        return int(size[0]), int(size[1])
    return _size_of(picture)


def _size_of(picture: str) -> tuple[int, int]:
    try:
        return upright_size(picture)
    except UnreadableImageError as error:
        raise ValueError(f"{printable(picture)} can't be read: {error}") from error


def _voc_box(entry: ElementTree.Element) -> list[Any]:
    """The box as [x, y, width, height]; values that are not numbers are returned as text.

    VOC gives the first and the last pixel, counted from 1.
    """
    corners = [_text(entry, f"bndbox/{name}") for name in ("xmin", "ymin", "xmax", "ymax")]
    numbers = _numbers(corners)
    if numbers is None:
        return corners
    left, top, right, bottom = numbers
    return [left - 1, top - 1, right - left + 1, bottom - top + 1]


def _numbers(words: Sequence[str]) -> list[float] | None:
    try:
        values = [float(word) for word in words]
    except ValueError:
        return None
    return values if all(map(math.isfinite, values)) else None


# YOLO


def yolo_file(root: Path) -> Path | None:
    """data.yaml of a folder, or the only .yaml there."""
    found = sorted(path for path in root.glob("*.y*ml") if path.suffix in (".yaml", ".yml"))
    named = [path for path in found if path.name in YOLO_FILES]
    return named[0] if named else found[0] if len(found) == 1 else None


def _read_yolo(root: Path, description: Path, split: str) -> Found:
    content = _parse_yaml(description)
    categories = _yolo_names(description, content)
    paths = list(dict.fromkeys(_yolo_pictures(root, description, content, split)))
    if not paths:
        raise FileNotFoundError(
            f"{description}: {split!r} has no pictures ({', '.join(EXTENSIONS)})"
        )
    images, objects, faults = [], [], []
    labelled = 0
    for number, path in enumerate(paths, start=1):
        labels = _yolo_labels(root, path)
        try:
            width, height = _size_of(path)
            lines = read_text(labels).splitlines() if labels.is_file() else []
        except ValueError as error:
            faults.append(str(error))
            continue
        labelled += labels.is_file()
        file_name = Path(path).relative_to(root).as_posix()
        images.append(dict(id=number, width=width, height=height, file_name=file_name))
        for place, line in enumerate(lines, start=1):
            if line.strip():
                where = f"line {place} of {labels.relative_to(root).as_posix()}"
                objects.append(dict(id=where, image_id=number, **_yolo_object(line, width, height)))
    if faults:
        raise ValueError(some(faults))
    if not labelled:
        first = _yolo_labels(root, paths[0])
        raise FileNotFoundError(
            f"none of the {len(paths):,} pictures of {split} in {description} has a label file: "
            f"{printable(paths[0])} needs {first}"
        )
    found = dict(images=images, annotations=objects, categories=categories)
    source = f"{description}, {split}"
    return Found("YOLO", source, check_fields(found, source), root)


def _parse_yaml(path: Path) -> dict[str, Any]:
    """Parse a yaml file; all values stay strings, so that a class can be named "no".

    Aliases are rejected, because with them a short file can expand to a huge one.
    """
    text = read_text(path)
    depth = 0
    try:
        # Checked before anything is built, because the time for that grows faster than the depth.
        for token in yaml.scan(text):
            depth += isinstance(token, YAML_OPENING) - isinstance(token, YAML_CLOSING)
            if isinstance(token, yaml.AliasToken) or depth > YAML_DEPTH:
                what = "is nested too deeply" if depth > YAML_DEPTH else "has aliases (*name)"
                raise ValueError(
                    f"{path} {what}; the yaml file of a data set has up to {YAML_DEPTH} levels and no aliases"
                )
        content = yaml.load(text, Loader=yaml.BaseLoader)
    except yaml.YAMLError as error:
        words = " ".join(str(error).split())
        raise ValueError(f"{path} is not valid yaml: {words}") from error
    if not isinstance(content, dict) or "names" not in content:
        raise ValueError(
            f"{path} has no 'names' (the classes), which the yaml file of a data set needs"
        )
    return content


def _yolo_names(path: Path, content: dict[str, Any]) -> list[dict[str, Any]]:
    given = content["names"]
    pairs = list(given.items()) if isinstance(given, dict) else []
    if isinstance(given, list):
        pairs = [(str(number), name) for number, name in enumerate(given)]
    if not pairs:
        raise ValueError(
            f"{path}: 'names' must be a list of classes, or a mapping from numbers to classes"
        )
    for number, name in pairs:
        if not isinstance(name, str) or not re.fullmatch("[0-9]{1,9}", number):
            raise ValueError(
                f"{path}: entry {number!a:.30} of 'names' must be a number with a name"
            )
    if content.get("nc", str(len(pairs))) != str(len(pairs)):
        raise ValueError(
            f"{path}: 'nc' is {content['nc']!a:.30}, but 'names' has {len(pairs)} classes"
        )
    return [dict(id=int(number), name=name) for number, name in pairs]


def _yolo_pictures(
    root: Path, description: Path, content: dict[str, Any], split: str
) -> Iterator[str]:
    """The pictures of a split, given by a folder, by a list of files, or by several of these."""
    given = content.get(split)
    entries = given if isinstance(given, list) else [given]
    base = content.get("path", "")
    for entry in entries:
        if not isinstance(entry, str) or not entry or not isinstance(base, str):
            raise ValueError(
                f"{description} has no {split!r}, which should be a folder of pictures or a file that lists them"
            )
        place = _in_folder(root, base, entry)
        if place is None:
            raise FileNotFoundError(
                f"{description}: {split!r} is {entry!a:.80}, which does not exist in {root}"
            )
        if place.is_dir():
            yield from image_files(place)
            continue
        for number, line in enumerate(read_text(place).splitlines(), start=1):
            if line.strip():
                named = line.strip()
                picture = _in_folder(place.parent, "", named) or _in_folder(root, base, named)
                if picture is None:
                    raise FileNotFoundError(
                        f"{place}, line {number}: {named!a:.80} does not exist in {root}"
                    )
                yield str(picture)


def _in_folder(root: Path, base: str, entry: str) -> Path | None:
    """Resolve a path from the yaml file, relative to ``base`` or to ``root``; None if it is not in ``root``.

    Exports have "../train/images" for a train/ that is next to the yaml file.
    """
    inside = re.sub(r"^(\.{1,2}[/\\])+", "", entry)
    top = os.path.abspath(root)
    for path in (root / base / entry, root / entry, root / inside):
        full = Path(os.path.abspath(path))
        if full.is_relative_to(top) and os.path.exists(full):
            return root / full.relative_to(top)
    return None


def _yolo_labels(root: Path, picture: str) -> Path:
    """The label file of a picture: labels/ replaces the last images/, or the file is next to the picture."""
    parts = list(Path(picture).relative_to(root).with_suffix(".txt").parts)
    places = [place for place, part in enumerate(parts[:-1]) if part == "images"]
    if places:
        parts[places[-1]] = "labels"
    return root.joinpath(*parts)


def _yolo_object(line: str, width: int, height: int) -> dict[str, Any]:
    """Parse a line "class x y width height" (x, y: centre of a box) or "class x y x y x y ..." (a polygon).

    All numbers are fractions of the picture's sides.

    Example:
        >>> _yolo_object("2 0.5 0.5 0.25 0.5", 200, 100)
        {'category_id': 2, 'bbox': [75.0, 25.0, 50.0, 50.0]}
    """
    number, *words = line.split()
    values = _numbers(words)
    kind = _numbers([number])
    category = int(kind[0]) if kind and kind[0].is_integer() else number
    if values is None or not (len(values) == 4 or (len(values) >= 6 and len(values) % 2 == 0)):
        return dict(category_id=category, bbox=line.strip())
    scaled = [value * (height if place % 2 else width) for place, value in enumerate(values)]
    if len(scaled) == 4:
        x, y, box_width, box_height = scaled
        box = [x - box_width / 2, y - box_height / 2, box_width, box_height]
        return dict(category_id=category, bbox=box)
    xs, ys = scaled[::2], scaled[1::2]
    box = [min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)]
    ahead = zip(xs, ys, xs[1:] + xs[:1], ys[1:] + ys[:1], strict=True)
    area = abs(sum(x * y_next - x_next * y for x, y, x_next, y_next in ahead)) / 2
    return dict(category_id=category, bbox=box, area=area, segmentation=[scaled])
