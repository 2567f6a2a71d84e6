"""Which samples a step sees: a function of (seed, step), so that a run continues where it stopped.

A key is (epoch, index). The epoch travels with the index to the loading processes, so these may work ahead
into the next epoch, and a sample's augmentation depends on (seed, epoch, index) alone.
"""

import dataclasses
import itertools
import operator
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, Dataset, Sampler

from softfree.data.images import seed_generators

Key = tuple[int, int]


class Augmented(Dataset):
    """A data set whose items are asked for by key; random transforms are seeded by it.

    An index beyond the last is that of an item that an epoch shows again, counted on from the first.
    The generators are not put back: the engine seeds them again before it draws anything.
    """

    def __init__(self, dataset: Any, seed: int):
        self.dataset = dataset
        self.seed = seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: Key) -> Any:
        epoch, index = key
        seed_generators(self.seed, epoch, index)
        return self.dataset[index % len(self.dataset)]


def shuffle(samples: int, batch_size: int, generator: torch.Generator) -> Tensor:
    """All indices in random order."""
    return torch.randperm(samples, generator=generator)


@dataclasses.dataclass(eq=False)
class StepSampler(Sampler[list[Key]]):
    """The batches of this process from step ``start`` to step ``stop``, across epochs.

    A global batch is a stretch of the epoch's permutation; its slice number ``pass_ * processes + rank`` is
    the process's. So two processes of batch b, or one with two accumulated passes, see in one step what
    one process of batch 2 b sees. What is left at the end of an epoch is dropped. ``permute(samples,
    batch_size, generator)`` gives an epoch's order.
    """

    samples: int
    batch_size: int
    passes: int
    rank: int
    processes: int
    seed: int
    start: int = 0
    stop: int = 0
    permute: Callable[[int, int, torch.Generator], Tensor] = shuffle

    def __post_init__(self) -> None:
        self.global_batch = self.batch_size * self.passes * self.processes
        self.steps_per_epoch = self.samples // self.global_batch
        if not self.steps_per_epoch:
            raise ValueError(
                f"one step takes {self.global_batch} samples (`batch_size` {self.batch_size} x "
                f"`grad_accum_steps` {self.passes} x {self.processes} processes), but there are only "
                f"{self.samples} to train on; make `batch_size` smaller"
            )

    def __len__(self) -> int:
        return (self.stop - self.start) * self.passes

    def __iter__(self) -> Iterator[list[Key]]:
        for epoch, slices in itertools.groupby(self._slices(), operator.itemgetter(0)):
            order = self._order(epoch).tolist()
            for _, part in slices:
                yield [(epoch, index) for index in order[part]]

    def on_device(
        self, device: torch.device, plan_epoch: Callable[[Tensor], Tensor]
    ) -> Generator[Tensor]:
        """The same batches on a device, where an epoch goes as a whole.

        ``plan_epoch(order)`` is given the indices (n,), and gives (..., n) to take the batches from; the
        generators are seeded for it.
        """
        for epoch, slices in itertools.groupby(self._slices(), operator.itemgetter(0)):
            order = self._order(epoch)
            if device.type == "cuda":
                # So that the host need not wait for the steps under way.
                order = order.pin_memory()
            order = order.to(device, non_blocking=True)
            seed_all(self.seed, epoch)
            plan = plan_epoch(order)
            for _, part in slices:
                yield plan[..., part]

    def _slices(self) -> Iterator[tuple[int, slice]]:
        """Of each batch the epoch, and where it lies in that epoch's order."""
        for step in range(self.start, self.stop):
            epoch, position = divmod(step, self.steps_per_epoch)
            for pass_ in range(self.passes):
                part = pass_ * self.processes + self.rank
                begin = position * self.global_batch + part * self.batch_size
                yield epoch, slice(begin, begin + self.batch_size)

    def _order(self, epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + epoch)
        return self.permute(self.samples, self.batch_size, generator)


class EvalSampler(BatchSampler):
    """Batches of the process's own share of the samples: each sample once, none repeated to fill up."""

    def __init__(self, samples: int, batch_size: int, rank: int, processes: int):
        super().__init__(range(rank, samples, processes), batch_size, drop_last=False)

    def on_device(self, device: torch.device) -> Generator[Tensor]:
        """The same batches as indices on a device."""
        for indices in self:
            yield torch.tensor(indices, device=device)


def seed_all(*key: int) -> None:
    """Seed Python's, numpy's and torch's generators (CPU and GPU in use) from the numbers of ``key``."""
    seed = seed_generators(*key)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)
