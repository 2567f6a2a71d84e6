"""Where a call runs: whether our kernels can take it, and the properties of the GPU."""

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

HAS_TRITON = importlib.util.find_spec("triton") is not None
HERE = contextlib.nullcontext()
SIXTEEN_BIT = (torch.float16, torch.bfloat16)


def usable(
    x: Tensor, dtypes: Collection[torch.dtype] = SIXTEEN_BIT, dtype: torch.dtype | None = None
) -> bool:
    """Whether kernels for ``dtypes`` can take ``x`` when computing in ``dtype`` (None: that of ``x``)."""
    if not x.is_cuda or not HAS_TRITON or (dtype or x.dtype) not in dtypes:
        return False
    return has_matrix_units(x.device) and not exporting()


def obstacle(
    device: torch.device, dtype: torch.dtype, dtypes: Collection[torch.dtype]
) -> str | None:
    """Why kernels for ``dtypes`` can't take a tensor; None if they can."""
    if not HAS_TRITON:
        return "the package triton is not installed"
    if device.type != "cuda" and not interpreted():
        return f"they need a CUDA device, got {device}"
    if not has_matrix_units(device):
        return "they need a GPU of compute capability 8.0 or more"
    if dtype not in dtypes:
        return f"they take {', '.join(map(str, dtypes))}, got {dtype}"
    return None


def exporting() -> bool:
    """Whether torch.export is tracing; exported programs contain none of our operators.

    ``torch.compiler.is_exporting()`` on its own is also true under ``torch.compile``, whose tracer treats it
    as a constant.
    """
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


def interpreted() -> bool:
    """Whether Triton interprets kernels on the CPU. Triton must be installed."""
    import triton

    return triton.knobs.runtime.interpret


def remembered(question: Callable[..., Any]) -> Any:
    """``functools.cache`` for a function of a device; ``torch.compile`` treats its result as a constant."""
    cached = functools.cache(question)

    @functools.wraps(question)
    def ask(*about: torch.device) -> Any:
        return cached(*about)

    # As torch.compiler.assume_constant_result does, but without importing the compiler, which would warn
    # about a bare cache.
    ask._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return ask


@remembered
def has_matrix_units(device: torch.device) -> bool:
    """Whether a GPU has the matrix instructions that the kernels use. True for the interpreter."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


@remembered
def is_hopper(device: torch.device) -> bool:
    """Whether the GPU is Hopper, or newer with as much shared memory. A device that is no GPU counts as it."""
    if device.type != "cuda":
        return True
    properties = torch.cuda.get_device_properties(device)
    shared_memory = getattr(properties, "shared_memory_per_block_optin", 0)
    return properties.major >= 9 and shared_memory >= 227 * 1024


@remembered
def processors(device: torch.device) -> int:
    """The number of streaming multiprocessors of a GPU; 1 for any other device."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@remembered
def can_overlap(device: torch.device) -> bool:
    """Whether a kernel can let the next one start before it ends."""
    on_nvidia = device.type == "cuda" and torch.version.hip is None
    return on_nvidia and torch.cuda.get_device_capability(device) >= (9, 0)


@remembered
def as_for_ampere() -> dict[str, str]:
    """The option to compile a kernel for Ampere, whose matrix instructions read operands from registers.

    It is for kernels with m x m products or with landmarks in tiles. Compiled for Hopper, some of them read
    their operands from the wrong place in shared memory.
    """
    return {} if interpreted() else {"arch": "sm80"}


@remembered
def knows_ptx() -> bool:
    """Whether kernels may contain NVIDIA assembly (PTX). False in the interpreter and on AMD GPUs."""
    return not interpreted() and torch.version.hip is None


def is_current(device: torch.device) -> bool:
    """Whether launches go to this GPU. True for a device that is no GPU."""
    return device.type != "cuda" or device.index == torch._C._cuda_getDevice()


def on(device: torch.device) -> AbstractContextManager:
    """A context in which launches go to this GPU, whichever is the current one."""
    return HERE if is_current(device) else torch.cuda.device(device)
