"""Launches of Triton's kernels that cost their host little.

``kernel[grid](...)`` looks at every argument of every launch to find out which compiled kernel it needs. Here that is
done once: a launch equal to an earlier one in all but where its tensors lie goes straight to the kernel that Triton
took then. Equal means the same kernel, GPU, values and options, and tensors of the same dtypes, each at a multiple of
16 bytes or not: no less than Triton looks at.

What this relies on inside Triton is known for version 3.6. Other versions, the interpreter, and launches that someone's
hooks want to see go the ordinary way.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel

KNOWN_VERSION = triton.__version__.startswith("3.6.")
MOST = 4096  # launches remembered, so that sizes that never come back don't fill the memory
ALIGNMENT = 16


class Compiled(NamedTuple):
    """A kernel as Triton compiled it, and what its launcher wants beside grid, stream and arguments."""

    run: Callable[..., None]
    function: int
    metadata: Any
    constants: tuple[
        None, ...
    ]  # in the place of compile-time arguments, which it takes and does not read


_remembered: dict[tuple, Compiled] = {}


def launch(
    kernel: Any, grid: tuple[int, ...], tensors: Sequence[Tensor], values: Sequence, **options: Any
) -> None:
    """As ``kernel[grid](*tensors, *values, **options)``, on the current GPU."""
    gpu = _gpu(tensors[0])
    addresses = [tensor.data_ptr() for tensor in tensors]
    key = (
        kernel,
        gpu,
        *values,
        *map(type, values),  # 1, 1.0 and True are equal
        *options.items(),
        *[tensor.dtype for tensor in tensors],
        *[address % ALIGNMENT for address in addresses],
    )
    compiled = _remembered.get(key)
    if compiled is None or kernel.pre_run_hooks or _hooked():
        launched = kernel[grid](*tensors, *values, **options)
        if gpu is not None and KNOWN_VERSION and isinstance(launched, CompiledKernel):
            _remember(key, kernel, launched, len(tensors) + len(values))
        return
    x, y, z = (*grid, 1, 1)[:3]
    compiled.run(
        x, y, z, _stream(gpu), compiled.function, compiled.metadata, None, None, None,
        *addresses, *values, *compiled.constants,
    )  # fmt: skip


def _remember(key: tuple, kernel: Any, launched: CompiledKernel, given: int) -> None:
    """Keep what Triton launched, if compile-time arguments come after those ``given`` for each launch."""
    at_compile_time = [parameter.is_constexpr for parameter in kernel.params]
    constants = (None,) * (len(at_compile_time) - given)
    if at_compile_time == [False] * given + [True] * len(constants):
        if len(_remembered) >= MOST:
            _remembered.clear()
        _remembered[key] = Compiled(
            launched.run, launched.function, launched.packed_metadata, constants
        )


def _gpu(tensor: Tensor) -> int | None:
    return torch.cuda.current_device() if tensor.is_cuda else None


def _stream(gpu: Any) -> int:
    return torch._C._cuda_getCurrentRawStream(gpu)


def _hooked() -> bool:
    """Whether someone asked to be told of launches."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
