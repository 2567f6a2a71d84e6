"""What the tests on a GPU share: which of them are long, and how exact a kernel must be."""

import contextlib
import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from softfree.ops.attention import operator as attention
from softfree.ops.shared import devices

from .cases import FLOOR

ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SIXTEEN_BIT = DTYPES[1:]


def spread(cases: Collection, *choices: Sequence, in_full: Collection = ()) -> list[Any]:
    """Every case with every combination of choices; the combinations take turns in being not ``long``.

    Each combination is another set of kernels to compile. Cases of ``in_full`` have all of them in the
    quick set.
    """
    combinations = list(itertools.product(*choices))
    return [
        pytest.param(
            case,
            *combination,
            id="-".join(map(str, (case, *combination))),
            marks=[]
            if case in in_full or turn == number % len(combinations)
            else [pytest.mark.long],
        )
        for number, case in enumerate(cases)
        for turn, combination in enumerate(combinations)
    ]


@contextlib.contextmanager
def plain_pytorch() -> Iterator[None]:
    """No kernel of ours is used."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "obstacle", lambda *_: "the test wants plain PyTorch")
        patch.setattr(devices, "usable", lambda *_, **__: False)
        patch.setattr(attention, "_CHECKED", {})  # which backend took such tensors before
        yield


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fresh memory is full of NaN, so that what no kernel writes shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(1, device="cuda").isnan()
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def check_against_plain(
    found: Sequence[Tensor],
    plain: Sequence[Tensor],
    exact: Sequence[Tensor],
    times: float = 2,
    floor: float = FLOOR,
):
    """Results are off by at most twice what plain PyTorch in their dtype is off, as FlashAttention asks.

    ``floor`` is allowed in any case: where plain PyTorch takes some part in float32, the precision of the tokens.
    """
    for part, (f, p, e) in enumerate(zip(found, plain, exact, strict=True)):
        error, allowed = (f.double() - e).norm(), times * (p.double() - e).norm() + floor * e.norm()
        assert error <= allowed, (
            f"part {part}: {error / e.norm():.1e}, allowed {allowed / e.norm():.1e}"
        )
