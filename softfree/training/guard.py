"""Steps without a finite gradient are left out, on the device: the host does not wait to find out.

The norm of the gradient tells: it is finite if and only if every entry is (and small enough). AdamW's fused
kernel takes a flag ``found_inf`` from the device and then changes neither weights nor its own state. The
counts stay on the device, too, and are read when the log is written.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from softfree.training.distributed import Processes, gather, total, whole


class NonFiniteError(RuntimeError):
    """Too many steps in a row had no finite gradient."""


class GuardedOptimizer:
    """AdamW that leaves out steps whose gradient is not finite, and counts them.

    Args:
        model: the plain model (sharded or not), whose trainable parameters the groups hold.
        groups: parameter groups, each with an optional "lr_scale".
        clip: largest norm of the gradient; 0: no limit.
        scaler: for float16; others leave it disabled.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: list[dict],
        betas: tuple[float, float],
        clip: float,
        scaler: torch.amp.GradScaler,
        processes: Processes,
    ):
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=betas, fused=True)
        self.parameters = [p for group in groups for p in group["params"]]
        self.clip = clip
        self.scaler = scaler
        self.processes = processes
        self.sums: dict[str, Tensor] = {}
        zero = torch.zeros((), device=processes.device)
        self.steps, self.skipped, self.in_a_row = zero.clone(), zero.clone(), zero.clone()
        # A forward pass with such numbers also spoils the statistics of batch norms.
        self.spoiled = zero.clone()
        self.buffers = [b for b in model.buffers() if b.is_floating_point()]
        self.kept_buffers = [b.clone() for b in self.buffers]

    def step(self, lr: float, numbers: Mapping[str, Tensor]) -> None:
        """Clip, step, clear the gradients; add ``numbers`` (0-dim tensors) to the sums of the log."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        if self.scaler.is_enabled():
            self.scaler.unscale_(self.optimizer)
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients, foreach=True)
        if self.clip:
            nn.utils.clip_grads_with_norm_(self.parameters, self.clip, norm, foreach=True)
        norm = whole(norm)
        bad = ~norm.isfinite()
        self.optimizer.grad_scale, self.optimizer.found_inf = None, bad.float()  # type: ignore[attr-defined]
        self.optimizer.step()
        if self.scaler.is_enabled():
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        self.skipped += bad
        self.spoiled += bad
        self.in_a_row.add_(1).mul_(bad)
        for name, value in {**numbers, "grad_norm": norm}.items():
            value = torch.where(bad, 0.0, value.detach().float())
            self.sums[name] = self.sums[name] + value if name in self.sums else value

    def read(self) -> tuple[dict[str, float], int, int]:
        """Means of the numbers since the last reading, steps left out since then, and in a row until now.

        This waits for the device.
        """
        names = list(self.sums)
        sums = torch.stack([self.sums[name] for name in names]) if names else torch.empty(0)
        sums = total(sums, self.processes) / self.processes.count
        counts = torch.stack([self.steps, self.skipped, self.in_a_row])
        steps, skipped, in_a_row = (int(value) for value in counts.tolist())
        means = {
            name: value / (steps - skipped) if steps > skipped else float("nan")
            for name, value in zip(names, sums.tolist(), strict=True)
        }
        self.sums.clear()
        self.steps.zero_()
        self.skipped.zero_()
        self.settle_buffers()
        return means, skipped, in_a_row

    def settle_buffers(self) -> None:
        """Make sure that buffers are sound before they are used or saved; this waits for the device.

        After a step without a finite gradient they go back to where they were when last settled.
        """
        if self.buffers and bool(self.spoiled):
            torch._foreach_copy_(self.buffers, self.kept_buffers)
        elif self.buffers:
            torch._foreach_copy_(self.kept_buffers, self.buffers)
        self.spoiled.zero_()


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
    if isinstance(value, Tensor):
        return value.is_floating_point() and not bool(whole(value).isfinite().all())
    if isinstance(value, (tuple, list)):
        return any(map(_has_nonfinite, value))
    if isinstance(value, Mapping):
        return any(map(_has_nonfinite, value.values()))
    return False
