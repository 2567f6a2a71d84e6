"""AP is 100 for the truth, the same by both packages, and each image counts once."""

import copy
import json

import numpy as np
import pytest
import torch

pytest.importorskip("faster_coco_eval")

from softfree.data.coco import coco_api, decode_mask, shape_annotations
from softfree.training.coco_metrics import CocoMetrics
from softfree.training.distributed import Processes

ALONE = Processes(0, 1, torch.device("cpu"))
TRUTH = shape_annotations(12, split="val")
CATEGORIES = [category["id"] for category in TRUTH["categories"]]


def truth_of(image_id):
    objects = [a for a in TRUTH["annotations"] if a["image_id"] == image_id]
    boxes = torch.tensor([a["bbox"] for a in objects], dtype=torch.float32)
    boxes[:, 2:] += boxes[:, :2]
    masks = [torch.from_numpy(decode_mask(a["segmentation"], 96, 96)) for a in objects]
    return dict(
        boxes=boxes,
        labels=torch.tensor([a["category_id"] for a in objects]),
        scores=torch.linspace(0.9, 0.5, len(objects)),
        masks=torch.stack(masks)[:, None].float(),
    )


def noisy(image_id):
    """The truth moved, with a wrong label here and there and a false box more."""
    generator = torch.Generator().manual_seed(image_id)
    found = truth_of(image_id)
    shift = 6 * torch.rand(len(found["boxes"]), 4, generator=generator)
    labels = found["labels"].clone()
    labels[::3] = labels[::3] % 5 + 1
    return dict(
        boxes=torch.cat([found["boxes"] + shift, torch.tensor([[1.0, 1.0, 30.0, 30.0]])]),
        labels=torch.cat([labels, torch.tensor([1])]),
        scores=torch.rand(len(labels) + 1, generator=generator),
        masks=torch.cat([found["masks"].roll(3, -1), torch.ones(1, 1, 96, 96)]),
    )


def figures(detections, package=None, masks=True):
    metrics = CocoMetrics(TRUTH, CATEGORIES, masks=masks, package=package)
    for image_id, found in detections.items():
        metrics.update([image_id], [found])
    return metrics.compute(ALONE)


def test_the_truth_scores_100():
    scores = figures({i: truth_of(i) for i in range(12)})
    assert scores["box_AP"] == scores["mask_AP"] == pytest.approx(100)
    # No shape is as large as 96², so there is no such figure.
    assert "box_APL" not in scores
    assert {"box_AP50", "box_AP75", "box_APS", "box_APM", "mask_AP50"} <= scores.keys()


@pytest.mark.parametrize("ids", ["from 0", "the same", "none"])
def test_the_truth_scores_100_whatever_the_ids_of_its_annotations(ids):
    new = {"from 0": lambda i: {"id": i}, "the same": lambda i: {"id": 5}, "none": lambda i: {}}
    truth = {
        **TRUTH,
        "annotations": [
            {key: value for key, value in a.items() if key != "id"} | new[ids](i)
            for i, a in enumerate(TRUTH["annotations"])
        ],
    }
    metrics = CocoMetrics(truth, CATEGORIES, masks=True)
    metrics.update(range(12), [truth_of(i) for i in range(12)])
    scores = metrics.compute(ALONE)
    assert scores["box_AP"] == scores["mask_AP"] == pytest.approx(100)


@pytest.mark.parametrize("package", ["faster-coco-eval", "pycocotools"])
@pytest.mark.parametrize("kind", ["box", "mask"])
def test_both_packages_take_the_results_as_a_file_and_give_the_same_ap(tmp_path, package, kind):
    pytest.importorskip(package.replace("-", "_"))
    metrics = CocoMetrics(TRUTH, CATEGORIES, masks=True)
    metrics.update(range(12), [noisy(i) for i in range(12)])
    scores = metrics.compute(ALONE)
    entries = metrics.entries()
    assert all(
        list(entry) == ["image_id", "category_id", "bbox", "score", "segmentation"]
        for entry in entries
    )
    for name, content in (("truth", {"info": {}, **TRUTH}), ("results", entries)):
        (tmp_path / name).write_text(json.dumps(content))
    api = coco_api(package)
    truth = api.COCO(str(tmp_path / "truth"))
    evaluation = api.COCOeval(
        truth, truth.loadRes(str(tmp_path / "results")), {"box": "bbox", "mask": "segm"}[kind]
    )
    for step in (evaluation.evaluate, evaluation.accumulate, evaluation.summarize):
        step()
    ours = [scores[f"{kind}_{name}"] for name in ("AP", "AP50", "AP75")]
    assert 100 * evaluation.stats[:3] == pytest.approx(ours)


@pytest.mark.parametrize("kind", ["box", "mask"])
def test_the_ap_of_a_class_is_that_of_its_category_alone(kind):
    pytest.importorskip("pycocotools")
    api = coco_api("pycocotools")
    metrics = CocoMetrics(TRUTH, CATEGORIES, masks=True)
    metrics.update(range(12), [noisy(i) for i in range(12)])
    scores = metrics.compute(ALONE)
    ours = metrics.of_classes(kind)
    truth = api.COCO()
    truth.dataset = copy.deepcopy({"info": {}, **TRUTH})
    truth.createIndex()
    for place, category in enumerate(CATEGORIES):
        entries = [e for e in metrics.entries() if e["category_id"] == category]
        kinds = {"box": "bbox", "mask": "segm"}
        evaluation = api.COCOeval(truth, truth.loadRes(entries), kinds[kind])
        evaluation.params.catIds = [category]
        for step in (evaluation.evaluate, evaluation.accumulate, evaluation.summarize):
            step()
        expected = 100 * evaluation.stats[[0, 1, 2, 8]]
        names = ("AP", "AP50", "AP75", "AR")
        assert [ours[name][place] for name in names] == pytest.approx(expected), category
    assert sum(ours["AP"]) / 5 == pytest.approx(scores[f"{kind}_AP"])


def picture_of(objects, found):
    """Metrics of one picture with ``objects`` (category, x, crowd) and ``found`` (category, x, score), all 10 x 10."""
    truth = {
        "images": [{"id": 7, "width": 100, "height": 100, "file_name": "a"}],
        "annotations": [
            dict(id=1, image_id=7, category_id=category, bbox=[x, 0, 10, 10], area=100, iscrowd=crowd)
            for category, x, crowd in objects
        ],
        "categories": [dict(id=3, name="cat"), dict(id=5, name="dog"), dict(id=9, name="bird")],
    }  # fmt: skip
    metrics = CocoMetrics(truth, [3, 5, 9])
    boxes = torch.tensor([[x, 0, x + 10, 10] for _, x, _ in found]).reshape(-1, 4)
    detection = dict(
        boxes=boxes.float(),
        labels=torch.tensor([[3, 5, 9].index(category) + 1 for category, _, _ in found]).long(),
        scores=torch.tensor([score for _, _, score in found]),
    )
    metrics.update([7], [detection])
    metrics.compute(ALONE)
    return metrics


def test_the_ap_of_a_class_by_hand():
    objects = [(3, 0, 0), (3, 20, 0), (5, 40, 0)]
    # Found, false, found: up to recall 0.5 the precision is 1, from there 2/3, at 101 places.
    found = [(3, 0, 0.9), (3, 60, 0.8), (3, 20, 0.7)]
    figures = picture_of(objects, found).of_classes("box")
    expected = 100 * (51 + 50 * 2 / 3) / 101
    assert figures["AP50"] == [pytest.approx(expected), 0, None]
    assert figures["AR"] == [pytest.approx(100), 0, None]
    nothing = picture_of(objects, []).of_classes("box")
    assert nothing["AP"] == nothing["AR"] == [0, 0, None]


def test_what_is_taken_for_what_by_hand():
    cat, dog, bird = 3, 5, 9
    objects = [(cat, 0, 0), (dog, 20, 0), (bird, 40, 0), (cat, 80, 1)]
    found = [
        (cat, 1, 0.9),  # overlaps the cat by 9 / 11
        (cat, 2, 0.8),  # a second one of the same cat, by 8 / 12
        (cat, 21, 0.7),  # the dog, taken for a cat
        (dog, 20, 0.6),  # the dog, too late
        (bird, 44, 0.9),  # overlaps the bird by 6 / 14, too little
        (bird, 40, 0.3),  # the bird, not certain enough
        (dog, 84, 0.9),  # more than half inside the crowd
    ]
    metrics = picture_of(objects, found)
    assert metrics.objects() == [1, 1, 1]
    expected = [
        [1, 0, 0, 0],  # the cat
        [1, 0, 0, 0],  # the dog
        [0, 0, 0, 1],  # the bird is missed
        [1, 1, 1, 0],  # nothing there
    ]
    assert metrics.confusion(0.5).tolist() == expected
    # The bird is found, once it may be.
    assert metrics.confusion(0.3)[2].tolist() == [0, 0, 1, 0]


def test_the_truth_is_taken_for_itself():
    metrics = CocoMetrics(TRUTH, CATEGORIES)
    metrics.update(range(12), [truth_of(i) for i in range(12)])
    metrics.compute(ALONE)
    assert metrics.confusion(0.5).tolist() == np.diag([*metrics.objects(), 0]).tolist()


def test_both_packages_give_the_same_figures():
    pytest.importorskip("pycocotools")
    detections = {i: noisy(i) for i in range(12)}
    ours = figures(detections, "faster-coco-eval")
    other = figures(detections, "pycocotools")
    assert ours.keys() == other.keys()
    assert 5 < ours["box_AP"] < 95
    for name, value in ours.items():
        assert value == pytest.approx(other[name], abs=1e-6), name


def test_no_detections_score_zero():
    empty = {key: value[:0] for key, value in truth_of(0).items()}
    assert figures({i: empty for i in range(12)})["box_AP"] == 0


def test_an_image_given_twice_counts_once():
    metrics = CocoMetrics(TRUTH, CATEGORIES)
    for _ in range(2):
        for i in range(12):
            metrics.update([i], [truth_of(i)])
    assert metrics.compute(ALONE)["box_AP"] == pytest.approx(100)


def test_only_evaluated_images_count():
    assert figures({3: truth_of(3)}, masks=False)["box_AP"] == pytest.approx(100)


def test_a_crowd_is_no_object_to_be_missed():
    truth = {**TRUTH, "annotations": [dict(a) for a in TRUTH["annotations"]]}
    truth["annotations"][0]["iscrowd"] = 1
    metrics = CocoMetrics(truth, CATEGORIES)
    for i in range(12):
        found = truth_of(i)
        if i == truth["annotations"][0]["image_id"]:
            found = {key: value[1:] for key, value in found.items()}
        metrics.update([i], [found])
    assert metrics.compute(ALONE)["box_AP"] == pytest.approx(100)


def test_the_background_is_no_category():
    found = truth_of(0)
    with_background = {
        "boxes": torch.cat([found["boxes"], found["boxes"][:1]]),
        "labels": torch.cat([found["labels"], torch.tensor([0])]),
        "scores": torch.cat([found["scores"], torch.tensor([1.0])]),
    }
    assert figures({0: with_background}, masks=False)["box_AP"] == pytest.approx(100)


def test_predictions_of_several_processes_are_put_together(monkeypatch):
    # What the other process sent, in place of a second process: gathering itself is tested elsewhere.
    other = CocoMetrics(TRUTH, CATEGORIES)
    mine = CocoMetrics(TRUTH, CATEGORIES)
    for i in range(12):
        (mine if i % 2 else other).update([i], [truth_of(i) if i % 2 else noisy(i)])
    monkeypatch.setattr(
        "softfree.training.coco_metrics.gather", lambda values, _: values + [*other.results.items()]
    )
    together = {i: truth_of(i) if i % 2 else noisy(i) for i in range(12)}
    assert mine.compute(ALONE) == figures(together, masks=False)
