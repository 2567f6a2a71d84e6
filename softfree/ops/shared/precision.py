"""The dtypes and the precision of computations."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

NOTHING = contextlib.nullcontext()
IEEE = ("none", "ieee")
AUTOCAST = (torch.float16, torch.bfloat16, torch.float32)


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype to compute ``x`` in: autocast's dtype if autocast is on and applies, otherwise its own."""
    device = x.device.type
    if device == "meta" or x.dtype not in AUTOCAST or not torch.is_autocast_enabled(device):
        return x.dtype
    return torch.get_autocast_dtype(device)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores, exponentials, sums and inverses: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def autocast(*values: Any) -> Sequence[Any]:
    """Cast tensors to :func:`autocast_dtype` as for the first tensor's device.

    Other values are returned unchanged.
    """
    first = values[0]
    if not isinstance(first, Tensor) or first.is_meta:
        return values
    if not torch.is_autocast_enabled(first.device.type):
        return values
    return [x.to(autocast_dtype(x)) if isinstance(x, Tensor) else x for x in values]


def without_autocast(device: torch.device) -> AbstractContextManager:
    """A context in which autocast is off."""
    return _autocast_off(device.type) if torch.is_autocast_enabled(device.type) else NOTHING


@contextlib.contextmanager
def _autocast_off(kind: str) -> Iterator[None]:
    # torch.autocast would do the same, with checks and bookkeeping that are not needed here.
    torch.set_autocast_enabled(kind, False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(kind, True)


class _FullPrecision:
    """Exact float32 products on a GPU.

    The setting belongs to the process: the first thread to enter saves it, and the last one to leave restores
    it.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inside = 0
        self.before = ""

    def __call__(self, device: torch.device) -> AbstractContextManager:
        """A context with float32 products in float32 on a GPU, whatever ``float32_matmul_precision`` says.

        TF32 keeps 11 bits, and distances and inverses amplify its rounding.
        """
        if device.type != "cuda":
            return NOTHING
        with self.lock:
            # Same as torch.backends.cuda.matmul.fp32_precision, in a third of the time.
            if self.inside == 0 and torch._C._get_fp32_precision_getter("cuda", "matmul") in IEEE:
                return NOTHING
        return self._changed()

    @contextlib.contextmanager
    def _changed(self) -> Iterator[None]:
        matmul = torch.backends.cuda.matmul
        with self.lock:
            if self.inside == 0:
                self.before, matmul.fp32_precision = matmul.fp32_precision, "ieee"
            self.inside += 1
        try:
            yield
        finally:
            with self.lock:
                self.inside -= 1
                if self.inside == 0:
                    matmul.fp32_precision = self.before


full_precision = _FullPrecision()


@contextlib.contextmanager
def exactly(device: torch.device) -> Iterator[None]:
    """A context in which PyTorch computes in the dtypes it is given, and float32 products in float32."""
    with without_autocast(device), full_precision(device):
        yield
