"""AdamW as torch has it, with less for the host to do in a step."""

from typing import Any

import torch
from torch import Tensor

# Of the weights of a group: first and second moments, and steps counted.
Moments = tuple[list[Tensor], list[Tensor], list[Tensor]]


class FusedAdamW(torch.optim.AdamW):
    """torch's fused AdamW; :meth:`advance` is its ``step``, on gradients that the caller has in a list.

    In each step torch looks up the moments of every weight, sorts all by device and dtype, and counts the steps of
    each weight apart. Here the lists of the first step are kept, and the counts lie in one tensor, of which the
    state of a weight has its element. The kernel is torch's, and so are the results and what a checkpoint holds.

    Attributes:
        weights: of all groups, in their order.
        grad_scale: on the device, what gradients are divided by; None: nothing.
        found_inf: on the device, 1 where the step is to be left out, else 0.
    """

    def __init__(self, groups: list[dict[str, Any]], betas: tuple[float, float]):
        super().__init__(groups, lr=0.0, betas=betas, fused=True)
        self.weights: list[Tensor] = [p for group in self.param_groups for p in group["params"]]
        self.grad_scale: Tensor | None = None
        self.found_inf: Tensor | None = None
        # Of each group; empty where every step is left to torch.
        self.held: list[Moments] | None = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.held = None

    def advance(self, gradients: list[Tensor]) -> None:
        """A step on ``gradients``: those of all ``weights`` that have one."""
        complete = len(gradients) == len(self.weights)
        if self.held and complete:
            self._advance(gradients, self.held)
            return
        self.step()
        if self.held is None:
            # Now or never: the CUDA graph of a later step keeps the addresses.
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
