"""The Long Range Arena, and twins: settings and recipes, and the task that the engine trains.

LongRange.run(settings)              -> Outcome, and OUTPUT/test.json with the test accuracy
LongRange.load("OUTPUT/best")        -> model, metadata
"""

import dataclasses
import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn

from softfree.data.files import write_durably
from softfree.data.images import MapData
from softfree.data.longrange import (
    UNLABELLED,
    LongRangeData,
    LongRangeTask,
    PadSequences,
    SequenceBatch,
    find_task,
    load_longrange,
    some_samples,
)
from softfree.layers import ATTENTIONS
from softfree.layers.factory import option_names
from softfree.models.checks import check_at_least, mistakes_in
from softfree.models.sequence import EMBED_DROPOUTS, POOLINGS, SequenceClassifier
from softfree.training import distributed
from softfree.training.checkpoint import SETTINGS, locate
from softfree.training.classification import parse_model_kwargs
from softfree.training.confusion import add_pairs
from softfree.training.devices import choose_device
from softfree.training.distributed import Processes
from softfree.training.engine import Outcome, Task
from softfree.training.loading import evaluation
from softfree.training.logs import TEST_RESULT
from softfree.training.settings import Given, OptimSettings, RunSettings, read_settings


@dataclasses.dataclass(frozen=True)
class LongRangeDataSettings:
    """The data to train and test on."""

    task: str = "listops"
    """listops, text, retrieval, image, pathfinder or twins"""
    data_dir: str | None = None
    """folder with the task's files. twins needs none. listops is generated if LRA's basic_train.tsv, ... are
    not here, and then kept here or in the user's cache folder"""
    listops_train: int = 96_000
    """number of training samples if listops is generated"""
    listops_eval: int = 2_000
    """number of dev samples, and of test samples, if listops is generated"""
    listops_seed: int = 0
    """seed for the samples if listops is generated"""
    eval_samples: int = 0
    """evaluate on this many random dev samples, always the same ones; 0: all. The test at the end uses all
    samples"""


@dataclasses.dataclass(frozen=True)
class SequenceModelSettings:
    """The encoder."""

    attention: str = "softfree"
    """softfree, soft, softpp, softmax, linformer, performer, nystromformer, reformer, agent or flatten"""
    attention_options: Annotated[tuple[str, ...], tyro.conf.arg(name="model-kwargs")] = ()
    """further arguments of the attention: stride=32 (tokens per SOFT landmark), inverse=solve (or newton),
    kernel=softmax (Performer)"""
    pooling: str = "mean"
    """mean: average of the tokens; cls: a class token; none (twins): a class for each token"""
    dim: int = 64
    """channels"""
    depth: int = 2
    """blocks"""
    num_heads: int = 2
    """heads"""
    mlp_dim: int = 128
    """hidden channels of the MLPs"""
    mlp_conv: int = 0
    """odd kernel size of a depthwise convolution over the MLPs' hidden tokens; 0: none"""
    dropout: float = 0.1
    """dropout after embedding and attention and in the MLPs"""
    embed_dropout: str = "auto"
    """what the embedding's dropout drops: tokens, channels of each token by itself; channels, the same of all
    tokens of a sequence, so that equal ones stay equal; auto: channels for softfree, else tokens"""


@dataclasses.dataclass(frozen=True)
class LongRangeSettings:
    """Settings of `softfree train longrange`."""

    recipe: Annotated[str, tyro.conf.Suppress] = ""
    data: LongRangeDataSettings = dataclasses.field(default_factory=LongRangeDataSettings)
    model: SequenceModelSettings = dataclasses.field(default_factory=SequenceModelSettings)
    optim: OptimSettings = dataclasses.field(default_factory=OptimSettings)
    run: RunSettings = dataclasses.field(default_factory=RunSettings)


# Batch, steps, warm-up and learning rate are those of the Nyströmformer's comparison, which the SOFT papers
# use. It evaluates more often on listops (every 50 steps), retrieval (300) and pathfinder (312).
_LR = 1e-4
RECIPES = {
    task: LongRangeSettings(
        task,
        data=LongRangeDataSettings(task=task),
        optim=OptimSettings(
            # First and last learning rate are those of torch's OneCycleLR.
            batch_size=batch_size, steps=steps, warmup_steps=warmup_steps, lr=_LR, warmup_lr=_LR / 25,
            min_lr=_LR * 4e-6, sched="linear", weight_decay=0.0,
        ),
        run=RunSettings(eval_every=eval_every, save_every="500", workers=workers),
    )
    for task, batch_size, steps, warmup_steps, eval_every, workers in (
        ("listops", 32, 5_000, 1_000, 100, 2),
        ("text", 32, 20_000, 8_000, 500, 2),
        ("retrieval", 32, 30_000, 800, 1_000, 2),
        ("image", 256, 35_000, 175, 175, 8),
        ("pathfinder", 256, 62_400, 312, 624, 8),
    )
}  # fmt: skip
# For our own task: equal cells that share their window with others are hard to tell apart.
WINDOW_PER_CELL = "stride=1"
# Enough for two blocks to learn to find equal cells within seconds.
RECIPES["twins"] = LongRangeSettings(
    "twins",
    data=LongRangeDataSettings(task="twins"),
    model=SequenceModelSettings(pooling="none", dropout=0.0),
    optim=OptimSettings(batch_size=64, steps=600, warmup_steps=50, lr=2e-3, min_lr=0.0),
    run=RunSettings(eval_every=100, save_every="500", workers=0),
)


def with_usual_window(model: SequenceModelSettings, task: str) -> SequenceModelSettings:
    """The settings with the task's window, if the attention has windows and is given no stride."""
    options = model.attention_options
    known = option_names(model.attention) if model.attention in ATTENTIONS else set()
    if task != "twins" or "stride" not in known or any(o.startswith("stride=") for o in options):
        return model
    return dataclasses.replace(model, attention_options=(WINDOW_PER_CELL, *options))


class LongRange(Task):
    """Classification of sequences, of pairs of them, or of their tokens, with cross-entropy."""

    name = "longrange"
    recipes = RECIPES
    metric = "accuracy"
    capturable = True

    @classmethod
    def usual_recipe(cls, given: Given) -> str:
        return find_task(given.get("task", LongRangeDataSettings.task)).name

    @classmethod
    def adapt(cls, settings: Any, given: Given) -> Any:
        if "epochs" in given:
            raise ValueError(
                f"`epochs` {given['epochs']} can't be used here: the length of these runs is set by `steps`"
            )
        usual, optim, run = RECIPES[settings.recipe].optim, settings.optim, settings.run
        if "warmup_steps" not in given:
            warmup = usual.warmup_steps * optim.steps // usual.steps
            optim = dataclasses.replace(optim, warmup_steps=warmup)
        if "eval_every" not in given:
            run = dataclasses.replace(run, eval_every=min(run.eval_every, optim.steps))
        model = with_usual_window(settings.model, settings.data.task)
        return dataclasses.replace(settings, model=model, optim=optim, run=run)

    def __init__(self, settings: LongRangeSettings, data: LongRangeData | None = None):
        self.settings = settings
        self.task = find_task(settings.data.task)
        self.model_kwargs = model_arguments(settings.model, self.task)
        self.data = load_data(settings.data) if data is None else data
        self.train_data = self.data.train
        self.eval_data = some_samples(self.data.dev, settings.data.eval_samples)
        self.pad = PadSequences(self.task.length)

    def finish(self, outcome: Outcome) -> str:
        """Test the checkpoint that was best on dev; the result is also written to test.json."""
        optim, run = self.settings.optim, self.settings.run
        scores = score_checkpoint(
            run.output / "best",
            self.data.test,
            Processes(0, 1, choose_device(run.device)),
            batch_size=optim.batch_size,
            workers=run.workers,
            amp_dtype=optim.amp_dtype,
        )
        position = outcome.position
        result = {**scores, "step": position.best_step, "steps": position.step}
        path = run.output / TEST_RESULT
        write_durably(path, (json.dumps(result, indent=2) + "\n").encode())
        return f"test accuracy {scores['accuracy']:.2f}% at step {result['step']:,}, in {path}"

    @classmethod
    def build(cls, metadata: dict[str, Any]) -> nn.Module:
        return build_encoder(metadata["model_kwargs"])

    def build_model(self) -> nn.Module:
        return self.build(self.metadata())

    def collate(self, samples: list[Any]) -> SequenceBatch:
        return self.pad(samples)

    def train_step(
        self, model: nn.Module, batch: SequenceBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss, hits, count = score_labels(model(batch.tokens, batch.mask), batch.labels)
        return loss, {"accuracy": 100 * hits / count}

    def evaluate(
        self, model: nn.Module, batches: Iterable[SequenceBatch], processes: Processes
    ) -> dict[str, float]:
        return evaluate_sequences(model, batches, processes)

    def metadata(self) -> dict[str, Any]:
        return {
            "model": "sequence",
            "model_kwargs": self.model_kwargs,
            "longrange_task": self.task.name,
            "class_names": list(self.data.class_names),
        }


@functools.lru_cache(maxsize=1)
def load_data(settings: LongRangeDataSettings) -> LongRangeData:
    """Load the task's samples; the last ones are cached, for looking at a sample after training."""
    check_at_least(1, listops_train=settings.listops_train, listops_eval=settings.listops_eval)
    return load_longrange(
        settings.task,
        None if settings.data_dir is None else Path(settings.data_dir),
        seed=settings.listops_seed,
        listops_sizes=(settings.listops_train, settings.listops_eval, settings.listops_eval),
    )


def first_sample(path: Path) -> Tensor:
    """Tokens of the first dev sample of a checkpoint's task: (n,), (n, channels), or (2, n) for a pair."""
    settings = read_settings(LongRangeSettings, locate(path) / SETTINGS)
    tokens, _ = load_data(settings.data).dev[0]
    if isinstance(tokens, list):
        shorter = min(map(len, tokens))
        tokens = torch.stack([each[:shorter] for each in tokens])
    return tokens


def model_arguments(settings: SequenceModelSettings, task: LongRangeTask) -> dict[str, Any]:
    """Checked keyword arguments for :class:`SequenceClassifier`."""
    choices = {"attention": ATTENTIONS, "pooling": POOLINGS, "embed_dropout": EMBED_DROPOUTS}
    for name, known in choices.items():
        if (given := getattr(settings, name)) not in known:
            raise ValueError(f"`{name}` must be one of {', '.join(known)}, got {given!r}")
    if (settings.pooling == "none") != task.per_token:
        labels = "none, a class for each token" if task.per_token else "mean or cls"
        raise ValueError(
            f"`pooling` must be {labels}, for `task` {task.name}; got {settings.pooling}"
        )
    check_at_least(1, depth=settings.depth, num_heads=settings.num_heads, mlp_dim=settings.mlp_dim)
    if settings.mlp_conv < 0 or (settings.mlp_conv and settings.mlp_conv % 2 == 0):
        raise ValueError(f"`mlp_conv` must be 0 or odd, got {settings.mlp_conv}")
    if settings.dim < 1 or settings.dim % settings.num_heads:
        raise ValueError(
            f"`dim` must be a multiple of `num_heads` {settings.num_heads}, got {settings.dim}"
        )
    if not 0 <= settings.dropout < 1:
        raise ValueError(f"`dropout` must lie in [0, 1), got {settings.dropout:g}")
    arguments = {
        **dataclasses.asdict(settings),
        "attention_options": parse_model_kwargs(settings.attention_options, example="stride=32"),
        "vocab_size": task.vocab_size,
        "length": task.length,
        "num_classes": task.num_classes,
        "pair": task.pair,
        "channels": task.channels,
    }
    with mistakes_in("model_kwargs"), torch.device("meta"):
        build_encoder(arguments)
    return arguments


def build_encoder(arguments: dict[str, Any]) -> SequenceClassifier:
    """Build the encoder from the result of :func:`model_arguments`."""
    others = {name: value for name, value in arguments.items() if name != "attention_options"}
    return SequenceClassifier(**others, **arguments.get("attention_options", {}))


def evaluate_sequences(
    model: nn.Module,
    batches: Iterable[SequenceBatch],
    processes: Processes,
    confusion: Tensor | None = None,
) -> dict[str, float]:
    """Accuracy in percent and the loss, over the batches of all processes.

    ``confusion``, zeros (classes, classes) int64, is filled with counts: rows are true classes, columns
    predicted ones.
    """
    sums = torch.zeros(4, dtype=torch.float64, device=processes.device)
    for batch in batches:
        logits = model(batch.tokens, batch.mask).float()
        found = score_labels(logits, batch.labels, reduction="sum")
        if confusion is not None:
            known = batch.labels != UNLABELLED
            add_pairs(confusion, batch.labels[known], logits.argmax(-1)[known])
        sums += torch.stack([*found, torch.full_like(found[0], len(batch.tokens))])
    loss_sum, hit, count, samples = distributed.total(sums, processes).tolist()
    if confusion is not None:
        distributed.total(confusion, processes)
    return {"accuracy": 100 * hit / count, "loss": loss_sum / count, "samples": int(samples)}


def score_labels(
    logits: Tensor, labels: Tensor, reduction: str = "mean"
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, the number of correct labels, and their total, for sequences (b,) or their tokens (b, n)."""
    loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction=reduction)
    return loss, (logits.argmax(-1) == labels).sum(), (labels != UNLABELLED).sum()


def score_checkpoint(
    path: Path,
    samples: MapData,
    processes: Processes,
    confusion: Tensor | None = None,
    **reading: Any,
) -> dict[str, float]:
    """Score a checkpoint folder on samples of its task; ``reading`` are keywords of :func:`evaluation`."""
    model, metadata = LongRange.load(path, processes.device)
    pad = PadSequences(metadata["model_kwargs"]["length"])
    with evaluation(samples, pad, processes, **reading) as (batches, _):
        return evaluate_sequences(model, batches, processes, confusion)
