"""Residuals and inverted shares of a model's layers, gathered by stage and drawn."""

import pytest
import torch

from softfree.analysis.capture import capture_attention
from softfree.analysis.convergence import (
    draw_convergence,
    draw_shares,
    residual_curves,
    share_curves,
)

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


def test_shares_of_a_solve_are_those_of_every_image_block_and_head():
    model = small("softfree_tiny")
    images = torch.randn(2, 3, 64, 64)
    curves = share_curves(model, images)
    assert [found.shape[0] for found in curves.values()] == [2, 4, 6, 8]
    last = capture_attention(model, images[1]).soft_layers[-1]
    torch.testing.assert_close(curves[4][-last.heads :], last.inverted_share())


def test_the_figures_say_what_was_taken_and_what_is_inverted():
    shares = {1: torch.tensor([[1.0, 0.9, 0.2], [1.0, 0.6, 0.1]]), 3: torch.ones(1, 3)}
    figure = draw_shares(shares, "tiny, cats", "red")
    assert figure.get_suptitle() == "What the solve inverts: tiny, cats"
    assert [axes.texts[0].get_text() for axes in figure.axes] == [
        "2 of 3 above half",
        "3 of 3 above half",
    ]
    assert list(figure.axes[0].lines[0].get_xdata()) == [1, 2, 3]
    figure = draw_convergence({1: torch.tensor([[1.0, 0.1, 1e-3]])}, {1}, "tiny, cats", "red")
    assert list(figure.axes[0].lines[0].get_xdata()) == [0, 1, 2]
    assert "Newton steps" in figure.axes[0].get_xlabel() and "(1)" in figure.get_supxlabel()


@pytest.mark.filterwarnings("error")
def test_a_single_landmark_is_drawn_as_a_point():
    figure = draw_shares({1: torch.tensor([[0.9], [0.7]])}, "tiny, cats", "red")
    (point,) = [line for line in figure.axes[0].lines if line.get_marker() == "o"]
    assert point.get_xdata().tolist() == [1]
    assert figure.axes[0].get_xlim() == (0.5, 1.5)


@pytest.mark.parametrize(
    "read", [share_curves, lambda model, images: residual_curves(model, images, 3)]
)
def test_a_model_without_softmax_free_layers_has_no_curves(read):
    with pytest.raises(ValueError, match="no softmax-free layer"):
        read(small("softpp_tiny", attention="softmax"), torch.randn(1, 3, 64, 64))
