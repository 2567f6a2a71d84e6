"""The learning rate as a function of the step: nothing to save, nothing to resume."""

import dataclasses
import math

from softfree.training.settings import OptimSettings


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Linear warm-up, then a cosine, a straight line, or drops at milestones.

    Example:
        >>> schedule = Schedule("linear", total=10, warmup=2, lr=1.0, min_lr=0.0, warmup_lr=0.0)
        >>> [schedule(step) for step in (0, 1, 2, 6)]
        [0.5, 1.0, 1.0, 0.5]
    """

    sched: str
    total: int
    warmup: int
    lr: float
    min_lr: float
    warmup_lr: float
    milestones: tuple[int, ...] = ()
    decay_rate: float = 0.1

    @classmethod
    def of(cls, optim: OptimSettings, steps_per_epoch: int) -> "Schedule":
        """Create the schedule of a run; lengths in epochs are converted to steps."""
        total = optim.steps or optim.epochs * steps_per_epoch
        warmup = optim.warmup_steps or round(optim.warmup_epochs * steps_per_epoch)
        if warmup >= total:
            raise ValueError(
                f"the warm-up of {warmup} steps (`warmup_epochs`, `warmup_steps`) must be shorter than "
                f"the run of {total} (`epochs`, `steps`); 0 for both turns it off"
            )
        unit = 1 if optim.steps else steps_per_epoch
        milestones = tuple(milestone * unit for milestone in optim.decay_milestones)
        rates = optim.lr, optim.min_lr, optim.warmup_lr
        return cls(optim.sched, total, warmup, *rates, milestones, optim.decay_rate)

    def __call__(self, step: int) -> float:
        """The learning rate of step ``step``, counted from 0."""
        if step < self.warmup:
            return self.warmup_lr + (self.lr - self.warmup_lr) * (step + 1) / self.warmup
        if self.sched == "multistep":
            return self.lr * self.decay_rate ** sum(step >= m for m in self.milestones)
        done = (step - self.warmup) / (self.total - self.warmup)
        falling = 1 - done if self.sched == "linear" else 0.5 * (1 + math.cos(math.pi * done))
        return self.min_lr + (self.lr - self.min_lr) * falling
