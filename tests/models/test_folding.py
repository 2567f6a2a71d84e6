"""Folding batch norms leaves what a network computes."""

import pytest
import timm
import torch
from torch import nn

import softfree


@pytest.mark.parametrize(
    ("name", "overlap"), [("softfree_tiny", True), ("softpp_tiny", True), ("softpp_tiny", False)]
)
def test_a_folded_backbone_gives_the_same_and_has_no_batch_norm(name, overlap):
    torch.manual_seed(0)
    kwargs = dict(embed_dims=(16, 32, 48, 64), num_heads=(1, 2, 3, 4), depths=(1, 1, 1, 1))
    model = timm.create_model(name, overlap=overlap, num_classes=5, **kwargs)
    model.train()
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(4, 3, 64, 64) + 1)  # statistics that are not 0 and 1
    model.eval()
    image = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        expected = model(image)
        assert softfree.fold_batch_norms(model) is model
        torch.testing.assert_close(model(image), expected, rtol=1e-4, atol=1e-5)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())


def test_a_network_in_training_is_refused():
    with pytest.raises(ValueError, match=r"network.eval\(\)"):
        softfree.fold_batch_norms(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)))
