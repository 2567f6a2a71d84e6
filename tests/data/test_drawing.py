"""Sheets show every tile, its caption and the colours it uses; boxes, masks and class maps lie where they should."""

import numpy as np
import torch
from PIL import Image

from softfree.data.drawing import (
    COLUMNS,
    OPACITY,
    TILE,
    class_map_tile,
    colour,
    in_turn,
    objects_tile,
    sheet,
    to_tile,
)

GREY = torch.full((3, 80, 40), 128, dtype=torch.uint8)


def test_a_tile_keeps_the_shape_of_its_picture_and_boxes_move_with_it():
    target = dict(
        boxes=torch.tensor([[10.0, 40.0, 30.0, 60.0]]),
        labels=torch.tensor([2]),
        masks=torch.zeros(1, 80, 40, dtype=torch.uint8),
    )
    target["masks"][0, 45:55, 15:25] = 1
    tile = objects_tile(GREY, target, ["cat", "dog"])
    assert tile.picture.size == (TILE // 2, TILE)
    drawn = np.asarray(tile.picture).astype(int)
    scale = TILE // 80
    assert (drawn[50 * scale, 10 * scale] == colour(2)).all()
    inside = drawn[50 * scale, 20 * scale]
    assert np.abs(inside - (OPACITY * np.array(colour(2)) + (1 - OPACITY) * 128)).max() <= 2
    assert (drawn[42 * scale, 20 * scale] == 128).all()


def test_a_target_without_objects_is_the_picture_alone():
    target = dict(
        boxes=torch.zeros(0, 4), labels=torch.zeros(0).long(), masks=torch.zeros(0, 80, 40)
    )
    tile = objects_tile(GREY, target, ["cat"])
    assert (np.asarray(tile.picture) == 128).all()


def test_pixels_have_the_colour_of_their_class_and_dark_ones_have_none():
    classes = torch.zeros(40, 20).long()  # at half the size of the picture
    classes[:20], classes[30:] = 3, 255
    tile = class_map_tile(GREY, classes, ["ground", "a", "b", "sky"])
    drawn = np.asarray(tile.picture).astype(int)
    for row, painted in ((0.1, colour(3)), (0.6, colour(0)), (0.9, (0, 0, 0))):
        expected = OPACITY * np.array(painted) + (1 - OPACITY) * 128
        assert np.abs(drawn[int(row * TILE), 5] - expected).max() <= 1
    assert tile.legend == {"ground": colour(0), "sky": colour(3)}


def test_a_sheet_has_rows_of_tiles_captions_and_one_legend():
    tiles = [class_map_tile(GREY, torch.ones(80, 40).long(), ["ground", "sky"], "truth")] * 5
    page = np.asarray(sheet(tiles, "title"))
    assert page.shape[1] >= COLUMNS * TILE and page.shape[0] > 2 * TILE
    # The legend's square is the only one that is not mixed with a picture.
    assert 0 < (page == colour(1)).all(-1).sum() < 400
    without = np.asarray(sheet([tile._replace(caption="") for tile in tiles], "title"))
    assert without.shape[0] < page.shape[0]


def test_long_captions_end_below_their_tile():
    tile = to_tile(torch.zeros(3, 80, 80).byte(), "word " * 40)
    page = np.asarray(sheet([tile], ""))
    assert page.shape[1] < TILE + 40 and (page[:, -7:] == 255).all()


def test_guesses_lie_below_their_truths():
    truths, guesses = (
        [to_tile(GREY, f"{name} {number}") for number in range(6)] for name in ("truth", "guess")
    )
    captions = [tile.caption for tile in in_turn(truths, guesses)]
    assert captions[:8] == [*(f"truth {n}" for n in range(4)), *(f"guess {n}" for n in range(4))]
    assert captions[8:10] == ["truth 4", "truth 5"] and captions[12:14] == ["guess 4", "guess 5"]
    assert isinstance(sheet(in_turn(truths[:2], guesses[:2]), ""), Image.Image)
