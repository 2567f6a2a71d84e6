"""The commands of a page of the documentation, to be run as printed."""

import re
import shlex
from collections.abc import Callable, Iterable

import pytest
import torch

import softfree_cli

# What a test can afford: a smaller model, smaller pictures and one epoch.
SMALL_PYRAMID = "embed_dims=16,16,16,16 num_heads=1,1,1,1 depths=1,1,1,1"
SMALL = f"--epochs 1 --img-size 32 --device cpu --workers 0 --model-kwargs {SMALL_PYRAMID}"


def commands(text: str) -> list[str]:
    """The lines of its shell blocks that call softfree, without their comments."""
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S)
    lines = [line.partition("  #")[0] for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith("softfree ")]


def run_commands(
    lines: Iterable[str], further: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> str:
    """What the commands print, each with ``further(line)`` behind it; all have to succeed."""
    threads = torch.get_num_threads()
    try:
        for line in lines:
            code = softfree_cli.main(shlex.split(f"{line} {further(line)}")[1:])
            assert code == 0, f"{line}: {capsys.readouterr().err}"
    finally:
        torch.set_num_threads(threads)
    return capsys.readouterr().out
