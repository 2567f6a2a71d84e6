"""COCO annotations are read in all their forms, and bad ones are named."""

import copy
import json
import sys

import numpy as np
import pytest
import torch

from softfree.data.coco import (
    _run_lengths,
    check_annotations,
    coco_api,
    decode_mask,
    encode_mask,
    encode_masks,
    read_annotations,
    shape_annotations,
)
from softfree.data.shapes import draw_shapes

pytest.importorskip("faster_coco_eval")

GOOD = dict(
    images=[dict(id=7, width=20, height=10, file_name="a.png")],
    annotations=[
        dict(id=1, image_id=7, category_id=3, bbox=[2, 3, 5, 4], area=20, iscrowd=0,
             segmentation=[[2, 3, 7, 3, 7, 7, 2, 7]]),
    ],
    categories=[dict(id=3, name="cat"), dict(id=90, name="brush")],
)  # fmt: skip


def with_annotation(**changes):
    annotations = copy.deepcopy(GOOD)
    annotations["annotations"].append({**GOOD["annotations"][0], "id": 2, **changes})
    return annotations


def test_good_annotations_pass():
    assert check_annotations(GOOD, "file", masks=True) == GOOD


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(bbox=[15, 3, 8, 4]), r"box \[15, 3, 8, 4\] lies outside of 20 x 10 pixels in a.png"),
        (dict(bbox=[2, 3, 0, 4]), r"box \[2, 3, 0, 4\] has no area"),
        (dict(bbox=[2, 3, 5]), "is not"),
        (dict(bbox=[2, 3, float("nan"), 4]), "is not"),
        (dict(bbox=[2, float("nan"), 3, 4]), "is not"),
        (dict(bbox=[2, 3, float("inf"), 4]), "is not"),
        (dict(bbox=[2, 3, 10**400, 4]), "lies outside"),
        (dict(image_id=[7]), r"its image_id must be a whole number, got \[7\]"),
        (dict(image_id="7"), "its image_id must be a whole number, got '7'"),
        (dict(category_id={}), "its category_id must be a whole number"),
        (dict(iscrowd=None), "its iscrowd must be 0 or 1, got None"),
        (dict(iscrowd=[]), "its iscrowd must be 0 or 1"),
        (dict(area="20"), "an area of '20'"),
        (dict(area=float("nan")), "an area of nan"),
        (dict(segmentation=[[2, 3, 7, 3, 7, float("inf")]]), "a polygon that is not"),
        (dict(segmentation=[[2, 3, 7, 3, float("nan"), 7]]), "a polygon that is not"),
        (dict(segmentation=[[2, 3, 7, 3, 1e9, 7]]), "a polygon that lies outside of 20 x 10"),
        (dict(segmentation=[[2, -3, 7, 3, 7, 7]]), "a polygon that lies outside of 20 x 10"),
        (dict(segmentation=dict(size=7, counts=[200])), "a run-length code with the size 7"),
        (dict(segmentation=dict(size=[10.0, 20], counts=[200])), "a run-length code with the size"),
        (dict(segmentation=dict(size=[10**6] * 2, counts=[10**12])), "a mask of 1000000 x 1000000"),
        (dict(segmentation=dict(size=[10, 20], counts=[-1, 201])), "code that can't be decoded"),
        (dict(segmentation=dict(size=[10, 20], counts=[10**12])), "it has 1,000,000,000,000 pix"),
        (dict(segmentation=dict(size=[10, 20], counts="\u00e9")), "code that can't be decoded"),
        (dict(bbox=["2", 3, 3, 4]), "is not"),
        (dict(category_id=4), "there is no category 4"),
        (dict(image_id=8), "there is no image 8"),
        (dict(segmentation=[]), "no mask"),
        (dict(segmentation=[[1, 2, 3, 4]]), "fewer than 3 points"),
        (
            dict(segmentation=dict(size=[20, 10], counts=[200])),
            "a mask of 10 x 20 for an image of 20 x 10 pixels",
        ),
        (dict(segmentation=dict(counts=[200])), "a run-length code without"),
        (dict(segmentation=dict(size=[10, 20], counts=[3, 5])), "code that can't be decoded"),
        (dict(segmentation=dict(size=[10, 20], counts=[3, "5"])), "code that can't be decoded"),
        (dict(segmentation=dict(size=[10, 20], counts="zzzz")), "code that can't be decoded"),
        (dict(segmentation=dict(size=[10, 20], counts=None)), "code that can't be decoded"),
        (dict(segmentation=[2, 3, 7, 3, 7, 7]), "a polygon that is not"),
        (dict(segmentation=[[2, 3, 7, 3, 7, "7"]]), "a polygon that is not"),
        (dict(segmentation="mask.png"), "neither polygons nor a run-length code"),
        (dict(bbox=None), "box None is not"),
    ],
)
def test_a_bad_annotation_is_named_with_its_reason_or_left_out(changes, message):
    annotations = with_annotation(**changes)
    with pytest.raises(ValueError, match=f"1 of 2 annotations .*annotation 2: .*{message}"):
        check_annotations(annotations, "file", masks=True)
    kept = check_annotations(annotations, "file", masks=True, skip_bad=True)
    assert [a["id"] for a in kept["annotations"]] == [1]


def test_run_lengths_are_those_of_the_code():
    generator = np.random.default_rng(0)
    for _ in range(50):
        height, width = generator.integers(1, 60, 2)
        mask = generator.random((height, width)) < generator.random()
        runs = _run_lengths(encode_mask(mask)["counts"])
        flat = np.concatenate([np.full(length, number % 2) for number, length in enumerate(runs)])
        assert np.array_equal(flat, mask.T.reshape(-1))


@pytest.mark.parametrize("content", ["null", "3", '"x"', "[]", "{" * 10**5, "[" * 10**5, "\x00"])
def test_a_json_that_is_something_else_is_refused_in_one_line(tmp_path, content):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ValueError, match="a.json is not (valid json|a COCO file)") as caught:
        read_annotations(tmp_path / "a.json")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("section", "changes", "message"),
    [
        ("images", dict(id="7"), "entry 1 of 'images' must have a whole number as id, got '7'"),
        ("images", dict(id=[7]), "must have a whole number as id"),
        ("images", dict(width=20.0), "whole numbers, got 20.0 and 10"),
        ("images", dict(width=True), "whole numbers, got True and 10"),
        ("images", dict(width=10**6, height=10**6), "larger than the limit of 100,000,000 pixels"),
        ("images", dict(file_name=7), "must have a file name, got 7"),
        ("images", dict(file_name="a\0.png"), "must have a file name"),
        ("images", dict(file_name="../a.png"), "outside of the picture folder"),
        ("images", dict(file_name="x/../../a.png"), "outside of the picture folder"),
        ("images", dict(file_name="..\\a.png"), "outside of the picture folder"),
        ("images", dict(file_name="/etc/a.png"), "outside of the picture folder"),
        ("images", dict(file_name="C:\\a.png"), "outside of the picture folder"),
        ("categories", dict(id={}), "entry 1 of 'categories' must have a whole number as id"),
        ("categories", dict(name=None), "must have a string as name, got None"),
    ],
)
def test_images_and_categories_of_other_kinds_are_named(tmp_path, section, changes, message):
    content = copy.deepcopy(GOOD)
    content[section][0].update(changes)
    (tmp_path / "a.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        read_annotations(tmp_path / "a.json")


def test_how_many_annotations_are_left_out_and_why_is_logged_once(caplog, monkeypatch):
    annotations = with_annotation(bbox=[2, 3, 0, 4])
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        check_annotations(annotations, "file", skip_bad=True)
    assert caplog.messages == [
        "file: 1 of 2 annotations can't be used (annotation 2: box [2, 3, 0, 4] has no area in "
        f"{GOOD['images'][0]['file_name']}); they are skipped"
    ]
    check_annotations(GOOD, "file", skip_bad=True)
    assert len(caplog.messages) == 1


def test_a_box_may_pass_the_border_by_a_fraction_of_a_pixel():
    check_annotations(with_annotation(bbox=[15, 3, 5.4, 4]), "file")


def test_masks_are_not_asked_for_where_none_are_needed():
    check_annotations(with_annotation(segmentation=[]), "file")


def test_two_images_of_one_id_are_refused():
    annotations = {**GOOD, "images": GOOD["images"] * 2}
    with pytest.raises(ValueError, match="several images with the same id"):
        check_annotations(annotations, "file")


@pytest.mark.parametrize(
    ("categories", "message"),
    [(GOOD["categories"] * 2, "several categories with the same id"), ([], "has no categories")],
)
def test_categories_without_or_of_the_same_id_are_refused(categories, message):
    with pytest.raises(ValueError, match=message):
        check_annotations({**GOOD, "categories": categories}, "file")


def test_area_and_crowd_are_filled_in(tmp_path):
    annotations = copy.deepcopy(GOOD)
    del annotations["annotations"][0]["area"], annotations["annotations"][0]["iscrowd"]
    path = tmp_path / "a.json"
    path.write_text(json.dumps(annotations))
    [read] = read_annotations(path)["annotations"]
    assert read["area"] == 20
    assert read["iscrowd"] == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid json"),
        ('{"images": []}', "it has no 'annotations', 'categories'"),
        (
            '{"images": [{"id": 1, "file_name": "a"}], "annotations": [], "categories": []}',
            "entry 1 of 'images' has no 'width', 'height'",
        ),
        ('{"images": null, "annotations": [], "categories": []}', "'images' must be a list"),
        ('{"images": [3], "annotations": [], "categories": []}', "entry 1 of 'images' has no 'id'"),
        (
            '{"images": [{"id": 1, "file_name": "a", "width": "20", "height": 9}], "annotations": [], '
            '"categories": []}',
            "must have a width and a height in pixels, whole numbers, got '20' and 9",
        ),
    ],
)
def test_a_file_that_is_no_coco_file_is_refused(tmp_path, content, message):
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_annotations(path)


def test_polygons_and_both_run_length_codes_give_the_same_mask():
    rectangle = np.zeros((10, 20), np.uint8)
    rectangle[3:7, 2:7] = 1
    runs = np.flatnonzero(np.diff(rectangle.T.ravel(), prepend=0, append=0))
    counts = np.diff([0, *runs, rectangle.size]).tolist()
    for segmentation in (
        [[2, 3, 7, 3, 7, 7, 2, 7]],
        dict(size=[10, 20], counts=counts),
        encode_mask(rectangle),
    ):
        np.testing.assert_array_equal(decode_mask(segmentation, 10, 20), rectangle)


def test_encoded_masks_are_plain_json():
    code = json.loads(json.dumps(encode_mask(np.eye(9, dtype=bool))))
    np.testing.assert_array_equal(decode_mask(code, 9, 9), np.eye(9))


def test_shapes_as_coco_pass_the_checks_and_hold_the_pictures_masks():
    annotations = shape_annotations(5, split="val")
    check_annotations(annotations, "shapes", masks=True)
    masks = [
        decode_mask(a["segmentation"], 96, 96)
        for a in annotations["annotations"]
        if a["image_id"] == 2
    ]
    np.testing.assert_array_equal(masks, draw_shapes(2, split="val").masks)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "faster_coco_eval", None)
    with pytest.raises(ValueError, match="needs faster-coco-eval: pip install 'softfree"):
        coco_api("faster-coco-eval")


def test_masks_encoded_together_have_the_codes_of_each():
    masks = torch.rand(5, 9, 14) > 0.4
    masks[2] = False
    masks[3] = True
    assert encode_masks(masks) == [encode_mask(mask.numpy()) for mask in masks]
    assert encode_masks(masks[:0]) == []
