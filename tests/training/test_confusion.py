"""What is taken for what: the counts and shares that scikit-learn finds."""

import pytest
import torch
from sklearn import metrics

from softfree.training.confusion import add_pairs, class_scores

GENERATOR = torch.Generator().manual_seed(0)
TRUTH = torch.randint(4, (200,), generator=GENERATOR)
PREDICTED = torch.where(torch.rand(200, generator=GENERATOR) < 0.6, TRUTH, (TRUTH * 3 + 1) % 4)


def counted(truth, predicted, classes):
    counts = torch.zeros(classes, classes, dtype=torch.int64)
    # In two parts, of which one has two axes.
    add_pairs(counts, truth[:100].view(10, 10), predicted[:100].view(10, 10))
    add_pairs(counts, truth[100:], predicted[100:])
    return counts


def test_counts_are_those_of_scikit_learn():
    expected = metrics.confusion_matrix(TRUTH, PREDICTED, labels=range(5))
    assert counted(TRUTH, PREDICTED, 5).tolist() == expected.tolist()


def test_scores_are_those_of_scikit_learn():
    scores = class_scores(counted(TRUTH, PREDICTED, 4))
    expected = metrics.precision_recall_fscore_support(TRUTH, PREDICTED)
    for name, values in zip(("precision", "recall", "F1"), expected, strict=False):
        assert scores[name] == pytest.approx(100 * values), name
    iou = metrics.jaccard_score(TRUTH, PREDICTED, average=None)
    assert scores["IoU"] == pytest.approx(100 * iou)


def test_a_class_that_never_occurs_has_no_score_and_one_never_found_has_no_precision():
    scores = class_scores(torch.tensor([[2, 0, 0], [2, 0, 0], [0, 0, 0]]))
    nan = pytest.approx(float("nan"), nan_ok=True)
    assert scores["precision"] == [50, nan, nan]
    assert scores["recall"] == [100, 0, nan]
    assert scores["F1"] == [pytest.approx(200 / 3), 0, nan]
    assert scores["IoU"] == [50, 0, nan]
