"""What numbers are computed in."""

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
    """What ``x`` is computed in: autocast's dtype where that is on and applies, else its own."""
    device = x.device.type
    if device == "meta" or x.dtype not in AUTOCAST or not torch.is_autocast_enabled(device):
        return x.dtype
    return torch.get_autocast_dtype(device)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores, exponentials, sums and inverses: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def autocast(*values: Any) -> Sequence[Any]:
    """Tensors in :func:`autocast_dtype`, as on the device of the first; what is none as it is."""
    first = values[0]
    if not isinstance(first, Tensor) or first.is_meta:
        return values
    if not torch.is_autocast_enabled(first.device.type):
        return values
    return [x.to(autocast_dtype(x)) if isinstance(x, Tensor) else x for x in values]


def without_autocast(device: torch.device) -> AbstractContextManager:
    """Inside, autocast is off."""
    return _autocast_off(device.type) if torch.is_autocast_enabled(device.type) else NOTHING


@contextlib.contextmanager
def _autocast_off(kind: str) -> Iterator[None]:
    # torch.autocast would do the same, and check and count what does not matter here.
    torch.set_autocast_enabled(kind, False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(kind, True)


class _FullPrecision:
    """The setting belongs to the process: the first thread in keeps what it was, the last one out restores it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inside = 0
        self.before = ""

    def __call__(self, device: torch.device) -> AbstractContextManager:
        """Products of float32 in float32 on a GPU, whatever ``float32_matmul_precision`` says.

        TF32 keeps 11 bits, which a distance or an inverse amplifies.
        """
        if device.type != "cuda":
            return NOTHING
        with self.lock:
            # As torch.backends.cuda.matmul.fp32_precision, in a third of its time.
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
    """Inside, PyTorch computes on the device in the dtypes it is given, products of float32 in float32."""
    with without_autocast(device), full_precision(device):
        yield
