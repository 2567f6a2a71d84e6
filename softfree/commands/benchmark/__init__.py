"""Measure attentions or whole models: time, memory, throughput.

`softfree benchmark attention` compares the operator with torch's softmax attention. Each of our attentions is
first checked against the float64 reference; one that fails the check is not timed (exit code 1).
`softfree benchmark model NAME ...` compares models: ours and any other in timm's registry.
`softfree benchmark latency NAME ...` compares how long one call takes: eager, compiled, in a CUDA graph.
`softfree benchmark detector NAME ...` compares backbones in the training of a detector, at 800 x 1333.
`softfree benchmark memory` shows how the memory of every attention grows with the tokens (Fig. 1b).
`softfree benchmark throughput` compares every attention inside one backbone (Table 2).
"""

from collections.abc import Callable, Sequence

from softfree.commands.benchmark import attention, speed
from softfree.commands.common import run_subcommand

SUBCOMMANDS: dict[str, Callable[..., int]] = {
    "attention": attention.attention,
    "detector": speed.detector,
    "latency": speed.latency,
    "memory": attention.memory,
    "model": speed.model,
    "throughput": speed.throughput,
}


def main(argv: Sequence[str]) -> int:
    """Run ``softfree benchmark`` with these arguments; return the exit code."""
    return run_subcommand(
        "benchmark", SUBCOMMANDS, argv, question="benchmark what?", description=__doc__
    )
