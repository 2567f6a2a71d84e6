"""Training on the Long Range Arena: presets, learning, resume, the test at the end, clear errors."""

import json

import pytest
import torch

import softfree_cli
from softfree.commands.settings import resolve
from softfree.data.longrange import TASKS, PadSequences
from softfree.layers import ATTENTIONS, attention
from softfree.training.checkpoint import read_weights
from softfree.training.longrange import RECIPES, LongRange, score_labels

QUICK = ["--device", "cpu", "--workers", "0", "--dim", "16", "--num-heads", "1", "--mlp-dim", "16"]


@pytest.fixture
def reviews(tmp_path):
    """Texts whose class is a word in them."""
    for split, count in (("train", 64), ("test", 32)):
        lines = [
            json.dumps(
                {"text": f"{'.' * (i % 7)} {('awful', 'great')[i % 2]} film", "label": i % 2}
            )
            for i in range(count)
        ]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def parse(argv):
    return resolve(argv, LongRange)


def arguments(reviews, output, *more):
    return ["--task", "text", "--data-dir", str(reviews), "--output", str(output), *QUICK, *more]


SPEC = {  # batch, lr, warm-up, steps
    "listops": (32, 1e-4, 1000, 5000),
    "text": (32, 1e-4, 8000, 20000),
    "retrieval": (32, 1e-4, 800, 30000),
    "image": (256, 1e-4, 175, 35000),
}


@pytest.mark.parametrize("name", SPEC)
def test_presets_are_the_papers(name):
    settings = parse(["--task", name])
    optim = settings.optim
    assert (optim.batch_size, optim.lr, optim.warmup_steps, optim.steps) == SPEC[name]
    assert (optim.sched, optim.weight_decay, optim.clip_grad) == ("linear", 0.0, 0.0)
    assert settings.data.task == name and settings.recipe == name
    model = settings.model
    assert (model.depth, model.dim, model.mlp_dim, model.num_heads) == (2, 64, 128, 2)
    assert (model.pooling, model.dropout) == ("mean", 0.1)
    task = TASKS[name]
    expected = {
        "listops": (2000, 32, 10),
        "text": (4000, 512, 2),
        "retrieval": (4000, 512, 2),
        "image": (1024, 512, 10),
    }[name]
    assert (task.length, task.vocab_size, task.num_classes) == expected
    assert task.pair == (name == "retrieval")


def test_every_task_has_a_preset():
    assert set(RECIPES) == set(TASKS)


def test_fewer_steps_shorten_the_warm_up_and_flags_win():
    optim = parse(["--task", "text", "--steps", "200"]).optim
    assert (optim.steps, optim.warmup_steps) == (200, 80)
    optim = parse(["--steps", "200", "--warmup-steps", "5", "--batch-size=3"]).optim
    assert (optim.warmup_steps, optim.batch_size) == (5, 3)


def test_the_batch_of_a_preset_is_shared_out_among_processes(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert parse(["--task", "image"]).optim.batch_size == 64
    assert parse(["--task", "image", "--batch-size", "100"]).optim.batch_size == 100


@pytest.mark.parametrize(
    "attention, more", [("softpp", []), ("softmax", []), ("softfree", ["--mlp-conv", "3"])]
)
def test_a_model_learns_and_its_checkpoint_gives_the_test_accuracy_again(
    reviews, tmp_path, attention, more
):
    settings = parse(
        arguments(
            reviews, tmp_path / "out", "--attention", attention, "--steps", "60", "--lr", "1e-2",
            "--batch-size", "16", "--eval-every", "20", *more,
        )
    )  # fmt: skip
    outcome = LongRange.run(settings)
    assert outcome.position.step == 60
    result = json.loads((tmp_path / "out" / "test.json").read_text())
    assert result["accuracy"] == 100 and result["samples"] == 32
    model, metadata = LongRange.load(tmp_path / "out" / "best")
    assert metadata["class_names"] == ["negative", "positive"]
    assert metadata["model_kwargs"]["attention"] == attention
    test = LongRange(settings).data.test
    batch = PadSequences(4000)([test[i] for i in range(len(test))])
    assert torch.equal(model(batch.tokens, batch.mask).argmax(-1), batch.labels)


def test_a_run_that_is_resumed_ends_like_one_that_was_not(reviews, tmp_path):
    def run(name, steps, *more):
        options = ["--batch-size", "8", "--warmup-steps", "2", "--eval-every", "100", *more]
        LongRange.run(parse(arguments(reviews, tmp_path / name, "--steps", steps, *options)))
        return read_weights(tmp_path / name / "last")

    whole = run("whole", "8", "--sched", "multistep")
    run("parts", "4", "--sched", "multistep")
    parts = run("parts", "8", "--sched", "multistep", "--resume", "auto")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            ["--attention", "soft"],
            "was written by a run with `attention` softpp; use the same settings",
        ),
        (["--model-kwargs", "stride=8"], "was written by a run with `model_kwargs` stride=2;"),
    ],
)
def test_a_run_does_not_go_on_from_that_of_another_network(reviews, tmp_path, changes, message):
    options = ["--model-kwargs", "stride=2", "--steps", "2", "--batch-size", "4"]
    given = arguments(reviews, tmp_path, "--attention", "softpp", *options)
    LongRange.run(parse(given))
    before = (tmp_path / "last" / "state.pt").read_bytes()
    with pytest.raises(ValueError, match=message):
        LongRange.run(parse([*given, "--steps", "4", *changes, "--resume", "auto"]))
    assert (tmp_path / "last" / "state.pt").read_bytes() == before


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_every_attention_trains_from_the_command_line(reviews, tmp_path, attention, capsys):
    options = ["--attention", attention, "--steps", "2", "--batch-size", "4"]
    code = softfree_cli.main(["train", "longrange", *arguments(reviews, tmp_path / "o", *options)])
    assert code == 0
    assert "test accuracy" in capsys.readouterr().out


def test_listops_needs_no_files(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    options = ["--listops-train", "8", "--listops-eval", "2", "--steps", "1", "--batch-size", "2"]
    options += ["--model-kwargs", "stride=100", "--output", str(tmp_path / "out"), *QUICK]
    assert LongRange.run(parse(options)).position.step == 1
    assert list((tmp_path / "cache" / "softfree").glob("listops*.npz"))


def test_the_data_of_a_training_are_read_once(tmp_path, caplog):
    rows = "".join(f"( ( [MAX {i} ) 0 ] )\t{i}\n" for i in range(4))
    for split in ("train", "val", "test"):
        (tmp_path / f"basic_{split}.tsv").write_text(f"Source\tTarget\n{rows}")
    options = ["--data-dir", str(tmp_path), "--output", str(tmp_path / "out"), *QUICK]
    options += ["--steps", "1", "--batch-size", "2", "--model-kwargs", "stride=2"]
    with caplog.at_level("INFO"):
        assert softfree_cli.main(["train", "longrange", *options]) == 0
    assert caplog.text.count("LRA's own samples") == 1


def test_a_part_of_the_dev_samples_is_evaluated_and_all_are_tested(reviews, tmp_path):
    options = ["--eval-samples", "5", "--steps", "1", "--batch-size", "2"]
    settings = parse(arguments(reviews, tmp_path / "out", *options))
    assert LongRange.run(settings).scores["samples"] == 5
    assert json.loads((tmp_path / "out" / "test.json").read_text())["samples"] == 32


def test_pairs_train(tmp_path):
    rows = [f"{i % 2}.0\ta\tb\tone {i}\ttwo {i}" for i in range(8)]
    for split in ("train", "eval", "test"):
        (tmp_path / f"pairs.{split}.tsv").write_text("\n".join(rows))
    options = [
        "--task",
        "retrieval",
        "--data-dir",
        str(tmp_path),
        "--output",
        str(tmp_path / "out"),
    ]
    options += ["--steps", "2", "--batch-size", "4", *QUICK]
    assert LongRange.run(parse(options)).position.step == 2


@pytest.mark.parametrize("attention", ["softfree", "softpp", "softmax"])
def test_twins_trains_with_a_label_per_token_and_is_tested(tmp_path, attention):
    options = ["--task", "twins", "--attention", attention, "--output", str(tmp_path), *QUICK]
    settings = parse([*options, "--steps", "2", "--batch-size", "4"])
    assert settings.model.attention_options == (() if attention == "softmax" else ("stride=1",))
    assert LongRange.run(settings).position.step == 2
    result = json.loads((tmp_path / "test.json").read_text())
    assert result["samples"] == 1024 and 40 < result["accuracy"] < 60
    model, metadata = LongRange.load(tmp_path / "best")
    assert metadata["class_names"] == ["single", "twin"]
    assert model(torch.randn(2, 64, 8)).shape == (2, 64, 2)


def test_twins_has_a_window_per_cell_unless_a_stride_is_given():
    assert parse(["--task", "twins"]).model.attention_options == ("stride=1",)
    for given, used in [
        (["landmarks=average:16"], ("stride=1", "landmarks=average:16")),
        (["bandwidth=2"], ("stride=1", "bandwidth=2")),
        (["value_conv=3", "stride=4"], ("value_conv=3", "stride=4")),
    ]:
        parsed = parse(["--task", "twins", "--model-kwargs", *given])
        assert parsed.model.attention_options == used
    assert parse([]).model.attention_options == ()


def test_tokens_without_a_label_count_neither_in_the_loss_nor_as_hits():
    logits = torch.tensor([[[2.0, 0.0], [0.0, 1.0], [5.0, 0.0]]])
    loss, hits, count = score_labels(logits, torch.tensor([[0, 0, -100]]))
    expected, *_ = score_labels(logits[:, :2], torch.tensor([[0, 0]]))
    assert (loss, hits, count) == (expected, 1, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--task", "sort"], "--task must be one of listops, text"),
        (["--task", "text"], "--task text needs --data-dir with IMDb's"),
        (["--attention", "linear"], "--attention must be one of softfree, soft, softpp"),
        (["--pooling", "max"], "--pooling must be one of mean, cls, none, got 'max'"),
        (["--pooling", "none"], "--pooling must be mean or cls, for --task listops; got none"),
        (["--embed-dropout", "all"], "--embed-dropout must be one of auto, tokens, channels, got 'all'"),
        (["--task", "twins", "--pooling", "cls"], "--pooling must be none, a class for each token, for --task twins"),
        (["--task", "twins", "--attention", "linear"], "--attention must be one of softfree, soft, softpp"),
        (["--model-kwargs", "strides=3"], "--model-kwargs: attention 'softfree' has no option 'strides'; there are"),
        (["--model-kwargs", "stride"], "--model-kwargs must look like stride=32, got 'stride'"),
        (["--model-kwargs", "stride=abc"], "--model-kwargs: stride must be a whole number, got 'abc'"),
        (["--model-kwargs", "stride=0"], "--model-kwargs: stride must be >= 1, got 0"),
        (["--attention", "performer", "--model-kwargs", "kernel=foo"], "--model-kwargs: kernel must be one"),
        (["--attention", "softmax", "--model-kwargs", "stride=32"], "'softmax' has no option 'stride'; there are 'qkv_bias'"),
        (["--listops-train", "0"], "--listops-train must be at least 1"),
        (["--mlp-dim", "0"], "--mlp-dim must be at least 1, got 0"),
        (["--depth", "0"], "--depth must be at least 1, got 0"),
        (["--dim", "65"], "--dim must be a multiple of --num-heads 2, got 65"),
        (["--dropout", "1.5"], "--dropout must lie in [0, 1), got 1.5"),
        (["--mlp-conv", "4"], "--mlp-conv must be 0 or odd, got 4"),
    ],
)  # fmt: skip
def test_mistakes_are_named_in_one_line(options, message, capsys, tmp_path):
    command = ["train", "longrange", "--output", str(tmp_path / "out"), *options]
    assert softfree_cli.main(command) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_a_checkpoint_of_another_task_is_refused(reviews, tmp_path):
    LongRange.run(parse(arguments(reviews, tmp_path / "out", "--steps", "1", "--batch-size", "4")))
    path = tmp_path / "out" / "best" / "metadata.json"
    path.write_text(path.read_text().replace('"task": "longrange"', '"task": "classification"'))
    with pytest.raises(ValueError, match="is a checkpoint of classification, not of longrange"):
        LongRange.load(tmp_path / "out" / "best")


@pytest.mark.full
def test_twins_is_solved_by_attention_and_by_nothing_without(tmp_path):
    """As many landmarks as cells; with the attention's term at 0, nothing passes from cell to cell."""

    def accuracy(name, steps):
        options = ["--task", "twins", "--attention", "softfree", "--steps", steps]
        options += ["--device", "cpu", "--output", str(tmp_path / name)]
        LongRange.run(parse(options))
        return json.loads((tmp_path / name / "test.json").read_text())["accuracy"]

    assert accuracy("softfree", "400") >= 99
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "soft_attention", lambda q, k, v, *_, **__: torch.zeros_like(v))
        assert 49 < accuracy("without", "100") < 51
