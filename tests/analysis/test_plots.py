"""Charts can be read."""

import errno
import itertools
import os

import pytest

from softfree.analysis import plots
from softfree.analysis.plots import (
    COLOURS,
    LABELS,
    Line,
    draw_against_tokens,
    draw_bars,
    draw_resolution,
)
from softfree.layers import ATTENTIONS


def test_a_line_in_proportion_to_the_tokens_ends_where_the_lowest_one_does():
    lines = [
        Line("a", [(100, 5.0), (200, 9.0)], "C0", "o-"), Line("b", [(100, 1.0), (400, 8.0)], "C1", "o-")
    ]  # fmt: skip
    axes = draw_against_tokens(lines, "ms", "title", "in proportion", xscale="log").axes[0]
    drawn = axes.lines[-1]
    assert drawn.get_label() == "in proportion"
    assert drawn.get_xydata().tolist() == [[100, 2], [400, 8]]


def test_accuracies_fill_their_axis_and_the_trained_size_is_marked():
    figure = draw_resolution({"a": [(96, 61.0), (128, 64.0)]}, {"a": 112}, {"a": "C0"})
    (axes,) = figure.axes
    low, high = axes.get_ylim()
    assert 50 < low < 61 and 64 < high < 75
    assert [list(line.get_xdata()) for line in axes.lines][1] == [112, 112]


def test_numbers_below_narrow_panels_do_not_run_into_each_other():
    values = {"training": [0.016, 0.016], "inference": [0.004, 0.004]}
    panels = {"images": values, "GiB": values}
    figure = draw_bars(["softmax (fused)", "b"], panels, "title", ["#1f77b4", "#ff7f0e"])
    figure.draw_without_rendering()
    for axes in figure.axes:
        boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
        gaps = [right.x0 - left.x1 for left, right in itertools.pairwise(boxes)]
        assert min(gaps) > 5


def test_every_attention_has_one_label_and_a_colour_of_its_own():
    assert set(ATTENTIONS) | {"softmax-unfused", "none"} <= set(LABELS) == set(COLOURS)
    assert len(set(COLOURS.values())) == len(COLOURS)


def test_checkpoints_of_one_attention_share_its_colour_and_differ_in_their_lines():
    curves = {name: [(96, 61.0), (128, 64.0)] for name in "abc"}
    colours = {"a": COLOURS["softpp"], "b": COLOURS["softmax"], "c": COLOURS["softpp"]}
    figure = draw_resolution(curves, dict.fromkeys(curves, 96), colours)
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    assert {name: lines[name].get_color() for name in curves} == colours
    looks = {name: (lines[name].get_linestyle(), lines[name].get_marker()) for name in curves}
    assert looks["a"] == looks["b"] != looks["c"]


def test_bars_have_the_colours_of_their_names():
    values = {"here": [1.0, 2.0], "papers": [3.0, None]}
    figure = draw_bars(["a", "b"], {"accuracy": values}, "title", ["#ff0000", "#0000ff"])
    first, second, lighter, _ = (bar.get_facecolor()[:3] for bar in figure.axes[0].patches)
    assert first == (1, 0, 0) and second == (0, 0, 1)
    assert lighter[0] == 1 and lighter[1] == lighter[2] > 0.5


def test_a_figure_is_written_as_a_whole_or_not_at_all(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file = tmp_path / "a.png"
    file.write_bytes(b"the one before")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        plots.save_figure(plots.new_figure(1, 1), file)
    assert file.read_bytes() == b"the one before"
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]
