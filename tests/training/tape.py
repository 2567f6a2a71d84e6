"""A CUDA graph's double on the CPU: records torch's calls with the tensors they met, and makes them again.

As a graph it runs no Python when it is replayed, keeps every address, draws from the generator as it then is, and
refuses to be asked for a number. Unlike a CPU's tensors, a graph's are not changed while they are captured: so
the tape puts back what was.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HOST = ("aten::_local_scalar_dense", "aten::nonzero", "aten::item", "aten::equal")
IGNORED = ("profiler::",)


class _Recording(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls, self.before = [], {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.name()
        if name.startswith(HOST):
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        arguments = [*args, *(kwargs.get(a.name) for a in func._schema.arguments[len(args) :])]
        for argument, value in zip(func._schema.arguments, arguments, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            # The schema of batch norms does not say that they write to these.
            if (written or argument.name.startswith("running_")) and value is not None:
                for tensor in tree_leaves(value):
                    storage = tensor.untyped_storage()
                    if storage.data_ptr() not in self.before:
                        self.before[storage.data_ptr()] = storage, storage.clone()
        result = func(*args, **kwargs)
        if not name.startswith(IGNORED) and not func.is_view:
            self.calls.append((func, args, kwargs, result))
        return result


class Tape:
    """In the place of :class:`softfree.models.graphs.CudaGraphs`."""

    def __init__(self):
        self.recorded = self.replayed = 0

    def warm_up(self, body):
        return body()

    def record(self, body):
        self.recorded += 1
        generator = torch.get_rng_state()
        with _Recording() as recording:
            result = body()
        for storage, before in recording.before.values():
            storage.copy_(before)
        torch.set_rng_state(generator)

        @torch.no_grad()
        def replay():
            self.replayed += 1
            for func, args, kwargs, result in recording.calls:
                again = tree_leaves(func(*args, **kwargs))
                for old, new in zip(tree_leaves(result), again, strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)
            return result_of

        result_of = result
        return replay
