"""Choosing the device, moving batches to it, and its precision."""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

AmpDtype = Literal["auto", "none", "bfloat16", "float16"]
AMP_DTYPES = {"none": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEFAULT_AMP = {"cpu": "none", "cuda": "bfloat16"}


def choose_device(name: str) -> torch.device:
    """The device behind a value of --device (auto, cuda, cuda:1, cpu), if this machine has it."""
    # With a driver that is too old, devices are counted but can't be used.
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        name = "cuda" if gpus else "cpu"
    kind, _, number = name.partition(":")
    if name != "cpu" and (kind != "cuda" or not (name == kind or number.isdecimal())):
        raise ValueError(f"`device` must be 'auto', 'cuda' or 'cpu', got {name!r}")
    if kind == "cuda" and int(number or 0) >= gpus:
        raise ValueError(f"`device` {name}: PyTorch finds no such GPU here; try `device` cpu")
    return torch.device(name)


def to_device(batch: Any, device: torch.device, channels_last: bool = False) -> Any:
    """Move a batch of tensors in tuples, lists and dicts to the device; other values stay as they are."""

    def move(tensor: Tensor) -> Tensor:
        images = channels_last and tensor.ndim == 4
        layout = torch.channels_last if images else torch.preserve_format
        return tensor.to(device, non_blocking=True, memory_format=layout)

    return tree_map_only(Tensor, move, batch)


def autocast(name: str, device: torch.device) -> torch.autocast:
    """The autocast context for a value of --amp-dtype."""
    dtype = AMP_DTYPES[DEFAULT_AMP[device.type] if name == "auto" else name]
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)
