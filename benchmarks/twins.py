"""What do landmarks cost? Accuracy on twins against their number, for each sampler, other attentions and none.

    python benchmarks/twins.py --seeds 0 1 2 --csv FILE --draw FILE          minutes on a GPU, an hour on a CPU
    python benchmarks/twins.py softfree:spread softmax --landmarks 64 16     some of the rows
    python benchmarks/twins.py --read FILE FILE --draw FILE                  draws the results of earlier runs

Twins asks which of 64 cells occur twice (:mod:`softfree.data.twins`). Each row is the encoder of `softfree train longrange
--task twins`, trained with its recipe and tested on 1,024 samples; all rows of a seed see the same training samples. On a
GPU, steps are replayed from a CUDA graph.
"""

import argparse
import csv
import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from softfree.analysis import describe_environment, write_csv
from softfree.analysis.plots import COLOURS, LABELS, new_figure, save_figure
from softfree.data import twins
from softfree.layers.landmarks import SAMPLERS
from softfree.models.graphs import WARM_UP, CudaGraphs
from softfree.models.sequence import SequenceClassifier
from softfree.training.longrange import RECIPES, score_labels
from softfree.training.parameters import parameter_groups
from softfree.training.schedule import Schedule

OPTIM = RECIPES["twins"].optim
COUNTS = (64, 32, 16, 8)
CONTROL = "none"
# Attentions whose number of landmarks can be set, and the option that sets it; ours also with each sampler.
LANDMARKS: dict[str, Callable[[int], dict[str, Any]]] = {
    **{
        f"{name}:{sampler}": lambda count, sampler=sampler: (
            dict(landmarks=sampler, stride=twins.CELLS // count)
            if sampler in ("average", "conv")
            else dict(landmarks=f"{sampler}:{count}")
        )
        for name in ("softfree", "softpp", "soft")
        for sampler in SAMPLERS
    },
    "nystromformer": lambda count: dict(landmarks=count),
    "agent": lambda count: dict(landmarks=count),
    "linformer": lambda count: dict(slots=count),
}
OTHERS = ("softmax", "performer", "reformer", "flatten", CONTROL)
USUAL = (
    *(f"softfree:{sampler}" for sampler in SAMPLERS),
    "softpp:average", "soft:average", "nystromformer", "agent", "linformer", *OTHERS,
)  # fmt: skip


@dataclasses.dataclass
class Result:
    """A row: the attention, its number of landmarks (0: it has none), and its results."""

    attention: str
    landmarks: int
    seed: int
    accuracy: float = 0.0
    loss: float = 0.0
    seconds: float = 0.0


class OwnValues(nn.Module):
    """The control: projects each token's own values; nothing passes from token to token."""

    def __init__(self, dim: int):
        super().__init__()
        self.values = nn.Linear(dim, dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, size: None = None, mask: Tensor | None = None) -> Tensor:
        return self.proj(self.values(x))


def build(attention: str, landmarks: int, seed: int) -> SequenceClassifier:
    """The encoder, with random weights from this seed."""
    torch.manual_seed(seed)
    name = attention.partition(":")[0]
    options = LANDMARKS[attention](landmarks) if landmarks else {}
    model = SequenceClassifier(
        vocab_size=0,
        length=twins.CELLS,
        num_classes=len(twins.CLASSES),
        channels=twins.CHANNELS,
        attention="softmax" if name == CONTROL else name,
        pooling="none",
        dropout=0.0,
        **options,
    )
    if name == CONTROL:
        for block in model.blocks:
            block.attn = OwnValues(model.positions.shape[-1])
    return model


def samples(split: str, first: int, last: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Values (n, 64, 8) and labels (n, 64) of samples ``first`` to ``last - 1``, on the device."""
    drawn = zip(*(twins.draw_twins(index, split) for index in range(first, last)), strict=True)
    values, labels = (torch.from_numpy(np.stack(part)).to(device) for part in drawn)
    return values, labels


def learn(model: nn.Module, values: Tensor, labels: Tensor) -> None:
    """Train on the samples, one batch after the other."""
    on_gpu = values.is_cuda
    steps, batch = len(values) // OPTIM.batch_size, OPTIM.batch_size
    warmup = OPTIM.warmup_steps * steps // OPTIM.steps
    schedule = Schedule.of(dataclasses.replace(OPTIM, steps=steps, warmup_steps=warmup), 0)
    rate = torch.tensor(0.0, device=values.device)
    optimizer = torch.optim.AdamW(
        parameter_groups(model, OPTIM), lr=rate, betas=OPTIM.betas, fused=on_gpu, capturable=on_gpu
    )
    x, y = values[:batch].clone(), labels[:batch].clone()

    def step() -> None:
        loss, *_ = score_labels(model(x), y)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()

    run = graphed(step, model, optimizer) if on_gpu else step
    for number in range(steps):
        rate.fill_(schedule(number))
        part = slice(number * batch, (number + 1) * batch)
        x.copy_(values[part])
        y.copy_(labels[part])
        run()


def graphed(
    step: Callable[[], None], model: nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[[], None]:
    """The step, replayed from a CUDA graph. Changes made by the steps before the capture are undone."""
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    graphs = CudaGraphs(next(model.parameters()).device)
    for _ in range(WARM_UP):
        graphs.warm_up(step)
    replay = graphs.record(step)
    model.load_state_dict(weights)
    for state in optimizer.state.values():
        for value in state.values():
            value.zero_()
    return replay


@torch.no_grad()
def score(model: nn.Module, values: Tensor, labels: Tensor) -> tuple[float, float]:
    """Accuracy in percent and loss."""
    model.eval()
    loss, hits, count = score_labels(torch.cat([model(x) for x in values.split(256)]), labels)
    return 100 * hits.item() / count.item(), loss.item()


def measure(
    attentions: Sequence[str],
    counts: Sequence[int],
    seeds: Sequence[int],
    steps: int,
    device: torch.device,
) -> Iterator[Result]:
    tests = samples("test", 0, twins.COUNTS[-1], device)
    for place, seed in enumerate(seeds):
        length = steps * OPTIM.batch_size
        training = samples("train", place * length, (place + 1) * length, device)
        for attention in attentions:
            for landmarks in counts if attention in LANDMARKS else (0,):
                began = time.perf_counter()
                model = build(attention, landmarks, seed).to(device)
                learn(model, *training)
                found = score(model, *tests)
                seconds = time.perf_counter() - began
                yield Result(attention, landmarks, seed, *found, seconds)


def draw(results: Sequence[Result], title: str) -> Any:
    """Draw accuracy against landmarks, one line per sampler and attention; those without landmarks are horizontal."""
    figure = new_figure(9.5, 5.5)
    axes = figure.add_subplot()
    styles = dict(zip(SAMPLERS, ("-", "-", ":", "-.", "-"), strict=True))
    markers = dict(zip(SAMPLERS, "v^x+o", strict=True))
    for attention in dict.fromkeys(result.attention for result in results):
        name, _, sampler = attention.partition(":")
        label = LABELS[name] + (f", {sampler}" if sampler else "")
        found: dict[int, list[float]] = defaultdict(list)
        for result in results:
            if result.attention == attention:
                found[result.landmarks].append(result.accuracy)
        curve = sorted((count, mean(each)) for count, each in found.items())
        if attention not in LANDMARKS:
            level = curve[0][1]
            axes.axhline(level, color=COLOURS[name], linestyle="--", linewidth=1.2, label=label)
            continue
        across, along = zip(*curve, strict=True)
        style = styles.get(sampler, "--")
        marker = markers.get(sampler, "s")
        axes.plot(across, along, style, marker=marker, color=COLOURS[name], label=label)
    counts = sorted({result.landmarks for result in results if result.landmarks})
    axes.set(
        xscale="log",
        xlabel=f"landmarks, agents or slots for {twins.CELLS} cells",
        ylabel="accuracy (%)",
    )
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.set_title(title, fontsize=9)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    return figure


def read(paths: Sequence[Path]) -> tuple[list[Result], dict[str, str]]:
    """Read the results of earlier runs; also return their last row."""
    rows = [row for path in paths for row in csv.DictReader(path.read_text().splitlines())]
    results = [
        Result(row["attention"], int(row["landmarks"]), int(row["seed"]), float(row["accuracy"]))
        for row in rows
    ]
    return results, rows[-1]


def save_drawing(results: Sequence[Result], about: Mapping[str, Any], path: Path) -> None:
    count = len({result.seed for result in results})
    seeds = f"mean of {count} seeds, " if count > 1 else ""
    title = f"Twins: two blocks, {about['steps']} steps of {OPTIM.batch_size}; {seeds}"
    save_figure(draw(results, f"{title}{about['device']}, {about['date']}"), path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = (*LANDMARKS, *OTHERS)
    parser.add_argument("attentions", nargs="*", metavar="ATTENTION[:SAMPLER]", default=USUAL)
    parser.add_argument("--landmarks", nargs="+", type=int, default=COUNTS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=OPTIM.steps)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--draw", type=Path)
    parser.add_argument("--read", nargs="+", type=Path, metavar="CSV")
    given = parser.parse_args()
    for attention in given.attentions:
        if attention not in known:
            parser.error(f"{attention}: there are {', '.join(known)}")
    if given.read:
        if given.draw is None:
            parser.error("--read needs --draw")
        save_drawing(*read(given.read), given.draw)
        return
    device = torch.device(given.device)
    torch.set_float32_matmul_precision("high")
    results = []
    for result in measure(given.attentions, given.landmarks, given.seeds, given.steps, device):
        results.append(result)
        print(
            f"{result.attention:20} {result.landmarks or '':>4} seed {result.seed}: "
            f"{result.accuracy:6.2f}%, {result.seconds:.1f} s",
            flush=True,
        )
    environment = describe_environment(device)
    rows = [{**vars(result), "steps": given.steps} for result in results]
    if given.csv is not None:
        write_csv(given.csv, rows, environment)
    if given.draw is not None:
        save_drawing(results, {**environment, "steps": given.steps}, given.draw)


if __name__ == "__main__":
    main()
