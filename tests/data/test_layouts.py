"""Sets as PASCAL VOC, Ultralytics and Roboflow lay them out are read as COCO's, and faults are named by their place."""

import json
import logging

import pytest
from PIL import Image

pytest.importorskip("faster_coco_eval")

from softfree.data import layouts
from softfree.data.detection import load_detection, load_split
from softfree.data.segmentation import IGNORE, load_segmentation

OBJECT = """
  <object><name>{name}</name><difficult>{difficult}</difficult>
    <bndbox><xmin>{box[0]}</xmin><ymin>{box[1]}</ymin><xmax>{box[2]}</xmax><ymax>{box[3]}</ymax></bndbox>
    <part><name>head</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>2</xmax><ymax>2</ymax></bndbox></part>
  </object>"""
SIZE = "<size><width>40</width><height>30</height><depth>3</depth></size>"


def write_picture(path, size=(40, 30)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (90, 60, 30)).save(path)


def write_voc(root, names=("cat", "dog")):
    """Three pictures, the last without objects, two of them to train on; a difficult object in each other."""
    for folder in ("Annotations", "ImageSets/Main"):
        (root / folder).mkdir(parents=True)
    for number in range(3):
        write_picture(root / "JPEGImages" / f"2008_{number}.jpg")
        objects = [(names[0], 0, (1, 1, 20, 10)), (names[1], 1, (5, 6, 7, 8))][: 2 * (number < 2)]
        text = "".join(OBJECT.format(name=n, difficult=d, box=b) for n, d, b in objects)
        path = root / "Annotations" / f"2008_{number}.xml"
        path.write_text(f"<annotation>{SIZE}{text}</annotation>")
    (root / "ImageSets" / "Main" / "train.txt").write_text("2008_0\n2008_2\n")
    (root / "ImageSets" / "Main" / "val.txt").write_text("2008_1\n")
    return root


def write_voc_maps(root):
    """Two pictures to train on and one to validate on, each with a class map that has the last class alone."""
    for folder in ("SegmentationClass", "ImageSets/Segmentation"):
        (root / folder).mkdir(parents=True)
    for number in range(3):
        write_picture(root / "JPEGImages" / f"{number}.jpg")
        Image.new("L", (40, 30), 20).save(root / "SegmentationClass" / f"{number}.png")
    (root / "ImageSets" / "Segmentation" / "train.txt").write_text("0\n1\n")
    (root / "ImageSets" / "Segmentation" / "val.txt").write_text("2\n")


def write_yolo(root, lines=("0 0.5 0.5 0.5 0.2", "1 0.1 0.1 0.3 0.1 0.3 0.4"), yaml=None):
    for split in ("train", "val"):
        for number in range(2):
            write_picture(root / "images" / split / f"{number}.png")
        (root / "labels" / split).mkdir(parents=True)
        (root / "labels" / split / "0.txt").write_text("\n".join(lines) + "\n")
    given = "path: .\ntrain: images/train\nval: images/val\nnames:\n  0: no\n  1: on\n"
    (root / "data.yaml").write_text(given if yaml is None else yaml)
    return root


def write_roboflow(root, group=True):
    categories = [
        dict(id=0, name="pets", supercategory="none"),
        dict(id=1, name="cat", supercategory="pets"),
        dict(id=2, name="dog", supercategory="pets"),
    ]
    for folder in ("train", "valid"):
        write_picture(root / folder / "a.jpg")
        content = dict(
            images=[dict(id=0, width=40, height=30, file_name="a.jpg")],
            annotations=[dict(id=0, image_id=0, category_id=2 if group else 0, bbox=[1, 2, 3, 4])],
            categories=categories,
        )
        (root / folder / "_annotations.coco.json").write_text(json.dumps(content))
    return root


def test_voc_boxes_count_pixels_from_one_and_difficult_objects_are_no_targets(tmp_path, caplog):
    caplog.set_level(logging.INFO, "softfree")
    data = load_detection(str(write_voc(tmp_path)))
    assert caplog.messages == ["VOC layout: 2 + 1 pictures, 20 classes"]
    assert data.class_names == layouts.VOC_CLASSES[1:]
    image, target = data.train[0]
    assert image.shape == (3, 30, 40)
    assert target["boxes"].tolist() == [[0, 0, 20, 10]]
    assert target["labels"].tolist() == [1 + data.class_names.index("cat")]
    assert len(data.train[1][1]["labels"]) == 0
    crowds = [a["iscrowd"] for a in data.train.annotations["annotations"]]
    assert crowds == [0, 1]


def test_classes_that_voc_does_not_have_are_those_of_both_splits_in_order(tmp_path):
    data = load_detection(str(write_voc(tmp_path, names=("zebra", "ant"))))
    assert data.class_names == ("ant", "zebra")
    # Only a difficult one to train on, and none to validate on: classes all the same.
    (tmp_path / "Annotations" / "2008_1.xml").write_text(f"<annotation>{SIZE}</annotation>")
    (tmp_path / "ImageSets" / "Main" / "val.txt").write_text("2008_1\n2008_0")
    assert load_split(str(tmp_path), "val").class_names == ("ant", "zebra")


@pytest.mark.parametrize("folder", ["VOC2012", "VOCdevkit/VOC2007"])
def test_the_set_is_found_inside_of_the_development_kit(tmp_path, folder):
    write_voc(tmp_path / folder)
    assert len(load_split(str(tmp_path), "train")) == 2
    write_voc(tmp_path / "VOCx")
    with pytest.raises(ValueError, match="several data sets, .*use one of them"):
        load_split(str(tmp_path), "train")


def test_trainval_and_test_serve_where_they_are_all_there_is(tmp_path):
    lists = write_voc(tmp_path) / "ImageSets" / "Main"
    (lists / "train.txt").rename(lists / "trainval.txt")
    with pytest.raises(
        FileNotFoundError,
        match=r"Main/train.txt is missing, and .*trainval.txt also has the pictures of val.txt",
    ):
        load_split(str(tmp_path), "train")  # trainval has the pictures of val.txt, too
    (lists / "val.txt").rename(lists / "test.txt")
    data = load_detection(str(tmp_path))
    assert (len(data.train), len(data.val)) == (2, 1)
    assert len(load_split(str(tmp_path), "test")) == 1


def test_a_size_that_the_file_lacks_is_the_picture_s_own(tmp_path):
    path = write_voc(tmp_path) / "Annotations" / "2008_1.xml"
    path.write_text(path.read_text().replace("<width>40", "<width>0"))
    assert load_split(str(tmp_path), "val").images[0]["width"] == 40


BOMB = """<!DOCTYPE a [<!ENTITY b "bbbbbbbb"><!ENTITY c "&b;&b;&b;&b;&b;&b;">]>"""


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (BOMB + "<annotation>&c;</annotation>", "document type"),
        ((BOMB + "<annotation>&c;</annotation>").encode("utf-16"), "document type"),
        ('<!DOCTYPE a SYSTEM "file:///etc/passwd"><annotation/>', "document type"),
        ("<annotation>", "no element found: line 1"),
        ("", "no element found"),
        (b"\xff\xfe\x00", ""),
        ('<?xml version="1.0" encoding="rot13"?><annotation/>', ""),
    ],
)
def test_xml_that_declares_entities_or_is_damaged_is_refused_by_name(tmp_path, content, fault):
    path = write_voc(tmp_path) / "Annotations" / "2008_1.xml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=f"2008_1.xml is not valid xml: .*{fault}"):
        load_split(str(tmp_path), "val")


def test_files_beyond_the_limit_are_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(layouts, "MAX_BYTES", 64)
    with pytest.raises(ValueError, match="2008_1.xml is larger than the limit"):
        load_split(str(write_voc(tmp_path)), "val")


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("<xmax>20", "<xmax>x", r"object 1 of Annotations/2008_1.xml.*\['1', '1', 'x', '10'\]"),
        ("<xmax>20", "<xmax>60", "object 1 .*lies outside of 40 x 30 pixels in 2008_1.jpg"),
        ("<xmax>20", "<xmax>0", "object 1 .*has no area in 2008_1.jpg"),
        ("<name>cat</name>", "", "object 1 .*category_id must be a whole number, got None"),
    ],
)
def test_bad_objects_of_voc_are_named_or_left_out(tmp_path, old, new, fault):
    path = write_voc(tmp_path) / "Annotations" / "2008_1.xml"
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(ValueError, match=fault):
        load_split(str(tmp_path), "val")
    left = load_split(str(tmp_path), "val", skip_bad=True).annotations["annotations"]
    assert [a["bbox"] for a in left] == [[4, 5, 3, 3]]


def test_missing_files_of_voc_are_named(tmp_path):
    root = write_voc(tmp_path)
    (root / "Annotations" / "2008_2.xml").unlink()
    with pytest.raises(FileNotFoundError, match="Annotations lacks 2008_2.xml"):
        load_split(str(root), "train")
    (root / "JPEGImages" / "2008_0.jpg").unlink()
    with pytest.raises(FileNotFoundError, match="JPEGImages lacks 2008_0, listed in .*train.txt"):
        load_split(str(root), "train")
    (root / "ImageSets" / "Main" / "train.txt").write_text("../Annotations/2008_1")
    with pytest.raises(ValueError, match="picture names without folders"):
        load_split(str(root), "train")


def test_yolo_boxes_and_polygons_are_in_pixels(tmp_path, caplog):
    caplog.set_level(logging.INFO, "softfree")
    data = load_detection(str(write_yolo(tmp_path)))
    assert caplog.messages == ["YOLO layout: 2 + 2 pictures, 2 classes"]
    assert data.class_names == ("no", "on")  # no YAML booleans
    _, target = data.train[0]
    assert target["boxes"].tolist() == [[10, 12, 30, 18], [4, 3, 12, 12]]
    assert target["labels"].tolist() == [1, 2]
    assert len(data.train[1][1]["labels"]) == 0  # without a file of labels
    polygon = data.train.annotations["annotations"][1]
    assert polygon["area"] == pytest.approx(36)
    assert polygon["segmentation"] == [pytest.approx([4, 3, 12, 3, 12, 12])]


def test_yolo_polygons_are_masks(tmp_path):
    data = load_detection(
        str(write_yolo(tmp_path, ["1 0.1 0.1 0.5 0.1 0.5 0.5 0.1 0.5"])), masks=True
    )
    masks = data.val[0][1]["masks"]
    assert masks.shape == (1, 30, 40)
    assert masks.sum() == 16 * 12
    with pytest.raises(ValueError, match="'line 1 of labels/train/0.txt': no mask"):
        load_detection(str(write_yolo(tmp_path / "mixed")), masks=True)


YAMLS = {
    "Roboflow": "train: ../images/train\nval: ../images/val\nnc: 2\nnames: ['a', 'b']",
    "lists": "path: ../datasets/elsewhere\ntrain: train.txt\nval: [val.txt, images/val]\nnames: [a, b]",
}


@pytest.mark.parametrize("kind", YAMLS)
def test_yolo_pictures_are_found_as_ultralytics_finds_them(tmp_path, kind):
    root = write_yolo(tmp_path, yaml=YAMLS[kind])
    for split in ("train", "val"):
        (root / f"{split}.txt").write_text(f"./images/{split}/0.png\nimages/{split}/1.png\n")
    data = load_detection(str(root))
    assert [image["file_name"] for image in data.val.images] == [
        "images/val/0.png",
        "images/val/1.png",
    ]
    assert len(data.train[0][1]["labels"]) == 2


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("0 0.5 0.5 0.5", "box '0 0.5 0.5 0.5' is not .x, y, width, height. in images/train/0.png"),
        ("0 0.5 0.5 0.5 nan", "is not .x, y, width, height."),
        ("0 0.5 0.5 0.5 0", "has no area"),
        ("0 9 9 0.1 0.1", "lies outside of 40 x 30"),
        ("7 0.5 0.5 0.5 0.5", "there is no category 7"),
        ("cat 0.5 0.5 0.5 0.5", "category_id must be a whole number, got 'cat'"),
    ],
)
def test_bad_lines_of_yolo_are_named_or_left_out(tmp_path, line, fault):
    root = write_yolo(tmp_path, ["", "1 0.5 0.5 0.5 0.5", line])
    with pytest.raises(ValueError, match=f"'line 3 of labels/train/0.txt': .*{fault}"):
        load_split(str(root), "train")
    assert len(load_split(str(root), "train", skip_bad=True).annotations["annotations"]) == 1


@pytest.mark.parametrize(
    ("yaml", "fault"),
    [
        ("names: [a]\nval: images/val", "data.yaml has no 'train'"),
        ("names: [a]\ntrain: /usr", "data.yaml: 'train' is '/usr', which does not exist in"),
        ("names: [a]\ntrain: ../../x", "'train' is '../../x', which does not exist in"),
        ("train: images/train", "data.yaml has no 'names'"),
        ("names: 3\ntrain: images/train", "'names' must be a list"),
        ("names: {x: a}\ntrain: images/train", "entry 'x' of 'names' must be a number"),
        ("names: [a]\nnc: 2\ntrain: images/train", "'nc' is '2', but 'names' has 1 classes"),
        ("names: [a", "data.yaml is not valid yaml: while parsing"),
        ("names: &a [x]\ntrain: *a", "data.yaml has aliases"),
        ("[" * 100_000, "nested too deeply"),
        ("- " * 100_000, "nested too deeply"),
        ("{a: " * 100_000, "nested too deeply"),
        ("names: !!python/object/apply:os.system [ls]", "data.yaml"),
        ("names: [a]\ntrain: labels", "'train' has no pictures"),
    ],
)
def test_faults_of_the_yaml_are_named(tmp_path, yaml, fault):
    root = write_yolo(tmp_path, yaml=yaml)
    with pytest.raises((ValueError, FileNotFoundError), match=fault):
        load_split(str(root), "train")


def test_a_yolo_set_without_any_labels_or_with_damaged_pictures_is_refused(tmp_path):
    root = write_yolo(tmp_path)
    (root / "labels" / "train" / "0.txt").unlink()
    with pytest.raises(FileNotFoundError, match="none of the 2 pictures .*labels/train/0.txt"):
        load_split(str(root), "train")
    (root / "images" / "val" / "1.png").write_bytes(b"no picture")
    with pytest.raises(ValueError, match="images/val/1.png can't be read: not a picture"):
        load_split(str(root), "val")


def test_a_yolo_set_without_its_yaml_is_told_so(tmp_path):
    (write_yolo(tmp_path) / "data.yaml").unlink()
    for load in (load_detection, load_segmentation):
        with pytest.raises(FileNotFoundError, match="images/ and labels/, but no data.yaml"):
            load(str(tmp_path))


def test_roboflow_s_group_of_all_classes_is_no_class(tmp_path, caplog):
    caplog.set_level(logging.INFO, "softfree")
    data = load_detection(str(write_roboflow(tmp_path / "a")))
    assert caplog.messages == ["Roboflow layout: 1 + 1 pictures, 2 classes"]
    assert data.class_names == ("cat", "dog")
    assert data.val[0][1]["labels"].tolist() == [2]
    assert load_detection(str(write_roboflow(tmp_path / "b", group=False))).class_names == (
        "pets", "cat", "dog",
    )  # fmt: skip


def test_class_maps_are_drawn_from_masks_the_smaller_object_on_top(tmp_path, caplog):
    caplog.set_level(logging.INFO, "softfree")
    small, large = "0 0.2 0.2 0.4 0.2 0.4 0.4 0.2 0.4", "1 0 0 0.5 0 0.5 0.5 0 0.5"
    data = load_segmentation(str(write_yolo(tmp_path, [small, large])))
    assert caplog.messages == ["YOLO layout: 2 + 2 pictures, 3 classes"]
    assert data.class_names == ("background", "no", "on")
    image, class_map = data.train[0]
    assert image.shape == (3, 30, 40)
    assert class_map.shape == (30, 40)
    assert class_map.flatten().bincount().tolist() == [1200 - 300, 48, 252]
    assert class_map[8, 10] == 1
    assert data.val[1][1].max() == 0


def test_crowds_have_no_class_in_class_maps(tmp_path):
    for folder in ("train", "valid"):
        write_picture(tmp_path / folder / "a.png")
        boxes = [([0, 0, 20, 30], 1), ([0, 0, 10, 30], 0)]
        content = dict(
            images=[dict(id=3, width=40, height=30, file_name="a.png")],
            annotations=[
                dict(id=i, image_id=3, category_id=7, bbox=box, iscrowd=crowd, segmentation=dict(
                    size=[30, 40], counts=[0, 30 * box[2], 30 * (40 - box[2])]))
                for i, (box, crowd) in enumerate(boxes)
            ],
            categories=[dict(id=7, name="sheep")],
        )  # fmt: skip
        (tmp_path / folder / "_annotations.coco.json").write_text(json.dumps(content))
    _, class_map = load_segmentation(str(tmp_path)).val[0]
    assert class_map[0].tolist() == [1] * 10 + [IGNORE] * 10 + [0] * 20


def test_boxes_alone_are_no_class_maps(tmp_path):
    with pytest.raises(ValueError, match="has boxes but no masks .VOC layout."):
        load_segmentation(str(write_voc(tmp_path)))


def test_class_maps_of_voc_are_found_inside_of_the_development_kit(tmp_path, caplog):
    caplog.set_level(logging.INFO, "softfree")
    write_voc_maps(tmp_path / "VOCdevkit" / "VOC2012")
    data = load_segmentation(str(tmp_path))
    assert caplog.messages == ["VOC layout: 2 + 1 pictures, 21 classes"]
    assert data.val[0][1].unique().tolist() == [20]


def test_a_folder_of_no_known_layout_is_told_those_that_are(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"(?s)none of the supported layouts.*VOC .*YOLO "):
        load_detection(str(tmp_path))
