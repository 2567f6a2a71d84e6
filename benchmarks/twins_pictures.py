"""Does a backbone's attention find equal cells? Twins as pictures: a small pyramid and a linear layer for each cell.

    python benchmarks/twins_pictures.py softfree softmax none --csv FILE        a minute for each on a CPU

The pictures (:func:`softfree.data.twins.draw_twin_picture`) have 8 x 8 cells, half of which occur twice. A token of the pyramid's
second stage is a cell, and every cell a landmark. There is no convolution of the values, and windows of the stem do not overlap:
nothing but the attention, or with "none" nothing at all, passes from cell to cell.
"""

import argparse
from pathlib import Path

import numpy as np
import timm
import torch
import torch.nn.functional as F
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor, nn

import softfree  # noqa: F401  registers the backbones
from softfree.analysis import describe_environment, write_csv
from softfree.data.twins import draw_twin_picture
from softfree.training.classification import Normalize

CELL = 8
BATCH, STEPS, WARM_UP, RATE, TESTED = 16, 200, 50, 2e-3, 200
normalize = Normalize(IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)


class OwnValues(nn.Module):
    """The control: every token's own values, projected."""

    def __init__(self, dim: int):
        super().__init__()
        self.values = nn.Linear(dim, dim)
        self.proj = nn.Linear(dim, dim)

    def forward(
        self, x: Tensor, size: tuple[int, int] | None = None, mask: Tensor | None = None
    ) -> Tensor:
        return self.proj(self.values(x))


class CellLabels(nn.Module):
    """Pictures (b, 3, 64, 64) to logits of their cells (b, 2, 8, 8)."""

    def __init__(self, attention: str):
        super().__init__()
        self.backbone = timm.create_model(
            "softfree_tiny",
            features_only=True,
            out_indices=(1,),
            img_size=64,
            embed_dims=(32, 64, 64, 64),
            num_heads=(1, 2, 2, 2),
            depths=(1, 2, 1, 1),
            attention="softmax" if attention == "none" else attention,
            overlap=False,
            landmarks="average:64",
            strides=(1, 1, 1, 1),
            value_convs=(0, 0, 0, 0),
        )
        self.head = nn.Conv2d(64, 2, 1)
        if attention == "none":
            for stage in self.backbone.model.stages:
                for block in stage.blocks:
                    block.attn = OwnValues(block.attn.proj.in_features)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.backbone(normalize(images))[0])


def pictures(split: str, first: int, last: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Pictures ``first`` to ``last - 1`` (n, 3, 64, 64), and the classes of their cells (n, 8, 8)."""
    drawn = zip(*(draw_twin_picture(index, split) for index in range(first, last)), strict=True)
    images, classes = (torch.from_numpy(np.stack(part)).to(device) for part in drawn)
    return images.permute(0, 3, 1, 2), classes[:, ::CELL, ::CELL].long()


def accuracy(attention: str, seed: int, steps: int, device: torch.device) -> float:
    """Percent of the cells of new pictures that are labelled right, after a training."""
    torch.manual_seed(seed)
    model = CellLabels(attention).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / WARM_UP, 2 * (steps - step) / steps)
        images, classes = pictures("train", step * BATCH, (step + 1) * BATCH, device)
        optimizer.zero_grad()
        F.cross_entropy(model(images), classes).backward()
        optimizer.step()
    images, classes = pictures("test", 0, TESTED, device)
    with torch.no_grad():
        return 100 * (model.eval()(images).argmax(1) == classes).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("attentions", nargs="+", metavar="ATTENTION")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--csv", type=Path)
    given = parser.parse_args()
    device = torch.device(given.device)
    rows: list[dict[str, object]] = []
    for seed in given.seeds:
        for attention in given.attentions:
            found = accuracy(attention, seed, given.steps, device)
            rows.append(dict(attention=attention, seed=seed, steps=given.steps, accuracy=found))
            print(f"{attention:14} seed {seed}: {found:.2f}%", flush=True)
    if given.csv is not None:
        write_csv(given.csv, rows, describe_environment(device))


if __name__ == "__main__":
    main()
