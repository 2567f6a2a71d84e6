"""Pooling as products with matrices, against torch's own."""

import pytest
import torch
import torch.nn.functional as F

from softfree.layers.pooling import averaging_matrix, pool_segments


@pytest.mark.parametrize("length", [1, 2, 5, 12, 13])
@pytest.mark.parametrize("bins", [1, 2, 5, 7])
def test_the_matrix_is_adaptive_average_pooling(length, bins):
    x = torch.randn(3, length, dtype=torch.float64)
    expected = F.adaptive_avg_pool1d(x, bins)
    torch.testing.assert_close(x @ averaging_matrix(length, bins, x).mT, expected)


def test_bins_beyond_those_used_are_empty():
    matrix = averaging_matrix(2, 4, torch.empty(0), used=2)
    assert matrix.tolist() == [[1, 0], [0, 1], [0, 0], [0, 0]]


def test_segments_are_adaptive_pooling_of_the_real_tokens():
    x = torch.randn(2, 3, 20, 4, dtype=torch.float64)
    mask = torch.rand(2, 20, generator=torch.Generator().manual_seed(0)) > 0.3
    pooled, present = pool_segments(x, mask, 6)
    assert present.all()
    for sample, real, found in zip(x, mask, pooled, strict=True):
        expected = F.adaptive_avg_pool1d(sample[:, real].mT, 6).mT
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("real", [1, 5, 6, 7, 17, 20])
def test_without_overlap_each_real_token_is_in_one_segment(real):
    tokens = torch.eye(20, dtype=torch.float64)[None, None]
    mask = torch.arange(20)[None] < real
    pooled, present = pool_segments(tokens, mask, 6, overlap=False)
    members = pooled[0, 0] > 0
    assert members[:, :real].sum(0).tolist() == [1] * real and not members[:, real:].any()
    assert present[0].tolist() == members.any(1).tolist() == [i < real for i in range(6)]
    sizes = members.sum(1)[present[0]]
    assert sizes.max() - sizes.min() <= 1
