"""Twins: half of the cells have exactly one equal, labels say which, every sample is its own and drawn again alike."""

import numpy as np
import pytest

from softfree.data.longrange import UNLABELLED, PadSequences, load_longrange
from softfree.data.twins import COUNTS, SPLITS, draw_twin_picture, draw_twins


@pytest.mark.parametrize("split", SPLITS)
def test_half_of_the_cells_have_exactly_one_equal_and_the_labels_say_which(split):
    for index in range(20):
        values, labels = draw_twins(index, split)
        equals = (values[:, None] == values).all(-1).sum(1) - 1
        assert values.shape == (64, 8) and values.dtype == np.float32
        assert np.array_equal(equals, labels) and labels.sum() == 32


def test_a_sample_is_drawn_again_alike_and_differs_from_all_others():
    again = [draw_twins(3, "dev")[0] for _ in range(2)]
    assert np.array_equal(*again)
    drawn = [draw_twins(i, split)[0].tobytes() for split in SPLITS for i in range(50)]
    assert len(set(drawn)) == len(drawn)


def test_places_and_values_say_nothing():
    values, labels = (np.stack(part) for part in zip(*map(draw_twins, range(2000)), strict=True))
    assert abs(labels.mean(0) - 0.5).max() < 0.06  # 5 standard errors
    assert abs(values[labels == 1].mean(0)).max() < 0.03
    assert abs(values[labels == 1].std(0) - 1).max() < 0.03


def test_an_unknown_split_is_named():
    with pytest.raises(ValueError, match="split must be one of train, dev, test, got 'val'"):
        draw_twins(0, "val")


def test_the_task_needs_no_files_and_pads_what_is_shorter():
    data = load_longrange("twins")
    assert [len(part) for part in (data.train, data.dev, data.test)] == list(COUNTS)
    assert data.class_names == ("single", "twin") and data.task.per_token
    (values, labels), (other, _) = data.train[0], data.train[1]
    batch = PadSequences(64)([(values, labels), (other, labels)])
    assert batch.tokens.shape == (2, 64, 8) and batch.mask is None
    batch = PadSequences(64)([(values, labels), (other[:10], labels[:10])])
    assert batch.mask is not None and batch.mask.sum(1).tolist() == [64, 10]
    assert (batch.labels[1, 10:] == UNLABELLED).all() and (batch.tokens[1, 10:] == 0).all()


def test_a_picture_has_cells_of_which_half_have_a_twin_and_its_class_map_says_which():
    picture, classes = draw_twin_picture(5, "dev")
    assert picture.shape == (64, 64, 3) and classes.shape == (64, 64)
    cells = picture.reshape(8, 8, 8, 8, 3).swapaxes(1, 2).reshape(64, -1)
    equals = (cells[:, None] == cells).all(-1).sum(1) - 1
    assert np.array_equal(equals, classes[::8, ::8].ravel()) and classes.mean() == 0.5
    assert np.array_equal(classes, classes[::8, ::8].repeat(8, 0).repeat(8, 1))
