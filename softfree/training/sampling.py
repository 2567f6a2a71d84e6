"""Which samples a step sees: a function of (seed, step), so that a run can continue where it stopped.

A key is (epoch, index). Loading processes get the epoch along with the index, so they may work ahead into the
next epoch, and a sample's augmentation depends only on (seed, epoch, index).
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
    """A data set indexed by keys; random transforms are seeded by the key.

    Indices beyond the last wrap around; they belong to items that an epoch shows more than once. The state of
    the generators is not restored, because the engine seeds them before it draws anything.
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

    A global batch is a contiguous part of the epoch's permutation. Its slice number ``pass_ * processes +
    rank`` belongs to this process. So two processes with batch size b, or one with two accumulated passes,
    see in one step what one process with batch size 2 b sees. The remainder at the end of an epoch is
    dropped. ``permute(samples, batch_size, generator)`` returns an epoch's order.
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
        """Yield the same batches on a device; an epoch's order is copied there at once.

        ``plan_epoch(order)`` turns the indices (n,) into (..., n), which batches are slices of. The
        generators are seeded before the call.
        """
        for epoch, slices in itertools.groupby(self._slices(), operator.itemgetter(0)):
            order = self._order(epoch)
            if device.type == "cuda":
                # So that the host need not wait for steps that are still running.
                order = order.pin_memory()
            order = order.to(device, non_blocking=True)
            seed_all(self.seed, epoch)
            plan = plan_epoch(order)
            for _, part in slices:
                yield plan[..., part]

    def _slices(self) -> Iterator[tuple[int, slice]]:
        """Yield the epoch of each batch, and its slice of that epoch's order."""
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
    """Batches of this process's share of the samples: each sample once, without repeating any as padding."""

    def __init__(self, samples: int, batch_size: int, rank: int, processes: int):
        super().__init__(range(rank, samples, processes), batch_size, drop_last=False)

    def on_device(self, device: torch.device) -> Generator[Tensor]:
        """Yield the same batches as indices on a device."""
        for indices in self:
            yield torch.tensor(indices, device=device)


def seed_all(*key: int) -> None:
    """Seed the generators of Python, NumPy and torch (CPU, and GPU if in use) from the numbers ``key``."""
    seed = seed_generators(*key)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)
