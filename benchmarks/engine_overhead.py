"""What the training engine adds to a step: `softfree train` against the bare loop of `benchmark model`.

    python benchmarks/engine_overhead.py                 a tiny model, where only the host's work matters
    python benchmarks/engine_overhead.py --model softpp_tiny_release --img-size 128 --batch-size 512 \
        --channels-last                                  on a GPU

The engine trains as `softfree train classification --recipe short --data-on-device` does, on random images
of 64 x 64 pixels. This includes crops, labels, schedule, clipping, guard and logs, but no evaluation and no
checkpoint. The bare loop is that of `softfree benchmark model --bench train`. Both train the same model in one
process and take turns: an epoch of the engine, then as many bare steps. On a CPU, one earlier turn of each
counts torch's calls. On a GPU, the same is then repeated with CUDA graphs, as with `--cuda-graph` for the engine.
"""

import argparse
import contextlib
import dataclasses
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from torch.utils._python_dispatch import TorchDispatchMode

from softfree.analysis import describe_environment, write_csv
from softfree.analysis.measure import capture_graph, synchronize
from softfree.analysis.speed import ModelConditions, training
from softfree.commands.common import heading, make_table
from softfree.data.images import ImageData, ImageDataset
from softfree.training import classification
from softfree.training.engine import train
from softfree.training.settings import RunSettings, settings_to_json

TINY = ("embed_dims=16,16,16,16", "num_heads=1,1,1,1", "depths=1,1,1,1")
CLASSES = 100
BAR = 1.05
COUNTED = 1  # the turn after the warm-up, which is turn 0
LOOPS = ("engine", "bare loop")


class Noise(ImageDataset):
    """Random images of 64 x 64."""

    def __init__(self, count: int):
        super().__init__()
        self.count = count
        self.pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)

    def __len__(self) -> int:
        return self.count

    def read(self, index: int) -> tuple[Image.Image, int]:
        return Image.fromarray(np.roll(self.pixels, index)), index % CLASSES

    def name(self, index: int) -> str:
        return f"picture {index}"


class CallCounter(TorchDispatchMode):
    """Counts the calls of torch's operators that compute something, and those that make views."""

    def __init__(self) -> None:
        super().__init__()
        self.computing = self.views = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        self.views += func.is_view
        self.computing += not func.is_view
        return func(*args, **(kwargs or {}))


class TakesTurns(classification.Classification):
    """The task of a user's run. When the engine asks for the order of an epoch, the bare loop takes its turn."""

    def begin(self, bare: Callable[[], object], steps: int, device: torch.device) -> None:
        self.bare, self.steps, self.device = bare, steps, device
        self.turn = -1
        self.seconds: dict[str, list[float]] = {loop: [] for loop in LOOPS}
        self.calls: dict[str, CallCounter] = {loop: CallCounter() for loop in LOOPS}
        self.engine_turn: contextlib.AbstractContextManager = contextlib.nullcontext()

    @contextlib.contextmanager
    def one_turn(self, loop: str) -> Any:
        synchronize(self.device)
        began = time.perf_counter()
        counting = self.turn == COUNTED and self.device.type == "cpu"
        with self.calls[loop] if counting else contextlib.nullcontext():
            yield
        synchronize(self.device)
        if self.turn > COUNTED:
            self.seconds[loop].append(time.perf_counter() - began)

    def order(self, samples: int, batch_size: int, generator: torch.Generator) -> torch.Tensor:
        self.engine_turn.__exit__(None, None, None)
        self.turn += 1
        with self.one_turn(LOOPS[1]):
            for _ in range(self.steps):
                self.bare()
        self.engine_turn = self.one_turn(LOOPS[0])
        self.engine_turn.__enter__()
        return super().order(samples, batch_size, generator)


def build_task(
    arguments: argparse.Namespace, device: torch.device, output: Path, cuda_graph: bool
) -> TakesTurns:
    """The task with the settings of the recipe, and the settings of the run."""
    recipe = classification.RECIPES["short"]
    kwargs = tuple(arguments.model_kwargs)
    if not arguments.model_kwargs and arguments.model == "softpp_tiny":
        kwargs = TINY
    optim = dataclasses.replace(
        recipe.optim,
        batch_size=arguments.batch_size,
        # The warm-up, the counted turn, the timed turns, and one more: a turn ends when the next begins.
        epochs=COUNTED + 1 + arguments.turns + 1,
    )
    settings = classification.ClassificationSettings(
        recipe="short",
        data=classification.DataSettings(data_on_device=True),
        model=classification.ModelSettings(
            model=arguments.model, img_size=arguments.img_size, model_kwargs=kwargs
        ),
        augment=recipe.augment,
        optim=optim,
        run=RunSettings(
            output=output,
            device=device.type,
            channels_last=arguments.channels_last,
            torchcompile=arguments.torchcompile,
            cuda_graph=cuda_graph,
            save_every="100000s",
            eval_every=10**9,
        ),
    )
    data = ImageData(
        Noise(arguments.batch_size * arguments.steps),
        Noise(arguments.batch_size),
        tuple(str(index) for index in range(CLASSES)),
    )
    return TakesTurns(settings, data)


def measure(
    arguments: argparse.Namespace, device: torch.device, cuda_graph: bool = False
) -> TakesTurns:
    """Run the engine to the end, with the bare loop between its epochs."""
    with tempfile.TemporaryDirectory() as folder:
        task = build_task(arguments, device, Path(folder) / "run", cuda_graph)
        conditions = ModelConditions(
            batch_size=arguments.batch_size,
            img_size=arguments.img_size,
            amp_dtype="bfloat16" if device.type == "cuda" else "none",
            channels_last=arguments.channels_last,
            torchcompile=arguments.torchcompile,
            cuda_graph=cuda_graph,
        )
        call = training(task.build_model(), conditions, device).call
        task.begin(capture_graph(call) if cuda_graph else call, arguments.steps, device)
        settings = task.settings
        train(task, settings.optim, settings.run, settings_to_json(settings))
    return task


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", default="softpp_tiny", help="as timm names it")
    parser.add_argument("--model-kwargs", nargs="*", default=(), help="e.g. depths=1,1,1,1")
    parser.add_argument("--img-size", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--torchcompile", action="store_true")
    parser.add_argument("--steps", type=int, default=50, help="steps per turn (default 50)")
    parser.add_argument("--turns", type=int, default=5, help="timed turns of each (default 5)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--csv", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    gc.freeze()  # as the commands do
    # One thread on a CPU as well: only the host's work counts.
    torch.set_num_threads(1)
    ways = [""] if device.type == "cpu" else ["", ", CUDA graph"]
    measured = {way: measure(arguments, device, cuda_graph=bool(way)) for way in ways}

    console = Console(highlight=False)
    measured_in = describe_environment(device)
    size = f"{arguments.img_size} x {arguments.img_size}, batch {arguments.batch_size}"
    heading(console, f"{arguments.model}, {size}", measured_in, threads=device.type == "cpu")
    table = make_table(
        ("a step of", "ms", "fastest\nturn", "engine\nover it", "bar", "torch's\ncalls", "views")
    )
    rows = []
    for way, task in measured.items():
        milliseconds = {
            loop: [1e3 * turn / arguments.steps for turn in turns]
            for loop, turns in task.seconds.items()
        }
        engine = statistics.median(milliseconds[LOOPS[0]])
        for loop, turns in milliseconds.items():
            median, calls = statistics.median(turns), task.calls[loop]
            rows.append(
                {
                    "loop": loop + way,
                    "model": arguments.model,
                    "img_size": arguments.img_size,
                    "batch_size": arguments.batch_size,
                    "channels_last": arguments.channels_last,
                    "torchcompile": arguments.torchcompile,
                    "ms": median,
                    "fastest_ms": min(turns),
                    "engine_over_it": engine / median,
                    "torch_calls": calls.computing / arguments.steps,
                    "views": calls.views / arguments.steps,
                }
            )
            counts = calls.computing, calls.views
            table.add_row(
                loop + way,
                f"{median:.2f}",
                f"{min(turns):.2f}",
                "" if loop == LOOPS[0] else f"{engine / median:.3f}",
                f"<= {BAR}" if loop == LOOPS[1] else "",
                *(f"{n / arguments.steps:.0f}" if n else "-" for n in counts),
            )
    console.print(table)
    console.print(
        f"ms: median of {arguments.turns} turns of {arguments.steps} steps.\n"
        "engine over it: the engine's time over the row's, without CUDA graphs or with them like the row.\n"
        "calls: of operators that compute; one call may start several kernels, as those for lists of "
        "tensors do.",
        style="dim",
    )
    if arguments.csv:
        write_csv(arguments.csv, rows, measured_in)
        console.print(f"written to {arguments.csv}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
