"""Charts can be read."""

import itertools

from softfree.analysis.plots import draw_bars


def test_numbers_below_narrow_panels_do_not_run_into_each_other():
    values = {"training": [0.016, 0.016], "inference": [0.004, 0.004]}
    figure = draw_bars(["softmax (fused)", "b"], {"images": values, "GiB": values}, "title")
    figure.draw_without_rendering()
    for axes in figure.axes:
        boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
        gaps = [right.x0 - left.x1 for left, right in itertools.pairwise(boxes)]
        assert min(gaps) > 5
