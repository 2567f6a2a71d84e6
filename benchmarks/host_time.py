"""What an eager call costs the host: Python, checks, autograd and the launches of its kernels.

    python benchmarks/host_time.py                 on a GPU; on a CPU the times include the work itself

First come single calls so small that the GPU waits for the host, next to PyTorch's fused attention: microseconds from one
call to the next, without and with a gradient. Then come 256 heads of 3,136 tokens, which give the kernels real work,
launched from Python and in a CUDA graph. Last comes one image through whole models, launched from Python. Everything runs
in half precision, in one process.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence

import timm
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

import softfree
from softfree.analysis import describe_environment
from softfree.analysis.measure import synchronize, time_call, time_graph, time_queued
from softfree.commands.common import heading, make_table
from softfree.ops.mlp.operator import mlp
from softfree.ops.norm.operator import add_norm, landmark_norm
from softfree.ops.value_conv.operator import value_conv
from softfree.ops.window_product.operator import window_product

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
CALLS, ROUNDS = 100, 15
MODELS = ("softfree_tiny", "softpp_tiny", "pvt_v2_b1", "swin_tiny_patch4_window7_224")


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=DTYPE).requires_grad_()


def small_calls() -> dict[str, tuple[Callable[[], Tensor], Sequence[Tensor]]]:
    """Calls by name, and the inputs that each is differentiated with respect to."""
    q, k, v, landmarks = (
        normal(2, 2, 196, 32),
        normal(2, 2, 196, 32),
        normal(2, 2, 196, 32),
        normal(2, 2, 49, 32),
    )
    tokens, weight, bias = normal(2, 196, 64), normal(64), normal(64)
    wide, wide_bias, narrow = normal(256, 64), normal(256), normal(64, 256)
    layer = softfree.SoftAttention(64, 2, stride=2, value_conv=3).to(DEVICE, DTYPE)
    filters, windows = normal(2, 1, 3, 3), normal(32, 32, 2, 2)
    parameters = list(layer.parameters())
    return {
        "scaled_dot_product_attention": (
            lambda: F.scaled_dot_product_attention(q, k, v), (q, k, v)
        ),
        "soft_attention": (lambda: softfree.soft_attention(q, None, v, landmarks), (q, v, landmarks)),
        'soft_attention, inverse="solve"': (
            lambda: softfree.soft_attention(q, None, v, landmarks, inverse="solve"),
            (q, v, landmarks),
        ),
        "SoftAttention, a layer": (lambda: layer(tokens, (14, 14)), (tokens, *parameters)),
        "mlp": (lambda: mlp(tokens, wide, wide_bias, narrow, bias), (tokens, wide, narrow)),
        "layer_norm": (lambda: F.layer_norm(tokens, (64,), weight, bias), (tokens, weight, bias)),
        "add_norm": (lambda: add_norm(tokens, tokens, weight, bias, 1e-5), (tokens, weight, bias)),
        "landmark_norm": (
            lambda: landmark_norm(tokens, weight, bias, 0.5, 1e-5), (tokens, weight, bias)
        ),
        "value_conv": (lambda: value_conv(tokens, filters, (14, 14)), (tokens, filters)),
        "window_product": (lambda: window_product(q, windows, (14, 14)), (q, windows)),
    }  # fmt: skip


def with_gradient(call: Callable[[], Tensor], leaves: Sequence[Tensor]) -> Callable[[], object]:
    grad = torch.randn_like(call())
    return lambda: torch.autograd.grad(call(), leaves, grad)


def without_gradient(call: Callable[[], Tensor]) -> Callable[[], object]:
    def run() -> object:
        with torch.no_grad():
            return call()

    return run


def host_microseconds(call: Callable[[], object]) -> float:
    """Time from one call to the next while the GPU keeps up: the median over synchronised rounds."""
    rounds = []
    for _ in range(ROUNDS + 1):
        synchronize(DEVICE)
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        rounds.append(1e6 * (time.perf_counter() - begin) / CALLS)
    return statistics.median(rounds[1:])


def show(console: Console, titles: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    table = make_table(titles)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def main() -> int:
    torch.manual_seed(0)
    console = Console()
    heading(console, "Host time of eager calls", describe_environment(DEVICE), DEVICE == "cpu")
    rows: list[tuple[str, ...]] = [
        (
            name,
            f"{host_microseconds(without_gradient(call)):.0f}",
            f"{host_microseconds(with_gradient(call, leaves)):.0f}",
        )
        for name, (call, leaves) in small_calls().items()
    ]
    show(console, ("call", "µs", "with gradient"), rows)
    q, v, landmarks = normal(256, 1, 3136, 32), normal(256, 1, 3136, 32), normal(256, 1, 49, 32)
    rows = []
    for inverse in ("newton", "solve") if DEVICE == "cuda" else ():
        call = lambda: softfree.soft_attention(q, None, v, landmarks, inverse=inverse)  # noqa: B023, E731
        for name, run in (
            (inverse, without_gradient(call)),
            (f"{inverse}, with gradient", with_gradient(call, (q, v, landmarks))),
        ):
            eager, graph = time_queued(run, DEVICE).median, time_graph(run, DEVICE).median
            rows.append((name, f"{1e3 * eager:.3f}", f"{1e3 * graph:.3f}", f"{eager / graph:.2f}"))
    if rows:
        show(console, ("256 x 3,136", "eager ms", "graph ms", "ratio"), rows)
    rows = []
    picture = torch.randn(1, 3, 224, 224, device=DEVICE, dtype=DTYPE)
    for name in MODELS:
        model = timm.create_model(name).to(DEVICE, DTYPE).eval()
        timing = time_call(without_gradient(lambda: model(picture)), DEVICE, budget=2.0)  # noqa: B023
        rows.append((name, f"{1e3 * timing.median:.2f}"))
    show(console, ("one picture", "ms"), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
