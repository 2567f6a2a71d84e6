"""Where a call runs: whether our kernels may take it, and what the GPU at hand is like."""

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
    """Whether kernels for ``dtypes`` may take ``x``, computed in ``dtype`` (None: its own)."""
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
    """Whether torch.export is tracing; its programs hold no operator of ours.

    ``torch.compiler.is_exporting()`` alone is also true under ``torch.compile``, whose tracer takes it for
    a constant.
    """
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


def interpreted() -> bool:
    """Whether Triton interprets kernels on the CPU; it is to be installed."""
    import triton

    return triton.knobs.runtime.interpret


def remembered(question: Callable[..., Any]) -> Any:
    """``functools.cache`` of a question about a device; to a compiler, the answer is a constant."""
    cached = functools.cache(question)

    @functools.wraps(question)
    def ask(*about: torch.device) -> Any:
        return cached(*about)

    # As torch.compiler.assume_constant_result does, which imports the compiler. A bare cache it would warn of.
    ask._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return ask


@remembered
def has_matrix_units(device: torch.device) -> bool:
    """Whether a GPU has the matrix instructions of the kernels; the interpreter has."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


@remembered
def is_hopper(device: torch.device) -> bool:
    """Whether the GPU is of that generation, or later with as much shared memory; what is no GPU counts as one."""
    if device.type != "cuda":
        return True
    properties = torch.cuda.get_device_properties(device)
    shared_memory = getattr(properties, "shared_memory_per_block_optin", 0)
    return properties.major >= 9 and shared_memory >= 227 * 1024


@remembered
def processors(device: torch.device) -> int:
    """How many streaming multiprocessors a GPU has; 1 for what is none."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@remembered
def can_overlap(device: torch.device) -> bool:
    """Whether a kernel can let the next one begin before it ends."""
    on_nvidia = device.type == "cuda" and torch.version.hip is None
    return on_nvidia and torch.cuda.get_device_capability(device) >= (9, 0)


@remembered
def as_for_ampere() -> dict[str, str]:
    """The option to compile a kernel for Ampere, whose matrix instructions take their operands from registers.

    For kernels with m x m products, and those with landmarks in tiles: as for Hopper, some of them read
    their operands from the wrong place in shared memory.
    """
    return {} if interpreted() else {"arch": "sm80"}


@remembered
def knows_ptx() -> bool:
    """Whether kernels may hold instructions of NVIDIA's assembler: neither in the interpreter nor on AMD's GPUs."""
    return not interpreted() and torch.version.hip is None


def is_current(device: torch.device) -> bool:
    """Whether launches go to this GPU; what is no GPU has no other."""
    return device.type != "cuda" or device.index == torch._C._cuda_getDevice()


def on(device: torch.device) -> AbstractContextManager:
    """Launches inside go to this GPU, whichever is the current one."""
    return HERE if is_current(device) else torch.cuda.device(device)
