"""A task that trains in a second, and a program to run it in a process of its own.

python tests/training/toy.py OUTPUT [--name value ...]      one run; names are fields of the settings
python tests/training/toy.py --kill-often OUTPUT            a run killed at chosen points until it is done
"""

import ast
import dataclasses
import gc
import itertools
import json
import os
import random
import signal
import stat
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softfree.commands.train import STOPPED
from softfree.training import distributed
from softfree.training.engine import Outcome, Task, train
from softfree.training.settings import OptimSettings, RunSettings
from softfree_cli import leave

SAMPLES, EVAL_SAMPLES, FEATURES, CLASSES = 50, 11, 6, 3


class Points:
    """Random points with labels; training adds noise from all three generators."""

    def __init__(self, count: int, noise: float):
        generator = torch.Generator().manual_seed(count)
        self.x = torch.randn(count, FEATURES, generator=generator)
        self.y = self.x[:, :CLASSES].argmax(1)
        self.noise = noise

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = random.random() + np.random.rand() + torch.rand(FEATURES)
        return self.x[index] + self.noise * noise, self.y[index]


class Layers(nn.Module):
    def __init__(self, norm: bool, dropout: float):
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(FEATURES, 8), nn.GELU(), nn.Linear(8, 8))
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(self.norm(self.blocks(x))))


class Toy(Task):
    name, metric = "toy", "top1"

    def __init__(
        self,
        norm: bool = True,
        dropout: float = 0.1,
        stop_at: int = 0,
        stop: str = "process",
        kill_at: int = 0,
    ):
        """``stop_at``: the call of train_step that sends SIGTERM to this process, its group or its parent
        (``stop``); ``kill_at``: the one that kills rank 1, once."""
        self.stop_at, self.stop, self.kill_at, self.calls = stop_at, stop, kill_at, 0
        self.train_data = Points(SAMPLES, noise=0.1)
        self.eval_data = Points(EVAL_SAMPLES, noise=0.0)
        self.norm, self.dropout = norm, dropout

    def build_model(self) -> nn.Module:
        return Layers(self.norm, self.dropout)

    def train_step(self, model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        x, y = batch
        self.calls += 1
        sys.audit("toy.step")
        if self.calls == self.stop_at:
            # For os.kill, 0 is the group of this process.
            target = {"process": os.getpid(), "group": 0, "parent": os.getppid()}[self.stop]
            os.kill(target, signal.SIGTERM)
        first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
        if self.calls == self.kill_at and first_life and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return F.cross_entropy(model(x), y), {"mean": x.mean()}

    def evaluate(self, model: nn.Module, batches: Any, processes: Any) -> dict[str, float]:
        sums = torch.zeros(2, dtype=torch.float64, device=processes.device)
        for x, y in batches:
            hits = model(x).argmax(1) == y
            sums += torch.stack([hits.sum(), torch.ones_like(hits).sum()])
        hits_all, count = distributed.total(sums, processes).tolist()
        return {"top1": 100 * hits_all / count, "samples": int(count)}

    def metadata(self) -> dict[str, Any]:
        return {"model": "layers"}


def run_toy(output: Path, task: Task | None = None, **changes: Any) -> Outcome:
    """A run of the toy with fields of either settings, or arguments of the toy, changed."""
    settings: list[Any] = []
    defaults = (
        OptimSettings(batch_size=8, epochs=3, lr=1e-2, warmup_epochs=1, clip_grad=1.0),
        RunSettings(output=output, workers=0, log_interval=1, device="cpu"),
    )
    for kind in defaults:
        names = {field.name for field in dataclasses.fields(kind)} & changes.keys()
        settings.append(dataclasses.replace(kind, **{name: changes.pop(name) for name in names}))
    return train(task or Toy(**changes), *settings, settings_json="{}\n")


WRITES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "toy.fsync"}


def kill_at_point(number: int, output: Path) -> None:
    """Kill this process at the ``number``-th point it reaches: a step, or an access to a file of ``output``."""
    points = itertools.count(1)
    fsync = os.fsync

    def reached(event: str, arguments: tuple) -> None:
        within = event == "open" and str(arguments[0]).startswith(str(output))
        if (within or event == "toy.step" or event in WRITES) and next(points) == number:
            if event == "toy.fsync":  # a file of which only a half was written
                os.truncate(arguments[0], os.fstat(arguments[0]).st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    def announced_fsync(descriptor: int) -> None:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            sys.audit("toy.fsync", descriptor)
        fsync(descriptor)

    os.fsync = announced_fsync
    sys.addaudithook(reached)  # called before each access


def kill_often(output: Path) -> None:
    """Kill the run at its first point, go on and kill it at the second, and so on until a run ends by itself.

    Prints as JSON how many lives it took and what the kills left beside ``output / "last"``.
    """
    left = []
    for life in itertools.count(1):
        child = os.fork()
        if child == 0:
            kill_at_point(life, output)
            run_toy(output, save_every="3", resume="auto", model_ema=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            break
        names = ("last", ".last.new", ".last.old")
        left.append([name for name in names if (output / name).exists()])
    print(json.dumps({"lives": life, "left": left, "status": status}))


def main() -> int:
    torch.set_num_threads(1)
    # As the command does: searching what the imports made would take half of a short life.
    gc.freeze()
    if sys.argv[1] == "--kill-often":
        kill_often(Path(sys.argv[2]))
        return 0
    output, *flags = sys.argv[1:]
    changes = {}
    for name, text in zip(flags[::2], flags[1::2], strict=True):
        try:
            changes[name.removeprefix("--")] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            changes[name.removeprefix("--")] = text
    outcome = run_toy(Path(output), **changes)
    print(f"step {outcome.position.step}, stopped {outcome.stopped}")
    return STOPPED if outcome.stopped else 0


if __name__ == "__main__":
    leave(main())  # as the command does under torchrun
