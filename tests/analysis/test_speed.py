"""What is measured of whole networks, and that measuring changes none of their results."""

import pytest
import torch
from torch import nn

from softfree.analysis.speed import fold_if_safe, make_target, try_count_macs


def test_a_model_whose_products_cannot_be_counted_is_still_measured():
    class AsksForNumbers(nn.Conv2d):
        def forward(self, x):
            return super().forward(x) if x.sum().item() else x

    assert try_count_macs(AsksForNumbers(3, 4, 3), 8) is None
    assert try_count_macs(nn.Conv2d(3, 4, 3), 8) == 6 * 6 * 9 * 3 * 4


def test_batch_norms_are_folded_only_where_the_result_stays():
    class NormFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 3)
            self.norm = nn.BatchNorm2d(3)

        def forward(self, x):
            return self.conv(self.norm(x))

    torch.manual_seed(0)
    follows = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    follows[1].running_mean.uniform_(-1, 1)
    image = torch.randn(1, 3, 8, 8)
    expected = follows(image)
    assert fold_if_safe(follows, 8) == "1 batch norms folded"
    assert isinstance(follows[1], nn.Identity)
    torch.testing.assert_close(follows(image), expected)

    precedes = NormFirst().eval()
    assert "not folded" in fold_if_safe(precedes, 8)
    assert isinstance(precedes.norm, nn.BatchNorm2d)
    assert fold_if_safe(nn.Conv2d(3, 4, 3), 8) == "no batch norm to fold"


@pytest.mark.parametrize("masks", [False, True])
def test_made_up_objects_lie_inside_the_picture(masks):
    target = make_target(60, 90, masks, torch.device("cpu"))
    left, top, right, bottom = target["boxes"].T
    assert (left >= 0).all() and (top >= 0).all() and (right <= 90).all() and (bottom <= 60).all()
    assert (right - left >= 9).all() and (bottom - top >= 6).all()
    if masks:
        assert target["masks"].shape == (len(left), 60, 90)
        # A mask has its box's area, to within the border's pixels.
        area = (right - left) * (bottom - top)
        assert torch.allclose(target["masks"].sum((1, 2)).float(), area, rtol=0.4)
