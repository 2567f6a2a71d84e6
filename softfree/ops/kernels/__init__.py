"""Triton kernels, and the arithmetic of their blocks, which needs no Triton."""

import contextlib
import functools
import importlib.util
from contextlib import AbstractContextManager

import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None


# Triton's own functions for these also work inside kernels, and take 5 microseconds a call outside.
def tiles_of(length: int, tile: int) -> int:
    """How many tiles cover a length."""
    return -(-length // tile)


def power_of_two(length: int) -> int:
    """The least power of two that is not below a length."""
    return 1 << max(0, length - 1).bit_length()


def block(length: int) -> int:
    """A length padded to a block that the matrix units take."""
    return max(16, power_of_two(length))


@functools.cache
def has_matrix_units(device: torch.device) -> bool:
    """Whether a GPU has the matrix instructions of the kernels; the interpreter has."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def on(device: torch.device) -> AbstractContextManager:
    """Launches inside go to this GPU, whichever is the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
