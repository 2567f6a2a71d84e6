"""Folders that timm and the Hugging Face Hub take."""

import json

import pytest
import timm
import torch
from timm.models import _hub

from softfree.models.hub import model_card, save_for_timm

from .small import small

METADATA = dict(
    task="classification",
    class_names=["cat", "dog", "owl"],
    img_size=64,
    mean=[0.1, 0.2, 0.3],
    std=[0.4, 0.5, 0.6],
    crop_pct=0.9,
    interpolation="bilinear",
)


@pytest.fixture
def saved(tmp_path):
    arguments = dict(
        embed_dims=(16, 32, 48, 64), num_heads=(1, 2, 3, 4), depths=(1, 1, 1, 1), iterations=3
    )
    model = timm.create_model("softpp_tiny", num_classes=3, img_size=64, **arguments).eval()
    metadata = {**METADATA, "model": "softpp_tiny", "model_kwargs": arguments}
    folder = tmp_path / "pets"
    assert save_for_timm(model, folder, metadata, {"top-1 (%)": 91.5}) == 0
    return model, folder


def test_timm_loads_the_model_with_its_classes_and_preparation(saved):
    model, folder = saved
    assert sorted(file.name for file in folder.iterdir()) == [
        "README.md", "config.json", "model.safetensors",
    ]  # fmt: skip
    loaded = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    image = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(loaded(image), model(image))
    data = timm.data.resolve_data_config(model=loaded)
    assert tuple(data["input_size"]) == (3, 64, 64) and list(data["mean"]) == METADATA["mean"]
    assert data["crop_pct"] == 0.9 and data["interpolation"] == "bilinear"
    assert json.loads((folder / "config.json").read_text())["label_names"] == ["cat", "dog", "owl"]


def test_a_new_head_and_features_are_made_from_the_folder(saved):
    _, folder = saved
    assert timm.create_model(f"local-dir:{folder}", pretrained=True, num_classes=7).num_classes == 7
    maps = timm.create_model(f"local-dir:{folder}", pretrained=True, features_only=True)
    assert len(maps(torch.randn(1, 3, 64, 64))) == 4


def test_names_of_the_hub_load_likewise(saved, monkeypatch):
    model, folder = saved
    fetched = []

    def download(repo_id, filename, **_):
        fetched.append((repo_id, filename))
        return str(folder / filename)

    monkeypatch.setattr(_hub, "hf_hub_download", download)
    loaded = timm.create_model("hf-hub:someone/pets", pretrained=True).eval()
    image = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(loaded(image), model(image))
    assert fetched == [("someone/pets", "config.json"), ("someone/pets", "model.safetensors")]


def test_the_card_says_what_the_model_is_what_it_scored_and_how_it_is_used(saved):
    _, folder = saved
    card = (folder / "README.md").read_text()
    assert card.startswith("---\ntags:\n") and "library_name: timm" in card
    assert "`softpp_tiny`" in card and "| top-1 (%) | 91.5 |" in card and "cat, dog, owl" in card
    assert "import softfree" in card and 'timm.create_model("hf-hub:USER/pets"' in card


@pytest.mark.parametrize("name", ["resnet10t", "vit_tiny_patch16_224"])
def test_models_of_timm_are_written_too_whether_they_take_an_image_size_or_not(name, tmp_path):
    arguments = dict(depth=1, embed_dim=16, num_heads=2) if "vit" in name else {}
    size = dict(img_size=64) if "vit" in name else {}
    model = timm.create_model(name, num_classes=3, **size, **arguments).eval()
    metadata = {**METADATA, "model": name, "model_kwargs": arguments}
    assert save_for_timm(model, tmp_path / "model", metadata) == 0
    card = (tmp_path / "model" / "README.md").read_text()
    assert "import softfree" not in card and "No scores are known" in card
    del metadata["class_names"]
    assert "Random weights" in model_card("fresh", metadata, {})


def test_weights_of_a_folder_are_told_from_none(tmp_path):
    with pytest.raises(RuntimeError, match="no weights come with softpp_tiny"):
        small("softpp_tiny", pretrained=True)
