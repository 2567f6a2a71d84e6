"""`softfree benchmark`: wrong attentions are not timed, figures reach table, CSV and plot, errors are clear."""

import csv

import pytest
import torch
from PIL import Image
from rich.console import Console
from torch import nn

import softfree
import softfree_cli
from softfree.analysis import attention_cost, speed
from softfree.analysis.attention_cost import Cost
from softfree.analysis.measure import Work
from softfree.commands import benchmark
from softfree.commands.benchmark.attention import cost_columns, pair_shapes
from softfree.commands.common import print_rows

TINY = ["--device", "cpu", "--tokens", "20", "33", "--heads-times-batch", "1", "2"]
TINY += ["--head-dim", "8", "--landmarks", "5", "--seconds", "0.001"]
MACHINE = {"date", "device", "threads", "python", "torch", "triton", "timm", "softfree"}


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("softfree.analysis.measure.TURN", 0.001)
    monkeypatch.setattr(benchmark.attention, "copy_bandwidth", lambda device: 1e10)


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_attention_prints_a_section_for_each_shape(capsys):
    assert benchmark.main(["attention", *TINY]) == 0
    out = capsys.readouterr().out
    assert " 1 x 20 " in out and " 2 x 33 " in out
    assert out.count("softpp auto") == out.count("soft auto") == 2
    assert "errors up to" in out and "10 GB/s" in out


def test_attention_csv_has_every_figure_and_the_environment_in_every_row(tmp_path):
    path = tmp_path / "new" / "costs.csv"
    assert benchmark.main(["attention", *TINY, "--csv", str(path)]) == 0
    rows = read(path)
    assert [(row["tokens"], row["batch_heads"], row["attention"]) for row in rows] == [
        (tokens, heads, name)
        for tokens, heads in (("20", "1"), ("33", "2"))
        for name in ("softpp", "softpp-solve", "soft", "softmax")
    ]
    for row in rows:
        assert row.keys() >= MACHINE
        assert row["torch"] == torch.__version__ and row["device"] and row["note"] == ""
        for column in ("forward_ms", "forward_backward_ms", "forward_backward_extra_mib"):
            assert float(row[column]) > 0
        traffic = 4 * int(row["batch_heads"]) * int(row["tokens"]) * 8 * 4
        assert float(row["memory_floor_ms"]) == pytest.approx(1e3 * traffic / 1e10)
        floor_share = float(row["memory_floor_ms"]) / float(row["forward_ms"])
        assert float(row["share_of_floor"]) == pytest.approx(floor_share)
        softmax = next(r for r in rows if r["tokens"] == row["tokens"] and "max" in r["attention"])
        ratio = float(softmax["forward_ms"]) / float(row["forward_ms"])
        assert float(row["forward_times_faster_than_softmax"]) == pytest.approx(ratio)


def test_without_backward_and_softmax_their_figures_are_missing(tmp_path, capsys):
    path = tmp_path / "costs.csv"
    options = ["--no-backward", "--attentions", "soft", "--backends", "torch", "reference"]
    assert benchmark.main(["attention", *TINY, *options, "--csv", str(path)]) == 0
    rows = read(path)
    assert [row["backend"] for row in rows] == ["torch", "reference"] * 2
    assert all(row["forward_ms"] and not row["forward_backward_ms"] for row in rows)
    assert not any(row["forward_times_faster_than_softmax"] for row in rows)
    assert "fwd+bwd" not in capsys.readouterr().out


def plant(monkeypatch, spoil):
    """Spoils SOFT++ of backend "torch", counts the calls that are not checks in float64."""
    calls = []

    def planted(q, k, v, landmarks, *, backend, **settings):
        out = softfree.soft_attention(q, k, v, landmarks, backend=backend, **settings)
        if backend == "torch" and settings["normalize"]:
            calls.append(q.shape)
            return spoil(out, q)
        return out

    monkeypatch.setattr(attention_cost, "soft_attention", planted)
    return calls


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda out, q: out * 1.001, id="result"),
        pytest.param(lambda out, q: out + (q - q.detach()), id="gradient"),
        pytest.param(lambda out, q: out * float("nan"), id="nan"),
    ],
)
def test_a_wrong_attention_is_not_timed_and_gives_exit_code_1(spoil, monkeypatch, tmp_path, capsys):
    calls = plant(monkeypatch, spoil)
    path = tmp_path / "costs.csv"
    arguments = [
        "attention",
        *TINY,
        "--attentions",
        "softpp",
        "soft",
        "softmax",
        "--backends",
        "torch",
        "--csv",
        str(path),
    ]
    assert benchmark.main(arguments) == 1
    assert len(calls) == 2  # one check for each shape
    for row in read(path):
        wrong = row["attention"] == "softpp"
        assert bool(row["forward_ms"]) is not wrong
        assert bool(row["forward_backward_ms"]) is not wrong
        assert row["note"].startswith("wrong: error") is wrong
    out = capsys.readouterr().out
    assert out.count("wrong: error") == 2
    assert "1 x 20 tokens, softpp torch: wrong: error" in out


def test_an_attention_that_fails_is_named_and_gives_exit_code_1(monkeypatch, capsys):
    def fail(out, q):
        raise RuntimeError("out of registers\nand so on")

    plant(monkeypatch, fail)
    assert benchmark.main(["attention", *TINY, "--backends", "torch"]) == 1
    out = capsys.readouterr().out
    assert "softpp torch: failed: out of registers\n" in out


def test_softmax_that_would_take_too_long_is_skipped(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(attention_cost, "SLOWEST", 0.0)
    path = tmp_path / "costs.csv"
    assert benchmark.main(["attention", *TINY, "--csv", str(path)]) == 0
    for row in read(path):
        assert bool(row["forward_ms"]) is (row["attention"] != "softmax")
        assert row["forward_times_faster_than_softmax"] == ""
    assert "softmax: skipped: one call would take about" in capsys.readouterr().out


def test_plot_is_written_and_shows_curves(tmp_path):
    path = tmp_path / "new" / "costs.png"
    assert benchmark.main(["attention", *TINY, "--draw", str(path)]) == 0
    with Image.open(path) as picture:
        colours = picture.convert("RGB").getcolors(maxcolors=2**24)
        assert picture.width > 500 and picture.height > 400
    blue, orange, yellow = (31, 119, 180), (255, 127, 14), (240, 180, 0)
    counts = {colour: count for count, colour in colours}
    assert all(counts.get(colour, 0) > 200 for colour in (blue, orange, yellow))


@pytest.mark.parametrize("width", [80, 120])
def test_a_full_table_of_a_gpu_run_fits_the_terminal(width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    figures = dict.fromkeys(
        ("forward_ms", "forward_backward_ms", "forward_eager_ms", "forward_backward_extra_mib"),
        12345.6,
    )
    cost = Cost(2560, 1048576, 32, 49, "bfloat16", "softpp", "reference", 1e-3, **figures)
    cost.share_of_floor, cost.forward_times_faster_than_softmax = 0.417, 190.2
    print_rows(Console(), [cost], cost_columns(True, True), lambda cost: "2,560 x 1,048,576")
    out = capsys.readouterr().out
    assert "2,560 x 1,048,576" in out and "…" not in out
    row = next(line for line in out.splitlines() if "softpp reference" in line)
    assert row.split()[2:] == ["12,346", "190", "12,346", "12,346", "-", "12,346", "42%"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["attention", "--device", "tpu"], "--device must be 'auto', 'cuda' or 'cpu', got 'tpu'"),
        (
            ["attention", "--attentions", "hard"],
            "--attentions must be one of softpp, softpp-solve, soft, ",
        ),
        (["attention", "--backends", "cobol"], "--backends must be one of auto, "),
        (["attention", "--dtype", "int8"], "--dtype must be one of bfloat16, "),
        (["attention", "--seconds", "0"], "--seconds must be above 0, got 0"),
        (["attention", "--tokens", "784", "3"], "the number of landmarks, 49, got 3"),
        (["attention", "--landmarks", "0"], "--landmarks must be above 0, got 0"),
        (["attention", "--head-dim", "-4"], "--head-dim must be above 0, got -4"),
        (
            ["attention", "--tokens", "99", "--heads-times-batch", "1", "2"],
            "one for each of the 1 values of --tokens, got 2",
        ),
        (["attention", "--draw", "costs.txt"], "--draw must end in .png, .svg, .pdf"),
        (["attention", "--csv", "."], "--csv must name a file, but . is a folder"),
        (["modle"], "One of attention, detector, latency, memory, model, throughput; got 'modle'"),
        (["model"], "needs a name"),
        (["model", "softpp_tinny"], "no model 'softpp_tinny'; did you mean 'softpp_tiny'?"),
        (["model", "softpp_tiny", "--bench", "fly"], "--bench must be one of train, infer, both"),
        (["model", "softpp_tiny", "--batch-size", "0"], "--batch-size must be above 0, got 0"),
        (["model", "softpp_tiny", "--img-size", "8"], "--img-size must be at least 32, got 8"),
        (["model", "softpp_tiny", "--amp-dtype", "int8"], "--amp-dtype must be one of none, "),
        (["model", "softpp_tiny", "--opt", "hope"], "--opt must be one of sgd, adamw"),
        (
            ["model", "softpp_tiny", "--cuda-graph"],
            "--cuda-graph needs a CUDA device, got --device",
        ),
        (["throughput", "--cuda-graph"], "--cuda-graph needs a CUDA device, got --device cpu"),
        (["detector", "softpp_tiny", "--cuda-graph"], "--cuda-graph needs a CUDA device"),
        (["detector"], "needs a name"),
        (
            ["detector", "softpp_tiny", "--detector", "yolo"],
            "--detector must be one of retinanet, ",
        ),
        (["detector", "softpp_tiny", "--img-size", "8", "64"], "at least 32 each way, got (8, 64)"),
        (["detector", "softpp_tiny", "--landmarks"], "--landmarks needs a value, e.g. conv:49"),
        (["detector", "softpp_tiny", "--model-kwargs", "depth"], "--model-kwargs must look like "),
        (["detector", "vit_tiny_patch16_224", "--img-size", "64", "64"], "dense models need 1/4"),
    ],
)
def test_bad_arguments_give_one_line_and_exit_code_2(arguments, message, capsys, monkeypatch):
    monkeypatch.delenv("SOFTFREE_TRACEBACK", raising=False)
    arguments = arguments if "tpu" in arguments else [*arguments, "--device", "cpu"]
    assert softfree_cli.main(["benchmark", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("softfree: error: ") and error.count("\n") == 1


@pytest.mark.parametrize("command", [["attention"], ["model", "softpp_tiny"]])
def test_cuda_without_cuda_is_refused(command, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="`device` cuda: PyTorch finds no such GPU here"):
        benchmark.main([*command, "--device", "cuda"])


def test_kernels_asked_for_on_a_cpu_are_refused():
    with pytest.raises(ValueError, match="backend 'triton'"):
        benchmark.main(["attention", *TINY, "--backends", "triton"])


def test_default_shapes_of_a_gpu_and_one_number_of_heads_for_all():
    pairs = pair_shapes((), (), 32, 49, "cuda")
    assert {(s.heads, s.tokens) for s in pairs} == {
        (256, 3136), (1024, 784), (2560, 196), (12, 65536),
    }  # fmt: skip
    pairs = pair_shapes((100, 60), (3,), 32, 49, "cpu")
    assert [(s.heads, s.tokens) for s in pairs] == [(3, 100), (3, 60)]


SMALL = ["--device", "cpu", "--batch-size", "2", "--img-size", "32", "--seconds", "0.001"]


def test_models_stand_beside_each_other_with_ratios_to_the_first(tmp_path, capsys):
    path = tmp_path / "models.csv"
    names = ["resnet10t", "soft_tiny_release"]
    options = ["--amp-dtype", "bfloat16", "--channels-last", "--opt", "sgd", "--fuse-bn"]
    files = ["--csv", str(path), "--draw", str(tmp_path / "models.png")]
    assert benchmark.main(["model", *names, *SMALL, *options, *files]) == 0
    assert (tmp_path / "models.png").is_file()
    first, second = read(path)
    assert [first["model"], second["model"]] == names
    for row in (first, second):
        assert row.keys() >= MACHINE | {"batch_size", "img_size", "amp_dtype", "opt", "macs"}
        for kind in ("train", "infer"):
            speed, ratio = float(row[f"{kind}_img_per_s"]), float(row[f"{kind}_ratio_to_first"])
            assert ratio == pytest.approx(speed / float(first[f"{kind}_img_per_s"]))
        # Weights, and two numbers a weight more in training: gradient and momentum.
        weights = 4 * int(row["parameters"]) / 2**30
        assert float(row["infer_peak_gib"]) > weights
        assert float(row["train_peak_gib"]) > 3 * weights
        assert "batch norms folded" in row["note"] and "not" not in row["note"]
    out = capsys.readouterr().out
    assert "batch 2, 32², bfloat16 autocast, channels last" in out
    assert "ratio: images per second over those of resnet10t" in out


def test_only_the_bench_asked_for_is_run(tmp_path, capsys):
    path = tmp_path / "models.csv"
    arguments = ["model", "resnet10t", *SMALL, "--bench", "infer", "--csv", str(path)]
    assert benchmark.main(arguments) == 0
    (row,) = read(path)
    assert float(row["infer_img_per_s"]) > 0 and row["train_img_per_s"] == ""
    assert "train" not in capsys.readouterr().out


def test_a_model_that_cannot_take_the_size_is_named():
    with pytest.raises(ValueError, match="maxvit_pico_rw_256 can't take images of 40 x 40: "):
        benchmark.main(["model", "maxvit_pico_rw_256", *SMALL, "--img-size", "40"])


@pytest.mark.full
def test_a_backbone_stands_under_a_detector_once_with_each_kind_of_landmarks(tmp_path, capsys):
    path = tmp_path / "detector.csv"
    small = ["--model-kwargs", "embed_dims=16,32,48,64", "num_heads=1,2,3,4", "depths=1,1,1,1"]
    options = ["--landmarks", "conv:4", "conv", "--img-size", "60", "70", "--batch-size", "1"]
    options += ["--channels-last", "--device", "cpu", "--seconds", "0.001", "--csv", str(path)]
    assert benchmark.main(["detector", "softpp_tiny", *small, *options]) == 0
    fixed, growing = read(path)
    assert [fixed["landmarks"], growing["landmarks"]] == ["conv:4", "conv"]
    for row in (fixed, growing):
        assert row.keys() >= MACHINE | {"detector", "batch_size", "height", "width", "amp_dtype"}
        for part in ("backbone", "step"):
            speed, ratio = float(row[f"{part}_img_per_s"]), float(row[f"{part}_ratio_to_first"])
            assert ratio == pytest.approx(speed / float(fixed[f"{part}_img_per_s"]))
        # Weights and gradients; in a whole step AdamW's two numbers a weight, too.
        assert float(row["backbone_peak_gib"]) > 8 * int(row["backbone_parameters"]) / 2**30
        assert float(row["step_peak_gib"]) > 16 * int(row["detector_parameters"]) / 2**30
    out = capsys.readouterr().out
    assert "softpp_tiny conv:4" in out
    assert "batch 1, 60 x 70, float32, eager, channels last" in out


def test_a_backbone_without_landmarks_is_measured_once(tmp_path, monkeypatch):
    built = []

    def build(part, name, arguments, detector):
        built.append(arguments)
        return nn.Linear(1, 1)

    monkeypatch.setattr(speed, "build_part", build)
    for name in ("backbone_pass", "detector_step"):
        monkeypatch.setattr(speed, name, lambda *_: Work(lambda: None))
    options = ["--landmarks", "conv:49", "conv", "--device", "cpu", "--seconds", "0.001"]
    drawn = tmp_path / "speeds.png"
    assert benchmark.main(["detector", "resnet10t", *options, "--draw", str(drawn)]) == 0
    assert drawn.is_file()
    assert built == [{}, {}]


def test_a_file_that_cannot_be_written_is_refused_before_the_measuring(tmp_path):
    (tmp_path / "file").touch()
    # In /proc root's permissions say yes, and the system no.
    for folder in (tmp_path / "file", "/proc/softfree"):
        with pytest.raises(ValueError, match="--csv: can't write .*costs.csv"):
            benchmark.main(["attention", *TINY, "--csv", f"{folder}/costs.csv"])


def test_latency_has_a_row_for_each_batch_and_model_with_arguments_after_a_plus(tmp_path, capsys):
    path, drawn = tmp_path / "latency.csv", tmp_path / "latency.png"
    small = "softpp_tiny+depths=1,1,1,1+embed_dims=16,16,16,16+num_heads=1,1,1,1"
    given = [small, f"{small}+inverse=solve", "--modes", "eager", "--batch-sizes", "1", "2"]
    given += ["--img-size", "32", "--seconds", "0.001", "--device", "cpu", "--fuse-bn"]
    assert benchmark.main(["latency", *given, "--csv", str(path), "--draw", str(drawn)]) == 0
    out = capsys.readouterr().out
    assert "batch 2" in out and "batch norms folded" in out and drawn.exists()
    rows = read(path)
    assert [(row["batch_size"], row["model"]) for row in rows] == [
        (batch, name) for batch in "12" for name in (small, f"{small}+inverse=solve")
    ]
    for first, second in (rows[:2], rows[2:]):
        assert float(first["eager_ms"]) > 0 and float(first["eager_ratio_to_first"]) == 1
        expected = float(first["eager_ms"]) / float(second["eager_ms"])
        assert float(second["eager_ratio_to_first"]) == pytest.approx(expected)
        assert first["compiled_ms"] == first["graph_ms"] == "" and "folded" in first["note"]


@pytest.mark.parametrize(
    "given, message",
    [
        ([], "needs a name"),
        (["softpp_tiny+inverse"], "`NAME` must look like softpp_tiny\\+inverse=solve"),
        (["no_such_model"], "no_such_model"),
        (["softpp_tiny", "--modes", "graph"], "--modes graph needs a CUDA device"),
        (["softpp_tiny", "--modes", "fast"], "--modes must be one of eager, compiled, graph"),
        (["softpp_tiny", "--half"], "--half needs --amp-dtype bfloat16 or float16"),
        (["softpp_tiny", "--batch-sizes", "0"], "--batch-size must be above 0"),
    ],
)
def test_latency_refuses_what_can_not_be(given, message):
    with pytest.raises((ValueError, SystemExit), match=message):
        benchmark.main(["latency", *given, "--device", "cpu"])
