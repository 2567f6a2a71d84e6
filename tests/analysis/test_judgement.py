"""Layers that attend to nothing or to everything alike are found, and drawn as such."""

from dataclasses import replace

import pytest
import torch

from softfree.analysis.capture import SoftmaxLayer, capture_attention
from softfree.analysis.judgement import judge, judge_layer, judge_maps, scale_maps, warnings_of

from .small import small


def rows(*weights: float) -> torch.Tensor:
    return torch.tensor([[weights]])


@pytest.mark.parametrize(
    ("weights", "word"),
    [
        ((0.25, 0.25, 0.25, 0.25), "flat"),
        ((0.25, 0.251, 0.25, 0.249), "flat"),
        ((-0.25, -0.25, -0.251, -0.25), "flat"),
        ((0.26, 0.24, 0.26, 0.24), ""),
        ((0.25, -0.25, 0.25, -0.25), ""),
        ((1e-3, 0.0, 0.0, 0.0), "dead"),
        ((0.0, 0.0, 0.0, 0.0), "dead"),
        ((1.0,), ""),
    ],
)
def test_rows_are_judged_by_their_total_and_their_contrast(weights, word):
    judged = judge(rows(*weights))
    assert judged.word == word and bool(judged.text) == bool(word)


def test_one_head_that_attends_is_enough():
    assert judge(torch.cat([rows(0.5, 0.5), rows(0.9, 0.1)])).word == ""


def test_a_flat_head_beside_a_dead_one_is_no_attention():
    judged = judge(torch.cat([rows(0.5, 0.5), rows(1e-4, 0.0)]))
    assert judged.word == "flat" and "differ by at most 0.0%" in judged.text


def test_a_layer_whose_landmarks_are_far_away_is_dead():
    found = capture_attention(
        small("softpp_tiny", landmark_gain=0.5, query_gain=8), torch.randn(3, 64, 96)
    )
    layer = found.soft_layers[0]
    assert judge_layer(layer).word == ""
    far = replace(layer, landmarks=layer.landmarks + 100)
    assert judge_layer(far).word == "dead"
    assert "add up to at most 0" in warnings_of([layer, far])[layer.name]


def test_a_softmax_layer_of_equal_keys_is_flat():
    layer = SoftmaxLayer("a", "softmax", (3, 4), torch.randn(2, 12, 4), torch.ones(2, 12, 4))
    assert warnings_of([layer]).keys() == {"a"}
    assert "differ by at most 0.0% of the largest" in judge_layer(layer).text


def test_maps_are_judged_and_scaled_one_by_one():
    attending, flat = torch.tensor([[0.0, 0.1], [0.2, 0.4]]), torch.full((2, 2), 0.16)
    flat[0, 0] += 1e-4
    maps = torch.stack([attending, flat, 1e-4 * attending])
    assert [judged.word for judged in judge_maps(maps)] == ["", "flat", "dead"]
    scaled = scale_maps(maps)
    torch.testing.assert_close(scaled[0], 2.5 * attending)
    assert (scaled[1] > 0.99).all() and scaled[1].max() == 1 and (scaled[2] == 0).all()
    torch.testing.assert_close(scale_maps(maps[None, :, None])[0, :, 0], scaled)


def test_the_colours_of_a_map_differ_by_as_much_as_its_weights():
    weights = torch.linspace(0.1555, 0.1645, 64).view(8, 8)
    torch.testing.assert_close(scale_maps(weights), weights / 0.1645)
    signed = torch.tensor([[-0.25, 0.0], [0.25, 0.75]])
    torch.testing.assert_close(scale_maps(signed), signed + 0.25)
    torch.testing.assert_close(scale_maps(-weights), 1 - weights / 0.1645)
