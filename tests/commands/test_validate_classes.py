"""Scores of classes, for people in 80 columns and for programs in rows."""

import io

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from softfree.analysis.plots import save_figure
from softfree.commands.validate.classes import ClassScores


def printed(scores):
    console = Console(file=io.StringIO(), width=80)
    scores.print(console)
    scores.print_confusion(console)
    return console.file.getvalue()


def scores_of(names, confusion, figures=None):
    values = figures or {"AP": [50.0] * len(names)}
    counts = np.array(confusion)
    objects = counts.sum(1)[: len(names)].tolist()
    return ClassScores(names, ("objects", objects), {"": values}, counts)


def test_the_matrix_is_shown_in_percent_of_each_row():
    text = printed(
        scores_of(["cat", "dog"], [[3, 1, 0], [0, 1, 1], [0, 0, 0]], {"AP": [40.04, None]})
    )
    lines = [line.split() for line in text.splitlines()]
    assert ["cat", "4", "40.0"] in lines and ["dog", "2", "-"] in lines
    assert ["1", "cat", "75", "25", "·"] in lines
    assert ["2", "dog", "·", "50", "50"] in lines
    assert ["3", "background", "·", "·", "·"] in lines
    short = [line.split() for line in printed(scores_of(["a", "b"], [[3, 1], [0, 1]])).splitlines()]
    assert ["a", "b"] in short and ["a", "75", "25"] in short


def test_of_many_classes_the_most_frequent_mistakes_are_listed():
    names = [f"a class of a very long name, number {index}" for index in range(40)]
    counts = 10 * np.eye(40, dtype=np.int64)
    counts[7, 30], counts[5, 6] = 30, 10
    text = printed(scores_of(names, counts))
    assert max(map(len, text.splitlines())) <= 80
    mistakes = " ".join(text.partition("Most frequent mistakes")[2].split())
    assert mistakes.index("number 7") < mistakes.index("number 5")
    assert "75.0" in mistakes and "50.0" in mistakes and "number 8" not in mistakes


@pytest.mark.parametrize("classes", [1, 14])
def test_a_matrix_that_is_shown_fits_in_80_columns(classes):
    names = ["a class with quite a long name"] * classes
    text = printed(scores_of(names, 100 * np.eye(classes, dtype=np.int64)))
    assert "Confusion matrix" in text
    assert max(map(len, text.splitlines())) <= 80


def test_rows_have_the_counts_and_what_has_no_figure_is_empty():
    scores = scores_of(
        ["cat", "dog"], [[3, 1, 0], [0, 1, 1], [2, 0, 0]], {"AP": [40.0, float("nan")]}
    )
    cat, dog, background = scores.rows({"split": "val"})
    assert cat == {
        "split": "val", "class": "cat", "objects": 4, "AP": 40.0,
        "predicted cat": 3, "predicted dog": 1, "predicted background": 0,
    }  # fmt: skip
    assert dog["AP"] is None and dog["predicted background"] == 1
    assert background["predicted cat"] == 2 and "AP" not in background


def test_classes_of_one_name_keep_their_counts():
    one, two = scores_of(["cat", "cat"], [[3, 1], [0, 2]]).rows({})
    assert [one["predicted cat (1)"], one["predicted cat (2)"]] == [3, 1]
    assert two["predicted cat (2)"] == 2


@pytest.mark.parametrize("classes", [1, 5, 150])
def test_a_drawing_is_written_for_few_and_many_classes(tmp_path, classes):
    names = [f"$class {index}" for index in range(classes)]
    scores = scores_of(names, np.eye(classes + 1, dtype=np.int64))
    save_figure(scores.draw("title"), tmp_path / "a.png")
    width, height = Image.open(tmp_path / "a.png").size
    assert 300 < width < 4000 and 300 < height < 4000
