"""Run a picture through a backbone, then race the operator against softmax attention."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import timm
import timm.data
import torch
from PIL import Image
from rich.console import Console

from softfree.analysis import count_macs, count_parameters, describe_environment, time_call
from softfree.analysis.attention_cost import Inputs, Shape, attend
from softfree.analysis.measure import Measured, Work, measure
from softfree.analysis.pictures import load_photo
from softfree.commands.common import Photo, command, digits, make_table, progress
from softfree.models.checks import check_model_name
from softfree.training.devices import choose_device

SIDES = (28, 56, 112, 224)  # of the token grid: one token per 4 x 4 pixels in stage 1
HEADS, HEAD_DIM, LANDMARKS = 2, 32, 49
SLOWEST = 20.0
# A call that takes more seconds than this is made only once, for both time and memory.
LONG = 1.0


def demo(
    photo: Photo = None,
    /,
    model: str = "softfree_tiny",
    device: str = "auto",
    max_tokens: int = SIDES[-1] ** 2,
) -> int:
    """Show what the package does on this machine.

    Args:
        photo: one of your photos; otherwise one is drawn.
        model: name of a backbone, see `softfree models`.
        device: 'cuda', 'cpu', or 'auto' for the GPU if there is one.
        max_tokens: skip longer inputs in the race.
    """
    console = Console(highlight=False)
    chosen = choose_device(device)
    show_backbone(console, model, load_photo(photo), chosen, drawn=photo is None)
    race(console, chosen, [side for side in SIDES if side**2 <= max_tokens])
    console.print(
        "\n[bold]Next[/]\n"
        "  softfree models                     all backbones, with the papers' figures\n"
        "  softfree demo PHOTO.jpg             the same with one of your photos\n"
        "and README.md: the operator and the backbones in a few lines of Python.\n"
        "If the shell does not find softfree: source .venv/bin/activate"
    )
    return 0


main = command(demo, __doc__)


def show_backbone(
    console: Console, name: str, picture: Image.Image, device: torch.device, *, drawn: bool
) -> None:
    """Build a backbone, run the picture through it, and print the results."""
    check_model_name(name)
    with progress() as report:
        report(f"building {name}")
        torch.manual_seed(0)
        network = timm.create_model(name, features_only=True).eval().to(device)
        reductions: list[int] = network.feature_info.reduction()  # type: ignore[union-attr, operator]
        transform = timm.data.create_transform(
            **timm.data.resolve_data_config(model=network), is_training=False
        )
        pixels = transform(picture)[None].to(device)
        report("running the picture through it")
        with torch.inference_mode():
            maps = network(pixels)
            timing = time_call(lambda: network(pixels), device, budget=1.0)
    side = pixels.shape[-1]
    macs = count_macs(network, side)
    source = "a lake at evening, drawn by this program" if drawn else "yours"
    console.print(
        f"\n[bold]1. A picture through {name}[/], on {describe_environment(device)['device']}\n\n"
        f"Picture   {source}: {picture.width} x {picture.height}, "
        f"cropped to {side}²\n"
        f"Backbone  {count_parameters(network) / 1e6:.1f} M parameters, "
        f"{macs / 1e9:.1f} billion multiply-adds; untrained\n"
        f"Time      [bold]{1e3 * timing.fastest:.0f} ms[/] per image, the fastest of {timing.repeats}\n"
        f"Result    {len(maps)} feature maps, as detectors and segmenters take them:"
    )
    table = make_table(["stage", "channels", "map", "tokens", "one token covers"])
    for stage, (feature, reduction) in enumerate(zip(maps, reductions, strict=True), 1):
        channels, rows, columns = feature.shape[1:]
        table.add_row(
            str(stage),
            str(channels),
            f"{rows} x {columns}",
            f"{rows * columns:,}",
            f"{reduction} x {reduction} pixels",
        )
    console.print(table)


def race(console: Console, device: torch.device, sides: Sequence[int]) -> None:
    """Measure time and memory of softmax-free and of softmax attention on growing images."""
    if not sides:
        raise ValueError(f"--max-tokens must be at least {SIDES[0] ** 2}")
    rows: list[tuple[int, Measured, Measured]] = []
    with progress() as report, torch.inference_mode():
        for side in sides:
            tokens = side * side
            report(f"{tokens:,} tokens: softmax-free attention")
            shape = Shape(HEADS, tokens, HEAD_DIM, LANDMARKS)
            inputs = Inputs.draw(shape, torch.float32, device)
            soft = run(partial(attend, "softpp", "auto", inputs), device)
            before = (rows[-1][2].seconds or 0.0) / rows[-1][0] ** 2 if rows else 0.0
            expected = before * tokens**2
            softmax = Measured(expected)
            if expected <= SLOWEST:
                report(f"{tokens:,} tokens: softmax attention (about {expected:.0f} s)")
                call = partial(attend, "softmax", "auto", inputs)
                softmax = run(call, device, once=expected > LONG)
            rows.append((tokens, soft, softmax))
    print_race(console, device, rows)


def run(call: Callable[[], object], device: torch.device, *, once: bool = False) -> Measured:
    """Time and peak extra memory of a call; a long one is made only once."""
    found = measure(partial(Work, call), device, seconds=0.5, once=once)
    if found.note:
        raise ValueError(f"{found.note}; use a smaller --max-tokens")
    return found


def print_race(
    console: Console, device: torch.device, rows: Sequence[tuple[int, Measured, Measured]]
) -> None:
    """Print the table of the race, and how to read it. Rows without a figure for memory were not run."""
    console.print(
        f"\n[bold]2. Attention without and with softmax[/], on {describe_environment(device)['device']}\n\n"
        f"{HEADS} heads of {HEAD_DIM} channels, {LANDMARKS} landmarks, float32.\n"
        "Without: softfree.soft_attention. With: torch's scaled_dot_product_attention."
    )
    titles = ("image", "tokens", "ms\nwithout", "ms\nwith", "times\nfaster",
              "MiB\nwithout", "MiB\nwith")  # fmt: skip
    table = make_table(titles)
    # Softmax-free and softmax, in seconds.
    times = [(soft.seconds or 0.0, softmax.seconds or 0.0) for _, soft, softmax in rows]
    for (tokens, soft, softmax), (ours, theirs) in zip(rows, times, strict=True):
        side = 4 * math.isqrt(tokens)
        about = "~" if softmax.extra_bytes is None else ""
        table.add_row(
            f"{side} x {side}",
            f"{tokens:,}",
            digits(ours, 1e3),
            about + digits(theirs, 1e3),
            about + digits(theirs / ours),
            digits(soft.extra_bytes, 2**-20),
            digits(softmax.extra_bytes, 2**-20),
        )
    console.print(table)
    longest = rows[-1][0]
    if len(rows) > 1:
        ours, theirs = (last / first for first, last in zip(times[0], times[-1], strict=True))
        console.print(
            f"{longest // rows[0][0]} times the tokens took {ours:.0f} times "
            f"the time without softmax,\n{theirs:,.0f} times with it."
        )
    if rows[-1][2].extra_bytes is None:
        console.print(
            f"~ estimated, since it would take over {SLOWEST:.0f} s: the row above, times the square\n"
            "of the growth."
        )
    console.print(
        "MiB: peak memory of a call beyond its inputs, including its result. Both grow\n"
        "linearly, as torch's kernel never stores the n x n matrix of softmax attention.\n"
        f"Stored, it would take {digits(longest**2 * HEADS * 4, 2**-20)} MiB in the last row.",
        style="dim",
    )
