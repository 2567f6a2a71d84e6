"""Triton kernel launches with little host overhead.

``kernel[grid](...)`` inspects every argument of every launch to find the compiled kernel it needs. Here that
happens once. A :class:`Launch` holds everything except the tensors. It asks Triton again only if the tensors'
dtypes, their GPU or their alignment to 16 bytes change; Triton looks at nothing else. :func:`launch` finds
the :class:`Launch` for equal arguments, for callers that do not keep it. A :class:`Chain` is a series of
launches whose arguments are parts of a few tensors: no tensor object is created for a part, and the
inspection happens once for the whole chain.

This relies on Triton internals as of version 3.6. Other versions, the interpreter, and launches observed by
hooks use the ordinary path.
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel

KNOWN_VERSION = triton.__version__.startswith("3.6.")
MOST = 4096  # launches to remember, so that sizes that never recur do not fill the memory
ALIGNMENT = 16
HOOKS = getattr(triton.knobs, "HookChain", None)

_address = Tensor.data_ptr
_dtype = operator.attrgetter("dtype")


class Compiled(NamedTuple):
    """A kernel as compiled by Triton: its launcher, and the arguments before and after the stream."""

    run: Callable[..., None]
    grid: tuple[int, int, int]
    settings: tuple


class Launch:
    """``kernel[grid](*tensors, *values, **options)``, on the GPU of the tensors, which is the current one."""

    def __init__(self, kernel: Any, grid: tuple[int, ...], values: Sequence, **options: Any):
        self.kernel, self.grid, self.values, self.options = kernel, grid, values, options
        self.compiled: dict[tuple, Compiled] = {}
        self.rest: tuple = ()

    def __call__(self, *tensors: Tensor) -> Compiled | None:
        """Returns the compiled kernel that was launched, if it is known."""
        gpu = _gpu(tensors[0])
        addresses = [*map(_address, tensors)]
        key = (gpu, _alignment(addresses), *map(_dtype, tensors))
        compiled = self.compiled.get(key)
        if compiled is None or self.kernel.pre_run_hooks or _hooked():
            launched = self.kernel[self.grid](*tensors, *self.values, **self.options)
            if gpu is not None and KNOWN_VERSION and isinstance(launched, CompiledKernel):
                self._remember(key, launched, len(tensors))
            return self.compiled.get(key)
        run, grid, settings = compiled
        run(*grid, _stream(gpu), *settings, *addresses, *self.rest)
        return compiled

    def _remember(self, key: tuple, launched: CompiledKernel, tensors: int) -> None:
        """Keep what Triton launched if compile-time arguments come last, as its launcher expects."""
        given = tensors + len(self.values)
        at_compile_time = [parameter.is_constexpr for parameter in self.kernel.params]
        count = len(at_compile_time) - given
        if at_compile_time == [False] * given + [True] * count:
            self.rest = (*self.values, *(None,) * count)  # the launcher ignores the Nones
            grid: Any = (*self.grid, 1, 1)[:3]
            run, before = _launcher(launched.run)
            settings = (launched.function, *before, launched.packed_metadata, None, None, None)
            self.compiled[key] = Compiled(run, grid, settings)


class Part(NamedTuple):
    """An argument of a launch in a :class:`Chain`.

    tensor: index of the chain's tensor that it lies in.
    offset: where it starts, in bytes.
    dtype: dtype of a part of a :class:`Room`; None: the tensor's dtype.
    """

    tensor: int
    offset: int = 0
    dtype: torch.dtype | None = None

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """A tensor that starts at the part's first element."""
        whole = tensors[self.tensor]
        if self.dtype is not None:
            return whole[self.offset // whole.itemsize :].view(self.dtype)
        if self.offset == 0:
            return whole
        first = whole.storage_offset() + self.offset // whole.itemsize
        return whole.as_strided((1,), (1,), first)


class Room:
    """Scratch memory of a chain, as parts of one tensor with index ``tensor``."""

    def __init__(self, tensor: int):
        self.tensor, self.bytes = tensor, 0

    def part(self, sizes: Sequence[int], dtype: torch.dtype = torch.float32) -> Part:
        part = Part(self.tensor, self.bytes, dtype)
        self.bytes += -(-math.prod(sizes) * dtype.itemsize // 256) * 256
        return part

    def empty(self, like: Tensor) -> Tensor:
        """The tensor, on the device of ``like``."""
        return like.new_empty(self.bytes // like.itemsize)


Step = tuple[Launch, Sequence[Part]]


class Chain:
    """Consecutive launches; their arguments are parts of the tensors that the chain is called with."""

    def __init__(self, steps: Sequence[Step]):
        self.steps = steps
        self.kernels = [*{id(run.kernel): run.kernel for run, _ in steps}.values()]
        places = {(part.tensor, part.offset): None for _, parts in steps for part in parts}
        self.places = [*places]  # where all the arguments lie, without duplicates
        self.compiled: dict[tuple, list[tuple]] = {}

    def __call__(self, *tensors: Tensor) -> None:
        gpu = _gpu(tensors[0])
        addresses = [*map(_address, tensors)]
        key = (gpu, _alignment(addresses), *map(_dtype, tensors))
        compiled = self.compiled.get(key)
        if compiled is None or _hooked() or self._hooked():
            self._one_by_one(key, tensors)
            return
        stream = _stream(gpu)
        begins = [addresses[n] + offset for n, offset in self.places]
        for run, grid, settings, arguments, rest in compiled:
            run(*grid, stream, *settings, *arguments(begins), *rest)

    def _hooked(self) -> bool:
        for kernel in self.kernels:  # noqa: SIM110  (a generator would cost a call per kernel)
            if kernel.pre_run_hooks:
                return True
        return False

    def _one_by_one(self, key: tuple, tensors: Sequence[Tensor]) -> None:
        compiled = []
        for run, parts in self.steps:
            found = run(*(part.of(tensors) for part in parts))
            if found is not None:
                numbers = [self.places.index((part.tensor, part.offset)) for part in parts]
                compiled.append((*found, _items(numbers), run.rest))
        if len(compiled) == len(self.steps):
            self.compiled[key] = compiled


_launches: dict[tuple, Launch] = {}


def launch(
    kernel: Any, grid: tuple[int, ...], tensors: Sequence[Tensor], values: Sequence, **options: Any
) -> None:
    """``kernel[grid](*tensors, *values, **options)`` on the GPU of the tensors."""
    # The key includes the types of the values, because 1, 1.0 and True are equal. It uses the kernel's id,
    # because its hash is that of its source.
    key = (id(kernel), grid, *values, *map(type, values), *options.items())
    known = _launches.get(key)
    if known is None:
        if len(_launches) >= MOST:
            _launches.clear()
        known = _launches[key] = Launch(kernel, grid, values, **options)
    known(*tensors)


def _items(numbers: Sequence[int]) -> Callable[[Sequence], Sequence]:
    """A function, implemented in C, that takes these items of a sequence."""
    if len(numbers) == 1:
        return operator.itemgetter(slice(numbers[0], numbers[0] + 1))
    return operator.itemgetter(*numbers)


def _alignment(addresses: Sequence[int]) -> bool | tuple[int, ...]:
    """True if all addresses are multiples of 16 bytes, otherwise each address modulo 16."""
    together = functools.reduce(operator.or_, addresses)
    return together % ALIGNMENT == 0 or (*[address % ALIGNMENT for address in addresses],)


def _launcher(run: Any) -> tuple[Callable[..., None], tuple]:
    """The launch function inside Triton's launcher, and its arguments after the kernel.

    Calling it directly skips the launcher's scratch allocation. If a kernel needs scratch memory, the
    launcher itself is returned.
    """
    if getattr(run, "global_scratch_size", 1) or getattr(run, "profile_scratch_size", 1):
        return run, ()
    return run.launch, (run.launch_cooperative_grid, run.launch_pdl, None, None)


def _gpu(tensor: Tensor) -> int | None:
    return tensor.get_device() if tensor.is_cuda else None


def _stream(gpu: Any) -> int:
    return torch._C._cuda_getCurrentRawStream(gpu)


def _hooked() -> bool:
    """Whether launch hooks are installed."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    if type(enter) is type(leave) is HOOKS:
        return bool(enter.calls or leave.calls)
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
