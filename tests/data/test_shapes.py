"""The embedded shapes repeat exactly, and boxes, masks and class maps agree with the picture."""

import numpy as np
import pytest

from softfree.data.shapes import CLASSES, draw_shapes


def test_the_same_arguments_give_the_same_picture():
    first = draw_shapes(3)
    draw_shapes.cache_clear()
    again = draw_shapes(3)
    assert first is not again
    np.testing.assert_array_equal(first.image, again.image)
    np.testing.assert_array_equal(first.masks, again.masks)


@pytest.mark.parametrize("other", [dict(index=4), dict(split="val"), dict(seed=1)])
def test_another_index_split_or_seed_gives_another_picture(other):
    pictures = [draw_shapes(**{"index": 3, **changed}).image for changed in ({}, other)]
    assert (pictures[0] != pictures[1]).mean() > 0.5


def test_masks_are_disjoint_and_make_up_the_class_map():
    for index in range(20):
        picture = draw_shapes(index)
        assert 1 <= len(picture.labels) <= 4
        assert picture.masks.sum(0).max() == 1
        assert picture.masks.any((1, 2)).all()
        for label in range(len(CLASSES) + 1):
            of_label = picture.masks[picture.labels == label].any(0)
            if label:
                np.testing.assert_array_equal(picture.class_map == label, of_label)


def test_every_class_occurs_and_some_shapes_overlap():
    pictures = [draw_shapes(index) for index in range(60)]
    labels = np.concatenate([picture.labels for picture in pictures])
    assert set(labels) == set(range(1, len(CLASSES) + 1))
    circles = [m for p in pictures for m, k in zip(p.masks, p.labels, strict=True) if k == 1]
    # A circle fills pi/4 of its box, unless another shape hides a part of it.
    filled = [m.sum() / (np.ptp(np.nonzero(m), axis=1) + 1).prod() for m in circles]
    assert max(filled) == pytest.approx(np.pi / 4, abs=0.03)
    assert min(filled) < 0.7


def test_shapes_stand_out_from_what_lies_around_them():
    picture = draw_shapes(0)
    inside = picture.image[picture.masks[-1]].mean(0)
    outside = picture.image[picture.class_map == 0].mean(0)
    assert np.abs(inside - outside).mean() > 20


def test_an_unknown_split_is_refused():
    with pytest.raises(ValueError, match="split must be one of train, val"):
        draw_shapes(0, split="test")
