"""From a photo to the square that a model sees, and from its pixels to places in that square."""

import numpy as np
import pytest
import torch
from PIL import Image

from softfree.analysis.pictures import view

METADATA = dict(mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))


def test_the_model_sees_the_central_square_normalised():
    photo = Image.new("RGB", (300, 100), (255, 0, 0))
    photo.paste((0, 255, 0), (100, 0, 200, 100))
    seen = view(photo, 64, METADATA)
    assert seen.box == (100, 0, 200, 100) and seen.picture.size == (64, 64)
    assert (np.asarray(seen.picture)[:, 4:-4] == (0, 255, 0)).all()
    torch.testing.assert_close(seen.pixels[:, 5, 17], torch.tensor([-2.0, 2.0, -2.0]))


def test_points_of_the_photo_are_found_in_the_square():
    seen = view(Image.new("RGB", (300, 100)), 64, METADATA)
    assert seen.locate(100, 0) == (0.005, 0.005)
    assert seen.locate(149.5, 49.5) == (0.5, 0.5)
    with pytest.raises(ValueError, match="x from 100 to 199 and y from 0 to 99 .* got 20,30"):
        seen.locate(20, 30)
