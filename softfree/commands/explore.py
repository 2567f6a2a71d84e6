"""Serve a page that shows where each patch of a photo attends to."""

import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import torch
import tyro
from PIL import Image
from rich.markup import escape

from softfree.analysis.pictures import landscape, load_photo
from softfree.analysis.subject import Subject, load_subjects
from softfree.commands.common import Repeated, command, message_console, newest_run
from softfree.data.shapes import draw_shapes
from softfree.training.devices import choose_device

LOOPBACK = "127.0.0.1"
DIGITS = 4
SHAPES = (1, 4)


def explore(
    photos: Annotated[
        tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="[PHOTO ...]")
    ] = (),
    /,
    checkpoint: Annotated[tuple[Path, ...], Repeated] = (),
    model: Annotated[tuple[str, ...], Repeated] = (),
    host: str = LOOPBACK,
    port: int = 8642,
    device: str = "auto",
) -> int:
    """Serve the page until Ctrl-C. Photos stay in memory; nothing is written or sent elsewhere.

    Args:
        photos: your photos to start with, in addition to the drawn ones.
        checkpoint: folder that `softfree train` wrote, such as OUT/best; may be repeated. If neither it nor
            --model is given, the newest run under output/.
        model: name of a fresh model with random weights, see `softfree models`; may be repeated.
        host: address to listen on. Any other than 127.0.0.1 lets other machines in, without a password.
        port: port to listen on; 0 for any free one.
        device: 'cuda', 'cpu', or 'auto' for the GPU if there is one.
    """
    try:
        import uvicorn

        from softfree.explorer.server import create_app
    except ImportError as error:
        raise ValueError(
            f"the explorer needs {error.name}: pip install 'softfree[explorer]'"
        ) from error
    where = choose_device(device)
    own = {path.name: load_photo(path) for path in photos}
    if not checkpoint and not model and (newest := newest_run()):
        checkpoint = (newest,)
    listening = listen(host, port)
    # Moving the query costs a few small products, which threads make slower, especially on busy cores.
    torch.set_num_threads(1)
    subjects = load_subjects(checkpoint, model, device=where)
    for subject in subjects:
        subject.check_photos()
    server = uvicorn.Server(
        uvicorn.Config(create_app(subjects, own | samples(subjects), host), log_level="warning")
    )
    console = message_console()
    address = f"[{host}]" if ":" in host else host
    console.print(
        f"Attention of {escape(', '.join(subject.title for subject in subjects))}\n"
        f"[bold]http://{escape(address)}:{listening.getsockname()[1]}/[/]   Ctrl-C stops it"
    )
    if host not in (LOOPBACK, "::1", "localhost"):
        console.print("[yellow]Anyone who reaches this address can use it.[/]")
    with suppress(KeyboardInterrupt):  # the usual way to stop it
        server.run(sockets=[listening])
    return 0


main = command(explore, __doc__)


def listen(host: str, port: int) -> socket.socket:
    """Open a socket at this address before models are loaded, or raise an error that says what would work."""
    if not 0 <= port <= 65535:
        raise ValueError(f"--port must be at most 65535 (0 for any free one), got {port}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns off Nagle's algorithm, which delays answers by 40 ms, only for sockets that specify TCP.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        # From here on a browser waits for the models instead of being refused.
        listening.listen()
    except OSError as error:
        listening.close()
        raise ValueError(
            f"--host {host} --port {port}: can't listen there ({error.strerror}); "
            "try another --port, or --port 0 for any free one"
        ) from error
    return listening


def samples(subjects: Sequence[Subject]) -> dict[str, Image.Image]:
    """Photos to begin with: drawn ones, after handwritten digits for models that know these."""
    shapes = {f"shapes {n}": draw_shapes(n, side=256).image for n in SHAPES}
    drawn = {"lake": landscape()} | {name: Image.fromarray(p) for name, p in shapes.items()}
    known = [list(subject.metadata.get("class_names", ())) for subject in subjects]
    if list("0123456789") not in known:
        return drawn
    # Imported late, because scikit-learn takes a second to import.
    from softfree.data.digits import Digits

    digits = Digits("val")
    return {f"digit {n + 1}": digits.read(n)[0] for n in range(DIGITS)} | drawn
