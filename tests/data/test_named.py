"""Data sets that timm names are read through the same interface as folders."""

import io
import json
import tarfile

import pytest
from PIL import Image

from softfree.data import Unreadable, load_images


def encoded(colour: str = "red") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (12, 8), colour).save(file, "PNG")
    return file.getvalue()


def write_shard(path, samples: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in samples.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


@pytest.fixture
def shards(tmp_path):
    write_shard(
        tmp_path / "pets-train-0000.tar",
        {"a/0.png": encoded("red"), "a/0.cls": b"1", "a/1.png": encoded("lime"), "a/1.cls": b"0"},
    )
    write_shard(tmp_path / "pets-train-0001.tar", {"2.png": encoded("blue")[:40], "2.cls": b"1"})
    label = json.dumps({"label": 1}).encode()
    write_shard(tmp_path / "pets-validation-00.tar", {"0.png": encoded(), "0.json": label})
    return tmp_path


def test_shards_are_read_in_any_order_with_their_labels(shards):
    data = load_images(str(shards), dataset="wds/pets")
    assert len(data.train) == 3 and len(data.val) == 1
    assert data.class_names == ("0", "1")
    picture, label = data.train[1]
    assert picture.getpixel((3, 3)) == (0, 255, 0) and label == 0
    picture, label = data.train[0]
    assert picture.getpixel((3, 3)) == (255, 0, 0) and label == 1
    assert data.val[0][1] == 1
    bad = data.train[2]
    assert isinstance(bad, Unreadable) and bad.path.endswith("pets-train-0001.tar:2.png")


def test_shards_take_class_names_from_a_file_and_check_the_labels(shards):
    (shards / "classnames.txt").write_text("cat\ndog\n")
    assert load_images(str(shards), dataset="wds/pets").class_names == ("cat", "dog")
    (shards / "classnames.txt").write_text("cat\n")
    with pytest.raises(ValueError, match=r"must lie in 0 ... 0, the lines of .*classnames.txt"):
        load_images(str(shards), dataset="wds/pets")


def test_shards_that_are_missing_or_broken_are_named(shards):
    with pytest.raises(FileNotFoundError, match=r"no birds\*train\*\.tar .*found no \.tar file"):
        load_images(str(shards), dataset="wds/birds")
    write_shard(shards / "pets-train-0002.tar", {"0.png": encoded()})
    with pytest.raises(ValueError, match=r"0002\.tar can't be read .*0\.png has no label"):
        load_images(str(shards), dataset="wds/pets")
    (shards / "pets-train-0002.tar").write_bytes(b"no tar")
    with pytest.raises(ValueError, match=r"0002\.tar can't be read as a shard"):
        load_images(str(shards), dataset="wds/pets")


def test_torchvision_dataset_is_read_and_bad_files_are_named(tmp_path):
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            (tmp_path / split / name).mkdir(parents=True)
            (tmp_path / split / name / "0.png").write_bytes(encoded())
    (tmp_path / "train" / "dog" / "0.png").write_bytes(encoded()[:40])
    data = load_images(str(tmp_path), dataset="torch/image_folder")
    assert data.class_names == ("cat", "dog") and len(data.train) == len(data.val) == 2
    assert data.train[0][0].size == (12, 8)
    assert isinstance(data.train[1], Unreadable) and "dog/0.png" in data.train[1].path
    assert data.val[1][1] == 1
    strict = load_images(str(tmp_path), dataset="torch/image_folder", strict=True)
    with pytest.raises(ValueError, match=r"dog/0\.png can't be read"):
        strict.train[1]


def test_torchvision_dataset_that_is_not_there_is_an_error_that_says_how_to_get_it(tmp_path):
    with pytest.raises(ValueError, match=r"torch/cifar10 can't be read .*fetch it"):
        load_images(str(tmp_path), dataset="torch/cifar10")
    with pytest.raises(ValueError, match=r"torch/nothing can't be read .*Unknown torchvision"):
        load_images(str(tmp_path), dataset="torch/nothing")


def test_hugging_face_dataset_is_read_through_timm(tmp_path, tmp_path_factory):
    pytest.importorskip("datasets", reason="needs the package datasets")
    for split in ("train", "test"):
        for name in ("cat", "dog"):
            (tmp_path / split / name).mkdir(parents=True)
            (tmp_path / split / name / "0.png").write_bytes(encoded())
    cache = str(tmp_path_factory.mktemp("cache"))
    data = load_images(cache, dataset=f"hfds/{tmp_path}")
    assert data.class_names == ("cat", "dog")
    assert len(data.train) == len(data.val) == 2
    assert data.val[1][0].size == (12, 8) and data.val[1][1] == 1


def test_wrong_name_or_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"must start with torch/, hfds/, wds/, got 'imagenet'"):
        load_images(str(tmp_path), dataset="imagenet")
    with pytest.raises(ValueError, match=r"`dataset` wds/a needs `data_dir`"):
        load_images(None, dataset="wds/a")
    with pytest.raises(FileNotFoundError, match=r"nowhere is not a folder"):
        load_images(str(tmp_path / "nowhere"), dataset="wds/a")
