"""Each layout gives classes from 0 and the ignore label, and bad class maps are named before training."""

import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import Cityscapes

from softfree.data.segmentation import (
    IGNORE,
    VOC_CLASSES,
    EvalTransform,
    balanced_weights,
    collate_pictures,
    collate_segmentation,
    load_segmentation,
    load_split,
    train_transform,
)
from softfree.data.shapes import draw_shapes


def write(path, values, mode=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(values, np.uint8)).convert(mode).save(path)


def write_pair(image, mask, values):
    write(image, np.zeros((*np.shape(values), 3)))
    write(mask, values)


def folders(root, values=((0, 1, 7), (1, 0, 7))):
    for split in ("train", "val"):
        write_pair(root / "images" / split / "a.png", root / "masks" / split / "a.png", values)
    (root / "classes.txt").write_text("ground\nroad\n")
    return root


def test_plain_folders_with_an_ignore_label(tmp_path):
    data = load_segmentation(str(folders(tmp_path)), ignore_label=7)
    assert data.class_names == ("ground", "road")
    image, mask = data.train[0]
    assert image.shape == (3, 2, 3)
    assert mask.tolist() == [[0, 1, IGNORE], [1, 0, IGNORE]]
    assert mask.dtype == torch.int64


def test_classes_of_few_pixels_weigh_more_within_bounds(tmp_path):
    # Of the pixels that count, class 0 has 900, class 1 has 100, class 2 none; 7 is ignored.
    values = np.zeros((40, 30), np.uint8)
    values.flat[:100], values.flat[100:300] = 1, 7
    root = folders(tmp_path, values)
    (root / "classes.txt").write_text("ground\nroad\nsky\n")
    data = load_segmentation(str(root), ignore_label=7)
    ground, road, sky = balanced_weights(data.train, 3).tolist()
    assert road / ground == pytest.approx(3)
    assert sky / ground == pytest.approx(20)
    assert 0.9 * ground + 0.1 * road == pytest.approx(1)


def test_colours_vary_and_class_maps_and_padding_stay(tmp_path):
    data = load_segmentation(None, shapes=(1, 1)).train
    data.transform = train_transform(192)
    torch.manual_seed(0)
    plain, classes = data[0]
    data.transform = train_transform(192, color_jitter=0.4)
    torch.manual_seed(0)
    varied, _ = data[0]
    outside = classes == IGNORE
    assert outside.any() and (plain[:, outside] == 0).all()
    torch.manual_seed(3)
    varied, classes = data[0]
    assert (varied[:, classes == IGNORE] == 0).all()
    means = [
        image[:, seen].float().mean()
        for image, seen in ((plain, ~outside), (varied, classes != IGNORE))
    ]
    assert abs(means[0] - means[1]) > 1


def test_a_class_beyond_the_classes_is_named(tmp_path):
    with pytest.raises(
        ValueError, match=r"a.png: class 7, but there are only 2 classes \(0 to 1\)"
    ):
        load_segmentation(str(folders(tmp_path)))


def test_what_is_ignored_is_told_as_it_was_given(tmp_path):
    root = folders(tmp_path, ((0, 1, 7),))
    with pytest.raises(ValueError, match=r"class 7, .*\(0 to 1\) and 1 and 255 to ignore"):
        load_segmentation(str(root), ignore_label=1)


def test_a_value_of_many_class_maps_is_said_once_with_the_ignore_label_that_fits(tmp_path):
    root = folders(tmp_path)
    for name in ("b", "c"):
        write_pair(root / f"images/train/{name}.png", root / f"masks/train/{name}.png", [[0, 7]])
    with pytest.raises(ValueError, match=r"a.png and 2 more: class 7, .*") as error:
        load_segmentation(str(root))
    train = str(error.value).splitlines()[0]
    assert train.count("class 7") == train.count("to ignore") == 1
    assert "3 of 3 pictures" in train
    assert "if 7 stands for no class, use `ignore_label` 7" in train


def test_of_several_values_beyond_the_classes_each_is_named_and_none_proposed(tmp_path):
    with pytest.raises(
        ValueError, match=r"class 7, .*class 9, but there are only 2 classes"
    ) as error:
        load_segmentation(str(folders(tmp_path, [[7, 9]])))
    assert "1 of 1 pictures" in str(error.value) and "ignore_label" not in str(error.value)


def test_faults_of_both_splits_are_named_and_a_common_one_once(tmp_path):
    with pytest.raises(
        ValueError, match=r"(?s)masks/train/a.png: class 7.*masks/val/a.png: class 7"
    ):
        load_segmentation(str(folders(tmp_path)))
    (tmp_path / "classes.txt").unlink()
    with pytest.raises(FileNotFoundError) as raised:
        load_segmentation(str(tmp_path))
    assert str(raised.value).count("classes.txt is missing") == 1


def test_a_class_map_of_another_size_is_named(tmp_path):
    root = folders(tmp_path, ((0, 1), (1, 0)))
    write(root / "masks" / "val" / "a.png", np.zeros((3, 2)))
    with pytest.raises(ValueError, match="the class map has 2 x 3 pixels, the picture 2 x 2"):
        load_segmentation(str(root))


def test_a_colour_picture_is_no_class_map(tmp_path):
    root = folders(tmp_path, ((0, 1), (1, 0)))
    write(root / "masks" / "val" / "a.png", np.zeros((2, 2, 3)))
    with pytest.raises(ValueError, match="is not a class map: expected one channel"):
        load_segmentation(str(root))


@pytest.mark.parametrize("count", [0, 256])
def test_no_classes_and_more_than_bytes_can_tell_are_refused(tmp_path, count):
    (folders(tmp_path) / "classes.txt").write_text("name\n" * count)
    with pytest.raises(ValueError, match=f"classes.txt must name 1 to 255 classes, got {count}"):
        load_segmentation(str(tmp_path))


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 3 2\n%%EndComments\nshowpage\n%%EOF\n"


@pytest.mark.parametrize(
    "content, message",
    [
        (EPS, "a.png: not a picture, or not in the format PNG"),
        (b"", "a.png: the file is empty"),
        (b"\x89PNG\r\n\x1a\n" + 30 * b"\xff", "a.png: "),
    ],
)
def test_class_maps_are_read_as_png_alone(tmp_path, monkeypatch, content, message):
    root = folders(tmp_path, ((0, 1, 1),))
    (root / "masks" / "train" / "a.png").write_bytes(content)
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", None)
    with pytest.raises(ValueError, match=message) as caught:
        load_segmentation(str(root))
    assert "\n" not in str(caught.value)


def test_a_class_map_that_promises_too_many_pixels_is_refused_undecoded(tmp_path):
    root = folders(tmp_path, ((0, 1, 1),))
    file = root / "masks" / "train" / "a.png"
    content = bytearray(file.read_bytes())
    for side, message in ((30_000, "limit of 100,000,000 pixels"), (60_000, "limit of")):
        content[16:24] = struct.pack(">II", side, side)
        content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
        file.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            load_segmentation(str(root))


def test_a_picture_with_an_orientation_that_is_a_text_is_checked_as_it_is(tmp_path):
    root = folders(tmp_path, ((0, 1, 1),))
    entry = struct.pack("<HHI4s", 0x0112, 2, 4, b"abc\0")  # of kind 2: letters
    exif = b"Exif\0\0II*\0" + struct.pack("<IH", 8, 1) + entry + bytes(4)
    Image.new("RGB", (3, 1)).save(root / "images" / "train" / "a.png", exif=exif)
    assert len(load_segmentation(str(root)).train) == 1


def test_class_names_that_are_no_text_are_said(tmp_path):
    root = folders(tmp_path)
    (root / "classes.txt").write_bytes(b"ground\n\xff\xfe\n")
    with pytest.raises(ValueError, match="classes.txt is not readable as text"):
        load_segmentation(str(root))


def test_missing_class_maps_are_named(tmp_path):
    root = folders(tmp_path)
    (root / "masks" / "train" / "a.png").unlink()
    with pytest.raises(FileNotFoundError, match="1 class maps are missing: .*a.png"):
        load_segmentation(str(root))


@pytest.mark.parametrize(
    ("images", "masks"),
    [
        ("images/train/{}.jpg", "masks/train/{}.png"),
        ("images/training/{}.jpg", "annotations/training/{}.png"),
        ("leftImg8bit/train/ulm/{}_leftImg8bit.png", "gtFine/train/ulm/{}_gtFine_labelIds.png"),
    ],
)
def test_a_class_map_without_its_picture_is_named(tmp_path, images, masks):
    (tmp_path / "classes.txt").write_text("ground\n")
    for name in ("ulm_1", "ulm_2"):
        write_pair(tmp_path / images.format(name), tmp_path / masks.format(name), ((0, 0),))
    assert len(load_split(str(tmp_path), "train")[0]) == 2
    (tmp_path / images.format("ulm_2")).unlink()
    with pytest.raises(FileNotFoundError, match="1 pictures are missing in .*: .*/ulm_2"):
        load_split(str(tmp_path), "train")


def test_a_damaged_picture_is_not_called_a_class_map(tmp_path):
    picture = folders(tmp_path, ((0, 1),)) / "images" / "train" / "a.png"
    picture.write_bytes(picture.read_bytes()[:50])
    with pytest.raises(ValueError, match="1 of 1 pictures with their class maps .*images/train/a"):
        load_segmentation(str(tmp_path))


def test_ade20k_counts_from_one_and_ignores_zero(tmp_path):
    for split in ("training", "validation"):
        write_pair(
            tmp_path / "images" / split / "a.jpg",
            tmp_path / "annotations" / split / "a.png",
            ((0, 1, 150),),
        )
    data = load_segmentation(str(tmp_path))
    assert len(data.class_names) == 150
    assert data.train[0][1].tolist() == [[IGNORE, 0, 149]]


def test_a_value_beyond_ade20ks_is_named_as_it_is_in_the_file(tmp_path):
    test_ade20k_counts_from_one_and_ignores_zero(tmp_path)
    write(tmp_path / "annotations" / "training" / "a.png", ((0, 1, 180),))
    with pytest.raises(
        ValueError, match=r"class 180, .* 150 classes \(1 to 150\) and 0 and 255 to ignore"
    ):
        load_segmentation(str(tmp_path))


def test_ade20k_takes_names_from_its_table(tmp_path):
    test_ade20k_counts_from_one_and_ignores_zero(tmp_path)
    rows = ["Idx\tRatio\tTrain\tVal\tStuff\tName"]
    rows += [f"{i}\t0\t0\t0\t0\tname{i}, other" for i in range(1, 151)]
    (tmp_path / "objectInfo150.txt").write_text("\n".join(rows))
    assert load_segmentation(str(tmp_path)).class_names[:2] == ("name1", "name2")


@pytest.mark.parametrize("ready", [False, True])
def test_cityscapes_gives_the_19_training_classes(tmp_path, ready):
    ids = [c.id for c in Cityscapes.classes if c.id >= 0]
    expected = [c.train_id for c in Cityscapes.classes if c.id >= 0]
    kind = "labelTrainIds" if ready else "labelIds"
    for split in ("train", "val"):
        write_pair(
            tmp_path / "leftImg8bit" / split / "ulm" / "ulm_0_1_leftImg8bit.png",
            tmp_path / "gtFine" / split / "ulm" / f"ulm_0_1_gtFine_{kind}.png",
            [expected if ready else ids],
        )
    data = load_segmentation(str(tmp_path))
    assert data.class_names[0] == "road"
    assert len(data.class_names) == 19
    assert data.val[0][1].tolist() == [expected]


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [("labelIds", 99, r"34 classes \(0 to 33\)"), ("labelTrainIds", 33, r"19 classes \(0 to 18\)")],
)
def test_an_id_that_cityscapes_does_not_have_is_named(tmp_path, kind, value, message):
    for split in ("train", "val"):
        write_pair(
            tmp_path / "leftImg8bit" / split / "ulm" / "ulm_0_1_leftImg8bit.png",
            tmp_path / "gtFine" / split / "ulm" / f"ulm_0_1_gtFine_{kind}.png",
            [[0, value, 255]],
        )
    with pytest.raises(
        ValueError, match=rf"{kind}.png: class {value}, but there are only {message}"
    ):
        load_segmentation(str(tmp_path))


@pytest.mark.parametrize("lists", ["ImageSets/Segmentation", "ImageSets"])
def test_voc_reads_palettes_lists_and_any_kind_of_picture(tmp_path, lists):
    for name, suffix in (("2007_1", ".jpg"), ("2007_2", ".webp")):
        write(tmp_path / "JPEGImages" / f"{name}{suffix}", np.zeros((2, 3, 3)))
        path = tmp_path / "SegmentationClass" / f"{name}.png"
        path.parent.mkdir(exist_ok=True)
        palette = Image.fromarray(np.array([[0, 20, 255], [1, 2, 3]], np.uint8), "P")
        palette.putpalette([7 * i % 256 for i in range(768)])
        palette.save(path)
    (tmp_path / lists).mkdir(parents=True)
    (tmp_path / lists / "train.txt").write_text("2007_1\n2007_2\n")
    (tmp_path / lists / "val.txt").write_text("2007_2\n")
    data = load_segmentation(str(tmp_path))
    assert data.class_names == VOC_CLASSES
    assert (len(data.train), len(data.val)) == (2, 1)
    assert data.train[1][1].tolist() == [[0, 20, IGNORE], [1, 2, 3]]


def test_an_unknown_layout_is_answered_with_those_that_are_known(tmp_path):
    with pytest.raises(FileNotFoundError, match="Cityscapes  leftImg8bit/train"):
        load_segmentation(str(tmp_path))


def test_shapes_are_the_embedded_pictures():
    data = load_segmentation(None, shapes=(3, 2))
    assert (len(data.train), len(data.val), len(data.class_names)) == (3, 2, 6)
    np.testing.assert_array_equal(data.val[1][1], draw_shapes(1, split="val").class_map)


def test_crops_have_one_size_and_ignore_what_is_outside_of_the_picture(tmp_path):
    data = load_segmentation(str(folders(tmp_path, np.ones((20, 30)))))
    data.train.transform = train_transform(24, short_side=16)
    batch = collate_segmentation([data.train[0] for _ in range(8)])
    assert batch.images.shape == (8, 3, 24, 24)
    assert batch.class_maps.shape == (8, 24, 24)
    assert set(batch.class_maps.unique().tolist()) == {1, IGNORE}


def test_flips_move_picture_and_class_map_alike():
    data = load_segmentation(None, shapes=(1, 1))
    plain, classes = data.train[0]
    data.train.transform = train_transform(96)
    for _ in range(8):
        image, mask = data.train[0]
        flipped = not torch.equal(image, plain)
        torch.testing.assert_close(image, plain.flip(-1) if flipped else torch.as_tensor(plain))
        torch.testing.assert_close(mask, (classes.flip(-1) if flipped else classes) + 0)


def test_evaluation_resizes_the_picture_and_not_the_class_map():
    data = load_segmentation(None, shapes=(1, 1))
    data.val.transform = EvalTransform(64)
    image, mask = data.val[0]
    assert image.shape == (3, 64, 64)
    assert mask.shape == (96, 96)
    assert len(collate_pictures([data.val[0]]).images) == 1


def test_an_unreadable_picture_is_skipped(tmp_path):
    root = folders(tmp_path, ((0, 1), (1, 0)))
    data = load_segmentation(str(root))
    (root / "images" / "train" / "a.png").write_bytes(b"no picture")
    batch = collate_segmentation([data.train[0]])
    assert len(batch.images) == 0
    assert len(batch.unreadable) == 1


def test_twins_have_three_splits_of_pictures_and_class_maps():
    data = load_segmentation(None, dataset="twins")
    assert data.class_names == ("single", "twin")
    test, _ = load_split(None, "test", dataset="twins")
    assert [len(part) for part in (data.train, data.val, test)] == [100_000, 256, 1024]
    image, class_map = data.val[3]
    assert image.shape == (3, 64, 64) and class_map.double().mean() == 0.5
    assert not torch.equal(image, test[3][0]) and not torch.equal(image, data.train[3][0])
    assert torch.equal(class_map, torch.from_numpy(data.val.class_map(3)).long())
