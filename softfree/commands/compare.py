"""Compare attentions on a task of the Long Range Arena, or on twins: accuracy, size, speed, memory.

`softfree compare --task listops --attentions softfree softmax --output OUT` trains each attention that is not
yet trained in OUT/TASK/ATTENTION, tests it, and measures it at the task's full length. If it is stopped (exit
code 75) and started again, it continues where it was; attentions that are already trained are only measured.
"""

import dataclasses
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from softfree.analysis import count_macs, count_parameters
from softfree.analysis.measure import Work, measure, relate
from softfree.analysis.plots import COLOURS, LABELS, draw_bars
from softfree.analysis.speed import new_row, training_step
from softfree.commands import train
from softfree.commands.common import (
    NOTHING,
    Columns,
    Report,
    check_choices,
    check_positive,
    field,
    progress,
)
from softfree.data.longrange import TASKS, LongRangeData, LongRangeTask
from softfree.layers import ATTENTIONS
from softfree.layers.factory import option_names
from softfree.training.checkpoint import (
    SETTINGS,
    different_settings,
    read_run_settings,
)
from softfree.training.devices import autocast, choose_device
from softfree.training.logs import TEST_RESULT
from softfree.training.longrange import (
    RECIPES,
    WINDOW_PER_CELL,
    LongRange,
    LongRangeSettings,
    build_encoder,
    load_data,
    model_arguments,
    score_labels,
    with_usual_window,
)
from softfree.training.settings import settings_to_json

# Table 12 of the SOFT papers: accuracy on the test samples, in percent.
PAPER = {
    "softmax": dict(listops=37.10, text=65.02, retrieval=79.35, image=38.20),
    "reformer": dict(listops=19.05, text=64.88, retrieval=78.64, image=43.29),
    "linformer": dict(listops=37.25, text=55.91, retrieval=79.37, image=37.84),
    "performer": dict(listops=18.80, text=63.81, retrieval=78.62, image=37.07),
    "nystromformer": dict(listops=37.15, text=65.52, retrieval=79.56, image=41.58),
    "soft": dict(listops=37.40, text=63.49, retrieval=81.77, image=46.91),
}


@dataclasses.dataclass(frozen=True)
class CompareSettings(LongRangeSettings):
    """Settings of `softfree compare`."""

    attentions: tuple[str, ...] = ATTENTIONS
    """one or more of softfree, soft, softpp, softmax, linformer, performer, nystromformer, reformer, agent,
    flatten"""
    train: bool = True
    """train attentions that are not trained yet; otherwise they are measured untrained"""
    seconds: float = 2.0
    """time for each measured figure"""
    csv: Path | None = None
    """write the figures to this file, with date, device and versions in every row"""
    draw: Path | None = None
    """draw accuracy, speed and memory into this file (.png, .pdf or .svg)"""


# Measured in training and inference; the table shows all figures except the memory of inference.
KINDS = ("train", "infer")
FIGURES = ("samples_per_s", "ratio_to_softmax", "peak_mib")


def main(argv: Sequence[str]) -> int:
    """Run ``softfree compare`` with these arguments; return the exit code."""
    if any(argument.split("=")[0] == "--attention" for argument in argv):
        raise ValueError("--attention: compare takes several, use --attentions softfree softmax")
    settings = train.resolve(
        argv,
        LongRange,
        {name: CompareSettings(**vars(recipe)) for name, recipe in RECIPES.items()},
        prog="softfree compare",
        description=f"{__doc__}\n--task sets the defaults below to those of the papers; flags override them.",
    )
    check(settings)
    rows = []
    device = choose_device(settings.run.device)
    data: LongRangeData | None = None
    for name in dict.fromkeys(settings.attentions):
        given = settings_for(settings, name)
        if settings.train and (settings.run.overwrite or not is_trained(given)):
            data = data or load_data(settings.data)
            print(f"{name}: training in {given.run.output}", flush=True)
            outcome = LongRange.run(given, data)
            if outcome.stopped:
                return train.report(outcome, given.run.output)
            print(outcome.note, flush=True)
        row = new_row(
            KINDS,
            FIGURES,
            attention=name,
            task=settings.data.task,
            test_accuracy=None,
            paper_accuracy=PAPER.get(name, {}).get(settings.data.task),
            steps=None,
            best_step=None,
            parameters=None,
            macs=None,
        )
        if is_trained(given):
            result = json.loads((given.run.output / TEST_RESULT).read_text())
            row.test_accuracy, row.best_step = result["accuracy"], result["step"]
            row.steps = result.get("steps", settings.optim.steps)
        rows.append(row)
    with progress() as say:
        for row in rows:
            say(f"{row.attention}: measuring")
            measure_encoder(row, settings_for(settings, row.attention), device, settings.seconds)
    softmax = next((row for row in rows if row.attention == "softmax"), None)
    relate(rows, softmax, {f"{k}_samples_per_s": f"{k}_ratio_to_softmax" for k in KINDS})
    write(rows, settings)
    return 0


def check(settings: CompareSettings) -> None:
    """Raise if settings can't be compared, before anything is trained."""
    check_choices("--attentions", settings.attentions, ATTENTIONS)
    check_choices("--task", [settings.data.task], TASKS)
    check_positive("--seconds", settings.seconds)
    Report(settings.run.device, settings.csv, settings.draw).check()
    known = sorted(set().union(*map(option_names, settings.attentions)))
    for word in settings.model.attention_options:
        # The recipe of twins gives a window per cell to the attentions that have one.
        if "=" in word and (settings.data.task != "twins" or word != WINDOW_PER_CELL):
            check_choices("--model-kwargs", [word.partition("=")[0]], known)
    for name in settings.attentions:
        model_arguments(settings_for(settings, name).model, TASKS[settings.data.task])


def settings_for(settings: CompareSettings, attention: str) -> LongRangeSettings:
    """The settings for `softfree train longrange`, with only those --model-kwargs the attention takes."""
    known = option_names(attention)
    words = settings.model.attention_options
    own = tuple(word for word in words if "=" not in word or word.partition("=")[0] in known)
    model = dataclasses.replace(settings.model, attention=attention, attention_options=own)
    folder = settings.run.output / settings.data.task / attention
    continues = settings.train and not settings.run.overwrite
    return LongRangeSettings(
        settings.recipe,
        settings.data,
        with_usual_window(model, settings.data.task),
        settings.optim,
        dataclasses.replace(settings.run, output=folder, resume="auto" if continues else ""),
    )


def is_trained(settings: LongRangeSettings) -> bool:
    """Whether the run exists and is finished; raises if it was, or would go on, with other settings."""
    folder = settings.run.output
    finished = (folder / TEST_RESULT).is_file()
    checkpoint = folder / ("best" if finished else "last")
    if not (checkpoint / SETTINGS).is_file() or not (finished or settings.run.resume):
        return False
    found, wanted = read_run_settings(checkpoint), json.loads(settings_to_json(settings))
    different = different_settings(found, wanted, ("data", "model", "optim"), ("data_dir",))
    if found["run"]["seed"] != settings.run.seed:
        different.append(f"--seed {found['run']['seed']}")
    if different:
        raise ValueError(
            f"{folder} was trained with {', '.join(different)}; use the same settings, or another --output"
        )
    return finished


class _OneSample(nn.Module):
    """The encoder on one sample of full length, called like an image model, for counting its MACs."""

    def __init__(self, model: nn.Module, task: LongRangeTask):
        super().__init__()
        self.model = model
        self.task = task

    def forward(self, image: Tensor) -> Tensor:
        return self.model(random_tokens(self.task, 1, image.device))


def random_tokens(task: LongRangeTask, batch: int, device: torch.device) -> Tensor:
    """Random samples with a task's full length."""
    if task.channels:
        return torch.randn(batch, task.length, task.channels, device=device)
    shape = (batch, 2, task.length) if task.pair else (batch, task.length)
    return torch.randint(1, task.vocab_size, shape, device=device)


def measure_encoder(
    row: SimpleNamespace, settings: LongRangeSettings, device: torch.device, seconds: float
) -> None:
    """Fill in size, work, speed and memory at the task's full length; they do not depend on the weights."""
    task = TASKS[settings.data.task]
    torch.manual_seed(0)
    model = build_encoder(model_arguments(settings.model, task))
    row.parameters = count_parameters(model)
    row.macs = count_macs(_OneSample(model, task), size=1, in_chans=1)
    model.to(device)
    batch = settings.optim.batch_size
    tokens = random_tokens(task, batch, device)
    labelled = (batch, task.length) if task.per_token else (batch,)
    labels = torch.zeros(labelled, dtype=torch.long, device=device)
    amp_dtype = settings.optim.amp_dtype

    def loss() -> Tensor:
        return score_labels(model(tokens), labels)[0]

    @torch.inference_mode()
    def infer() -> None:
        with autocast(amp_dtype, device):
            loss()

    train = partial(training_step, model, loss, amp_dtype, device)
    prepare = {"train": train, "infer": partial(Work, infer)}
    for kind in KINDS:
        model.train(kind == "train")
        found = measure(prepare[kind], device, seconds=seconds)
        setattr(row, f"{kind}_samples_per_s", found.per_second(batch))
        if found.extra_bytes is not None:
            setattr(row, f"{kind}_peak_mib", found.extra_bytes / 2**20)
        else:
            row.note = "; ".join(filter(None, (row.note, f"{kind}: {found.note}")))


COLUMNS: Columns = {
    "attention": lambda row: row.attention,
    "test\n%": lambda row: percentage(row.test_accuracy),
    "paper\n%": lambda row: percentage(row.paper_accuracy),
    "size\nM": field("parameters", 1e-6),
    "GMACs": field("macs", 1e-9),
    "train\n1/s": field("train_samples_per_s"),
    "train\nratio": field("train_ratio_to_softmax"),
    "train\nMiB": field("train_peak_mib"),
    "infer\n1/s": field("infer_samples_per_s"),
    "infer\nratio": field("infer_ratio_to_softmax"),
}


def percentage(accuracy: float | None) -> str:
    """Format an accuracy as in the papers; a dash for None."""
    return NOTHING if accuracy is None else f"{accuracy:.2f}"


def write(rows: Sequence[SimpleNamespace], settings: CompareSettings) -> None:
    """Print the table, and write the files that were requested."""
    task, optim = TASKS[settings.data.task], settings.optim
    extra = {
        "batch_size": optim.batch_size,
        "seed": settings.run.seed,
        "attention_options": " ".join(settings.model.attention_options),
    }
    panels = {
        "test accuracy, %": {
            "here": [row.test_accuracy for row in rows],
            "papers": [row.paper_accuracy for row in rows],
        },
        "training, samples per second": {"here": [row.train_samples_per_s for row in rows]},
        "training, MiB": {"here": [row.train_peak_mib for row in rows]},
    }
    report = Report(settings.run.device, settings.csv, settings.draw)
    report.publish(
        f"{task.name}: {task.length:,} tokens, batch {optim.batch_size}, {optim.steps:,} steps",
        rows,
        COLUMNS,
        "test: accuracy at the step that was best on dev; paper: Table 12.\n"
        "size: million parameters. 1/s: samples per second, of full length; ratio: to softmax.\n"
        "MiB: the most that a training step held beyond weights and input.\n"
        "GMACs: billions of multiply-adds for one sample.",
        lambda title: draw_bars(
            [LABELS[row.attention] for row in rows],
            panels,
            title,
            [COLOURS[row.attention] for row in rows],
        ),
        extra=extra,
    )
