"""Pictures of every kind are read correctly, bad ones stop nothing, and randomness can be repeated."""

import os
import random
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform
from torch.utils.data import DataLoader, Dataset

from softfree.data import (
    Unreadable,
    UnreadableImageError,
    collate_images,
    load_images,
    open_image,
    seeded,
)
from softfree.data.classification import has_fewer
from softfree.data.images import ImageFiles, image_files, printable, upright_size

ORANGE = (240, 120, 20)


def picture(size=(40, 24), colour=ORANGE) -> Image.Image:
    """Of one colour, with a black upper left corner that shows how it is turned."""
    image = Image.new("RGB", size, colour)
    image.paste((0, 0, 0), (0, 0, 10, 6))
    return image


def assert_is_the_picture(image: Image.Image, tolerance=4):
    assert image.mode == "RGB"
    assert image.size == (40, 24)
    difference = np.abs(np.asarray(image, dtype=int) - np.asarray(picture(), dtype=int))
    assert difference[12:, 12:].max() <= tolerance
    assert difference[:5, :9].max() <= tolerance


def save_folders(root, classes=("cat", "dog"), count=2, splits=("train", "val")):
    for split in splits:
        for name in classes:
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                picture().save(root / split / name / f"{number}.png")


@pytest.mark.parametrize("extension", ["png", "bmp", "gif", "tiff", "webp", "ppm"])
def test_every_format_gives_the_same_picture(tmp_path, extension):
    path = tmp_path / f"a.{extension}"
    picture().save(path, **({"lossless": True} if extension == "webp" else {}))
    assert_is_the_picture(open_image(path))


def test_grey_becomes_three_equal_channels(tmp_path):
    picture().convert("L").save(tmp_path / "grey.jpg")
    pixels = np.asarray(open_image(tmp_path / "grey.jpg"))
    assert pixels.shape == (24, 40, 3)
    assert (pixels[..., 0] == pixels[..., 1]).all() and (pixels[..., 0] == pixels[..., 2]).all()
    assert abs(int(pixels[20, 30, 0]) - 144) <= 2  # the luminance of the orange


def test_cmyk_keeps_its_colours(tmp_path):
    picture().convert("CMYK").save(tmp_path / "print.jpg", quality=100)
    assert_is_the_picture(open_image(tmp_path / "print.jpg"), tolerance=8)


def test_palette_keeps_its_colours(tmp_path):
    picture().convert("P", palette=Image.Palette.ADAPTIVE).save(tmp_path / "palette.png")
    assert_is_the_picture(open_image(tmp_path / "palette.png"))


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_transparent_parts_become_white_whatever_colour_hides_there(tmp_path, mode):
    alpha = Image.new("L", (40, 24), 255)
    alpha.paste(0, (0, 0, 40, 12))
    image = picture().convert(mode)
    image.putalpha(alpha)
    image.save(tmp_path / "cut_out.png")
    pixels = np.asarray(open_image(tmp_path / "cut_out.png"))
    assert (pixels[:12] == 255).all()
    assert (pixels[12:] < 250).all()


def test_transparent_palette_entry_becomes_white(tmp_path):
    image = Image.new("P", (8, 8), 0)
    image.putpalette([0, 0, 0, 240, 120, 20])
    image.paste(1, (0, 4, 8, 8))
    image.save(tmp_path / "a.gif", transparency=0)
    pixels = np.asarray(open_image(tmp_path / "a.gif"))
    assert (pixels[:4] == 255).all() and (pixels[4:] == ORANGE).all()


@pytest.mark.parametrize("extension", ["png", "tiff", "pgm"])
def test_sixteen_bits_are_scaled_and_not_cut_off(tmp_path, extension):
    values = np.array([[0, 257, 32896, 65535]], dtype=np.uint16)
    path = tmp_path / f"deep.{extension}"
    Image.fromarray(values).save(path)
    assert np.asarray(open_image(path))[0, :, 0].tolist() == [0, 1, 128, 255]


def test_animated_picture_gives_its_first_frame(tmp_path):
    frames = [picture(colour=colour) for colour in (ORANGE, (0, 0, 255), (0, 255, 0))]
    frames[0].save(tmp_path / "moving.gif", save_all=True, append_images=frames[1:])
    assert_is_the_picture(open_image(tmp_path / "moving.gif"))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_undone(tmp_path, orientation):
    stored = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    image = picture()
    if orientation in stored:
        image = image.transpose(stored[orientation])
    exif = Image.Exif()
    exif[0x0112] = orientation
    image.save(tmp_path / "turned.png", exif=exif)
    assert_is_the_picture(open_image(tmp_path / "turned.png"))


def png_header(width: int, height: int) -> bytes:
    """A PNG that promises a size and has no pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        check = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    end = chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + end


def damage(path, kind: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    content = path.read_bytes()
    path.write_bytes(
        {
            "empty": b"",
            "truncated": content[: len(content) // 2],
            "text": b"not a picture",
            "program": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n",
            "bomb": png_header(30_000, 30_000),
            "small bomb": png_header(30_000, 5_000),
            "no pixels": png_header(64, 64),
        }[kind]
    )


DAMAGES = {
    "empty": "the file is empty",
    "truncated": "truncated",
    "text": "not a picture, or in none of the formats BMP",
    "program": "not a picture, or in none of the formats BMP",
    "bomb": "more than the limit of 100,000,000 pixels$",
    "small bomb": "more than the limit of 100,000,000 pixels: 30,000 x 5,000",
    "no pixels": "truncated|broken",
}


@pytest.mark.parametrize("extension", ["jpg", "png"])
@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_file_is_refused_with_a_reason(tmp_path, kind, extension):
    path = tmp_path / f"bad.{extension}"
    damage(path, kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UnreadableImageError, match=DAMAGES[kind]):
            open_image(path)


def test_missing_file_and_floating_point_pixels_are_refused(tmp_path):
    with pytest.raises(UnreadableImageError, match="No such file"):
        open_image(tmp_path / "nowhere.png")
    Image.fromarray(np.ones((4, 4), np.float32)).save(tmp_path / "depth.tiff")
    with pytest.raises(UnreadableImageError, match="no fixed range"):
        open_image(tmp_path / "depth.tiff")


def test_a_picture_of_one_row_is_refused_before_it_is_decoded(tmp_path):
    # Resized to a short side of 224 it would have 224 x 224 million pixels.
    Image.new("L", (1, 1_000_000)).save(tmp_path / "a.png")
    Image.new("L", (3, 300)).save(tmp_path / "b.png")
    with pytest.raises(UnreadableImageError, match="1 x 1,000,000 pixels: one side is more than 1"):
        open_image(tmp_path / "a.png")
    assert open_image(tmp_path / "b.png").size == (3, 300)


def test_an_orientation_that_is_a_text_turns_nothing(tmp_path):
    entry = struct.pack("<HHI4s", 0x0112, 2, 4, b"abc\0")  # of kind 2: letters
    exif = b"Exif\0\0II*\0" + struct.pack("<IH", 8, 1) + entry + bytes(4)
    picture().save(tmp_path / "a.jpg", exif=exif)
    assert upright_size(tmp_path / "a.jpg") == open_image(tmp_path / "a.jpg").size == (40, 24)


def test_what_is_no_file_and_folders_that_were_seen_are_left_out_by_name(tmp_path, caplog):
    (tmp_path / "deep").mkdir()
    picture().save(tmp_path / "deep" / "a.png")
    (tmp_path / "deep" / "up").symlink_to(tmp_path)
    (tmp_path / "again").symlink_to(tmp_path / "deep")
    (tmp_path / "loop.png").symlink_to(tmp_path / "loop.png")
    (tmp_path / "lost.png").symlink_to(tmp_path / "nowhere.png")
    (tmp_path / "device.png").symlink_to("/dev/zero")
    (tmp_path / "link.png").symlink_to(tmp_path / "deep" / "a.png")
    os.mkfifo(tmp_path / "pipe.png")
    found = image_files(tmp_path)
    assert [Path(path).name for path in found] == ["a.png", "link.png"]
    for name in ("loop", "lost", "device", "pipe"):
        assert f"{name}.png: it is not a file" in caplog.text


def test_names_that_are_no_utf_8_are_read_and_shown_escaped(tmp_path):
    name = os.fsencode(tmp_path) + b"/caf\xe9\x1b.png"
    picture().save(os.fsdecode(name))
    (found,) = image_files(tmp_path)
    assert open_image(found).size == (40, 24)
    assert printable(found).endswith("/caf\\xe9\\x1b.png")
    printable(found).encode()


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_files_are_named_in_the_batch_and_the_loader_goes_on(tmp_path, workers):
    save_folders(tmp_path, count=len(DAMAGES))
    for number, kind in enumerate(DAMAGES):
        damage(tmp_path / "train" / "dog" / f"{number}.png", kind)
    data = load_images(str(tmp_path))
    data.train.transform = create_transform(input_size=32, is_training=False)
    loader = DataLoader(data.train, 5, num_workers=workers, collate_fn=collate_images)
    batches = list(loader)
    assert sum(len(batch.labels) for batch in batches) == len(DAMAGES)
    assert all(batch.images.shape[0] == len(batch.labels) for batch in batches)
    named = [item.path for batch in batches for item in batch.unreadable]
    assert named == [str(tmp_path / "train" / "dog" / f"{i}.png") for i in range(len(DAMAGES))]


def test_strict_data_stops_at_a_bad_file_and_names_it(tmp_path):
    save_folders(tmp_path)
    damage(tmp_path / "train" / "cat" / "1.png", "truncated")
    data = load_images(str(tmp_path), strict=True)
    assert data.train[0][1] == 0
    with pytest.raises(ValueError, match=r"train/cat/1\.png can't be read: .*truncated"):
        data.train[1]


def test_error_in_a_transform_is_not_taken_for_a_bad_file(tmp_path):
    picture().save(tmp_path / "a.png")
    files = ImageFiles([str(tmp_path / "a.png")], [0])
    files.transform = lambda image: image.no_such_method()
    with pytest.raises(AttributeError, match="no_such_method"):
        files[0]


def test_refilled_batch_keeps_its_size_and_repeats_readable_items():
    items = [(torch.full((3, 2, 2), float(i)), i) for i in range(2)]
    bad = Unreadable("a.png", "the file is empty")
    batch = collate_images([items[0], bad, bad, items[1], bad], refill=True)
    assert batch.labels.tolist() == [0, 1, 0, 1, 0]
    assert batch.images[:, 0, 0, 0].tolist() == [0, 1, 0, 1, 0]
    assert batch.unreadable == [bad] * 3
    assert collate_images([items[0], bad]).labels.tolist() == [0]


@pytest.mark.parametrize("refill", [False, True])
def test_batch_of_bad_files_alone_has_no_images(refill):
    batch = collate_images([Unreadable("a.png", "the file is empty")], refill=refill)
    assert len(batch.images) == len(batch.labels) == 0
    assert len(batch.unreadable) == 1


def test_folders_give_sorted_classes_and_every_picture(tmp_path):
    save_folders(tmp_path, classes=("dog", "cat"), count=3, splits=("train", "validation"))
    (tmp_path / "train" / "cat" / "deeper").mkdir()
    picture().save(tmp_path / "train" / "cat" / "deeper" / "UPPER.JPG")
    (tmp_path / "train" / "cat" / "notes.txt").write_text("no picture")
    (tmp_path / "train" / "cat" / "._0.png").write_text("a file manager's")
    data = load_images(str(tmp_path))
    assert data.class_names == ("cat", "dog")
    assert len(data.train) == 7 and len(data.val) == 6
    labels = [data.train[i][1] for i in range(7)]
    assert labels == [0, 0, 0, 0, 1, 1, 1]


def test_missing_data_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"`data_dir` .*nowhere does not exist; .*train/"):
        load_images(str(tmp_path / "nowhere"))
    (tmp_path / "file").write_text("")
    with pytest.raises(FileNotFoundError, match=r"file is a file; expected a folder"):
        load_images(str(tmp_path / "file"))


def test_folder_without_train_or_val_says_what_is_there(tmp_path):
    (tmp_path / "cat").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no folder train/ .*found cat/"):
        load_images(str(tmp_path))
    save_folders(tmp_path, splits=("train",))
    with pytest.raises(FileNotFoundError, match=r"no folder val/ \(or validation/.*found cat/, tr"):
        load_images(str(tmp_path))


def test_the_split_test_takes_the_pictures_of_test_and_of_nothing_else(tmp_path):
    save_folders(tmp_path, count=1)
    with pytest.raises(
        FileNotFoundError, match=r"no folder test/ \(or testing/\).*found train/, val/"
    ):
        load_images(str(tmp_path), split="test")
    save_folders(tmp_path, count=3, splits=("test",))
    data = load_images(str(tmp_path), split="test")
    assert len(data.train) == 2 and len(data.val) == 6
    assert all("/test/" in path for path in data.val.paths)
    with pytest.raises(
        ValueError, match="`split` test: the embedded digits have only train and val"
    ):
        load_images(None, split="test")


def flat_folder(root, **counts):
    for name, count in counts.items():
        (root / name).mkdir(parents=True)
        for number in range(count):
            picture().save(root / name / f"{number}.png")


def names(data):
    return {Path(path).relative_to(Path(path).parents[1]).as_posix() for path in data.paths}


@pytest.mark.parametrize("folder", ["", "train"])
def test_a_share_of_each_class_is_set_aside_where_there_is_no_val(tmp_path, folder):
    flat_folder(tmp_path / folder, cat=10, dog=20, emu=2)
    data = load_images(str(tmp_path), val_split=0.2)
    assert data.class_names == ("cat", "dog", "emu")
    assert [data.val.labels.count(label) for label in range(3)] == [2, 4, 1]
    assert [data.train.labels.count(label) for label in range(3)] == [8, 16, 1]
    assert not names(data.train) & names(data.val)
    again = load_images(str(tmp_path), val_split=0.2)
    assert again.val.paths == data.val.paths
    other = load_images(str(tmp_path), val_split=0.2, split_seed=1)
    assert other.val.paths != data.val.paths


def test_pictures_that_are_added_leave_the_others_where_they_are(tmp_path):
    flat_folder(tmp_path, cat=100)
    before = names(load_images(str(tmp_path), val_split=0.2).val)
    picture().save(tmp_path / "cat" / "new.png")
    assert len(before - names(load_images(str(tmp_path), val_split=0.2).val)) <= 1


def test_a_split_that_makes_no_sense_is_refused(tmp_path):
    flat_folder(tmp_path / "one", cat=3, dog=1)
    with pytest.raises(ValueError, match="needs at least two pictures per class.*only one in dog/"):
        load_images(str(tmp_path / "one"), val_split=0.2)
    save_folders(tmp_path / "both")
    with pytest.raises(ValueError, match="val already has validation pictures; use one of the two"):
        load_images(str(tmp_path / "both"), val_split=0.2)
    with pytest.raises(ValueError, match="`val_split` must be a share from 0 to 1"):
        load_images(str(tmp_path / "one"), val_split=20)
    with pytest.raises(
        ValueError, match="is for folders of pictures; the set of embedded digits already has"
    ):
        load_images(None, val_split=0.2)


def test_pictures_are_counted_no_further_than_need_be(tmp_path):
    flat_folder(tmp_path, cat=3, dog=2)
    assert has_fewer(str(tmp_path), 6) and not has_fewer(str(tmp_path), 5)
    save_folders(tmp_path / "split", count=1)
    assert has_fewer(str(tmp_path / "split"), 3) and not has_fewer(str(tmp_path / "split"), 2)
    assert not has_fewer(None, 6) and not has_fewer(str(tmp_path / "nowhere"), 6)


def test_split_without_class_folders_says_what_is_there(tmp_path):
    save_folders(tmp_path, splits=("train",))
    (tmp_path / "val").mkdir()
    with pytest.raises(ValueError, match=r"val has no class folders.*found nothing"):
        load_images(str(tmp_path))
    picture().save(tmp_path / "val" / "0.png")
    with pytest.raises(ValueError, match=r"val has no class folders.*found 0.png"):
        load_images(str(tmp_path))


def test_empty_class_folder_is_named(tmp_path):
    save_folders(tmp_path)
    for file in (tmp_path / "val" / "dog").iterdir():
        file.unlink()
    with pytest.raises(ValueError, match=r"val has class folders without a picture: dog/; .*\.png"):
        load_images(str(tmp_path))


def test_classes_that_differ_are_named(tmp_path):
    save_folders(tmp_path, classes=("cat", "dog"), splits=("train",))
    save_folders(tmp_path, classes=("cat", "emu"), splits=("val",))
    with pytest.raises(ValueError, match=r"only in .*train: dog; only in .*val: emu"):
        load_images(str(tmp_path))


def random_transform(image: Image.Image) -> torch.Tensor:
    """Draws from all three generators."""
    return torch.tensor([random.random(), np.random.rand(), float(torch.rand(()))])


def read_all(loader: DataLoader) -> torch.Tensor:
    return torch.cat([batch.images for batch in loader])


class Seeded(Dataset):
    """Items read as in a training run, with the epoch given."""

    def __init__(self, dataset: Dataset, seed: int, epoch: int):
        self.dataset, self.seed, self.epoch = dataset, seed, epoch

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int):
        with seeded(self.seed, self.epoch, index):
            return self.dataset[index]


def test_random_transforms_depend_on_seed_epoch_and_index_alone():
    digits = load_images(None).val
    digits.transform = random_transform
    noisy = Seeded(digits, seed=3, epoch=0)
    here = read_all(DataLoader(noisy, 90, collate_fn=collate_images))
    assert len(here.unique(dim=0)) == len(digits)
    loader = DataLoader(noisy, 60, num_workers=2, collate_fn=collate_images)
    torch.testing.assert_close(read_all(loader), here, rtol=0, atol=0)
    torch.testing.assert_close(noisy[359][0], here[359], rtol=0, atol=0)
    for other in (Seeded(digits, seed=3, epoch=1), Seeded(digits, seed=4, epoch=0)):
        assert not (other[7][0] == here[7]).any()


def test_training_transform_of_timm_can_be_repeated():
    digits = load_images(None).train
    digits.transform = create_transform(
        32, is_training=True, auto_augment="rand-m9-mstd0.5-inc1", re_prob=0.5
    )
    noisy = Seeded(digits, seed=0, epoch=0)
    torch.testing.assert_close(noisy[11][0], noisy[11][0], rtol=0, atol=0)
    assert not torch.equal(noisy[11][0], noisy[12][0])


def test_generators_continue_as_if_nothing_had_been_drawn():
    def draws() -> list[float]:
        return random_transform(picture()).tolist()

    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = [draws(), draws()]
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    first = draws()
    with pytest.raises(RuntimeError), seeded(1, 2, 3):
        draws()
        raise RuntimeError
    assert [first, draws()] == expected
