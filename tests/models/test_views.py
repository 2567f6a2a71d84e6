"""Test-time augmentation of classifiers: means of probabilities over the views, nothing else."""

import pytest
import torch
from torch import nn

from softfree.models.views import AS_IS, AveragedClassifier, Views, mirror, rescale


class Slanted(nn.Module):
    """Sees left from right."""

    def forward(self, images):
        return (images * torch.linspace(-1, 1, images.shape[-1])).mean((2, 3))


def symmetric(images):
    return images.mean((2, 3))


@pytest.fixture
def images():
    return torch.rand(2, 3, 12, 20, generator=torch.Generator().manual_seed(0))


def test_the_mirror_image_tells_a_symmetric_model_nothing_new(images):
    network = nn.Module()
    network.forward = symmetric
    found = AveragedClassifier(network, Views(mirrored=True))(images)
    torch.testing.assert_close(found, symmetric(images).log_softmax(-1))


def test_probabilities_are_averaged_over_sizes_and_mirror_images(images):
    network = Slanted()
    found = AveragedClassifier(network, Views((0.5, 1.0), mirrored=True))(images)
    small = rescale(images, 0.5)
    assert small.shape[-2:] == (6, 10)
    shown = (small, small.flip(-1), images, images.flip(-1))
    expected = sum(network(view).softmax(-1) for view in shown) / 4
    torch.testing.assert_close(found.exp(), expected)
    assert not torch.allclose(expected, network(images).softmax(-1), atol=1e-3)


def test_certain_answers_that_differ_give_a_finite_loss():
    class Certain(nn.Module):
        def forward(self, images):
            return torch.tensor([[1e4, 0.0]] if images[0, 0, 0, 0] else [[0.0, 1e4]])

    images = torch.zeros(1, 3, 1, 2)
    images[..., 0] = 1
    found = AveragedClassifier(Certain(), Views(mirrored=True))(images)
    torch.testing.assert_close(found.exp(), torch.tensor([[0.5, 0.5]]))


def test_a_map_of_a_mirrored_view_is_turned_back(images):
    for shown, turn_back in Views(mirrored=True).show(images):
        assert torch.equal(turn_back(shown), images)
    assert torch.equal(mirror(images)[..., 0], images[..., -1])


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_size_that_no_picture_can_have_is_refused(scale):
    with pytest.raises(ValueError, match="`tta_scales` must be above 0, got "):
        Views.of(True, (1.0, scale))


def test_nothing_asked_for_is_the_picture_as_it_is():
    assert Views.of(False, ()) == Views.of(False, (1.0, 1.0)) == AS_IS
    assert len(Views.of(True, (0.5, 1.0))) == 4


def test_pictures_are_loaded_at_the_largest_size_they_are_shown_at():
    assert Views((0.5, 1.0)).loaded_at(64) == (64, Views((0.5, 1.0)))
    assert Views((1.0, 2.0)).loaded_at(64) == (128, Views((0.5, 1.0)))
    assert Views((1.0, 2.0)).loaded_at(0) == (0, Views((1.0, 2.0)))


def test_a_network_of_one_size_is_not_shown_others():
    network = Slanted()
    network.set_input_size = lambda img_size: None
    AveragedClassifier(network, Views(mirrored=True))
    with pytest.raises(ValueError, match="`tta_scales` 0.5 1: Slanted takes pictures of one size"):
        AveragedClassifier(network, Views((0.5, 1.0)))
