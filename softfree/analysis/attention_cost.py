"""The cost of attention: time, memory and the share of the memory bandwidth. Correctness is checked first."""

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from softfree.analysis.measure import Work, first_line, measure, relate, time_call, time_in_turn
from softfree.analysis.plots import COLOURS, LABELS, Line, draw_against_tokens, shades
from softfree.layers import ATTENTIONS, create_attention
from softfree.layers.factory import SETTINGS
from softfree.ops import soft_attention

# Softpp first, as in the tables; its settings are those of the papers, with the Newton iteration.
OURS: dict[str, dict[str, Any]] = {
    "softpp": SETTINGS["softpp"],
    "softpp-solve": dict(normalize=True, inverse="solve"),
    "soft": SETTINGS["soft"],
}
OPERATORS = (*OURS, "softmax")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# Relative to the norm of the result and of each gradient; half precision rounds inputs, results and products.
TOLERANCE = {torch.bfloat16: 5e-3, torch.float16: 5e-3, torch.float32: 1e-5}
# Limit on the entries of the n x m kernel in the comparison with float64, which holds several of them at
# once.
MAX_CHECKED = 2**22
SLOWEST = 3.0
BACKWARD_FACTOR = 3.5
# Softmax attention computed literally, with its n x n matrix; torch's fused version has none.
UNFUSED = "softmax-unfused"
LAYERS = (*ATTENTIONS, UNFUSED)
# Tokens of the papers' Fig. 1b, and how many landmarks or slots layers have at each of them.
UNIT = 784
LENGTHS = tuple(UNIT * p for p in range(1, 9))
LANDMARKS = 49
PASSES = ("forward", "forward_backward")


@dataclass(frozen=True)
class Shape:
    """Size of one problem: q, k and v are (1, heads, tokens, dim), landmarks (1, heads, landmarks, dim)."""

    heads: int
    tokens: int
    dim: int = 32
    landmarks: int = 49

    def floor_bytes(self, dtype: torch.dtype) -> int:
        """Minimum traffic of a forward pass without an n x m matrix: q twice, v once, the result once.

        Example:
            >>> Shape(heads=256, tokens=3136).floor_bytes(torch.bfloat16)
            205520896
        """
        return 4 * self.heads * self.tokens * self.dim * dtype.itemsize

    def smaller(self) -> "Shape":
        """The shape at which correctness is checked: at most two heads, the same tokens if they fit."""
        heads = min(self.heads, 2)
        tokens = min(self.tokens, max(MAX_CHECKED // (heads * self.landmarks), self.landmarks))
        return Shape(heads, tokens, self.dim, self.landmarks)


@dataclass
class Cost:
    """One attention at one shape; a figure is None if it was not measured, and ``note`` says why."""

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
    def label(self) -> str:
        """The attention in words, for a legend; with its backend, unless that is "auto"."""
        backend = "" if self.name == "softmax" or self.backend == "auto" else f" ({self.backend})"
        return LABELS[self.attention] + backend

    @property
    def faulty(self) -> bool:
        """Whether it is wrong or can't run, as opposed to skipped."""
        return self.note.startswith(("wrong", "failed"))


class Inputs(NamedTuple):
    """q, k, v, landmarks and the gradient of the result."""

    q: Tensor
    k: Tensor
    v: Tensor
    landmarks: Tensor
    grad: Tensor

    @staticmethod
    def draw(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int = 0) -> "Inputs":
        """Draw normally distributed tokens; landmarks are evenly spaced tokens."""
        generator = torch.Generator(device).manual_seed(seed)
        size = (1, shape.heads, shape.tokens, shape.dim)
        q, k, v, grad = (
            torch.randn(size, generator=generator, device=device).to(dtype) for _ in range(4)
        )
        places = torch.arange(shape.landmarks, device=device) * shape.tokens // shape.landmarks
        return Inputs(q, k, v, q[:, :, places].contiguous(), grad)

    def leaves(self, dtype: torch.dtype) -> "Inputs":
        """The same inputs for a backward pass, in this dtype."""
        q, k, v, landmarks = (t.detach().to(dtype).requires_grad_() for t in self[:4])
        return Inputs(q, k, v, landmarks, self.grad.to(dtype))


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
    """Largest relative error of result and gradients against the float64 reference; inf if not finite."""
    drawn = Inputs.draw(shape, dtype, device, seed=1)
    results = []
    for chosen, wide in ((backend, dtype), ("reference", torch.float64)):
        leaves = drawn.leaves(wide)
        with torch.set_grad_enabled(backward):
            out, used = attend(attention, chosen, leaves)
        grads = torch.autograd.grad(out, used, leaves.grad) if backward else ()
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
) -> list[Cost]:
    """Measure the costs of all attentions, shape by shape.

    An attention that is wrong at a shape is not timed.

    Args:
        attentions: names from ``OPERATORS``.
        backends: backends of the operator, each used for each of our attentions.
        dtype: a name from ``DTYPES``.
        bandwidth: bytes per second of the memory, see :func:`softfree.analysis.copy_bandwidth`.
        seconds: time for each figure.
        report: called with progress messages.
    """
    kind, found = DTYPES[dtype], []
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
        softmax = next((cost for cost in costs if cost.attention == "softmax"), None)
        ratios = {f"{each}_ms": f"{each}_times_faster_than_softmax" for each in PASSES}
        relate(costs, softmax, ratios, lower_is_better=True)
        for cost in costs:
            if cost.forward_ms is not None and cost.memory_floor_ms is not None:
                cost.share_of_floor = cost.memory_floor_ms / cost.forward_ms
        found += costs
    return found


def _check(cost: Cost, shape: Shape, device: torch.device, backward: bool) -> None:
    if cost.attention == "softmax":
        return
    dtype = DTYPES[cost.dtype]
    try:
        cost.error = largest_error(
            cost.attention, cost.backend, shape, dtype, device, backward=backward
        )
    except RuntimeError as error:
        cost.note = f"failed: {first_line(error)}"
        return
    if not cost.error <= TOLERANCE[dtype]:
        cost.note = f"wrong: error {cost.error:.1e}, allowed {TOLERANCE[dtype]:.0e}"


def _call(cost: Cost, inputs: Inputs, backward: bool) -> Callable[[], object]:
    if not backward:
        return torch.no_grad()(lambda: attend(cost.attention, cost.backend, inputs)[0])
    leaves = inputs.leaves(inputs.q.dtype)

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
    prefix = PASSES[backward]
    on_host: list[tuple[Cost, Callable[[], object]]] = []
    for cost in costs:
        if cost.faulty or cost.note == "out of memory":
            continue
        expected = _expected(cost, device, backward)
        if expected > SLOWEST:
            cost.note = f"skipped: one call would take about {expected:.0f} s"
            continue
        call = _call(cost, inputs, backward)
        # On a CPU they take turns below, so that other load on the machine affects all of them equally.
        alone = seconds if device.type == "cuda" else 0.0
        found = measure(partial(Work, call), device, seconds=alone, cuda_graph=None)
        cost.note = found.note or cost.note
        cost.timer = found.timer or cost.timer
        for figure, value, unit in (
            ("extra_mib", found.extra_bytes, 2**-20),
            ("ms", found.seconds, 1e3),
            ("eager_ms", found.eager_seconds, 1e3),
        ):
            if value is not None:
                setattr(cost, f"{prefix}_{figure}", value * unit)
        if not alone and not found.note:
            on_host.append((cost, call))
    if on_host:
        medians = time_in_turn([call for _, call in on_host], seconds * len(on_host))
        for (cost, _), median in zip(on_host, medians, strict=True):
            setattr(cost, f"{prefix}_ms", 1e3 * median)
            cost.timer = "host"


def time_curves(costs: Sequence[Cost], figure: str) -> dict[str, list[tuple[int, float]]]:
    """Tokens and milliseconds of each attention, ascending; time per head if shapes differ in their heads."""
    per_head = len({cost.batch_heads for cost in costs}) > 1
    found: dict[str, list[tuple[int, float]]] = {}
    for cost in sorted(costs, key=lambda cost: cost.tokens):
        ms = getattr(cost, figure)
        if ms is not None:
            value = ms / cost.batch_heads if per_head else ms
            found.setdefault(cost.name, []).append((cost.tokens, value))
    return found


def draw_times(costs: Sequence[Cost], title: str) -> Any:
    """Draw time against tokens, both axes logarithmic, with a colour for each attention."""
    words = {cost.name: cost.label for cost in costs}
    # Backends of one attention are shades of its colour.
    by_attention: dict[str, dict[str, None]] = {}
    for cost in costs:
        by_attention.setdefault(cost.attention, {})[cost.name] = None
    colours = {
        name: shade
        for attention, names in by_attention.items()
        for name, shade in zip(names, shades(COLOURS[attention], len(names)), strict=True)
    }
    lines = [
        Line(f"{words[name]}, {what}", points, colours[name], style)
        for passes, what, style in zip(
            PASSES, ("forward", "forward + backward"), ("o-", "s--"), strict=True
        )
        for name, points in time_curves(costs, f"{passes}_ms").items()
    ]
    heads = sorted({cost.batch_heads for cost in costs})
    unit = "ms for each head" if len(heads) > 1 else f"ms for {heads[0]} heads"
    linear = "twice the tokens, twice the time"
    return draw_against_tokens(lines, unit, title, linear, xscale="log")


@dataclass
class LayerMemory:
    """Peak memory of a layer beyond its weights and its input; None if memory ran out."""

    attention: str
    tokens: int
    batch_size: int
    dim: int
    heads: int
    dtype: str
    forward_mib: float | None = None
    forward_backward_mib: float | None = None
    note: str = ""


def measure_layer_memory(row: LayerMemory, device: torch.device) -> LayerMemory:
    """Fill in the figures of one attention, a name from ``LAYERS``, at one length."""
    unfused = row.attention == UNFUSED

    def prepare(backward: bool) -> Work:
        torch.manual_seed(0)
        layer = create_attention(
            "softmax" if unfused else row.attention,
            row.dim,
            row.heads,
            sequence=True,
            grid=row.tokens,
            landmarks=f"average:{LANDMARKS}",
            stride=UNIT // LANDMARKS,
            slots=LANDMARKS,
        ).to(device, DTYPES[row.dtype])
        shape = (row.batch_size, row.tokens, row.dim)
        x = torch.randn(shape, device=device).to(DTYPES[row.dtype]).requires_grad_()

        def step() -> None:
            layer(x).sum().backward()
            # Freed before the next call, which would otherwise add to them.
            layer.zero_grad()
            x.grad = None

        return Work(step if backward else torch.no_grad()(lambda: layer(x)))

    with sdpa_kernel(SDPBackend.MATH) if unfused else contextlib.nullcontext():
        for backward, passes in enumerate(PASSES):
            found = measure(partial(prepare, bool(backward)), device, seconds=0)
            row.note = found.note or row.note
            if found.extra_bytes is not None:
                setattr(row, f"{passes}_mib", found.extra_bytes / 2**20)
    return row


def draw_memory(rows: Sequence[LayerMemory], title: str) -> Any:
    """Draw memory against tokens, with a curve for each attention."""
    lines = []
    for name in dict.fromkeys(row.attention for row in rows):
        points = [
            (row.tokens, row.forward_backward_mib)
            for row in rows
            if row.attention == name and row.forward_backward_mib is not None
        ]
        if points:
            # SOFT and SOFT++ need the same memory; both curves must be visible.
            style = "o--" if name == "softpp" else "o-"
            lines.append(Line(LABELS[name], points, COLOURS[name], style))
    return draw_against_tokens(lines, "MiB, forward and backward", title)
