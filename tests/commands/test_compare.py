"""`softfree compare`, and the benchmarks of every attention: figures, files, going on, clear errors."""

import csv
import dataclasses
import json
import os
import signal

import pytest
from PIL import Image

import softfree_cli
from softfree.commands import benchmark, compare
from softfree.layers import ATTENTIONS
from softfree.training.longrange import RECIPES, LongRange
from softfree.training.settings import settings_to_json

MACHINE = {"date", "device", "threads", "python", "torch", "triton", "timm", "softfree"}
QUICK = ["--device", "cpu", "--workers", "0", "--dim", "16", "--num-heads", "1", "--mlp-dim", "16"]
QUICK += [
    "--steps",
    "3",
    "--batch-size",
    "2",
    "--seconds",
    "0.001",
    "--model-kwargs",
    "stride=50",
]
QUICK += ["--listops-train", "8", "--listops-eval", "4", "--eval-every", "2"]


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture
def command(tmp_path):
    return ["--output", str(tmp_path / "out"), "--data-dir", str(tmp_path / "cache"), *QUICK]


@pytest.mark.slow
def test_compare_trains_tests_and_measures_and_then_only_measures(command, tmp_path, capsys):
    files = ["--csv", str(tmp_path / "table.csv"), "--draw", str(tmp_path / "table.png")]
    names = ["--attentions", "softmax", "soft"]
    assert compare.main([*command, *names, *files]) == 0
    assert capsys.readouterr().out.count(": training in") == 2
    rows = read(tmp_path / "table.csv")
    assert [row["attention"] for row in rows] == ["softmax", "soft"]
    for row in rows:
        result = json.loads(
            (tmp_path / "out" / "listops" / row["attention"] / "test.json").read_text()
        )
        assert float(row["test_accuracy"]) == result["accuracy"]
        assert row.keys() >= MACHINE and row["attention_options"] == "stride=50"
        ratio = float(row["train_samples_per_s"]) / float(rows[0]["train_samples_per_s"])
        assert float(row["train_ratio_to_softmax"]) == pytest.approx(ratio)
        for column in ("parameters", "macs", "infer_samples_per_s", "train_peak_mib"):
            assert float(row[column]) > 0
    assert float(rows[1]["paper_accuracy"]) == 37.4
    assert int(rows[1]["macs"]) < int(rows[0]["macs"])
    assert Image.open(tmp_path / "table.png").size[0] > 500

    assert compare.main([*command, "--attentions", "soft"]) == 0
    out = capsys.readouterr().out
    assert ": training in" not in out and "37.40" in out


@pytest.mark.full
def test_compare_trains_and_measures_a_task_with_a_label_per_token(tmp_path, capsys):
    small = [word for word in QUICK if word not in ("--model-kwargs", "stride=50")]
    options = ["--task", "twins", "--output", str(tmp_path / "out"), *small]
    names = ["--attentions", "softmax", "softpp"]
    assert compare.main([*options, *names, "--csv", str(tmp_path / "table.csv")]) == 0
    rows = read(tmp_path / "table.csv")
    assert all(40 < float(row["test_accuracy"]) < 60 for row in rows)
    n, dim, mlp, channels = 64, 16, 16, 8
    block = n * (4 * dim * dim + 2 * dim * mlp) + 2 * n * n * dim
    assert int(rows[0]["macs"]) == 2 * block + n * (channels * dim + dim * mlp + mlp * 2)


def test_on_twins_attentions_without_windows_keep_their_own_arguments(tmp_path):
    given = ["--task", "twins", "--attentions", "softmax", "performer", "--model-kwargs"]
    small = [
        "--seconds",
        "0.01",
        "--depth",
        "1",
        "--dim",
        "16",
        "--mlp-dim",
        "16",
        "--num-heads",
        "2",
    ]
    path = tmp_path / "table.csv"
    options = ["kernel=softmax", "--no-train", *small, "--device", "cpu", "--csv", str(path)]
    assert compare.main([*given, *options, "--output", str(tmp_path / "out")]) == 0
    assert [row["attention"] for row in read(path)] == ["softmax", "performer"]


@pytest.mark.full
def test_compare_without_training_measures_every_attention(command, tmp_path, capsys):
    path = tmp_path / "table.csv"
    assert compare.main([*command, "--no-train", "--csv", str(path)]) == 0
    rows = read(path)
    assert [row["attention"] for row in rows] == list(ATTENTIONS)
    assert all(row["test_accuracy"] == "" and float(row["macs"]) > 0 for row in rows)
    assert not (tmp_path / "out").exists()
    # Projections to queries and values, and to keys in the attentions that have them apart.
    size = {row["attention"]: int(row["parameters"]) for row in rows}
    assert size["softmax"] - size["soft"] == 2 * (16 * 16 + 16)


def test_multiply_adds_are_those_of_the_products(command, tmp_path):
    path = tmp_path / "table.csv"
    plain = [word for word in command if word not in ("--model-kwargs", "stride=50")]
    compare.main([*plain, "--no-train", "--attentions", "softmax", "--csv", str(path)])
    n, dim, mlp = 2000, 16, 16
    block = n * (4 * dim * dim + 2 * dim * mlp) + 2 * n * n * dim
    assert int(read(path)[0]["macs"]) == 2 * block + dim * mlp + mlp * 10


def test_a_run_with_other_settings_is_not_taken_for_this_one(command, tmp_path):
    assert compare.main([*command, "--attentions", "softpp"]) == 0
    with pytest.raises(
        ValueError, match="softpp was trained with `lr` 0.0001; use the same settings, or"
    ):
        compare.main([*command, "--attentions", "softpp", "--lr", "1e-3"])
    with pytest.raises(
        ValueError, match="softpp was trained with --seed 42; use the same settings, or"
    ):
        compare.main([*command, "--attentions", "softpp", "--seed", "7"])


def test_compare_stops_when_asked_and_goes_on_when_started_again(command, monkeypatch, capsys):
    step = LongRange.train_step

    def asked_to_stop(task, model, batch):
        os.kill(os.getpid(), signal.SIGTERM)
        return step(task, model, batch)

    names = ["--attentions", "softpp"]
    monkeypatch.setattr(LongRange, "train_step", asked_to_stop)
    assert compare.main([*command, *names]) == 75
    assert "stopped at step 1" in capsys.readouterr().out
    monkeypatch.setattr(LongRange, "train_step", step)
    for other, before in (["--dim", "32"], "`dim` 16"), (["--lr", "1e-3"], "`lr` 0.0001"):
        with pytest.raises(
            ValueError, match=f"softpp was trained with {before}; use the same settings"
        ):
            compare.main([*command, *names, *other])
    others = [*command, *names, "--dim", "32"]
    assert compare.main([*others, "--no-train"]) == 0  # goes on with nothing
    assert compare.main([*command, *names]) == 0
    assert "continuing from step 1" in capsys.readouterr().out


def test_on_twins_the_settings_of_an_attention_without_windows_leave_the_others_theirs(tmp_path):
    twins = RECIPES["twins"]
    softmax = dataclasses.replace(twins.model, attention="softmax")
    config, path = tmp_path / "settings.json", tmp_path / "table.csv"
    config.write_text(settings_to_json(dataclasses.replace(twins, model=softmax)))
    options = ["--attentions", "softfree", "--no-train", "--seconds", "0.01", "--device", "cpu"]
    work = []
    for given in (["--task", "twins"], ["--config", str(config)]):
        assert compare.main([*given, *options, "--csv", str(path), "--output", str(tmp_path)]) == 0
        work.append(read(path)[-1]["macs"])
    assert work[0] == work[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--attentions", "linear"], "--attentions must be one of softfree, soft, softpp"),
        (["--attention", "soft"], "compare takes several, use --attentions"),
        (["--task", "sort"], "--task must be one of listops"),
        (["--task", "image", "--attentions", "soft"], "--task image needs --data-dir"),
        (["--model-kwargs", "slot=3"], "--model-kwargs must be one of"),
        (["--attentions", "softmax", "--model-kwargs", "stride=4"], "got 'stride'"),
        (["--attentions", "softmax", "--model-kwargs", "stride=1"], "got 'stride'"),
        (["--model-kwargs", "stride=x"], "stride must be a whole number, got 'x'"),
        (["--draw", "table.txt"], "--draw must end in"),
    ],
)
def test_mistakes_are_named_before_anything_is_trained(options, message, capsys, tmp_path):
    assert softfree_cli.main(["compare", "--output", str(tmp_path / "out"), *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


TINY = ["--device", "cpu", "--dim", "16", "--num-heads", "2", "--tokens", "64", "128"]


def test_memory_of_every_attention_reaches_table_csv_and_plot(tmp_path, capsys):
    files = ["--csv", str(tmp_path / "memory.csv"), "--draw", str(tmp_path / "memory.png")]
    assert benchmark.main(["memory", *TINY, *files]) == 0
    out = capsys.readouterr().out
    rows = read(tmp_path / "memory.csv")
    assert [(row["attention"], row["tokens"]) for row in rows] == [
        (name, tokens) for name in (*ATTENTIONS, "softmax-unfused") for tokens in ("64", "128")
    ]
    for row in rows:
        assert row["attention"] in out and row.keys() >= MACHINE
        assert 0 < float(row["forward_mib"]) <= float(row["forward_backward_mib"])
    assert Image.open(tmp_path / "memory.png").size[0] > 500


@pytest.mark.slow
def test_throughput_compares_attentions_in_one_backbone(tmp_path, capsys):
    files = ["--csv", str(tmp_path / "table.csv"), "--draw", str(tmp_path / "table.png")]
    options = ["--device", "cpu", "--img-size", "32", "--batch-size", "2", "--seconds", "0.001"]
    names = ["--attentions", "softmax", "softpp", "--channels-last"]
    small = "landmarks=conv:4 embed_dims=16,32,48,64 num_heads=1,2,3,4 depths=1,1,1,1"
    names += ["--model-kwargs", *small.split()]
    assert benchmark.main(["throughput", *options, *names, *files]) == 0
    said = capsys.readouterr().out
    assert "Attentions in softpp_tiny" in said and "channels last" in said
    rows = read(tmp_path / "table.csv")
    assert rows[0]["channels_last"] == "True"
    assert rows[0]["model_kwargs"] == small
    assert [(row["attention"], row["model"]) for row in rows] == [
        ("softmax", "softpp_tiny"),
        ("softpp", "softpp_tiny"),
    ]
    assert rows[0]["parameters"] != rows[1]["parameters"]
    ratio = float(rows[1]["train_img_per_s"]) / float(rows[0]["train_img_per_s"])
    assert float(rows[1]["train_ratio_to_first"]) == pytest.approx(ratio)
    assert Image.open(tmp_path / "table.png").size[0] > 500


def test_mistakes_point_to_the_help_of_their_benchmark(capsys):
    with pytest.raises(SystemExit):
        benchmark.main(["throughput", "--bogus", "3"])
    assert "softfree benchmark throughput --help" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["memory", "--attentions", "none"], "--attentions must be one of soft"),
        (["memory", "--tokens", "0"], "--tokens must be above 0"),
        (["memory", "--num-heads", "0"], "--num-heads must be above 0"),
        (["throughput", "--attentions", "reformer"], "--attentions must be one of softmax"),
        (["throughput", "--model", "resnet18"], "--model must be one of `softfree models`"),
        (["throughput", "--model-kwargs", "attention=soft"], "use --attentions instead"),
        (
            ["throughput", "--model-kwargs", "depth=1"],
            "--model-kwargs: SoftPyramid with attention 'softmax' has no option 'depth'; there are",
        ),
    ],
)
def test_mistakes_in_the_benchmarks_are_named(options, message, capsys):
    assert softfree_cli.main(["benchmark", *options]) == 2
    assert message in capsys.readouterr().err
