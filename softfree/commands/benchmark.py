"""Measure attentions, or whole models beside their peers: time, memory, throughput.

`softfree benchmark attention` compares the operator with torch's softmax attention; each of ours is checked
against the float64 reference first, and a wrong one is not timed (exit code 1).
`softfree benchmark model NAME ...` compares any models that timm knows, ours among them.
`softfree benchmark detector NAME ...` compares backbones in training under a detector, at 800 x 1333.
`softfree benchmark memory` shows how the memory of every attention grows with the tokens (Fig. 1b).
`softfree benchmark throughput` compares every attention inside one backbone (Table 2).
"""

from collections.abc import Callable, Sequence

import tyro

from softfree.commands._benchmark_attention import attention
from softfree.commands._benchmark_detector import detector
from softfree.commands._benchmark_memory import memory
from softfree.commands._benchmark_model import model
from softfree.commands._benchmark_throughput import throughput

BENCHMARKS: dict[str, Callable[..., int]] = {
    "attention": attention,
    "detector": detector,
    "memory": memory,
    "model": model,
    "throughput": throughput,
}


def main(argv: Sequence[str]) -> int:
    """Run ``softfree benchmark`` with these arguments; return the exit code."""
    if not argv or argv[0] not in (*BENCHMARKS, "-h", "--help"):
        given = f"got {argv[0]!r}" if argv else "e.g. `softfree benchmark attention`"
        raise ValueError(f"benchmark what? One of {', '.join(BENCHMARKS)}; {given}")
    if argv[0] in BENCHMARKS:
        # On its own, so that errors point to its own --help.
        return tyro.cli(BENCHMARKS[argv[0]], args=argv[1:], prog=f"softfree benchmark {argv[0]}")
    return tyro.extras.subcommand_cli_from_dict(
        BENCHMARKS, args=argv, prog="softfree benchmark", description=__doc__
    )
