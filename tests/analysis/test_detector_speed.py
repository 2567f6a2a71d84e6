"""The made-up objects that a detector is measured with."""

import pytest
import torch

from softfree.analysis.detector_speed import make_target


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
