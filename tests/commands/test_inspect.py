"""`softfree inspect`: figures of the layers, and warnings where something is wrong with them."""

import json

import timm
import torch
from torch import nn

import softfree_cli
from softfree.analysis.capture import capture_attention
from softfree.commands.inspect import describe, print_report
from softfree.commands.settings import resolve
from softfree.training.longrange import LongRange

from .checkpoints import SHAPE, classifier_checkpoint


def small(**kwargs) -> nn.Module:
    # Queries of the size that they have after training: before it, layers attend to everything alike.
    return timm.create_model("softpp_tiny", img_size=64, **SHAPE | dict(query_gain=8) | kwargs)


def examine(model: nn.Module, image: torch.Tensor) -> list[dict]:
    return [describe(layer) for layer in capture_attention(model, image).layers]


def test_a_run_s_name_is_printed_as_it_is(capsys):
    print_report(examine(small(), torch.randn(3, 64, 64)), "softpp_tiny, cats [red] [/red]")
    assert "softpp_tiny, cats [red] [/red]" in capsys.readouterr().out


def test_a_sound_model_has_no_warnings():
    rows = examine(small(landmark_gain=0.5), torch.randn(3, 64, 64))
    assert [row["layer"] for row in rows] == [f"stages.{i}.blocks.0.attn" for i in range(4)]
    assert not any(row["warnings"] for row in rows)
    assert all(row["residual"] < 1e-2 and row["steps_needed"] <= 20 for row in rows)


def test_a_layer_that_solves_has_no_steps_to_take_or_to_need():
    for row in examine(small(landmark_gain=0.5, inverse="solve"), torch.randn(3, 64, 64)):
        assert (row["inverse"], row["steps"], row["steps_needed"]) == ("solve", None, None)
        assert 0 < row["residual"] < 1e-2
        assert not row["warnings"]


def test_a_planted_near_singular_layer_is_found():
    model = small()
    nn.init.constant_(model.stages[1].blocks[0].attn.sampler.norm.weight, 1e-4)
    rows = examine(model, torch.randn(3, 64, 64))
    warned = {row["layer"]: row["warnings"] for row in rows if row["warnings"]}
    assert list(warned) == ["stages.1.blocks.0.attn"]
    assert "near-singular" in warned["stages.1.blocks.0.attn"][0]
    assert rows[1]["condition"] > 1e6 and rows[1]["kept_eigenvalues"] < rows[1]["m"]


def test_a_planted_under_iterated_layer_is_found_and_the_advice_helps():
    model = small()
    attention = model.stages[2].blocks[0].attn
    attention.iterations = 3
    image = torch.randn(3, 64, 64)
    rows = examine(model, image)
    warned = {row["layer"]: row["warnings"] for row in rows if row["warnings"]}
    assert list(warned) == ["stages.2.blocks.0.attn"]
    needed = rows[2]["steps_needed"]
    assert f"iterations={needed} would bring it to 0.01" in warned["stages.2.blocks.0.attn"][0]
    attention.iterations = needed
    assert not examine(model, image)[2]["warnings"]


def test_layers_that_attend_to_everything_alike_are_found():
    rows = examine(small(landmark_gain=0.5, query_gain=0.1), torch.randn(3, 64, 64))
    assert [row["judgement"] for row in rows] == ["flat"] * 4
    assert all("attends to everything alike" in row["warnings"][-1] for row in rows)
    assert max(row["contrast"] for row in rows) < 0.05


def test_a_layer_with_landmarks_far_from_all_tokens_is_found_and_our_own_family_advised(capsys):
    model = small(landmark_gain=0.5)
    nn.init.constant_(model.stages[1].blocks[0].attn.sampler.norm.weight, 9)
    rows = examine(model, torch.randn(3, 64, 64))
    warned = {row["layer"]: row["warnings"] for row in rows if row["warnings"]}
    assert list(warned) == ["stages.1.blocks.0.attn"]
    assert "attends to next to nothing" in warned["stages.1.blocks.0.attn"][0]
    assert rows[1]["total_weight"] < 1e-2 < rows[0]["total_weight"]
    print_report(rows, "a model")
    out = capsys.readouterr().out
    assert "softfree_* (and --attention\nsoftfree)" in out
    # A table of 80 columns has room for its first one.
    assert all(f"\n {place} " in out for place in ("stage", "block", "1.1", "4.1"))
    image = torch.randn(3, 64, 64)
    own = timm.create_model("softfree_tiny", img_size=64, **SHAPE)
    assert not any(row["judgement"] == "dead" for row in examine(own, image))


def test_the_command_reports_a_checkpoint(tmp_path, capsys):
    folder = classifier_checkpoint(tmp_path / "run" / "best", iterations=3)
    assert softfree_cli.main(["inspect", "--checkpoint", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "softpp_tiny, run on a drawn picture of 64 x 64 pixels" in out
    assert out.count("too few Newton steps") == 4
    assert softfree_cli.main(["inspect", "--checkpoint", str(folder), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["steps"] for row in rows] == [3] * 4


def test_a_model_of_sequences_is_inspected_on_a_sample_of_its_task(tmp_path, capsys):
    options = [
        "--task",
        "twins",
        "--steps",
        "1",
        "--batch-size",
        "2",
        "--device",
        "cpu",
        "--workers",
        "0",
    ]
    LongRange.run(resolve([*options, "--output", str(tmp_path)], LongRange))
    assert softfree_cli.main(["inspect", "--checkpoint", str(tmp_path / "best"), "--json"]) == 0
    out = capsys.readouterr().out
    rows = json.loads(out[out.index("[\n") :])
    assert [(row["layer"], row["m"]) for row in rows] == [(f"blocks.{i}.attn", 64) for i in (0, 1)]
    given = ["inspect", "--checkpoint", str(tmp_path / "best"), "--img-size", "64"]
    assert softfree_cli.main(given) == 2
    assert "a sequence model takes no photo" in capsys.readouterr().err


def test_softmax_layers_are_listed_without_figures(capsys):
    assert softfree_cli.main(["inspect", "--model", "soft_tiny_release", "--img-size", "64"]) == 0
    out = capsys.readouterr().out
    assert "softmax" in out and "SOFT" in out


def test_wrong_arguments_are_refused(tmp_path, capsys):
    for arguments, message in (
        (["missing.jpg"], "no photo at missing.jpg"),
        (["--model", "no_such"], "timm knows no model 'no_such'"),
        (["--img-size", "20"], "--img-size must be at least 32, got 20"),
        (["--model", "soft_tiny", "--checkpoint", "x"], "use only one"),
        (["--checkpoint", str(tmp_path / "none")], "no checkpoint at"),
    ):
        assert softfree_cli.main(["inspect", *arguments]) == 2
        assert message in capsys.readouterr().err
