"""The explorer's maps are those of the captured layers, its classes the model's, its memory bounded."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from softfree.analysis.capture import SoftLayer, SoftmaxLayer, capture_attention
from softfree.analysis.judgement import WORDS
from softfree.analysis.pictures import view
from softfree.analysis.subject import Subject
from softfree.explorer.maps import (
    KEPT_PHOTOS,
    MOST_STEPS,
    WIDEST,
    Explorer,
    Place,
    pack,
    top_classes,
)
from tests.analysis.small import small

from .small import PREPARATION, encoded, photo, spread, subjects


@pytest.fixture
def explorer() -> Explorer:
    return Explorer(subjects(), {"one": photo(0), "two": photo(1)})


@pytest.mark.parametrize("steps", [None, 0, 3])
@pytest.mark.parametrize("stage", [1, 4])  # the fourth has a class token
def test_maps_equal_those_of_the_layer_and_of_what_if(explorer, stage, steps):
    place = Place(0, "sample-1", 96, stage, -1)
    layer = explorer.layer(place)
    assert isinstance(layer, SoftLayer)
    maps = explorer.heat_maps(place, 0.3, 0.8, steps)
    changed = replace(layer, iterations=layer.iterations if steps is None else steps)
    token = layer.token_at(0.3, 0.8)
    for found, what in zip(
        maps,
        (replace(changed, normalize=False), replace(changed, normalize=True), layer.as_softmax()),
        strict=True,
    ):
        torch.testing.assert_close(found, what.heat_map(token).double(), rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("steps", [None, 3])
def test_maps_of_pooled_landmarks_have_the_share_that_the_layer_has(steps):
    model = spread(small("softpp_tiny", strides=(2, 2, 1, 1), landmarks="conv:4"))
    explorer = Explorer([Subject("pooled", model, dict(PREPARATION))], {"one": photo(0)})
    place = Place(0, "sample-1", 96, 1, -1)
    layer = explorer.layer(place)
    assert isinstance(layer, SoftLayer) and layer.share < 0.1
    changed = replace(layer, iterations=layer.iterations if steps is None else steps)
    _, found, _ = explorer.heat_maps(place, 0.3, 0.8, steps)
    expected = changed.heat_map(layer.token_at(0.3, 0.8)).double()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-12)


def test_the_photo_shown_for_a_model_is_what_it_sees():
    metadata = {**PREPARATION, "crop_pct": 0.5}
    explorer = Explorer([Subject("half", small("softpp_tiny"), metadata)], {"one": photo(0)})
    assert explorer.photo("sample-1").size == (70, 70)
    assert explorer.photo("sample-1", model=0).size == (35, 35)


def test_a_layer_of_another_kind_has_the_one_map_it_computes(explorer):
    place = Place(1, "sample-1", 64, 1, -1)
    layer = explorer.layer(place)
    assert isinstance(layer, SoftmaxLayer)
    expected = layer.heat_map(layer.token_at(0.5, 0.5)).double()[None]
    torch.testing.assert_close(explorer.heat_maps(place, 0.5, 0.5, steps=3), expected)
    assert explorer.inverse(place) == {"residuals": [], "kept": [], "shares": []}
    assert explorer.describe(1, "sample-1", 64)["layers"][0]["variants"] == ["softmax"]


def test_residuals_and_what_is_kept_are_those_of_the_iteration(explorer):
    place = Place(0, "sample-2", 64, 2, -1)
    layer = explorer.layer(place)
    assert isinstance(layer, SoftLayer)
    found = explorer.inverse(place)
    assert len(found["residuals"]) == len(found["kept"]) == MOST_STEPS + 1
    assert found["kept"][3] == replace(layer, iterations=3).kept_eigenvalues().min()
    assert sum(share > 0.5 for share in found["shares"]) == found["kept"][layer.iterations]
    computed = layer.residuals(8).amax(0)
    torch.testing.assert_close(
        torch.tensor(found["residuals"][:9], dtype=computed.dtype), computed, rtol=1e-3, atol=1e-6
    )


def test_a_layer_of_more_steps_than_can_be_chosen_has_its_own_residual():
    model = small("softpp_tiny", iterations=MOST_STEPS + 10)
    explorer = Explorer([Subject("long", model, dict(PREPARATION))], {"one": photo(0)})
    found = explorer.inverse(Place(0, "sample-1", 64, 1, -1))
    assert len(found["residuals"]) == len(found["kept"]) == MOST_STEPS + 11


def test_a_solve_says_what_it_keeps(explorer):
    place = Place(2, "sample-1", 64, 1, -1)
    layer = explorer.layer(place)
    assert isinstance(layer, SoftLayer) and layer.method == "solve"
    found = explorer.inverse(place)
    assert found["residuals"] == [layer.residual().max().item()]
    assert found["kept"] == [int(layer.kept_eigenvalues().min())]
    assert found["shares"] == sorted(found["shares"], reverse=True)
    assert sum(share > 0.5 for share in found["shares"]) == found["kept"][0]


def test_a_layer_that_attends_to_everything_alike_is_described_so():
    model = small("softfree_tiny", query_gain=1e-3)
    explorer = Explorer([Subject("dull", model, dict(PREPARATION))], {"one": photo(0)})
    layers = explorer.describe(0, "sample-1", 64)["layers"]
    assert all("alike" in layer["warning"] for layer in layers)


def test_the_likeliest_classes_are_the_models(explorer):
    found = explorer.describe(0, "sample-1", 64)["top"]
    _, model, metadata, _ = explorer.subjects[0]
    logits = capture_attention(model, view(photo(0), 64, metadata).pixels).output[0]
    order = logits.argsort(descending=True).tolist()
    assert [row["label"] for row in found] == [metadata["class_names"][index] for index in order]
    assert sum(row["probability"] for row in found) == pytest.approx(1)


def test_models_that_do_not_classify_have_no_classes():
    assert top_classes({"0": torch.zeros(1)}, {"task": "detection"}) is None
    assert top_classes(torch.tensor([[0.0, 2.0]]), {"task": "classification"}) is None


def test_a_capture_is_made_once(explorer, monkeypatch):
    explorer.describe(0, "sample-1", 64)

    def fail(*_):
        raise AssertionError("captured again")

    monkeypatch.setattr("softfree.explorer.maps.capture_attention", fail)
    explorer.heat_maps(Place(0, "sample-1", 64, 1, -1), 0.1, 0.2)
    with pytest.raises(AssertionError, match="captured again"):
        explorer.describe(0, "sample-1", 96)


def test_threads_do_not_mix_their_captures(explorer):
    sizes = range(64, 193, 32)
    with ThreadPoolExecutor(len(sizes)) as threads:
        found = list(threads.map(lambda size: explorer.describe(0, "sample-1", size), sizes))
    assert [layer["grid"][0] for row in found for layer in row["layers"]] == [
        size // reduction for size in sizes for reduction in (4, 8, 16, 32)
    ]


def test_the_oldest_upload_is_forgotten_and_samples_stay(explorer):
    names = [explorer.add_photo(encoded(photo(seed, 8, 8))) for seed in range(KEPT_PHOTOS + 1)]
    with pytest.raises(ValueError, match="no longer kept"):
        explorer.photo(names[0])
    assert explorer.photo(names[-1]).size == (8, 8)
    assert explorer.photo("sample-1").size == (70, 70)


def test_large_photos_are_kept_as_a_smaller_square(explorer):
    name = explorer.add_photo(encoded(photo(0, 3000, 1500), "JPEG"))
    assert explorer.photo(name).size == (WIDEST, WIDEST)


def test_packed_maps_have_their_ranges_what_they_are_and_each_its_own_scale():
    some = [[0.0, 1.0], [2.0, 4.0]]
    maps = torch.tensor([[some], [[[7.0, 7.0], [7.0, 7.1]]], [[[0.0, 1e-9], [0.0, 0.0]]]]).double()
    packed = pack(maps)
    np.testing.assert_allclose(np.frombuffer(packed[:24], "<f4"), [0, 4, 7, 7.1, 0, 1e-9])
    assert [WORDS[place] for place in packed[24:27]] == ["", "flat", "dead"]
    assert list(packed[27:]) == [0, 64, 128, 255, 251, 251, 251, 255, 0, 0, 0, 0]
