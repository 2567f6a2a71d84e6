"""Run every small case through Triton's interpreter and print the errors as JSON, each on one path or, with "all", on both.

A program of its own, since the interpreter is chosen when the kernels are imported. Fresh memory is
filled with NaN, so that a place no kernel writes shows. float16 stands for 16-bit inputs: the
interpreter's bfloat16 arithmetic is not to be trusted.
"""

import dataclasses
import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import cases
import torch

from softfree.ops.attention import chunked
from softfree.ops.attention.kernels import launch
from softfree.ops.attention.settings import AttentionSettings, Inputs, InverseSettings
from softfree.ops.shared import devices
from softfree.ops.shared.registration import flatten

FEW_STEPS = 3
MAX_SPLIT = launch.MAX_SPLIT_ITERATIONS


def poisoned(create):
    def wrapper(*args, **kwargs):
        tensor = create(*args, **kwargs)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    return wrapper


def poison() -> None:
    """Fill what is fresh with NaN from here on."""
    for owner, name in (
        (torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty"),
        (torch.Tensor, "new_empty_strided"),
    ):  # fmt: skip
        setattr(owner, name, poisoned(getattr(owner, name)))


def kept_inverses() -> list[torch.Tensor]:
    """Newton's and a solve's, as a forward pass keeps them for a backward one."""
    q = torch.randn(2, 2, 40, 8, generator=torch.Generator().manual_seed(0))
    inputs = Inputs(q, None, q, q[:, :, ::2].contiguous(), None, None)
    methods = InverseSettings(), InverseSettings.solve(None, 2)
    return [launch.forward(inputs, AttentionSettings(0.4, inverse=way))[1] for way in methods]


def few_steps(case: cases.Case) -> cases.Case:
    """The same with as few Newton steps as take its way: of landmarks beyond a program each step is many launches."""
    if case.iterations > launch.MAX_SPLIT_ITERATIONS:
        launch.MAX_SPLIT_ITERATIONS = FEW_STEPS - 1
    return dataclasses.replace(case, iterations=FEW_STEPS)


def main() -> None:
    torch.manual_seed(0)
    # A triangle where one program makes the inverse.
    for m, kept in ((7, (28,)), (140, (140, 140))):
        q = torch.randn(1, 1, m, 8, requires_grad=True)
        settings = AttentionSettings(0.4, inverse=InverseSettings(iterations=FEW_STEPS))
        arguments = flatten(q, None, q, q, None, None, settings, "triton")
        torch.library.opcheck(
            torch.ops.softfree.attention.default, arguments, test_utils="test_faketensor"
        )
        assert torch.ops.softfree.attention(*arguments)[1].shape == (1, 1, *kept)
    poison()
    inverses = []
    for path, tokens in (("one launch", 1024), ("three launches", 0)):
        launch.remembered_call.cache_clear()
        launch.ONE_LAUNCH = ((tokens, 1000),)
        chunked.FEW_TOKENS = tokens or 60  # in three launches some cases keep U, others do not
        # Several programs per head, so that parts are added up.
        devices.processors = lambda device: 6
        inverses.append(kept_inverses())
        for number, (name, case) in enumerate(cases.SMALL.items()):
            if number // 2 % 2 == bool(tokens) and "all" not in sys.argv:
                continue
            # Each dtype on one of the paths, half of the cases the one and half the other.
            dtype = torch.float32 if number % 2 == bool(tokens) else torch.float16
            found = cases.errors(few_steps(case) if case.m > 128 else case, dtype, "cpu")
            launch.MAX_SPLIT_ITERATIONS = MAX_SPLIT
            line = {"path": path, "case": name, "dtype": str(dtype), "errors": found}
            print(json.dumps(line), flush=True)
    # So that either backward pass may follow either forward pass.
    assert all(map(torch.equal, *inverses))


if __name__ == "__main__":
    main()
