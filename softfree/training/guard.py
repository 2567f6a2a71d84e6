"""Steps without a finite gradient are left out, on the device: the host does not wait to find out.

The norm of the gradient tells: it is finite if and only if every entry is (and small enough). AdamW's fused
kernel takes a flag ``found_inf`` from the device and then changes neither weights nor its own state. Norms and
losses stay on the device, too; they are read, and bad steps counted, when the log is written.
"""

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from softfree.training.adamw import FusedAdamW
from softfree.training.distributed import Processes, gather, total, whole
from softfree.training.settings import OptimSettings


class NonFiniteError(RuntimeError):
    """Too many steps in a row had no finite gradient."""


class GuardedOptimizer:
    """AdamW that leaves out steps whose gradient is not finite, and counts them.

    Args:
        model: the plain model (sharded or not), whose trainable parameters the groups hold.
        groups: parameter groups, each with an optional "lr_scale".
    """

    def __init__(
        self, model: nn.Module, groups: list[dict], optim: OptimSettings, processes: Processes
    ):
        self.optimizer = FusedAdamW(groups, optim.betas)
        self.clip = optim.clip_grad
        half = optim.amp_dtype == "float16"
        self.scaler = torch.amp.GradScaler(processes.device.type, enabled=half)
        self.processes = processes
        # Of every step since the last reading: names and numbers, the norm at the end.
        self.unread: list[list[tuple[str, Tensor]]] = []
        self.in_a_row = 0
        self.lr: Tensor | None = None
        self.keep_gradients = False
        # A forward pass with bad numbers also spoils the statistics of batch norms.
        self.norms_since_settled: list[Tensor] = []
        self.buffers = [b for b in model.buffers() if b.is_floating_point()]
        self.kept_buffers = [b.clone() for b in self.buffers]

    def hold_on_device(self, keep_gradients: bool) -> None:
        """From now on :meth:`update` reads the learning rate from the device, as a CUDA graph needs it.

        ``keep_gradients``: it leaves the memory of the gradients in place, filled with 0, for passes to add to.
        """
        scales = [group.get("lr_scale", 1.0) for group in self.optimizer.param_groups]
        self.lr = torch.zeros((), device=self.processes.device)
        self.lr_scales = torch.tensor(scales, device=self.processes.device)
        self.keep_gradients = keep_gradients
        # The first updates are made before there is a graph.
        self.optimizer._warned_capturable_if_run_uncaptured = True

    def set_lr(self, lr: float) -> None:
        """The learning rate of the next update."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        if self.lr is not None:
            self.lr.fill_(lr)

    def update(self) -> Tensor:
        """Clip, step, clear the gradients; return their norm. Nothing here waits for the device."""
        if self.scaler.is_enabled():
            self.scaler.unscale_(self.optimizer)
        weights = self.optimizer.weights
        gradients = [gradient for p in weights if (gradient := p.grad) is not None]
        norm = whole(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))))
        # AdamW's kernel divides gradients by this: clipping needs no pass over them of its own.
        self.optimizer.grad_scale = (norm / self.clip).clamp_(min=1) if self.clip else None
        # Infinity and NaN, times 0, are NaN.
        self.optimizer.found_inf = (norm * 0).nan_to_num_(nan=1.0)
        with self._lr_of_the_device():
            self.optimizer.advance(gradients)
        if self.scaler.is_enabled():
            self.scaler.update()
        if self.keep_gradients:
            torch._foreach_zero_(gradients)
        else:
            for weight in weights:
                weight.grad = None
        return norm

    @contextlib.contextmanager
    def _lr_of_the_device(self) -> Iterator[None]:
        """If it is there, the groups have it inside; outside they have numbers, as checkpoints want them."""
        if self.lr is None:
            yield
            return
        groups = self.optimizer.param_groups
        kept = [(group["lr"], group["capturable"]) for group in groups]
        for group, lr in zip(groups, (self.lr * self.lr_scales).unbind(), strict=True):
            group["lr"], group["capturable"] = lr, True
        try:
            yield
        finally:
            for group, (lr, capturable) in zip(groups, kept, strict=True):
                group["lr"], group["capturable"] = lr, capturable

    def note(self, passes: Sequence[Mapping[str, Tensor]]) -> None:
        """Keep the numbers of a step's passes (0-dim tensors) for the log; the last is the gradient's norm."""
        numbers = [number for each in passes for number in each.items()]
        self.norms_since_settled.append(numbers[-1][1])
        self.unread.append(numbers)

    def read(self) -> tuple[dict[str, float], int, int]:
        """Means of the numbers since the last reading, steps left out since then, and in a row until now.

        This waits for the device.
        """
        flat = torch.stack([x for step in self.unread for _, x in step]).double()
        values = iter((total(flat, self.processes) / self.processes.count).tolist())
        seen: dict[str, list[float]] = {name: [] for step in self.unread for name, _ in step}
        skipped = 0
        for step in self.unread:
            numbers = [(name, next(values)) for name, _ in step]
            if math.isfinite(numbers[-1][1]):
                self.in_a_row = 0
                for name, value in numbers:
                    seen[name].append(value)
            else:
                self.in_a_row += 1
                skipped += 1
        self.unread.clear()
        self.settle_buffers()
        means = {name: statistics.fmean(x) if x else math.nan for name, x in seen.items()}
        return means, skipped, self.in_a_row

    def settle_buffers(self) -> None:
        """Make sure that buffers are sound before they are used or saved; this waits for the device.

        After a step without a finite gradient they go back to where they were when last settled.
        """
        norms = self.norms_since_settled
        if self.buffers and norms and not bool(torch.stack(norms).isfinite().all()):
            torch._foreach_copy_(self.buffers, self.kept_buffers)
        elif self.buffers:
            torch._foreach_copy_(self.kept_buffers, self.buffers)
        norms.clear()


def find_nonfinite(
    model: nn.Module, loss_of_last_batch: Callable[[], Tensor], processes: Processes
) -> str:
    """Where the first number that is not finite arises, in words.

    Runs the last batch again. Layers are asked in the order they finish; after them the gradients, from
    the last parameter to the first, as the backward pass makes them.
    """
    found: list[str] = []

    def look(name: str) -> Callable[[nn.Module, tuple, object], None]:
        def hook(module: nn.Module, inputs: tuple, output: object) -> None:
            if not found and _has_nonfinite(output):
                kind = type(module).__name__
                source = "its input has, too" if _has_nonfinite(inputs) else "its input is finite"
                found.append(f"the first layer with one is {name} ({kind}; {source})")

        return hook

    handles = [
        module.register_forward_hook(look(name)) for name, module in model.named_modules() if name
    ]
    try:
        # Compiled code would run without the hooks.
        with torch.compiler.set_stance("force_eager"):
            loss = loss_of_last_batch()
    finally:
        for handle in handles:
            handle.remove()
    if not found and _has_nonfinite(loss):
        found.append("every layer's output is finite, the loss is not")
    # Decided together: the backward pass of a sharded model needs all processes.
    everywhere = gather(found, processes)
    if not everywhere:
        loss.backward()
        for name, parameter in reversed(list(model.named_parameters())):
            if parameter.grad is not None and _has_nonfinite(parameter.grad):
                found.append(
                    f"outputs are finite, the first gradient that is not is that of {name}"
                )
                break
        everywhere = gather(found, processes)
    return everywhere[0] if everywhere else "the last batch shows none when run again"


def _has_nonfinite(value: object) -> bool:
    return any(
        isinstance(leaf, Tensor)
        and leaf.is_floating_point()
        and not bool(whole(leaf).isfinite().all())
        for leaf in tree_leaves(value)
    )
