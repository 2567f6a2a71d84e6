"""A detector's results for COCO's tools: ids of an annotation file, of names, or in order."""

import json

import pytest

pytest.importorskip("faster_coco_eval")

from softfree.commands.predict.results import CocoResults

FOUND = [{"label": "cat", "score": 0.5, "box": [10.0, 20.0, 40.0, 30.0]}]


def ids(paths, categories, annotations=None):
    """Image and category of what is found in each picture."""
    results = CocoResults(paths, categories, annotations)
    for path in paths:
        results.add(path, FOUND)
    return [(entry["image_id"], entry["category_id"]) for entry in results.entries]


def test_without_annotations_names_that_are_numbers_are_ids():
    categories = {"dog": 3, "cat": 18}
    assert ids(["a/000139.jpg", "b/7.png"], categories) == [(139, 18), (7, 18)]
    assert ids(["a/139.jpg", "b/139.png"], categories) == [(1, 18), (2, 18)]
    assert ids(["139.jpg", "street.png"], categories) == [(1, 18), (2, 18)]


def test_annotations_give_ids_by_the_names_of_pictures_and_classes(tmp_path):
    images = [
        {"id": number, "width": 100, "height": 100, "file_name": name}
        for number, name in ((5, "1.jpg"), (6, "night/1.jpg"), (8, "2.jpg"))
    ]
    file = tmp_path / "val.json"
    content = {"images": images, "annotations": [], "categories": [{"id": 44, "name": "cat"}]}
    file.write_text(json.dumps(content))
    assert ids(["day/1.jpg", "x/night/1.jpg"], {"cat": 1}, file) == [(5, 44), (6, 44)]
    with pytest.raises(ValueError, match=r"val.json has no image with the file name of 3.jpg"):
        ids(["2.jpg", "3.jpg"], {"cat": 1}, file)
    with pytest.raises(ValueError, match="val.json has no category for dog"):
        ids(["2.jpg"], {"cat": 1, "dog": 2}, file)


def test_boxes_are_corner_and_size():
    results = CocoResults(["7.jpg"], {"cat": 18})
    results.add("7.jpg", FOUND)
    [entry] = results.entries
    assert entry["bbox"] == [10.0, 20.0, 30.0, 10.0]
    assert entry["score"] == 0.5 and "segmentation" not in entry
