"""From a photo to the square that a model sees, and from its pixels to places in that square."""

import numpy as np
import pytest
import torch
from PIL import Image

from softfree.analysis.pictures import view
from softfree.training.classification import Normalize, eval_transform

METADATA = dict(mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))


def test_the_model_sees_the_central_square_normalised():
    photo = Image.new("RGB", (300, 100), (255, 0, 0))
    photo.paste((0, 255, 0), (100, 0, 200, 100))
    seen = view(photo, 64, METADATA)
    assert seen.box == (100, 0, 200, 100) and seen.picture.size == (64, 64)
    assert (np.asarray(seen.picture)[:, 4:-4] == (0, 255, 0)).all()
    torch.testing.assert_close(seen.pixels[:, 5, 17], torch.tensor([-2.0, 2.0, -2.0]))


@pytest.mark.parametrize("crop_pct", [1.0, 0.875, 0.5])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_a_model_sees_what_it_is_tested_with(crop_pct, interpolation):
    pixels = np.random.default_rng(0).integers(0, 256, (70, 120, 3), dtype=np.uint8)
    photo = Image.fromarray(pixels)
    metadata = METADATA | dict(img_size=64, crop_pct=crop_pct, interpolation=interpolation)
    tested = Normalize(metadata["mean"], metadata["std"])(eval_transform(metadata)(photo)[None])[0]
    seen = view(photo, 64, metadata)
    torch.testing.assert_close(seen.pixels, tested)
    assert seen.box[2] - seen.box[0] == seen.box[3] - seen.box[1] == round(crop_pct * 70)


def test_the_box_is_where_the_seen_pixels_come_from():
    photo = Image.new("RGB", (300, 100), (255, 0, 0))
    photo.paste((0, 255, 0), (125, 25, 175, 75))
    seen = view(photo, 64, METADATA | {"crop_pct": 0.5})
    assert seen.box == (125, 25, 175, 75)
    assert (np.asarray(seen.picture)[3:-3, 3:-3] == (0, 255, 0)).all()


def test_points_of_the_photo_are_found_in_the_square():
    seen = view(Image.new("RGB", (300, 100)), 64, METADATA)
    assert seen.locate(100, 0) == (0.005, 0.005)
    assert seen.locate(149.5, 49.5) == (0.5, 0.5)
    with pytest.raises(ValueError, match="x from 100 to 199 and y from 0 to 99 .* got 20,30"):
        seen.locate(20, 30)
