"""`softfree benchmark model`."""

import contextlib
import copy
import dataclasses
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import timm
import torch
import torch.nn.functional as F
import tyro
from rich.console import Console
from rich.markup import escape
from torch import Tensor, nn

from softfree.analysis import (
    capture_graph,
    count_macs,
    count_parameters,
    describe_environment,
    peak_extra_memory,
    time_queued,
)
from softfree.commands._common import (
    NARROWEST,
    check_choices,
    check_output,
    check_positive,
    digits,
    heading,
    make_table,
    progress,
    save_rows,
)
from softfree.models import fold_batch_norms
from softfree.models.checks import check_at_least, check_model_name
from softfree.training.devices import AMP_DTYPES, DEFAULT_AMP, autocast, choose_device

BENCHES = ("train", "infer", "both")
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.05),
}
DEFAULT_BATCH = {"cpu": 4, "cuda": 256}
# A folded model computes the same sums in another order.
FOLDING_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Settings:
    """How every model of a run is measured."""

    batch_size: int
    img_size: int
    amp_dtype: str
    opt: str
    channels_last: bool
    torchcompile: bool
    fuse_bn: bool
    cuda_graph: bool = False


@dataclass
class Throughput:
    """One model's figures; None where not measured, and ``note`` says why."""

    model: str
    parameters: int
    macs: int | None
    train_img_per_s: float | None = None
    train_ratio_to_first: float | None = None
    train_peak_gib: float | None = None
    infer_img_per_s: float | None = None
    infer_ratio_to_first: float | None = None
    infer_peak_gib: float | None = None
    note: str = ""


def model(
    names: Annotated[
        tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="NAME [NAME ...]")
    ],
    /,
    bench: str = "both",
    batch_size: int | None = None,
    img_size: int = 224,
    amp_dtype: str = "auto",
    opt: str = "adamw",
    channels_last: bool = False,
    torchcompile: bool = False,
    fuse_bn: bool = False,
    cuda_graph: bool = False,
    device: str = "auto",
    seconds: float = 3.0,
    csv: Path | None = None,
) -> int:
    """Throughput and memory of models, ours and any of timm's, in one run, untrained.

    A training step is forward, cross-entropy, backward and the optimizer's step.

    Args:
        names: models that timm knows; ratios are to the first.
        bench: train, infer or both.
        batch_size: images at a time; otherwise 4 on a CPU, 256 on a GPU.
        img_size: side of the square images.
        amp_dtype: autocast to bfloat16 or float16, or none; 'auto': bfloat16 on a GPU, none on a CPU.
        opt: optimizer, adamw or sgd.
        channels_last: keep images and maps with the channels last in memory.
        torchcompile: compile the models with torch.compile.
        fuse_bn: for inference, fold batch norms into the convolutions before them.
        cuda_graph: replay every step from a CUDA graph: the GPU's time alone, however slow the host.
        device: 'cuda', 'cpu', or 'auto' for the GPU if there is one.
        seconds: time for each figure.
        csv: write the figures to this file, with date, device and versions in every row.
    """
    where = choose_device(device)
    check_names(names)
    check_choices("--bench", [bench], BENCHES)
    check_choices("--opt", [opt], OPTIMIZERS)
    amp = DEFAULT_AMP[where.type] if amp_dtype == "auto" else amp_dtype
    check_choices("--amp-dtype", [amp], AMP_DTYPES)
    batch = DEFAULT_BATCH[where.type] if batch_size is None else batch_size
    check_positive("--batch-size", batch)
    check_positive("--seconds", seconds)
    check_output("--csv", csv)
    check_at_least(NARROWEST, **{"--img-size": img_size})
    settings = Settings(batch, img_size, amp, opt, channels_last, torchcompile, fuse_bn, cuda_graph)
    check_cuda_graph(cuda_graph, amp, where)

    console = Console(highlight=False)
    rows: list[Throughput] = []
    with progress() as report:
        for name in dict.fromkeys(names):
            rows.append(measure(name, settings, bench, where, seconds, report))
            gc.collect()
            if where.type == "cuda":
                torch.cuda.empty_cache()
    relate(rows)
    measured_in = describe_environment(where)
    print_rows(console, rows, settings, bench, measured_in, where)
    extra = dataclasses.asdict(settings)
    save_rows(csv, [{**dataclasses.asdict(row), **extra} for row in rows], measured_in)
    return 0


def check_cuda_graph(wanted: bool, amp_dtype: str, device: torch.device) -> None:
    """Refuse a CUDA graph where there can be none."""
    if wanted and device.type != "cuda":
        raise ValueError(f"--cuda-graph needs a CUDA device, got --device {device}")
    if wanted and amp_dtype == "float16":
        raise ValueError(
            "--cuda-graph can't hold float16's loss scaling, which asks the GPU whether to skip a step; "
            "--amp-dtype bfloat16 or none works"
        )


def check_names(names: Sequence[str]) -> None:
    """Refuse none, and names that timm does not know."""
    if not names:
        raise ValueError("benchmark model needs a name, e.g. softpp_tiny pvt_v2_b1")
    for name in names:
        check_model_name(name, "NAME")


def build(name: str, img_size: int, **options: Any) -> nn.Module:
    """An untrained model for images of this size, told the size if it wants to know."""
    torch.manual_seed(0)
    try:
        return timm.create_model(name, img_size=img_size, **options)
    except TypeError as error:
        # Networks that take any size have no such argument.
        if "img_size" not in str(error):
            raise
        return timm.create_model(name, **options)


def try_count_macs(network: nn.Module, img_size: int) -> int | None:
    """Multiply-adds; None for a model that runs but whose products can't be counted from shapes alone."""
    try:
        return count_macs(network, img_size)
    # Anything that a model from elsewhere may do with tensors that hold no numbers.
    except Exception:
        with torch.inference_mode():
            network.eval()(torch.randn(1, 3, img_size, img_size))
        return None


def measure(
    name: str,
    settings: Settings,
    bench: str,
    device: torch.device,
    seconds: float,
    report: Callable[[str], None],
    **options: Any,
) -> Throughput:
    """One row, without its ratios; ``options`` are timm's keywords of the model."""
    report(f"{name}: building")
    try:
        network = build(name, settings.img_size, **options)
        macs = try_count_macs(network, settings.img_size)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        words = ", ".join(f"{key}={value}" for key, value in options.items())
        given = f" with {words}" if words else ""
        raise ValueError(
            f"{name}{given} can't take images of {settings.img_size} x {settings.img_size}: {reason}"
        ) from error
    row = Throughput(name, count_parameters(network), macs)
    # Inference last: folding changes the model.
    for kind, step_of in (("train", training_step), ("infer", inference_step)):
        if bench not in (kind, "both"):
            continue
        report(f"{name}: {'training' if kind == 'train' else 'inference'}")
        torch.compiler.reset()
        try:
            with step_of(network, settings, device, row) as (step, held):
                step()
                extra = peak_extra_memory(step, device)
                if settings.cuda_graph:
                    step = capture_graph(step)
                timing = time_queued(step, device, budget=seconds, max_repeats=1000)
                setattr(row, f"{kind}_peak_gib", (held() + extra) / 2**30)
                setattr(row, f"{kind}_img_per_s", settings.batch_size / timing.median)
        except torch.OutOfMemoryError:
            row.note = _join(row.note, f"{kind}: out of memory")
        gc.collect()
    return row


@contextlib.contextmanager
def training_step(
    network: nn.Module, settings: Settings, device: torch.device, row: Throughput
) -> Iterator[tuple[Callable[[], object], Callable[[], int]]]:
    """Forward, cross-entropy, backward, the optimizer's step; and the bytes held between steps."""
    network.train()
    images, compiled = place(network, settings, device)
    optimizer = OPTIMIZERS[settings.opt](network.parameters())
    for group in optimizer.param_groups:
        group["capturable"] = settings.cuda_graph  # Adam then counts its steps on the GPU
    scaler = torch.amp.GradScaler(device.type, enabled=settings.amp_dtype == "float16")
    labels: Tensor | None = None

    def step() -> None:
        nonlocal labels
        with autocast(settings.amp_dtype, device):
            logits = compiled(images)
            if labels is None:
                labels = torch.randint(logits.shape[-1], (len(images),), device=device)
            loss = F.cross_entropy(logits, labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    def held() -> int:
        state = [t for each in optimizer.state.values() for t in each.values()]
        return count_bytes([images, *network.parameters(), *network.buffers(), *state])

    try:
        yield step, held
    finally:
        optimizer.zero_grad(set_to_none=True)


@contextlib.contextmanager
def inference_step(
    network: nn.Module, settings: Settings, device: torch.device, row: Throughput
) -> Iterator[tuple[Callable[[], object], Callable[[], int]]]:
    """Forward without gradients; and the bytes held between steps."""
    network.eval()
    if settings.fuse_bn:
        row.note = _join(row.note, fold_if_safe(network, settings.img_size))
    images, compiled = place(network, settings, device)

    def step() -> None:
        with torch.inference_mode(), autocast(settings.amp_dtype, device):
            compiled(images)

    yield step, lambda: count_bytes([images, *network.parameters(), *network.buffers()])


def place(
    network: nn.Module, settings: Settings, device: torch.device
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Images, and the model to call on them, on the device in the layout asked for."""
    layout = torch.channels_last if settings.channels_last else torch.contiguous_format
    side = settings.img_size
    images = torch.randn(settings.batch_size, 3, side, side).to(device, memory_format=layout)
    if settings.channels_last:
        network.to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    else:
        network.to(device)
    return images, torch.compile(network) if settings.torchcompile else network


def count_bytes(tensors: Sequence[object]) -> int:
    """Bytes of the tensors among these."""
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))


def fold_if_safe(network: nn.Module, img_size: int) -> str:
    """Fold batch norms into convolutions if that leaves the results alone; say what was done.

    That a norm is listed after a convolution does not mean that it follows it. So a copy with random
    statistics is folded first and compared.
    """
    trial = copy.deepcopy(network).cpu().float().eval()
    with torch.no_grad():
        for module in trial.modules():
            if isinstance(module, nn.BatchNorm2d):
                for tensor in (module.running_var, module.weight):
                    if tensor is not None:
                        tensor.uniform_(0.5, 1.5)
                for tensor in (module.running_mean, module.bias):
                    if tensor is not None:
                        tensor.uniform_(-0.5, 0.5)
        image = torch.randn(1, 3, img_size, img_size)
        expected = trial(image)
        count = fold_batch_norms(trial)
        error = float((trial(image) - expected).norm() / expected.norm())
    if not count:
        return "no batch norm to fold"
    if not error <= FOLDING_TOLERANCE:
        return f"batch norms not folded: the result would change by {error:.0e}"
    fold_batch_norms(network)
    return f"{count} batch norms folded"


def relate(rows: Sequence[Any], kinds: Sequence[str] = ("train", "infer")) -> None:
    """Fill in the ratios to the first model."""
    for row in rows:
        for kind in kinds:
            own = getattr(row, f"{kind}_img_per_s")
            first = getattr(rows[0], f"{kind}_img_per_s")
            if own is not None and first is not None:
                setattr(row, f"{kind}_ratio_to_first", own / first)


def print_rows(
    console: Console,
    rows: Sequence[Throughput],
    settings: Settings,
    bench: str,
    measured_in: dict[str, object],
    device: torch.device,
) -> None:
    """The table and how to read it."""
    precision = "float32" if settings.amp_dtype == "none" else f"{settings.amp_dtype} autocast"
    modes = {
        "channels last": settings.channels_last,
        "compiled": settings.torchcompile,
        "CUDA graph": settings.cuda_graph,
        "batch norms folded for inference": settings.fuse_bn,
    }
    said = [f"batch {settings.batch_size}", f"{settings.img_size}²", precision]
    said += [mode for mode, on in modes.items() if on] or ["eager"]
    heading(console, f"Models: {', '.join(said)}", measured_in, threads=device.type == "cpu")
    kinds = [kind for kind in ("train", "infer") if bench in (kind, "both")]
    titles = ["model", "params\nM", "GMACs"]
    for kind in kinds:
        titles += [f"{kind}\nimg/s", f"{kind}\nratio", f"{kind}\nGiB"]
    table = make_table(titles)
    for row in rows:
        cells = [f"{row.parameters / 1e6:.1f}", digits(row.macs, 1e-9)]
        for kind in kinds:
            cells += [digits(getattr(row, f"{kind}_img_per_s"))]
            cells += [digits(getattr(row, f"{kind}_ratio_to_first"))]
            cells += [digits(getattr(row, f"{kind}_peak_gib"))]
        table.add_row(row.model, *cells)
    console.print(table)
    for row in rows:
        if row.note:
            console.print(f"{row.model}: {escape(row.note)}", style="yellow")
    step = f"forward, cross-entropy, backward and {settings.opt}'s step"
    console.print(
        (f"train: {step}.\n" if "train" in kinds else "")
        + f"ratio: images a second over those of {rows[0].model}.\n"
        "GiB: the most that was held at once, weights and images included.\n"
        f"GMACs: billions of multiply-adds for one image of {settings.img_size}².",
        style="dim",
    )


def _join(*notes: str) -> str:
    return "; ".join(note for note in notes if note)
