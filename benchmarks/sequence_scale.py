"""How much does an attention add to the tokens of an untrained sequence encoder, on ListOps?

    python benchmarks/sequence_scale.py                  prints a table (seconds, on a CPU)
    python benchmarks/sequence_scale.py softpp:stride=32 for an attention with its options

Prints root mean squares over the tokens of four samples: of the tokens before each block's attention, and of what
the attention adds to them.
"""

import argparse
from typing import Any

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torch import Tensor

from softfree.data import listops
from softfree.data.longrange import PackedSequences, PadSequences
from softfree.models.sequence import SequenceClassifier
from softfree.training.classification import parse_model_kwargs

LENGTH, VOCABULARY, CLASSES = 2000, 32, 10


def measure(
    attention: str, options: dict[str, Any], tokens: Tensor, mask: Tensor
) -> list[tuple[float, float]]:
    """For each block: the size of the tokens, and of what the attention adds."""
    torch.manual_seed(0)
    model = SequenceClassifier(VOCABULARY, LENGTH, CLASSES, attention, **options).eval()
    sizes: list[float] = []

    def note(x: Tensor) -> None:
        sizes.append(x[mask].square().mean().sqrt().item())

    for block in model.blocks:
        block.norm1.register_forward_pre_hook(lambda _, inputs: note(inputs[0]))
        block.attn.register_forward_hook(lambda _, inputs, output: note(output))
    with torch.no_grad():
        model(tokens, mask)
    return list(zip(sizes[::2], sizes[1::2], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument(
        "attentions", nargs="*", metavar="ATTENTION[:OPTION=VALUE...]",
        default=["soft:query_gain=1", "soft", "softpp", "softmax", "nystromformer"],
    )  # fmt: skip
    given = parser.parse_args()
    data = PackedSequences(listops.generate(given.samples), shift=0, length=LENGTH)
    batch = PadSequences(LENGTH)([data[index] for index in range(given.samples)])
    table = Table("attention", "tokens", "block 1 adds", "tokens", "block 2 adds", box=SIMPLE)
    for text in given.attentions:
        attention, *options = text.split(":")
        pairs = measure(attention, parse_model_kwargs(options), batch.tokens, batch.tokens > 0)
        table.add_row(text, *(f"{size:.3g}" for pair in pairs for size in pair))
    Console().print(table)


if __name__ == "__main__":
    main()
