"""Confusion matrices: counts of (truth, prediction), and the scores of each class computed from them."""

from torch import Tensor


def add_pairs(counts: Tensor, truth: Tensor, predicted: Tensor) -> None:
    """Add pairs of classes to ``counts`` (classes, classes) int64: rows are the truth, columns predictions.

    Example:
        >>> import torch
        >>> counts = torch.zeros(2, 2, dtype=torch.int64)
        >>> add_pairs(counts, torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1]))
        >>> counts.tolist()
        [[1, 1], [0, 1]]
    """
    places = truth.flatten() * len(counts) + predicted.flatten()
    counts += places.bincount(minlength=counts.numel()).view_as(counts)


def class_scores(counts: Tensor) -> dict[str, list[float]]:
    """Scores of each class in percent. With the row sum r, the column sum c and the hits h in ``counts``:

        precision h / c, recall h / r, F1 2 h / (r + c), IoU h / (r + c - h)

    A score is NaN where this is 0 / 0: a class that never occurs has no recall.

    Example:
        >>> import torch
        >>> class_scores(torch.tensor([[3, 1], [0, 0]]))["recall"]
        [75.0, nan]
    """
    hits, rows, columns = counts.diag().double(), counts.sum(1), counts.sum(0)
    shares = {
        "precision": hits / columns,
        "recall": hits / rows,
        "F1": 2 * hits / (rows + columns),
        "IoU": hits / (rows + columns - hits),
    }
    return {name: (100 * share).tolist() for name, share in shares.items()}
