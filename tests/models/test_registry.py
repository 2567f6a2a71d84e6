"""What timm's registry knows: names, sizes, keywords."""

import importlib

import pytest
import timm
import torch
from torch import nn

from .small import ALL, ISOTROPIC, KINDS, OWN, PAPER, RELEASE, small

# As the tables of the papers (to 0.1M) and of the released code (to 0.01M) have them.
PARAMETERS = {
    **{f"{kind}_tiny": 14.9e6 for kind in ("soft", "softpp")},
    **{f"{kind}_small": 27.2e6 for kind in ("soft", "softpp")},
    **{f"{kind}_medium": 48.4e6 for kind in ("soft", "softpp")},
    **{f"{kind}_large": 85.2e6 for kind in ("soft", "softpp")},
    **{f"{kind}_tiny_release": 13.07e6 for kind in ("soft", "softpp")},
    **{f"{kind}_small_release": 38.86e6 for kind in ("soft", "softpp")},
    **{f"{kind}_medium_release": 45.81e6 for kind in ("soft", "softpp")},
    **{f"{kind}_large_release": 64.70e6 for kind in ("soft", "softpp")},
    **{f"{kind}_huge_release": 87.11e6 for kind in ("soft", "softpp")},
}


def count(name: str, **kwargs) -> int:
    with torch.device("meta"):
        model = timm.create_model(name, **kwargs)
    return sum(parameter.numel() for parameter in model.parameters())


def test_the_registry_holds_these_names_and_no_others():
    assert sorted(timm.list_models("soft*")) == sorted(ALL)
    assert len(ALL) == 4 + 8 + 10 + 3


@pytest.mark.parametrize("name", [*PAPER, *RELEASE])
def test_parameters_are_as_many_as_the_tables_say(name):
    unit = 1e4 if name in RELEASE else 1e5
    assert abs(count(name) - PARAMETERS[name]) <= unit / 2


def test_the_tiny_release_without_convolution_has_as_many_parameters_as_table_10_says():
    assert abs(count("soft_tiny_release", landmarks="average") - 12.96e6) <= 0.5e4


@pytest.mark.parametrize("name", OWN)
def test_our_own_models_have_the_budget_of_the_papers(name):
    assert 0.97 < count(name) / count(name.replace("softfree", "softpp")) < 1.005


@pytest.mark.parametrize("name", [*OWN, "softfree_vit_small"])
def test_our_own_models_norm_their_queries_and_learn_the_width_of_their_kernels(name):
    for attention in small(name).modules():
        if type(attention).__name__ == "SoftAttention":
            settings = (attention.query_norm, attention.normalize, attention.inverse)
            assert settings == (True, True, "solve")
            assert attention.log_bandwidth.shape == (attention.num_heads,)
            assert (attention.log_bandwidth == 0).all()
            assert (type(attention.sampler).__name__, attention.sampler.count) == (
                "AverageLandmarks", 128,
            )  # fmt: skip


@pytest.mark.parametrize("name", ISOTROPIC)
def test_the_isotropic_models_have_twelve_layers_of_384_channels(name):
    with torch.device("meta"):
        model = timm.create_model(name)
    assert len(model.blocks) == 12
    assert model.num_features == 384
    assert {block.attn.num_heads for block in model.blocks} == {12}
    assert model.pos_embed.grid == (14, 14)


@pytest.mark.parametrize("name", ALL)
def test_every_name_builds_and_classifies(name):
    model = small(name).eval()
    with torch.no_grad():
        out = model(torch.randn(2, 3, 64, 64))
    assert out.shape == (2, 5)
    assert out.isfinite().all()


@pytest.mark.parametrize("name", [name for name in ALL if not name.startswith("softfree")])
def test_soft_and_softpp_differ_in_the_operator_alone(name):
    attentions = [m for m in small(name).modules() if type(m).__name__ == "SoftAttention"]
    assert len(attentions) >= 3
    for attention in attentions:
        settings = (attention.normalize, attention.start, attention.ridge, attention.iterations)
        plus = name.startswith("softpp")
        assert settings == ((True, "halving", 0.0, 20) if plus else (False, "scaled", 0.01, 20))


@pytest.mark.parametrize("name", ALL)
def test_timms_configuration_fits_the_model(name):
    model = small(name)
    cfg = model.pretrained_cfg
    assert cfg["architecture"] == name
    assert cfg["input_size"] == (3, 224, 224)
    assert isinstance(model.get_submodule(cfg["first_conv"]), nn.Conv2d)
    assert model.get_submodule(cfg["classifier"]) is model.get_classifier()
    data = timm.data.resolve_model_data_config(model)
    assert data["crop_pct"] == 0.875 and data["interpolation"] == "bicubic"


@pytest.mark.parametrize("name", KINDS)
def test_asking_for_pretrained_weights_says_where_the_authors_are_and_how_to_load_them(name):
    assert name not in timm.list_pretrained()
    with pytest.raises(RuntimeError, match=f"{name}.*github.com.*load_release_checkpoint"):
        small(name, pretrained=True)


@pytest.mark.parametrize("name", ALL)
def test_every_name_is_a_documented_function_of_its_module(name):
    function = timm.models.model_entrypoint(name)
    assert function.__name__ == name and name in function.__doc__
    assert getattr(importlib.import_module(function.__module__), name) is function


def test_unknown_keywords_are_refused():
    with pytest.raises(TypeError, match="no_such_keyword"):
        small("softpp_tiny", no_such_keyword=1)


def test_keywords_override_a_names_arguments():
    model = small("softpp_tiny", start="scaled", ridge=0.25, iterations=3, normalize=False)
    attention = model.stages[0].blocks[0].attn
    assert (attention.start, attention.ridge, attention.iterations) == ("scaled", 0.25, 3)
    assert not attention.normalize
