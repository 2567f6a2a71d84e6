"""`softfree models`: which models, which figures."""

import json

import pytest
import timm
import torch

from softfree.analysis import count_macs, count_parameters
from softfree.commands import models


def test_every_registered_model_is_found_and_no_other():
    names = models.matching_names("*")
    assert len(names) == len(set(names)) == 25
    assert set(names) == set(timm.list_models("soft*"))


def test_pattern_selects_by_glob():
    assert models.matching_names("softpp_*_release") == [
        f"softpp_{size}_release" for size in ("tiny", "small", "medium", "large", "huge")
    ]


def test_unmatched_pattern_says_how_patterns_look():
    with pytest.raises(ValueError, match=r"no model matches 'resnet\*'.*'softfree_\*'"):
        models.main(["resnet*"])


def test_too_small_an_image_is_refused():
    with pytest.raises(ValueError, match=r"`img_size` must be at least 32, got 8"):
        models.main(["soft_tiny", "--img-size", "8"])


def test_json_has_our_counts_and_the_published_figures(capsys):
    assert models.main(["soft*_tiny*", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == [
        "softfree_tiny", "soft_tiny", "softpp_tiny", "soft_tiny_release", "softpp_tiny_release",
    ]  # fmt: skip
    assert round(rows["softpp_tiny"]["parameters"] / 1e6, 1) == 14.9
    assert round(rows["soft_tiny_release"]["parameters"] / 1e6, 2) == 13.07
    assert rows["softpp_tiny"]["paper_top1_at_224"] == 80.9
    assert rows["soft_tiny_release"]["paper_gflops_at_224"] == 2.0
    assert models.describe("soft_small_release", 224)["paper_top1_at_224"] is None


def test_one_count_serves_soft_and_softpp():
    soft, softpp = (timm.create_model(f"{family}_tiny") for family in ("soft", "softpp"))
    assert count_parameters(soft) == count_parameters(softpp)
    assert count_macs(soft) == count_macs(softpp)


def test_release_parameters_are_those_of_the_authors_code():
    for size in ("tiny", "small", "medium", "large", "huge"):
        name = f"softpp_{size}_release"
        with torch.device("meta"):
            parameters = count_parameters(timm.create_model(name))
        assert round(parameters / 1e6, 2) == models.PUBLISHED[name].params


def test_table_has_a_row_per_model_and_a_dash_where_nothing_is_published(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert models.main(["*_vit_small", "--img-size", "64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("GMACs" in line for line in lines) and any("at 64²" in line for line in lines)
    (row,) = [line for line in lines if "soft_vit_small" in line]
    assert row.split()[-3:] == ["-", "-", "-"]


def test_a_bad_option_exits_2(capsys):
    with pytest.raises(SystemExit) as stopped:
        models.main(["--img-sizes", "3"])
    assert stopped.value.code == 2
