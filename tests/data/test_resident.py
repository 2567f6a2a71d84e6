"""Pictures on the device are cropped and resized as Pillow and torchvision do it on the CPU."""

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform
from torchvision.transforms import InterpolationMode, RandomResizedCrop
from torchvision.transforms import functional as TF

from softfree.data.images import ImageFiles
from softfree.data.resident import RandomCrops, ResidentImages, random_boxes, resize_matrices

BOX = dict(scale=(0.3, 1.0), ratio=(3 / 4, 4 / 3))


@pytest.fixture
def files(tmp_path):
    random = np.random.default_rng(0)
    paths = []
    for index in range(6):
        pixels = random.integers(0, 256, (20, 24, 3), dtype=np.uint8)
        paths.append(str(tmp_path / f"{index}.png"))
        Image.fromarray(pixels).save(paths[-1])
    return ImageFiles(paths, [0, 1, 2, 0, 1, 2])


@pytest.mark.parametrize("size", [33, 9], ids=["larger", "smaller"])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_resizing_equals_pillow(files, size, interpolation):
    pixels = torch.from_numpy(np.array(Image.open(files.paths[0]))).permute(2, 0, 1).float()
    top, left, height, width = (torch.tensor([float(x)]) for x in (3, 5, 14, 11))
    cubic = interpolation == "bicubic"
    down = resize_matrices(top, height, 20, size, cubic)[0]
    across = resize_matrices(left, width, 24, size, cubic)[0]
    wide = (pixels @ across.T).round().clamp(0, 255)
    ours = (down @ wide).round().clamp(0, 255)
    theirs = TF.resized_crop(
        Image.open(files.paths[0]), 3, 5, 14, 11, [size, size], InterpolationMode(interpolation)
    )
    difference = (ours - TF.pil_to_tensor(theirs)).abs()
    # Where noise overshoots, the order of the two directions shows; Pillow may take either.
    assert (difference > 2).float().mean() < 0.02 and difference.mean() < 0.5


def test_boxes_are_drawn_as_torchvision_draws_them():
    torch.manual_seed(0)
    (top, left), (height, width) = random_boxes(20_000, (20, 24), **BOX, device=torch.device("cpu"))
    picture = Image.new("RGB", (24, 20))
    theirs = [
        RandomResizedCrop.get_params(picture, BOX["scale"], BOX["ratio"]) for _ in range(20_000)
    ]
    theirs = torch.tensor(theirs, dtype=torch.float32)
    for ours, other in zip((top, left, height, width), theirs.T, strict=True):
        assert abs(ours.min() - other.min()) <= 1 and abs(ours.max() - other.max()) <= 1
        assert abs(ours.mean() - other.mean()) < 0.1
        assert abs(ours.std() - other.std()) < 0.1


def test_a_shape_that_never_fits_gives_the_largest_centred_box():
    boxes = random_boxes(3, (20, 24), (5.0, 6.0), (1.0, 1.0), torch.device("cpu"))
    (top, left), (height, width) = boxes
    assert (top == 0).all() and (left == 2).all() and (height == 20).all() and (width == 20).all()


def draw(resident, indices, size, **settings):
    """Random crops of the pictures, as seed 3 has them."""
    torch.manual_seed(3)
    crops = RandomCrops(resident, size, **settings)
    return crops(crops.draw(indices))


@pytest.mark.parametrize("kind", ["bicubic", "bilinear"])
def test_matrices_of_the_table_are_those_of_the_boxes(files, kind):
    crops = RandomCrops(ResidentImages(files, "cpu"), 16, **BOX, hflip=0.5, interpolation=kind)
    torch.manual_seed(3)
    plan = crops.draw(torch.arange(6).repeat(5))
    torch.manual_seed(3)
    first, length = random_boxes(30, (20, 24), **BOX, device=torch.device("cpu"))
    mirrored = torch.rand(30) < 0.5
    expected = resize_matrices(first, length, 24, 16, kind == "bicubic")
    expected[1, mirrored] = expected[1, mirrored].flip(1)
    torch.testing.assert_close(crops.matrices[plan[1:3], plan[3:5]], expected)
    assert 0 < mirrored.sum() < 30


def test_whole_pictures_are_kept_and_mirrored(files):
    resident = ResidentImages(files, "cpu")
    assert resident.labels.tolist() == [0, 1, 2, 0, 1, 2]
    indices = torch.tensor([4, 0])
    square = dict(scale=(1.0, 1.0), ratio=(24 / 20, 24 / 20))
    plain, mirrored = (draw(resident, indices, 24, **square, hflip=hflip) for hflip in (0.0, 1.0))
    assert torch.equal(mirrored, plain.flip(3))
    wide = TF.pil_to_tensor(Image.open(files.paths[4])).float()
    assert (plain[0, :, ::6].shape, plain.min() >= 0, plain.max() <= 255) == (
        (3, 4, 24),
        True,
        True,
    )
    assert (plain[0].mean() - wide.mean()).abs() < 3


@pytest.mark.parametrize("crop_pct", [1.0, 0.8])
def test_test_pictures_are_prepared_as_timm_prepares_them(files, crop_pct):
    transform = create_transform(
        16, is_training=False, interpolation="bicubic", crop_pct=crop_pct, normalize=False
    )
    expected = torch.stack([transform(files.read(index)[0]) for index in (5, 2)])
    ours = ResidentImages(files, "cpu").centre_crops(torch.tensor([5, 2]), 16, crop_pct=crop_pct)
    difference = (ours - expected).abs()
    assert difference.max() <= 2 and difference.mean() < 0.3


def test_the_same_seed_gives_the_same_crops(files):
    resident = ResidentImages(files, "cpu")
    settings = dict(**BOX, hflip=0.5, interpolation="random")
    assert torch.equal(*(draw(resident, torch.arange(6), 16, **settings) for _ in range(2)))


def test_crops_of_a_part_are_that_part_of_the_crops(files):
    crops = RandomCrops(ResidentImages(files, "cpu"), 16, **BOX, hflip=0.5)
    plan = crops.draw(torch.arange(6))
    assert torch.equal(crops(plan[:, 2:5]), crops(plan)[2:5])


def test_each_picture_has_its_own_filter_when_it_is_random(files):
    resident, indices = ResidentImages(files, "cpu"), torch.arange(6).repeat(4)
    kinds = ("random", "bicubic", "bilinear")
    mixed, cubic, linear = (
        draw(resident, indices, 16, **BOX, hflip=0.5, interpolation=kind) for kind in kinds
    )
    is_cubic = (mixed == cubic).flatten(1).all(1)
    is_linear = (mixed == linear).flatten(1).all(1)
    assert is_cubic.any() and is_linear.any() and (is_cubic ^ is_linear).all()


def test_pictures_of_different_sizes_are_refused(files, tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "odd.png")
    files.paths[3] = str(tmp_path / "odd.png")
    with pytest.raises(
        ValueError, match=r"the same size: .*0\.png has 24 x 20 pixels, .*odd\.png has 8 x 8"
    ):
        ResidentImages(files, "cpu")


def test_a_file_that_cannot_be_read_is_named(files, tmp_path):
    (tmp_path / "bad.png").write_bytes(b"no picture")
    files.paths[2] = str(tmp_path / "bad.png")
    with pytest.raises(ValueError, match=r"`data_on_device`: .*bad\.png can't be read"):
        ResidentImages(files, "cpu")
