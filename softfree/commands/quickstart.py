"""Train a small model on handwritten digits, score it, and draw what it has learned."""

import csv
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from rich.console import Console
from rich.markup import escape
from torch import Tensor

from softfree.analysis.capture import capture_attention
from softfree.analysis.heatmap import note_of
from softfree.analysis.judgement import judge_maps, scale_maps
from softfree.analysis.predictions import COLUMNS, ROWS, HeatMap, Sample, draw_quickstart
from softfree.commands import train, validate
from softfree.commands.common import command, message_console, shell_lines
from softfree.data import load_images
from softfree.training.classification import Classification, Normalize, eval_transform
from softfree.training.devices import choose_device
from softfree.training.logs import EVAL_CSV, TRAIN_CSV

# Twice the size of the digits, and landmarks of small windows, so that attention maps have details.
FLAGS = (
    "--img-size", "64", "--model", "softfree_tiny", "--model-kwargs", "embed_dims=32,64,96,128",
    "num_heads=1,2,3,4", "depths=1,1,1,1", "strides=4,2,1,1",
    "--smoothing", "0", "--warmup-epochs", "0.5",
)  # fmt: skip
EPOCHS = 6
MOST_WRONG = COLUMNS
STAGES = (1, 2)
EXAMPLES = 10


def quickstart(
    output: Path = Path("output/quickstart"), epochs: int = EPOCHS, device: str = "auto"
) -> int:
    """Needs no data and no internet. If run again, it continues, or shows the results.

    Args:
        output: folder for checkpoints, logs and the picture.
        epochs: passes over the 1,437 training digits.
        device: 'cuda', 'cpu', or 'auto' for the GPU if there is one.
    """
    console = message_console()
    where = choose_device(device)
    began = time.monotonic()
    best = output / "best"
    training = [
        "classification", "--output", str(output), *FLAGS, "--epochs", str(epochs),
        "--device", where.type, "--resume", "auto",
    ]  # fmt: skip
    show_step(console, 1, "Train on 1,437 handwritten digits", "train", training)
    if code := train.main(training, advice=False):
        return code
    scoring = [
        "classification", "--checkpoint", str(best), "--device", where.type, "--workers", "0",
    ]  # fmt: skip
    show_step(console, 2, "Score on 360 others", "validate", scoring)
    if code := validate.main(scoring):
        return code
    console.print("[bold]3. Draw what it has learned[/]")
    picture = output / "quickstart.png"
    examples = output / "digits"
    draw(picture, output, where)
    save_examples(examples)
    predicting = shell_lines(["softfree", "predict", str(examples), "--checkpoint", str(best)])
    console.print(
        f"Picture: [bold]{escape(str(picture))}[/]\n\n"
        f"[bold]That took {time.monotonic() - began:.0f} s. Next:[/]\n"
        f"  {escape(predicting)}\n"
        "  softfree train classification --data-dir D --output OUT\n"
        "                     your pictures, one folder per class: D/cats/, D/dogs/, ...\n"
        f"  softfree explore   a page that shows where {escape(str(best))} attends\n"
        "  softfree demo      how fast it is without softmax\n"
        "If the shell does not find softfree: source .venv/bin/activate"
    )
    return 0


main = command(quickstart, __doc__)


def show_step(console: Console, number: int, what: str, command: str, argv: Sequence[str]) -> None:
    """Print a heading, and the command that does the same."""
    console.print(f"[bold]{number}. {what}[/]")
    console.print(shell_lines(["softfree", command, *argv]), style="dim", markup=False)


def draw(path: Path, output: Path, device: torch.device) -> None:
    """Draw samples with right and wrong answers, the curves, and where a patch of one digit attends to."""
    model, metadata = Classification.load(output / "best", device)
    digits = load_images(None).val
    prepare = eval_transform(metadata)
    normalize = Normalize(metadata["mean"], metadata["std"])
    pictures, labels = zip(*(digits.read(i) for i in range(len(digits))), strict=True)
    inputs = normalize(torch.stack([prepare(picture) for picture in pictures]).to(device))
    with torch.inference_mode():
        chances = model(inputs).float().softmax(-1).cpu()
    names = metadata["class_names"]
    samples = [
        Sample(picture, names[label], names[int(row.argmax())], float(row.max()))
        for picture, label, row in zip(pictures, labels, chances, strict=True)
    ]
    right = [sample for sample in samples if sample.predicted == sample.label]
    wrong = [sample for sample in samples if sample.predicted != sample.label][:MOST_WRONG]
    shown = wrong + right[: ROWS * COLUMNS - len(wrong)]
    chosen = samples.index(next((sample for sample in right if sample.label == "8"), samples[0]))
    draw_quickstart(
        path,
        f"{metadata['model']}, made small: {len(right)} of {len(samples)} handwritten digits "
        f"read correctly ({len(right) / len(samples):.1%})",
        shown,
        read_curve(output / TRAIN_CSV, "loss"),
        read_curve(output / EVAL_CSV, "top1"),
        pictures[chosen],
        heat_maps(model, inputs[chosen], pictures[chosen]),
    )


def heat_maps(model: torch.nn.Module, image: Tensor, picture: Image.Image) -> list[HeatMap]:
    """Rows of the attention matrices of two stages, averaged over the heads, for a patch on the digit."""
    captured = capture_attention(model, image)
    x, y = brightest(picture)
    maps = []
    for stage in STAGES:
        layer = captured.layer(stage)
        heat = layer.heat_map(layer.token_at(x, y)).mean(0).cpu()
        rows, columns = heat.shape
        title = f"stage {stage}: {rows} x {columns} tokens"
        note = note_of(heat, judge_maps(heat)[0])
        maps.append(HeatMap(title, scale_maps(heat).numpy(), note, x, y))
    return maps


def brightest(picture: Image.Image) -> tuple[float, float]:
    """The centre of the brightest pixel, across and down, in [0, 1]."""
    width, height = picture.size
    grey = torch.tensor(list(picture.convert("L").tobytes()))
    down, across = divmod(int(grey.argmax()), width)
    return (across + 0.5) / width, (down + 0.5) / height


def read_curve(path: Path, column: str) -> list[tuple[float, float]]:
    """Read (epoch, value) from every row of a run's log."""
    with path.open(newline="") as file:
        return [(float(row["epoch"]), float(row[column])) for row in csv.DictReader(file)]


def save_examples(folder: Path) -> None:
    """Write a few validation digits to files, for trying `softfree predict`."""
    digits = load_images(None).val
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(EXAMPLES):
        picture, label = digits.read(index)
        picture.save(folder / f"{index}_is_a_{label}.png")
