"""What commands print fits 80 columns, with the widest figures and names that a GPU and timm give, in whole words."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from softfree.analysis import speed
from softfree.analysis.attention_cost import Cost
from softfree.commands import benchmark, compare, inspect
from softfree.commands.benchmark import attention
from softfree.commands.benchmark import speed as speeds
from softfree.commands.common import REPORT, fold_name, message_console, print_rows
from softfree.commands.train import next_steps

LONG = "swin_tiny_patch4_window7_224"
NAMES = (LONG, "softfree_vit_small", "softpp_tiny+inverse=solve+landmarks=average:49")


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def printed(capsys):
    """What was printed, after its lines were found to fit, and these words to be whole; names break after a sign."""

    def check(*words: str, names: tuple[str, ...] = ()) -> str:
        text = capsys.readouterr().out
        assert max(map(len, text.splitlines())) <= 80, text
        assert set(words) <= set(re.findall(r"[^\s|]+", text)), text
        for name in names:
            parts = re.findall(r"[^_+,:=]*[_+,:=]*", name)
            assert all(part in text for part in parts), text
        return text

    return check


def filled(kinds, figures, **known):
    row = speed.new_row(kinds, figures, **known)
    for name in vars(row).keys() - known.keys() - {"note"}:
        setattr(row, name, 23456.0 if "img_per_s" in name else 123.4 if "ms" in name else 0.0123)
    return row


def test_models_with_long_names(printed):
    figures = ("img_per_s", "ratio_to_first", "peak_gib")
    known = dict(parameters=123e6, macs=123.4e9)
    rows = [filled(speed.KINDS, figures, model=name, **known) for name in NAMES]
    speeds.publish_models(REPORT, "Models", "model", rows, speed.ModelConditions(), speed.KINDS)
    printed("train", "infer", "ratio", "23,456", "0.0123", "123.0", names=NAMES)


def test_latency_in_all_modes(printed, monkeypatch):
    figures = ("ms", "ratio_to_first")
    rows = [
        filled(speed.MODES, figures, model=name, batch_size=size, parameters=123e6)
        for size in (1, 8)
        for name in NAMES
    ]
    monkeypatch.setattr(speed, "measure_latency", lambda *_, **__: rows)
    monkeypatch.setattr(speed, "MODES", ("eager", "compiled", "graph")[:2])
    benchmark.main(["latency", *NAMES, "--device", "cpu"])
    printed("compiled", "ratio", "0.0123", "123", names=NAMES)


def test_backbones_of_detectors(printed):
    rows = [
        filled(speed.PARTS, ("img_per_s", "ratio_to_first", "peak_gib"), model=name)
        for name in (f"softfree_medium {sampler}" for sampler in ("average:128", "conv:49"))
    ]
    columns = {"backbone": lambda row: row.model, **speeds.speed_columns(speed.PARTS)}
    print_rows(Console(), rows, columns)
    printed("alone", "step", "23,456", "conv:49", "average:128")


@pytest.mark.parametrize("on_gpu", [True, False])
def test_attentions(printed, on_gpu):
    costs = [
        Cost(
            2560, 1048576, 32, 49, "bfloat16", "softpp-solve", "reference",
            forward_ms=1234.5, forward_backward_ms=12345.6,
            forward_eager_ms=1234.5, forward_backward_eager_ms=12345.6,
            forward_times_faster_than_softmax=0.0001234,
            forward_backward_times_faster_than_softmax=0.0001234,
            forward_backward_extra_mib=12345.6, share_of_floor=0.0123,
        )
    ]  # fmt: skip
    columns = attention.cost_columns(on_gpu, backward=True)
    print_rows(Console(), costs, columns, section=lambda cost: "2,560 x 1,048,576")
    printed("softpp-solve", "reference", "0.000123", "12,346", "faster", "memory")


def test_compared_attentions(printed):
    numbers = dict(test_accuracy=62.34, paper_accuracy=62.34, parameters=12.3e6, macs=12.34e9,
                   train_samples_per_s=12345, train_ratio_to_softmax=0.123, train_peak_mib=1234,
                   infer_samples_per_s=12345, infer_ratio_to_softmax=0.123)  # fmt: skip
    rows = [SimpleNamespace(attention="nystromformer", **numbers)]
    print_rows(Console(), rows, compare.COLUMNS)
    printed("nystromformer", "attention", "12,345", "0.123")


@pytest.mark.parametrize("methods", [("solve",), ("newton",), ("newton", "solve")])
def test_inspected_layers(printed, methods):
    rows = [
        dict(
            layer="stages.0.blocks.0.attn", stage=1, block=12, kind="softfree", m=128, inverse=method,
            condition=1.2e12, residual=1.2e-3, steps=20, steps_needed=None, nystrom_error=12.34,
            kept_eigenvalues=100, total_weight=0.00123, contrast=1.25, warnings=[], judgement="",
        )
        for method in methods
    ]  # fmt: skip
    inspect.print_report(rows, "softfree_tiny")
    text = printed("stage", "block", "cond.", "resid.", "Nyström", "verted", "100/128", "1.12")
    assert ("T for" in text) == ("newton" in methods)  # which a solve does not have


def test_names_that_fit_stay_as_they_are():
    assert fold_name(LONG, len(LONG)) == LONG
    assert fold_name(LONG, 12, "  ").replace("\n  ", "") == f"  {LONG}"


def test_messages_break_between_words_in_a_terminal_and_stay_one_line_in_a_file():
    words = (
        "attends to everything alike, and so it goes on for more than eighty columns of a terminal"
    )
    for terminal in (True, False):
        console = message_console(force_terminal=terminal, width=80, record=True)
        with console.capture() as shown:
            console.print(words)
        lines = shown.get().splitlines()
        assert len(lines) == (2 if terminal else 1) and " ".join(map(str.strip, lines)) == words


def test_what_to_type_after_a_training_fits_wherever_it_is_written():
    for folder in (Path("out/best"), Path("output/my_photos_of_cats_and_dogs/best")):
        lines = next_steps("classification", folder).splitlines()
        assert max(map(len, lines)) <= 80
        assert sum(f"--checkpoint {folder}" in line for line in lines) == 3
