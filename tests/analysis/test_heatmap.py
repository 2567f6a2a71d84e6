"""Heat maps as they are drawn."""

import numpy as np
import pytest
import torch
from PIL import Image

from softfree.analysis import heatmap
from softfree.analysis.capture import SoftmaxLayer


def test_the_map_drawn_is_the_scaled_row_of_the_query():
    queries = torch.randn(2, 12, 4)
    layer = SoftmaxLayer("layer", "softmax", (3, 4), queries, queries)
    first, second = heatmap.heat_panels(layer, (0.9, 0.5), heads=5)
    row = layer.row(7)[0].reshape(3, 4).numpy()  # the last of the middle row
    np.testing.assert_allclose(first.heat, row / row.max(), rtol=1e-5)
    assert (first.title, second.title) == ("head 1", "head 2")
    assert first.note == f"{row.min():.3g} to {row.max():.3g}, total 1"  # softmax


@pytest.mark.parametrize(("spread", "words"), [(1e-3, "alike: 0.0833 to 0.0833"), (2.0, "total 1")])
def test_a_map_of_weights_that_are_alike_has_one_colour_and_says_so(spread, words):
    queries = spread * torch.randn(1, 12, 4)
    layer = SoftmaxLayer("layer", "softmax", (3, 4), queries, queries)
    (panel,) = heatmap.heat_panels(layer, (0.5, 0.5), heads=1)
    assert words in panel.note
    assert (panel.heat > 0.95).all() == (words != "total 1")


def test_a_map_is_painted_in_flat_squares_over_the_photo():
    heat = np.array([[0.0, 1.0], [0.5, 0.5]])
    black = np.asarray(heatmap.paint(heat, Image.new("RGB", (8, 8))))
    white = np.asarray(heatmap.paint(heat, Image.new("RGB", (8, 8), "white")))
    for rows in (slice(0, 4), slice(4, 8)):
        for columns in (slice(0, 4), slice(4, 8)):
            assert len(np.unique(black[rows, columns].reshape(-1, 3), axis=0)) == 1
    assert (black[0, 0] != black[0, -1]).any() and (black[-1, 0] == black[-1, -1]).all()
    # A quarter of what is seen is the photo.
    assert np.abs(white.astype(int) - black - 0.25 * 255).max() <= 1


def test_each_model_has_its_maps_over_what_it_sees_itself():
    panel = heatmap.Panel("head 1", np.zeros((2, 2)), "total 1")
    colours = {"wide": 40, "narrow": 200}
    groups = [
        heatmap.Group(name, [panel], Image.new("L", (9, 9), grey).convert("RGB"), (0.5, 0.5))
        for name, grey in colours.items()
    ]
    figure = heatmap.draw_heat_maps(groups, "heading", across=True)
    photo, wide, narrow, _ = [axes.images[0].get_array() for axes in figure.axes]
    assert photo.max() == colours["wide"]
    # A quarter of what is seen is the photo.
    assert narrow.mean() - wide.mean() == pytest.approx(0.25 * (200 - 40), abs=1)


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_all_that_is_written_lies_inside_the_figure(rows):
    panels = [heatmap.Panel(f"head {row + 1}", np.zeros((2, 2)), "total 1") for row in range(rows)]
    group = heatmap.Group("stage 1", panels, Image.new("RGB", (9, 9)), (0.5, 0.5))
    figure = heatmap.draw_heat_maps([group], "heading", across=True)
    figure.canvas.draw()
    written = [
        text
        for axes in figure.axes
        for text in (axes.title, axes.yaxis.label, *axes.get_yticklabels(), *axes.texts)
        if text.get_text()
    ]
    assert any("each map's largest" in text.get_text() for text in written)
    for text in written:
        box = text.get_window_extent()
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1, text
        assert figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1, text
