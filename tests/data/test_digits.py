"""The embedded digits."""

from collections import Counter

import numpy as np
import pytest

from softfree.data import load_images
from softfree.data.digits import Digits


@pytest.fixture(scope="module")
def data():
    return load_images(None)


def test_split_is_fixed_and_every_digit_is_in_both_parts_in_equal_shares(data):
    assert len(data.train) == 1437 and len(data.val) == 360
    assert data.class_names == tuple("0123456789")
    train, val = Counter(data.train.labels), Counter(data.val.labels)
    assert all(0.18 < val[digit] / (val[digit] + train[digit]) < 0.22 for digit in range(10))
    again = load_images(None)
    assert again.val.labels == data.val.labels
    assert (again.val.pixels == data.val.pixels).all()


def test_no_digit_is_in_both_parts_and_none_is_lost(data):
    from sklearn.datasets import load_digits

    everything = np.concatenate([data.train.pixels, data.val.pixels]).reshape(1797, -1)
    expected = np.rint(load_digits().images * (255 / 16)).astype(np.uint8).reshape(1797, -1)
    assert Counter(map(bytes, everything)) == Counter(map(bytes, expected))


def test_picture_is_rgb_upscaled_from_black_to_white(data):
    picture, label = data.train[0]
    assert picture.mode == "RGB" and picture.size == (32, 32)
    assert isinstance(label, int)
    pixels = np.asarray(picture)
    assert pixels.min() < 10 and pixels.max() > 200
    small = np.asarray(picture.resize((8, 8))).mean(-1)
    assert np.corrcoef(small.ravel(), data.train.pixels[0].ravel())[0, 1] > 0.97


def test_mirroring_is_ruled_out_and_items_are_named(data):
    assert not data.mirrors
    assert Digits("val").name(4) == "digits/val/4"
