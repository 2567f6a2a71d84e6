"""Residual curves of a model's layers, gathered by stage."""

import pytest
import torch

from softfree.analysis.capture import capture_attention
from softfree.analysis.convergence import residual_curves

from .small import small


def test_every_image_block_and_head_has_a_curve_in_its_stage():
    model = small("softpp_tiny", depths=(1, 2, 1, 1))
    images = torch.randn(2, 3, 64, 64)
    curves = residual_curves(model, images, steps=6)
    assert {stage: tuple(found.shape) for stage, found in curves.items()} == {
        1: (2, 7),
        2: (8, 7),
        3: (6, 7),
        4: (8, 7),
    }
    first = capture_attention(model, images[0]).soft_layers[0]
    torch.testing.assert_close(curves[1][:1], first.residuals(6))


def test_a_model_without_newton_steps_has_no_curves():
    with pytest.raises(ValueError, match="no softmax-free layer"):
        residual_curves(small("softpp_tiny", attention="softmax"), torch.randn(1, 3, 64, 64), 3)
