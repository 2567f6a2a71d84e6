"""Batches and precision on a device."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

AMP_DTYPES = {"none": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


def to_device(batch: Any, device: torch.device, channels_last: bool = False) -> Any:
    """A batch of tensors in tuples, lists and dicts, on the device; what is no tensor stays."""
    if isinstance(batch, Tensor):
        images = channels_last and batch.ndim == 4
        layout = torch.channels_last if images else torch.preserve_format
        return batch.to(device, non_blocking=True, memory_format=layout)
    if isinstance(batch, Mapping):
        return {name: to_device(value, device, channels_last) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device, channels_last) for value in batch))
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        return type(batch)(to_device(value, device, channels_last) for value in batch)  # type: ignore[call-arg]
    return batch


def amp_dtype_for(name: str, device: torch.device) -> torch.dtype | None:
    """The type behind a value of --amp-dtype; None: no autocast."""
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "none"
    return AMP_DTYPES[name]
