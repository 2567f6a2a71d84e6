"""Launches of Triton's kernels that cost their host little.

``kernel[grid](...)`` looks at every argument of every launch to find out which compiled kernel it needs. Here that is
done once: a :class:`Launch` has everything but the tensors, and asks Triton again only where these have other dtypes,
another GPU, or lie at a multiple of 16 bytes where they did not, all that Triton looks at. :func:`launch` finds the
:class:`Launch` of equal arguments, for callers that do not keep it.

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
    """A kernel as Triton compiled it: its launcher, and what that wants to know of it."""

    run: Callable[..., None]
    function: int
    metadata: Any


class Launch:
    """``kernel[grid](*tensors, *values, **options)``, on the current GPU, as a function of the tensors."""

    def __init__(self, kernel: Any, grid: tuple[int, ...], values: Sequence, **options: Any):
        self.kernel, self.grid, self.values, self.options = kernel, grid, values, options
        self.compiled: dict[tuple, Compiled] = {}
        self.three_axes = (*grid, 1, 1)[:3]
        self.rest: tuple = ()

    def __call__(self, *tensors: Tensor) -> None:
        gpu = _gpu(tensors[0])
        addresses = [tensor.data_ptr() for tensor in tensors]
        key = (
            gpu,
            *[tensor.dtype for tensor in tensors],
            *[address % ALIGNMENT == 0 for address in addresses],
        )
        compiled = self.compiled.get(key)
        if compiled is None or self.kernel.pre_run_hooks or _hooked():
            launched = self.kernel[self.grid](*tensors, *self.values, **self.options)
            if gpu is not None and KNOWN_VERSION and isinstance(launched, CompiledKernel):
                self._remember(key, launched, len(tensors))
            return
        run, function, metadata = compiled
        run(
            *self.three_axes,
            _stream(gpu),
            function,
            metadata,
            None,
            None,
            None,
            *addresses,
            *self.rest,
        )

    def _remember(self, key: tuple, launched: CompiledKernel, tensors: int) -> None:
        """Keep what Triton launched, if arguments of compile time are the last, as its launcher takes them."""
        given = tensors + len(self.values)
        at_compile_time = [parameter.is_constexpr for parameter in self.kernel.params]
        count = len(at_compile_time) - given
        if at_compile_time == [False] * given + [True] * count:
            self.rest = (*self.values, *(None,) * count)  # which are there, and not read
            self.compiled[key] = Compiled(launched.run, launched.function, launched.packed_metadata)


_launches: dict[tuple, Launch] = {}


def launch(
    kernel: Any, grid: tuple[int, ...], tensors: Sequence[Tensor], values: Sequence, **options: Any
) -> None:
    """As ``kernel[grid](*tensors, *values, **options)``, on the current GPU."""
    # With the values' types: 1, 1.0 and True are equal. A kernel's own hash is that of its source.
    key = (id(kernel), grid, *values, *map(type, values), *options.items())
    known = _launches.get(key)
    if known is None:
        if len(_launches) >= MOST:
            _launches.clear()
        known = _launches[key] = Launch(kernel, grid, values, **options)
    known(*tensors)


def _gpu(tensor: Tensor) -> int | None:
    return torch.cuda.current_device() if tensor.is_cuda else None


def _stream(gpu: Any) -> int:
    return torch._C._cuda_getCurrentRawStream(gpu)


def _hooked() -> bool:
    """Whether someone asked to be told of launches."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
