"""What commands print: help that fits 80 columns, kept where it is printed without importing torch."""

import contextlib
import os
import re

import pytest

import softfree_cli
from softfree.commands import models, texts
from softfree.commands.settings import resolve
from softfree.training.classification import Classification
from softfree_cli import TEXTS, text_name

KEPT = list(texts.kept())
REMEDY = "run `make texts`"


@pytest.mark.parametrize("arguments", KEPT, ids=" ".join)
def test_the_kept_text_is_what_the_command_prints(arguments):
    assert softfree_cli.kept_text(arguments) == texts.printed(*arguments), REMEDY


def test_only_what_commands_print_is_kept():
    assert {file.name for file in TEXTS.iterdir()} == set(map(text_name, KEPT)), REMEDY


@pytest.mark.full
def test_the_kept_counts_are_those_of_the_models():
    assert models.counted() == {key: models.count(*key) for key in models.counted()}, REMEDY


def test_every_text_fits_80_columns_and_says_what_may_be_typed():
    for arguments in KEPT:
        lines = softfree_cli.kept_text(arguments).splitlines()
        assert lines and max(map(len, lines)) <= 80, arguments
        for wrong in ("{None}", "(default: )", "(default: None)"):
            assert not any(wrong in line for line in lines), (arguments, wrong)


@pytest.mark.parametrize(
    "task", ["train classification", "train detection", "train segmentation", "compare"]
)
def test_recipe_and_config_are_in_the_list_of_options(task):
    text = softfree_cli.kept_text([*task.split(), "--help"])
    assert "\n  --recipe {" in text and "\n  --config FILE " in text


def shown_help(capsys, *argv):
    with pytest.raises(SystemExit) as stop:
        resolve([*argv, "--help"], Classification, prog="softfree train classification")
    assert stop.value.code == 0
    return " ".join(capsys.readouterr().out.split())


def test_the_defaults_shown_are_those_that_the_given_data_get(capsys, tmp_path):
    digits = shown_help(capsys)
    assert (
        "(here: digits)" in digits and "--img-size INT side of the pictures (default: 32)" in digits
    )
    other = shown_help(capsys, "--dataset", "torch/cifar10", "--data-dir", str(tmp_path))
    settings = resolve(["--dataset", "torch/cifar10", "--data-dir", str(tmp_path)], Classification)
    assert f"(here: {settings.recipe})" in other
    assert f"side of the pictures (default: {settings.model.img_size})" in other
    assert f"one forward pass (default: {settings.optim.batch_size})" in other
    short = shown_help(capsys, "--recipe", "short", "--data-dir", str(tmp_path))
    assert "(here: short)" in short and "passes over the training data (default: 20)" in short


@pytest.mark.parametrize(
    "arguments",
    [
        "export x.onnx --img-siz 5",
        "train classification --lr fast",
        "export",
        "models --img-size wide",
    ],
)
def test_an_error_of_the_parser_fits_80_columns(arguments, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stop:
        softfree_cli.main(arguments.split())
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert max(map(len, error.splitlines())) <= 80 and "{None}" not in error


def test_what_is_not_kept_or_would_not_fit_is_left_to_the_command(monkeypatch):
    assert softfree_cli.kept_text(["models", "softpp_*"]) == ""
    assert softfree_cli.kept_text(["train", "../x", "--help"]) == ""
    assert softfree_cli.kept_text(["models", "-h"]) != ""
    monkeypatch.setenv("COLUMNS", "60")
    assert softfree_cli.kept_text(["models", "-h"]) == ""


def test_help_fits_a_narrower_terminal_too(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    with contextlib.suppress(SystemExit):
        softfree_cli.main(["benchmark", "memory", "--help"])
    out = capsys.readouterr().out
    assert os.environ["COLUMNS"] == "60" and max(map(len, out.splitlines())) <= 60


def test_an_argument_that_need_not_be_given_may_be(capsys):
    assert softfree_cli.main(["models", "soft_tiny", "--img-size", "0"]) == 2
    assert "img-size" in capsys.readouterr().err


def test_warnings_of_inspect_break_between_words_in_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in a terminal, to rich
    arguments = ["inspect", "--model", "softpp_vit_small", "--img-size", "64", "--device", "cpu"]
    assert softfree_cli.main(arguments) == 0
    plain = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    assert "warning" in plain and max(map(len, plain.splitlines())) <= 80
