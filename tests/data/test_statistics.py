"""The numbers of a split are those of its samples."""

import numpy as np
import pytest
import torch

from softfree.data.detection import CocoDetection
from softfree.data.images import Unreadable
from softfree.data.statistics import (
    Seen,
    describe_class_maps,
    describe_objects,
    describe_pictures,
    describe_sequences,
    look,
)


def test_pictures_have_sizes_and_shares():
    found = describe_pictures([0, 0, 2], ["a", "b", "c"], [Seen(4, 3), Seen(9, 3), Seen(5, 3)])
    assert found["samples"] == 3
    assert found["width"] == {"min": 4, "median": 5, "max": 9}
    assert [own["count"] for own in found["classes"]] == [2, 0, 1]
    assert sum(own["share"] for own in found["classes"]) == pytest.approx(1)
    assert "width" not in describe_pictures([0], ["a"], [])


def test_objects_are_small_medium_or_large_by_coco_s_areas():
    images = [dict(id=i, width=200, height=100 + i, file_name=f"{i}.png") for i in range(3)]
    areas = [1, 1023, 1024, 9215, 9216]
    objects = [
        dict(image_id=0, category_id=8, iscrowd=0, area=area, bbox=[0, 0, 5, 5]) for area in areas
    ]
    objects.append(dict(image_id=1, category_id=3, iscrowd=1, area=50, bbox=[0, 0, 5, 5]))
    categories = [dict(id=8, name="cat"), dict(id=3, name="ant")]
    data = CocoDetection(
        dict(images=images, annotations=objects, categories=categories), read=lambda _: None
    )
    found = describe_objects(data)
    assert [found[name] for name in ("small", "medium", "large")] == [2, 2, 1]
    assert (found["objects"], found["crowds"], found["empty"]) == (5, 1, 1)
    assert [(own["name"], own["count"]) for own in found["classes"]] == [("ant", 0), ("cat", 5)]
    assert found["height"] == {"min": 100, "median": 101, "max": 102}


def test_class_maps_are_counted_by_pixels_and_those_without_a_class_apart():
    maps = [torch.tensor([[0, 0, 1, 255]]), torch.tensor([[0, 0, 0, 255]])]
    seen = [look((torch.zeros(3, 1, 4), own)) for own in maps]
    found = describe_class_maps(2, ["ground", "cat"], seen)
    assert [(own["count"], own["pictures"]) for own in found["classes"]] == [(5, 2), (1, 1)]
    assert found["ignored"] == pytest.approx(0.25)
    assert found["empty"] == 1
    assert describe_class_maps(2, ["road", "cat"], seen)["empty"] == 0
    assert "classes" not in describe_class_maps(2, ["road", "cat"], [])


def test_what_could_not_be_decoded_stays_what_it_is():
    item = Unreadable("a.png", "damaged")
    assert look(item) is item


def test_pairs_have_two_lengths_and_tokens_may_have_labels():
    pair = [torch.zeros(3), torch.zeros(7)]
    found = describe_sequences([(pair, 1)], ["apart", "joined"])
    assert found["length"] == {"min": 3, "median": 5, "max": 7}
    assert [own["count"] for own in found["classes"]] == [0, 1]
    tokens = describe_sequences([(torch.zeros(3, 8), torch.tensor([0, 1, 1]))], ["a", "b"])
    assert np.allclose([own["share"] for own in tokens["classes"]], [1 / 3, 2 / 3])
