"""torch's AdamW with less work for the host in each step."""

from typing import Any

import torch
from torch import Tensor

# For the weights of a group: first moments, second moments and step counts.
Moments = tuple[list[Tensor], list[Tensor], list[Tensor]]


class FusedAdamW(torch.optim.AdamW):
    """torch's fused AdamW; :meth:`advance` does a ``step`` on gradients that the caller holds in a list.

    In each step torch looks up the moments of every weight, groups them by device and dtype, and counts the
    steps of each weight separately. This class keeps the lists of the first step instead. All step counts are
    in one tensor, and the state of each weight refers to its element. The kernel is torch's, so the results
    and the checkpoints are the same.

    Attributes:
        weights: the weights of all groups, in order.
        grad_scale: what gradients are divided by, a tensor on the device; None: they are not divided.
        found_inf: 1 if the step is to be skipped, else 0, a tensor on the device.
    """

    def __init__(self, groups: list[dict[str, Any]], betas: tuple[float, float]):
        super().__init__(groups, lr=0.0, betas=betas, fused=True)
        self.weights: list[Tensor] = [p for group in self.param_groups for p in group["params"]]
        self.grad_scale: Tensor | None = None
        self.found_inf: Tensor | None = None
        # One entry per group; empty if torch does every step.
        self.held: list[Moments] | None = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.held = None

    def advance(self, gradients: list[Tensor]) -> None:
        """Do a step on ``gradients``, those of all ``weights`` that have one."""
        complete = len(gradients) == len(self.weights)
        if self.held and complete:
            self._advance(gradients, self.held)
            return
        self.step()
        if self.held is None:
            # Only after the first step: the CUDA graph of a later step keeps the addresses.
            self.held = self._hold() if complete else []

    def _hold(self) -> list[Moments]:
        if len({(weight.dtype, weight.device) for weight in self.weights}) > 1:
            return []
        self.counts = torch.stack([self.state[weight]["step"] for weight in self.weights])
        for weight, count in zip(self.weights, self.counts.unbind(), strict=True):
            self.state[weight]["step"] = count
        held = []
        for group in self.param_groups:
            states = [self.state[weight] for weight in group["params"]]
            means, squares, counts = (
                [state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step")
            )
            held.append((means, squares, counts))
        return held

    @torch.no_grad()
    def _advance(self, gradients: list[Tensor], held: list[Moments]) -> None:
        self.counts.add_(1)
        begin = 0
        for group, (means, squares, counts) in zip(self.param_groups, held, strict=True):
            weights, (beta1, beta2) = group["params"], group["betas"]
            if not weights:
                continue
            end = begin + len(weights)
            torch._fused_adamw_(
                weights,
                gradients[begin:end],
                means,
                squares,
                [],
                counts,
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
                grad_scale=self.grad_scale,
                found_inf=self.found_inf,
            )
            begin = end
        if self.found_inf is not None:
            self.counts.sub_(self.found_inf)
