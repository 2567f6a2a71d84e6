"""Steps without a finite gradient are skipped on the device, so that the host need not wait to find out.

This is decided by the gradient's norm, which is finite if and only if every entry is (and small enough).
AdamW's fused kernel reads a flag ``found_inf`` on the device; if it is set, neither weights nor moments
change. Norms and losses stay on the device, too. They are read, and skipped steps counted, when the log is
written.
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
    """AdamW that skips steps whose gradient is not finite, and counts them.

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
        # Names and numbers of every step since the last reading, with the norm at the end.
        self.unread: list[list[tuple[str, Tensor]]] = []
        self.in_a_row = 0
        self.lr: Tensor | None = None
        self.keep_gradients = False
        # A forward pass with non-finite numbers also spoils batch norm statistics.
        self.norms_since_settled: list[Tensor] = []
        self.buffers = [b for b in model.buffers() if b.is_floating_point()]
        self.kept_buffers = [b.clone() for b in self.buffers]

    def hold_on_device(self, keep_gradients: bool) -> None:
        """Make :meth:`update` read the learning rate from the device from now on, as a CUDA graph requires.

        With ``keep_gradients`` it fills the gradients with 0 instead of freeing them, so that passes can add
        to the same memory.
        """
        scales = [group.get("lr_scale", 1.0) for group in self.optimizer.param_groups]
        self.lr = torch.zeros((), device=self.processes.device)
        self.lr_scales = torch.tensor(scales, device=self.processes.device)
        self.keep_gradients = keep_gradients
        # Suppresses torch's warning: the first updates come before there is a graph.
        self.optimizer._warned_capturable_if_run_uncaptured = True

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the next update."""
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
        # AdamW's kernel divides gradients by this, so clipping needs no extra pass over them.
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
        """Give the groups the learning rate on the device, if there is one, inside this context only.

        Outside of it they have plain numbers, as checkpoints need them.
        """
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
        """Keep the numbers of a step's passes (0-dim tensors) for the log.

        The last is the gradient's norm.
        """
        numbers = [number for each in passes for number in each.items()]
        self.norms_since_settled.append(numbers[-1][1])
        self.unread.append(numbers)

    def read(self) -> tuple[dict[str, float], int, int]:
        """Read the means since the last call, the steps skipped since then, and those skipped in a row.

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
        """Make sure that buffers are finite before they are used or saved; this waits for the device.

        After a step without a finite gradient they are reset to their values at the last call.
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
    """Find where the first non-finite number arises, and describe it in words.

    This runs the last batch again. It checks layers in the order they finish, then gradients from the last
    parameter to the first, in the order of the backward pass.
    """
    found: list[str] = []

    def look(name: str) -> Callable[[nn.Module, tuple, object], None]:
        def hook(module: nn.Module, inputs: tuple, output: object) -> None:
            if not found and _has_nonfinite(output):
                kind = type(module).__name__
                source = (
                    "its input is not finite either"
                    if _has_nonfinite(inputs)
                    else "its input is finite"
                )
                found.append(f"the first layer with non-finite output is {name} ({kind}; {source})")

        return hook

    handles = [
        module.register_forward_hook(look(name)) for name, module in model.named_modules() if name
    ]
    try:
        # Compiled code would not call the hooks.
        with torch.compiler.set_stance("force_eager"):
            loss = loss_of_last_batch()
    finally:
        for handle in handles:
            handle.remove()
    if not found and _has_nonfinite(loss):
        found.append("every layer's output is finite, but the loss is not")
    # All processes decide together: the backward pass of a sharded model needs all of them.
    everywhere = gather(found, processes)
    if not everywhere:
        loss.backward()
        for name, parameter in reversed(list(model.named_parameters())):
            if parameter.grad is not None and _has_nonfinite(parameter.grad):
                found.append(f"outputs are finite, the first non-finite gradient is that of {name}")
                break
        everywhere = gather(found, processes)
    return everywhere[0] if everywhere else "running the last batch again gave only finite numbers"


def _has_nonfinite(value: object) -> bool:
    return any(
        isinstance(leaf, Tensor)
        and leaf.is_floating_point()
        and not bool(whole(leaf).isfinite().all())
        for leaf in tree_leaves(value)
    )
