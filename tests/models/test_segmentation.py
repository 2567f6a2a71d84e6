"""UPerNet and the linear head work at any size, on any backbone, at once or by sliding windows."""

import pytest
import torch
from torch import nn

from tests.models.small import PYRAMID

pytest.importorskip("segmentation_models_pytorch")

from softfree.models.segmentation import linear, resize_logits, segment, upernet


@pytest.mark.parametrize("size", [(64, 64), (33, 70)])
def test_logits_have_a_quarter_of_the_image_and_the_auxiliary_a_sixteenth(size):
    model = upernet("softpp_tiny", 5, width=16, backbone_kwargs=PYRAMID)
    logits, auxiliary = model(torch.randn(2, 3, *size))
    assert logits.shape == (2, 5, *(-(-side // 4) for side in size))
    assert auxiliary.shape == (2, 5, *(-(-side // 16) for side in size))
    assert model.eval()(torch.randn(2, 3, *size)).shape == logits.shape


def test_every_parameter_takes_part_in_training():
    model = upernet("softfree_tiny", 5, width=16, backbone_kwargs=PYRAMID)
    logits, auxiliary = model(torch.randn(2, 3, 64, 64))
    (logits.sum() + auxiliary.sum()).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("size", [(64, 64), (33, 70)])
def test_logits_of_the_linear_head_add_up_those_of_each_map(size):
    model = linear("softfree_tiny", 5, backbone_kwargs=PYRAMID)
    logits, auxiliary = model(torch.randn(2, 3, *size))
    assert logits.shape == (2, 5, *(-(-side // 4) for side in size)) and auxiliary is None
    logits.sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    layers = model.network.decoder.layers
    for layer in layers[:3]:
        nn.init.zeros_(layer.weight)
    last = model.eval()(torch.randn(2, 3, 64, 64))
    # What is left is the map at 1/32: eight logits at 1/4 are one token of it.
    assert torch.equal(last, last[..., ::8, ::8].repeat_interleave(8, 2).repeat_interleave(8, 3))
    assert not torch.equal(last[..., 0, 0], last[..., 0, 8])


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "resnet10t"])
def test_rivals_serve_as_backbones(name):
    model = upernet(name, 5, width=16).eval()
    with torch.no_grad():
        assert segment(model, torch.randn(1, 3, 40, 50)).shape == (1, 5, 40, 50)


class PixelModel(nn.Module):
    """Each logit is the mean of its 4 x 4 pixels: the same for windows on the grid as for the whole."""

    def forward(self, image):
        return nn.functional.avg_pool2d(image, 4, ceil_mode=True)


def test_sliding_windows_agree_with_the_whole_image_inside_of_them():
    image = torch.randn(1, 3, 48, 64)
    whole = segment(PixelModel(), image)
    slid = segment(PixelModel(), image, window=32, step=16)
    assert slid.shape == whole.shape
    # Interpolation at the border of a window lacks what lies beyond; the middle of the image has it all.
    torch.testing.assert_close(slid[..., 2:14, 2:14], whole[..., 2:14, 2:14])


def test_a_window_larger_than_the_image_is_the_whole_image():
    image = torch.randn(1, 3, 20, 30)
    torch.testing.assert_close(
        segment(PixelModel(), image, window=64), segment(PixelModel(), image)
    )


def test_windows_cover_every_pixel_of_any_size():
    ones = torch.ones(1, 3, 37, 53)
    torch.testing.assert_close(segment(PixelModel(), ones, window=16, step=12), ones)


@pytest.mark.parametrize(("window", "step"), [(0, 1), (16, 0), (16, 17)])
def test_windows_that_leave_gaps_are_refused(window, step):
    with pytest.raises(ValueError, match="step from 1 to window"):
        segment(PixelModel(), torch.ones(1, 3, 32, 32), window=window, step=step)


def test_resizing_does_not_shift_the_logits_of_a_padded_image():
    # A ramp stays the same ramp whether the map covers 30 columns or 32.
    ramp = torch.arange(8.0).expand(1, 1, 8, 8)
    torch.testing.assert_close(
        resize_logits(ramp, (32, 32))[..., :30], resize_logits(ramp, (32, 30))
    )


# Table 7 of the IJCV paper, in millions.
@pytest.mark.parametrize(
    ("name", "paper", "ours"),
    [("softpp_small", 60, 58.9), ("softpp_medium", 81, 80.1), ("swin_tiny_patch4_window7_224", 60, 59.9)],
)  # fmt: skip
def test_parameters_are_close_to_those_of_the_papers_table(name, paper, ours):
    with torch.device("meta"):
        count = sum(p.numel() for p in upernet(name, 150).parameters()) / 1e6
    assert count == pytest.approx(ours, abs=0.06)
    assert count == pytest.approx(paper, rel=0.02)


def test_activations_can_be_recomputed():
    model = upernet("softpp_tiny", 5, width=16, backbone_kwargs=PYRAMID)
    model.set_grad_checkpointing()
    assert sum(getattr(m, "grad_checkpointing", False) for m in model.modules()) == 4
    logits, auxiliary = model(torch.randn(2, 3, 64, 64))
    (logits.sum() + auxiliary.sum()).backward()
    assert model.network.encoder.model.model.stem[0].conv.weight.grad is not None


@pytest.mark.parametrize("given", [dict(num_classes=0), dict(width=1)])
def test_decoders_without_classes_or_channels_are_refused(given):
    with pytest.raises(ValueError, match=f"`{next(iter(given))}` must be at least"):
        upernet("softpp_tiny", **given)
