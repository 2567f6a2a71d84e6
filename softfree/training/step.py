"""One step of the optimizer: forward and backward passes over batches, then the update.

The host does a part of each step: it takes batches, seeds generators, sets the learning rate and keeps
numbers for the log. The rest, :meth:`Step.body`, runs on the device and never waits for the host to read a
number. :class:`GraphedStep` captures it as a CUDA graph, which the host then starts with a single launch.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from softfree.models.graphs import WARM_UP, CudaGraphs, Recorder, explained
from softfree.training import distributed
from softfree.training.devices import autocast
from softfree.training.distributed import Processes
from softfree.training.guard import GuardedOptimizer
from softfree.training.settings import OptimSettings, RunSettings

MOST_GRAPHS = 32
Numbers = dict[str, Tensor]
TrainStep = Callable[[nn.Module, Any], tuple[Tensor, Numbers]]


class Step:
    """A step that the host launches kernel by kernel.

    Args:
        device: where the model is.
        model: the model to call in training, perhaps a wrapper (DDP) around the one that is optimized.
        prepare: turns a batch into the input of ``train_step``; random numbers are drawn on the host here.
        train_step: returns the loss of a batch and other numbers for the log, see
            :meth:`softfree.training.engine.Task.train_step`.
        optimizer: the optimizer of the model's parameters.
        optim: the run's settings.
        seed: ``seed(step, pass_)`` seeds the generators before a pass.
    """

    def __init__(
        self,
        device: torch.device,
        model: nn.Module,
        prepare: Callable[[Any], Any],
        train_step: TrainStep,
        optimizer: GuardedOptimizer,
        optim: OptimSettings,
        seed: Callable[[int, int], None],
    ):
        self.model, self.prepare, self.train_step = model, prepare, train_step
        self.optimizer, self.seed, self.device = optimizer, seed, device
        self.passes, self.amp_dtype = optim.grad_accum_steps, optim.amp_dtype
        # The share of one pass in the step; the backward pass starts from it instead of from 1.
        self.share = torch.tensor(1 / self.passes, device=device)

    def __call__(self, batches: Iterator[Any], step: int, lr: float) -> Any:
        """Do step number ``step`` (from 0) on the next batches; return the last batch."""
        self.optimizer.set_lr(lr)
        numbers = []
        for pass_ in range(self.passes):
            batch = next(batches)
            self.seed(step, pass_)
            numbers.append(self.run(self.prepare(batch), last=pass_ == self.passes - 1))
        self.optimizer.note(numbers)
        return batch

    def run(self, batch: Any, last: bool) -> Numbers:
        """Run :meth:`body`; the memory of the returned numbers is not written to again."""
        return self.body(batch, last)

    def body(self, batch: Any, last: bool) -> Numbers:
        """Do a pass, and the update after the ``last`` one; the gradient's norm is then the last number."""
        with distributed.gradients_stay_local(self.model, not last):
            with autocast(self.amp_dtype, self.device):
                loss, others = self.train_step(self.model, batch)
            self.optimizer.scaler.scale(loss).backward(self.share)
        numbers = {name: x.detach() for name, x in {"loss": loss, **others}.items()}
        return numbers | {"grad_norm": self.optimizer.update()} if last else numbers


class GraphedStep(Step):
    """A step whose passes are captured and replayed, with a graph for each shape of a batch.

    The first ``WARM_UP`` passes of a shape are ordinary ones. Once there are ``MOST_GRAPHS`` graphs, so are
    all passes of further shapes. Ordinary passes also read the learning rate from the device, so that the
    results do not depend on which passes are ordinary.
    """

    def __init__(self, *args: Any, recorder: Recorder):
        super().__init__(*args)
        self.recorder = recorder
        self.seen: dict[Any, int] = {}
        self.graphs: dict[Any, tuple[list[Tensor], list[str], Callable[[], Tensor]]] = {}
        self.optimizer.hold_on_device(keep_gradients=self.passes > 1)

    def run(self, batch: Any, last: bool) -> Numbers:
        leaves, structure = tree_flatten(batch)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        tensors = [leaves[i] for i in places]
        key = (
            last,
            *((i, t.shape, t.dtype, t.stride()) for i, t in zip(places, tensors, strict=True)),
        )
        if key not in self.graphs:
            self.seen[key] = self.seen.get(key, 0) + 1
            if self.seen[key] <= WARM_UP or len(self.graphs) == MOST_GRAPHS:
                return self.recorder.warm_up(lambda: self.body(batch, last))
            inputs = [t.clone() for t in tensors]
            for i, tensor in zip(places, inputs, strict=True):
                leaves[i] = tensor
            self.graphs[key] = (inputs, *self._capture(tree_unflatten(leaves, structure), last))
        inputs, names, replay = self.graphs[key]
        torch._foreach_copy_(inputs, tensors)
        # A copy: the next replay writes to the same place.
        return dict(zip(names, replay().clone().unbind(), strict=True))

    def _capture(self, batch: Any, last: bool) -> tuple[list[str], Callable[[], Tensor]]:
        """Return the names of the numbers, and the replay function that returns them as one tensor."""
        names: list[str] = []

        def body() -> Tensor:
            numbers = self.body(batch, last)
            names.extend(numbers)
            return torch.stack([x.float() for x in numbers.values()])

        state = self.optimizer.optimizer.state
        known = len(state)
        with explained("`cuda_graph`: the step of this model"):
            replay = self.recorder.record(body)
        if len(state) > known:
            # Its state was created during the capture, and each replay would create it again.
            raise ValueError(
                f"`cuda_graph`: a parameter got its first gradient only after {WARM_UP} passes; train this "
                "model without `cuda_graph`"
            )
        return names, replay


def check_graph(capturable: bool, task: str, run: RunSettings, processes: Processes) -> None:
    """Raise if the step of this run can't be captured in a CUDA graph."""
    if not capturable:
        raise ValueError(
            f"`cuda_graph` is for classification and longrange; a step of {task} reads numbers from the GPU"
        )
    if processes.device.type != "cuda":
        raise ValueError(f"`cuda_graph` needs a GPU, got `device` {processes.device.type}")
    if processes.count > 1:
        raise ValueError(
            f"`cuda_graph` is for one process, got {processes.count}: the exchange of gradients is not captured"
        )
    if run.grad_checkpointing:
        raise ValueError(
            "`cuda_graph` can't be combined with `grad_checkpointing`, which reads the state of the generators"
        )


def create_step(cuda_graph: bool, device: torch.device, *parts: Any) -> Step:
    """Create the step of a run; ``parts`` are the further arguments of :class:`Step`."""
    if cuda_graph:
        return GraphedStep(device, *parts, recorder=CudaGraphs(device))
    return Step(device, *parts)
