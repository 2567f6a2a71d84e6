"""What attention costs: time, memory and the share of the memory's speed, once it is known to be right."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from softfree.analysis.measure import (
    peak_extra_memory,
    time_call,
    time_graph,
    time_in_turn,
    time_queued,
)
from softfree.layers.factory import SETTINGS
from softfree.ops import soft_attention

# Softpp first, as the tables have it.
OURS = {name: SETTINGS[name] for name in ("softpp", "soft")}
ATTENTIONS = (*OURS, "softmax")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# Of the norm of the result and of each gradient; half precision rounds inputs, results and products.
TOLERANCE = {torch.bfloat16: 5e-3, torch.float16: 5e-3, torch.float32: 1e-5}
# Entries of the n x m kernel in the comparison with float64, where some of them are held at once.
MAX_CHECKED = 2**22
SLOWEST = 3.0
BACKWARD_FACTOR = 3.5
# Above this many seconds a call on a GPU costs the host nothing, and a graph would replay it for long.
LONG = 0.1


@dataclass(frozen=True)
class Shape:
    """Size of one problem: q, k and v are (1, heads, tokens, dim), landmarks (1, heads, landmarks, dim)."""

    heads: int
    tokens: int
    dim: int = 32
    landmarks: int = 49

    def floor_bytes(self, dtype: torch.dtype) -> int:
        """Least traffic of a forward pass that stores no n x m matrix: q twice, v once, the result once.

        Example:
            >>> Shape(heads=256, tokens=3136).floor_bytes(torch.bfloat16)
            205520896
        """
        return 4 * self.heads * self.tokens * self.dim * dtype.itemsize

    def smaller(self) -> "Shape":
        """The shape at which correctness is checked: two heads at most, the same tokens if they fit."""
        heads = min(self.heads, 2)
        tokens = min(self.tokens, max(MAX_CHECKED // (heads * self.landmarks), self.landmarks))
        return Shape(heads, tokens, self.dim, self.landmarks)


@dataclass
class Cost:
    """One attention at one shape; None where it was not measured, and ``note`` says why."""

    batch_heads: int
    tokens: int
    dim: int
    landmarks: int
    dtype: str
    attention: str
    backend: str
    error: float | None = None
    note: str = ""
    forward_ms: float | None = None
    forward_backward_ms: float | None = None
    forward_times_faster_than_softmax: float | None = None
    forward_backward_times_faster_than_softmax: float | None = None
    forward_eager_ms: float | None = None
    forward_backward_eager_ms: float | None = None
    forward_extra_mib: float | None = None
    forward_backward_extra_mib: float | None = None
    memory_floor_ms: float | None = None
    share_of_floor: float | None = None
    copy_gb_per_s: float | None = None
    timer: str = ""

    @property
    def name(self) -> str:
        return self.attention if self.attention == "softmax" else f"{self.attention} {self.backend}"

    @property
    def faulty(self) -> bool:
        """Wrong or not able to run, as opposed to skipped."""
        return self.note.startswith(("wrong", "failed"))


@dataclass(frozen=True)
class Inputs:
    """q, k, v, landmarks and the gradient that arrives at the result."""

    q: Tensor
    k: Tensor
    v: Tensor
    landmarks: Tensor
    grad: Tensor

    @staticmethod
    def draw(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int = 0) -> "Inputs":
        """Normal tokens; landmarks are tokens at even distances."""
        generator = torch.Generator(device).manual_seed(seed)
        size = (1, shape.heads, shape.tokens, shape.dim)
        q, k, v, grad = (
            torch.randn(size, generator=generator, device=device, dtype=torch.float32).to(dtype)
            for _ in range(4)
        )
        places = torch.arange(shape.landmarks, device=device) * shape.tokens // shape.landmarks
        return Inputs(q, k, v, q[:, :, places].contiguous(), grad)


def attend(attention: str, backend: str, inputs: Inputs) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The result and the tensors it depends on."""
    if attention == "softmax":
        used = (inputs.q, inputs.k, inputs.v)
        return F.scaled_dot_product_attention(*used), used
    used = (inputs.q, inputs.v, inputs.landmarks)
    q, v, landmarks = used
    return soft_attention(q, None, v, landmarks, backend=backend, **OURS[attention]), used


def largest_error(
    attention: str,
    backend: str,
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    *,
    backward: bool = True,
) -> float:
    """Largest relative error of the result and the gradients against the reference in float64.

    ``inf`` where something is not finite.
    """
    drawn = Inputs.draw(shape, dtype, device, seed=1)
    results = []
    for chosen, wide in ((backend, dtype), ("reference", torch.float64)):
        tensors = (drawn.q, drawn.k, drawn.v, drawn.landmarks)
        q, k, v, landmarks = (t.to(wide, copy=True).requires_grad_(backward) for t in tensors)
        out, used = attend(attention, chosen, Inputs(q, k, v, landmarks, drawn.grad))
        grads = torch.autograd.grad(out, used, drawn.grad.to(wide)) if backward else ()
        results.append([t.detach().double() for t in (out, *grads)])
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(*results, strict=True)]
    return max(error if math.isfinite(error) else math.inf for error in errors)


def measure_costs(
    shapes: Sequence[Shape],
    attentions: Sequence[str],
    backends: Sequence[str],
    dtype: str,
    device: torch.device,
    *,
    bandwidth: float,
    backward: bool = True,
    seconds: float = 0.5,
    report: Callable[[str], None] = lambda text: None,
) -> Iterator[list[Cost]]:
    """For each shape, the costs of all attentions. What is wrong there is not timed.

    Args:
        shapes: problem sizes.
        attentions: names among ``ATTENTIONS``.
        backends: of the operator, each for each of our attentions.
        dtype: a name among ``DTYPES``.
        device: where to run.
        bandwidth: bytes a second of the memory, see :func:`softfree.analysis.copy_bandwidth`.
        backward: also time forward and backward together.
        seconds: for each figure.
        report: told what is going on.
    """
    kind = DTYPES[dtype]
    for shape in shapes:
        costs = [
            Cost(
                shape.heads, shape.tokens, shape.dim, shape.landmarks, dtype, attention, backend,
                copy_gb_per_s=bandwidth / 1e9,
                memory_floor_ms=1e3 * shape.floor_bytes(kind) / bandwidth,
            )
            for attention in attentions
            for backend in (("torch",) if attention == "softmax" else backends)
        ]  # fmt: skip
        where = f"{shape.heads} x {shape.tokens:,} tokens"
        for cost in costs:
            report(f"{where}: checking {cost.name}")
            _check(cost, shape.smaller(), device, backward)
        report(f"{where}: timing")
        inputs = Inputs.draw(shape, kind, device)
        _time(costs, inputs, device, seconds, backward=False)
        if backward:
            _time(costs, inputs, device, seconds, backward=True)
        _relate(costs)
        yield costs


def _check(cost: Cost, shape: Shape, device: torch.device, backward: bool) -> None:
    if cost.attention == "softmax":
        return
    dtype = DTYPES[cost.dtype]
    try:
        cost.error = largest_error(
            cost.attention, cost.backend, shape, dtype, device, backward=backward
        )
    except RuntimeError as error:
        cost.note = f"failed: {_first_line(error)}"
        return
    if not cost.error <= TOLERANCE[dtype]:
        cost.note = f"wrong: error {cost.error:.1e}, allowed {TOLERANCE[dtype]:.0e}"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _call(cost: Cost, inputs: Inputs, backward: bool) -> Callable[[], object]:
    if not backward:
        return torch.no_grad()(lambda: attend(cost.attention, cost.backend, inputs)[0])
    tensors = (inputs.q, inputs.k, inputs.v, inputs.landmarks)
    q, k, v, landmarks = (t.detach().requires_grad_() for t in tensors)
    leaves = Inputs(q, k, v, landmarks, inputs.grad)

    def step() -> object:
        out, used = attend(cost.attention, cost.backend, leaves)
        return torch.autograd.grad(out, used, leaves.grad)

    return step


def _expected(cost: Cost, device: torch.device, backward: bool) -> float:
    """Rough seconds of softmax attention, from a shorter input; 0 for ours, which is linear."""
    if cost.attention != "softmax":
        return 0.0
    longest = 4096 if device.type == "cuda" else 784
    shape = Shape(min(cost.batch_heads, 8), min(cost.tokens, longest), cost.dim, 1)
    inputs = Inputs.draw(shape, DTYPES[cost.dtype], device)
    probe = time_call(_call(cost, inputs, False), device, max_repeats=3, budget=0.0).fastest
    growth = (cost.tokens / shape.tokens) ** 2 * cost.batch_heads / shape.heads
    return probe * growth * (BACKWARD_FACTOR if backward else 1)


def _time(
    costs: Sequence[Cost], inputs: Inputs, device: torch.device, seconds: float, *, backward: bool
) -> None:
    """Fill in time and memory of the costs that may be timed."""
    prefix = "forward_backward" if backward else "forward"
    runnable: list[tuple[Cost, Callable[[], object], float]] = []
    for cost in costs:
        if cost.faulty or cost.note == "out of memory":
            continue
        expected = _expected(cost, device, backward)
        if expected > SLOWEST:
            cost.note = f"skipped: one call would take about {expected:.0f} s"
            continue
        call = _call(cost, inputs, backward)
        try:
            # First of all: where memory runs out, it does so here.
            held = peak_extra_memory(call, device)
        except torch.OutOfMemoryError:
            cost.note = "out of memory"
            continue
        setattr(cost, f"{prefix}_extra_mib", held / 2**20)
        runnable.append((cost, call, expected))
    if device.type != "cuda":
        calls = [call for _, call, _ in runnable]
        medians = time_in_turn(calls, seconds * len(calls)) if calls else []
        for (cost, _, _), median in zip(runnable, medians, strict=True):
            setattr(cost, f"{prefix}_ms", 1e3 * median)
            cost.timer = "host"
        return
    for cost, call, expected in runnable:
        slow = expected > LONG
        eager = time_queued(
            call, device, min_repeats=1 if slow else 20, budget=0.0 if slow else seconds
        ).median
        graph = None if slow else time_graph(call, budget=seconds)
        setattr(cost, f"{prefix}_eager_ms", 1e3 * eager)
        setattr(cost, f"{prefix}_ms", 1e3 * (eager if graph is None else graph))
        cost.timer = "events" if graph is None else "CUDA graph"


def _relate(costs: Sequence[Cost]) -> None:
    """Fill in the ratios to softmax attention and the share of the memory floor."""
    softmax = next((cost for cost in costs if cost.attention == "softmax"), None)
    for cost in costs:
        if cost.forward_ms is not None and cost.memory_floor_ms is not None:
            cost.share_of_floor = cost.memory_floor_ms / cost.forward_ms
        for prefix in ("forward", "forward_backward"):
            own = getattr(cost, f"{prefix}_ms")
            other = getattr(softmax, f"{prefix}_ms", None)
            if own is not None and other is not None:
                setattr(cost, f"{prefix}_times_faster_than_softmax", other / own)
