"""COCO folders are read with their gaps, crowds and empty images, and transforms keep boxes and masks together."""

import copy
import json

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.ops import masks_to_boxes

pytest.importorskip("faster_coco_eval")

from softfree.data.coco import shape_annotations
from softfree.data.detection import (
    CocoDetection,
    aspect_ratio_order,
    collate_detection,
    load_detection,
    load_split,
    repeat_factors,
    repeat_indices,
    train_transform,
)
from softfree.data.images import Unreadable

ANNOTATIONS = dict(
    images=[
        dict(id=9, width=20, height=10, file_name="wide.png"),
        dict(id=4, width=10, height=20, file_name="tall.png"),
        dict(id=6, width=20, height=10, file_name="empty.png"),
    ],
    annotations=[
        dict(id=1, image_id=9, category_id=90, bbox=[2, 3, 5, 4], area=20, iscrowd=0,
             segmentation=[[2, 3, 7, 3, 7, 7, 2, 7]]),
        dict(id=2, image_id=9, category_id=3, bbox=[0, 0, 20, 10], area=200, iscrowd=1,
             segmentation=dict(size=[10, 20], counts=[0, 200])),
        dict(id=3, image_id=4, category_id=3, bbox=[5, 15, 5.5, 5], area=25, iscrowd=0,
             segmentation=[[5, 15, 10, 15, 10, 20, 5, 20]]),
    ],
    categories=[dict(id=90, name="brush"), dict(id=3, name="cat")],
)  # fmt: skip


def write_coco(root, annotations=ANNOTATIONS, suffix="2017"):
    for split in ("train", "val"):
        folder = root / f"{split}{suffix}"
        folder.mkdir(parents=True)
        for image in annotations["images"]:
            size, colour = (image["width"], image["height"]), (10 * image["id"], 50, 100)
            Image.new("RGB", size, colour).save(folder / image["file_name"])
        (root / "annotations").mkdir(exist_ok=True)
        path = root / "annotations" / f"instances_{split}{suffix}.json"
        path.write_text(json.dumps(annotations))
    return root


@pytest.mark.parametrize("suffix", ["2017", ""])
def test_a_coco_folder_gives_labels_without_gaps_and_keeps_the_names(tmp_path, suffix):
    data = load_detection(str(write_coco(tmp_path, suffix=suffix)), masks=True)
    assert data.class_names == ("cat", "brush")
    assert data.train.category_ids == [3, 90]
    assert [image["id"] for image in data.train.images] == [4, 6, 9]
    image, target = data.train[2]
    assert image.shape == (3, 10, 20)
    assert image.dtype == torch.uint8
    assert target["labels"].tolist() == [2]
    assert target["boxes"].tolist() == [[2, 3, 7, 7]]
    assert target["masks"].sum() == 20
    assert target["image_id"] == 9


def test_boxes_are_cut_at_the_border(tmp_path):
    _, target = load_detection(str(write_coco(tmp_path))).train[0]
    assert target["boxes"].tolist() == [[5, 15, 10, 20]]


def test_an_empty_image_is_a_sample_without_objects(tmp_path):
    _, target = load_detection(str(write_coco(tmp_path)), masks=True).train[1]
    assert target["boxes"].shape == (0, 4)
    assert target["labels"].shape == (0,)
    assert target["masks"].shape == (0, 10, 20)


def test_missing_files_are_named(tmp_path):
    root = write_coco(tmp_path)
    (root / "val2017" / "tall.png").unlink()
    with pytest.raises(FileNotFoundError, match="1 images of .* are not in .*: tall.png"):
        load_detection(str(root))


def test_missing_annotations_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="has none of the supported layouts"):
        load_detection(str(tmp_path))


def test_faults_of_both_splits_are_named(tmp_path):
    root = write_coco(tmp_path)
    for split in ("train2017", "val2017"):
        (root / split / "tall.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"(?s)train2017: tall.png.*val2017: tall.png"):
        load_detection(str(root))


def test_bad_annotations_stop_the_run_or_are_left_out(tmp_path):
    annotations = copy.deepcopy(ANNOTATIONS)
    annotations["annotations"][0]["bbox"] = [2, 3, 0, 4]
    root = write_coco(tmp_path, annotations)
    with pytest.raises(ValueError, match="box .2, 3, 0, 4. has no area in wide.png"):
        load_split(str(root), "train")
    assert len(load_split(str(root), "train", skip_bad=True)[2][1]["labels"]) == 0


def test_categories_of_train_and_val_must_be_the_same(tmp_path):
    root = write_coco(tmp_path)
    other = copy.deepcopy(ANNOTATIONS)
    other["categories"].append(dict(id=5, name="dog"))
    path = root / "annotations" / "instances_val2017.json"
    path.write_text(json.dumps(other))
    with pytest.raises(ValueError, match="differ; only in train: none; only in val: 5 'dog'$"):
        load_detection(str(root))
    other["categories"] = [dict(id=90, name="broom"), dict(id=3, name="cat")]
    path.write_text(json.dumps(other))
    with pytest.raises(ValueError, match="in train: 90 'brush'; only in val: 90 'broom'$"):
        load_detection(str(root))


def test_an_unreadable_picture_or_one_of_another_size_is_skipped(tmp_path):
    root = write_coco(tmp_path)
    (root / "train2017" / "wide.png").write_bytes(b"no picture")
    Image.new("RGB", (11, 20)).save(root / "train2017" / "tall.png")
    data = load_detection(str(root)).train
    items = [data[i] for i in range(3)]
    assert [isinstance(item, Unreadable) for item in items] == [True, False, True]
    assert "11 x 20 pixels, but 10 x 20 in the annotations" in items[0].reason
    batch = collate_detection(items)
    assert len(batch.images) == len(batch.targets) == 1
    assert [file.path for file in batch.unreadable] == ["tall.png", "wide.png"]
    assert len(collate_detection(items, refill=True).images) == 3


def test_a_batch_holds_its_items_in_few_tensors(tmp_path):
    data = load_detection(str(write_coco(tmp_path)), masks=True).train
    items = [data[index] for index in range(3)]
    assert len({image.shape for image, _ in items}) > 1
    assert 0 in {len(target["labels"]) for _, target in items}
    [batch] = DataLoader(data, 3, collate_fn=collate_detection)
    assert len(batch.packed_targets) == 3
    unpacked = zip(batch.images, batch.unit_images, batch.targets, strict=True)
    for (image, target), (same, unit, other) in zip(items, unpacked, strict=True):
        assert torch.equal(image, same)
        assert torch.equal(image.float() / 255, unit)
        assert target.keys() == other.keys()
        assert target["image_id"] == other["image_id"]
        for name in ("boxes", "labels", "masks"):
            assert target[name].dtype == other[name].dtype
            assert torch.equal(target[name], other[name]), name


def test_flips_and_resizes_move_boxes_and_masks_alike():
    shapes = load_detection(None, masks=True, shapes=(6, 1))
    shapes.train.transform = train_transform([96, 160], 160)
    sides = set()
    for index in range(6):
        image, target = shapes.train[index]
        assert type(image) is type(target["boxes"]) is torch.Tensor
        assert target["masks"].shape[1:] == image.shape[1:]
        sides.add(image.shape[1])
        found = masks_to_boxes(target["masks"])
        found[:, 2:] += 1
        assert (found - target["boxes"]).abs().max() <= 2
    assert sides == {96, 160}


def test_crops_of_resized_pictures_keep_boxes_at_what_is_left_of_the_masks():
    shapes = load_detection(None, masks=True, shapes=(20, 1))
    whole = [len(shapes.train[index][1]["labels"]) for index in range(20)]
    shapes.train.transform = train_transform([96], 96, scales=(0.5, 2.0), crop=64)
    torch.manual_seed(0)
    kept, padded = 0, 0
    for index in range(20):
        image, target = shapes.train[index]
        assert image.shape == (3, 64, 64)
        padded += (image.flatten(1) == torch.tensor([[124], [116], [104]])).all(0).any().item()
        kept += len(target["labels"])
        assert len(target["labels"]) == len(target["boxes"]) == len(target["masks"])
        if len(target["boxes"]):
            found = masks_to_boxes(target["masks"])
            found[:, 2:] += 1
            assert torch.equal(found, target["boxes"])
    # Some lie outside, and small pictures have a border.
    assert 0 < kept < sum(whole) and 0 < padded < 20


def test_a_crop_of_a_picture_with_objects_has_one():
    shapes = load_detection(None, shapes=(10, 1))
    shapes.train.transform = train_transform([96], 96, scales=(1.0, 3.0), crop=40)
    torch.manual_seed(0)
    places = set()
    for index in [*range(10)] * 5:
        image, target = shapes.train[index]
        assert image.shape == (3, 40, 40) and len(target["boxes"])
        places.add(tuple(target["boxes"][0].tolist()))
    assert len(places) > 10


def test_boxes_without_masks_are_cut_at_the_border_of_a_crop():
    shapes = load_detection(None, shapes=(20, 1))
    shapes.train.transform = train_transform([96], 96, crop=48)
    for index in range(20):
        _, target = shapes.train[index]
        assert target["boxes"].numel() == 0 or 0 <= target["boxes"].min()
        assert target["boxes"].numel() == 0 or target["boxes"].max() <= 48
        assert ((target["boxes"][:, 2:] - target["boxes"][:, :2]) >= 1).all()


def test_colours_vary_and_boxes_stay():
    shapes = load_detection(None, shapes=(1, 1))
    shapes.train.transform = train_transform([96], 96)
    torch.manual_seed(0)
    plain, boxes = shapes.train[0]
    shapes.train.transform = train_transform([96], 96, color_jitter=0.4)
    torch.manual_seed(0)
    varied, same = shapes.train[0]
    assert torch.equal(boxes["boxes"], same["boxes"])
    difference = (plain.float() - varied.float()).abs().mean()
    assert 1 < difference < 100


def test_pictures_of_a_rare_class_come_again_and_an_epoch_stays_as_long():
    labels = [[1, 1], [1], [], [1, 2], *[[1]] * 96]
    factors = repeat_factors(labels, 0.09)
    assert factors == pytest.approx([1, 1, 1, 3, *[1] * 96])
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(100)
    for _ in range(50):
        shown = repeat_indices(factors, generator)
        # Each showing has a number of its own.
        assert len(shown) == len(set(shown)) == 100
        counts += torch.bincount(torch.tensor(shown) % 100, minlength=100)
    assert counts[3] / 50 == pytest.approx(3, rel=0.1)
    assert counts.min() > 40
    # Fractions are kept in the mean.
    halves = [repeat_indices([1.5, 1.0, 1.0, 1.0], generator).count(4) for _ in range(400)]
    assert sum(halves) / 400 == pytest.approx(0.5 * 4 / 4.5, rel=0.2)


def test_the_long_side_stays_within_its_limit():
    wide = CocoDetection(
        dict(
            images=[dict(id=0, width=300, height=100, file_name="a")],
            annotations=[],
            categories=[dict(id=1, name="a")],
        ),
        lambda image: Image.new("RGB", (300, 100)),
        transform=train_transform([100], 150),
    )
    assert wide[0][0].shape == (3, 50, 150)


def test_batches_are_all_wide_or_all_tall_and_every_picture_comes_once():
    ratios = np.where(np.arange(103) % 3 == 0, 0.7, 1.4)
    order = aspect_ratio_order(ratios, 4, torch.Generator().manual_seed(1))
    assert sorted(order) == list(range(103))
    groups = [ratios[order[i : i + 4]] for i in range(0, 96, 4)]
    assert all(len(set(group)) == 1 for group in groups)
    assert len({group[0] for group in groups[:12]}) == 2
    assert order != aspect_ratio_order(ratios, 4, torch.Generator().manual_seed(2))


def test_shapes_are_the_same_through_the_reader():
    data = load_detection(None, shapes=(2, 1))
    assert data.class_names == ("circle", "square", "triangle", "star", "cross")
    annotations = shape_annotations(2, split="train")["annotations"]
    _, target = data.train[1]
    assert len(target["boxes"]) == sum(a["image_id"] == 1 for a in annotations)
