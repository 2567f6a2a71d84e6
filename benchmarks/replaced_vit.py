"""How much of what a ViT has learned remains when its attention is replaced, and how soon it recovers.

    python benchmarks/replaced_vit.py --device cuda

A small timm ViT is trained on the embedded digits with softmax attention. Then its attention is replaced
(softfree.replace_attention) and training continues. For comparison, the same epochs are run from random weights.
"""

import argparse
import copy

import timm
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import softfree

BATCH = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=60, help="epochs of the softmax model")
    parser.add_argument("--further", type=int, default=10, help="epochs after the replacement")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    for seed in range(options.seeds):
        found = measure(options.epochs, options.further, seed, options.device)
        print(f"seed {seed}:", ", ".join(found), flush=True)


def measure(epochs: int, further: int, seed: int, device: str = "cpu") -> list[str]:
    train, test = (tuple(t.to(device) for t in part) for part in digits(seed))
    torch.manual_seed(seed)
    model = vit().to(device)
    fit(model, train, epochs)
    lines = [f"softmax {epochs} epochs {accuracy(model, test):.1f}%"]
    replaced = copy.deepcopy(model)
    softfree.replace_attention(replaced)
    lines.append(f"replaced {accuracy(replaced, test):.1f}%")
    fit(replaced, train, further)
    lines.append(f"{further} epochs later {accuracy(replaced, test):.1f}%")
    fit(model, train, further)
    lines.append(f"softmax {further} epochs later {accuracy(model, test):.1f}%")
    fresh = vit().to(device)
    softfree.replace_attention(fresh)
    fit(fresh, train, further)
    lines.append(f"{further} epochs from random weights {accuracy(fresh, test):.1f}%")
    return lines


def vit() -> nn.Module:
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=16, patch_size=2, in_chans=1, embed_dim=48, num_heads=3, depth=4,
        num_classes=10,
    )  # fmt: skip


def digits(seed: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Images of 16 x 16, made from the 8 x 8 ones, and their classes."""
    data = load_digits()
    pictures = torch.tensor(data.images, dtype=torch.float32)[:, None] / 8 - 1
    pictures = F.interpolate(pictures, scale_factor=2.0, mode="bilinear")
    classes = torch.tensor(data.target)
    rows = train_test_split(
        range(len(classes)), test_size=0.25, random_state=seed, stratify=classes
    )
    first, second = ((pictures[r], classes[r]) for r in rows)
    return first, second


def fit(model: nn.Module, data: tuple[Tensor, Tensor], epochs: int) -> None:
    pictures, classes = data
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    steps = epochs * (len(classes) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps)
    model.train()
    for _ in range(epochs):
        order = torch.randperm(len(classes))[: len(classes) // BATCH * BATCH]
        for batch in order.split(BATCH):
            loss = F.cross_entropy(model(pictures[batch]), classes[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()


@torch.no_grad()
def accuracy(model: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    pictures, classes = data
    return 100 * (model.eval()(pictures).argmax(1) == classes).float().mean().item()


if __name__ == "__main__":
    main()
