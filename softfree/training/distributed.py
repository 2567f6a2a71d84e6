"""Several processes: which take part, how a model is distributed, how they agree.

One process needs none of it. torchrun tells each process its place through the environment. GPUs communicate
through NCCL, CPUs through gloo.
"""

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from softfree.training.devices import choose_device

BEGUN = "softfree_begun"
# Names that timm's models, and ours, give to lists of layers.
LAYER_LISTS = ("blocks", "layers")


@dataclasses.dataclass(frozen=True)
class Processes:
    """This process among all: its rank, the number of processes, its device, and torchrun's store."""

    rank: int
    count: int
    device: torch.device
    store: dist.Store | None = None

    @property
    def main(self) -> bool:
        """Whether this process writes files and talks to the user."""
        return self.rank == 0


@contextlib.contextmanager
def join_processes(device: str = "auto") -> Iterator[Processes]:
    """Join the processes that torchrun started, or run alone; ``device`` is auto, cuda or cpu."""
    place = choose_device(device)
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield Processes(0, 1, place)
        return
    kind = place.type
    if kind == "cuda":
        place = torch.device(kind, int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(place)
    # Both backends, so that agreeing on flags and file names does not make the GPU wait.
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    store, rank, count = next(iter(rendezvous("env://")))
    # torchrun's store survives a restart. Without a prefix a process would find the addresses of dead
    # processes.
    life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group(
        backend, store=dist.PrefixStore(f"life{life}", store), rank=rank, world_size=count
    )
    try:
        yield Processes(rank, count, place, store)
        # Leave together: a process that leaves early closes its connections to the others.
        dist.barrier()
    finally:
        dist.destroy_process_group()


def note_begun(processes: Processes) -> None:
    """Record that the run has begun, for processes that torchrun restarts."""
    if processes.store is not None:
        processes.store.set(BEGUN, "yes")


def restarted(processes: Processes) -> bool:
    """Whether torchrun restarted this process after the run had begun.

    torchrun also restarts a process that rejected its arguments. The restarted process must reject them
    again.
    """
    return processes.store is not None and processes.store.check([BEGUN])


def shard(model: nn.Module) -> None:
    """Apply FSDP2 in place: each layer's weights are sharded, and gathered when the layer runs."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in LAYER_LISTS and isinstance(
            module, (nn.ModuleList, nn.Sequential)
        ):
            for layer in module:
                fully_shard(layer)
    fully_shard(model)


def replicate(model: nn.Module, processes: Processes) -> nn.Module:
    """Wrap ``model`` in DDP: each process has all weights, gradients are averaged."""
    return DistributedDataParallel(
        model,
        device_ids=[processes.device.index] if processes.device.type == "cuda" else None,
        # Batch norm statistics are averaged before they are used, see average_buffers.
        broadcast_buffers=False,
        gradient_as_bucket_view=True,
    )


@contextlib.contextmanager
def gradients_stay_local(model: nn.Module, local: bool) -> Iterator[None]:
    """Skip the exchange of gradients if ``local``: in all accumulated passes except the last."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(not local)
    if local and isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
    else:
        yield


def average_buffers(model: nn.Module, processes: Processes) -> None:
    """Average the floating-point buffers (batch norm statistics) over the processes, in place."""
    if processes.count == 1:
        return
    for buffer in model.buffers():
        if buffer.is_floating_point():
            dist.all_reduce(buffer)
            buffer /= processes.count


def total(values: Tensor, processes: Processes) -> Tensor:
    """The sum of ``values`` over the processes."""
    if processes.count > 1:
        dist.all_reduce(values)
    return values


def gather(values: list[Any], processes: Processes) -> list[Any]:
    """Concatenate the lists of all processes."""
    if processes.count == 1:
        return values
    parts: list[Any] = [None] * processes.count
    dist.all_gather_object(parts, values)
    return [value for part in parts for value in part]


def whole(tensor: Tensor) -> Tensor:
    """Convert a tensor that may be sharded to an ordinary one."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Agreement:
    """Flags that any process may raise and all must act on at the same step.

    The exchange runs during the next step, so with several processes the answer is one step old.
    """

    def __init__(self, processes: Processes):
        self.processes = processes
        self.pending: tuple[Any, Tensor] | None = None

    def exchange(self, *flags: bool) -> tuple[bool, ...]:
        """Send this process's flags; return those that any process raised."""
        if self.processes.count == 1:
            return flags
        agreed = self.finish() or (False,) * len(flags)
        values = torch.tensor(flags, dtype=torch.int32)
        self.pending = (dist.all_reduce(values, dist.ReduceOp.MAX, async_op=True), values)
        return agreed

    def finish(self) -> tuple[bool, ...] | None:
        """Wait for the pending exchange, if there is one."""
        if self.pending is None:
            return None
        work, values = self.pending
        work.wait()
        self.pending = None
        return tuple(bool(value) for value in values)


# Whole tensors under the plain model's names, so that one file works for one process, DDP and FSDP2.
_WHOLE = StateDictOptions(full_state_dict=True)
_WHOLE_ON_CPU = StateDictOptions(full_state_dict=True, cpu_offload=True)
# Parameters that no step has used yet have no state.
_WHOLE_IF_THERE = StateDictOptions(full_state_dict=True, strict=False)


def get_weights(model: nn.Module) -> dict[str, Tensor]:
    """Get the whole weights and buffers. With FSDP2 all processes must call this."""
    return get_model_state_dict(model, options=_WHOLE)  # type: ignore[return-value]


def set_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Load whole weights and buffers; all names must be present."""
    set_model_state_dict(model, weights, options=_WHOLE)  # type: ignore[arg-type]


def get_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Get the optimizer's state by parameter name, on the CPU of the main process."""
    return get_optimizer_state_dict(model, optimizer, options=_WHOLE_ON_CPU)


def set_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> None:
    """Load the moments from :func:`get_optimizer_state`.

    The optimizer keeps its own weight decay and betas.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = [
        {**group, "params": [names[parameter] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    state = {"state": state["state"], "param_groups": groups}
    set_optimizer_state_dict(model, optimizer, state, options=_WHOLE_IF_THERE)
    for name, parameter in model.named_parameters():
        if name not in state["state"]:
            # torch created a state for it, with a step count of one.
            optimizer.state.pop(parameter, None)
