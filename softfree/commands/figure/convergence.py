"""`softfree figure convergence`: the Newton iteration's residual per step and stage (Fig. 5 of the papers)."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image
from rich.console import Console
from rich.progress import track
from torch import Tensor

from softfree.analysis.convergence import draw_convergence, residual_curves
from softfree.analysis.pictures import landscape, load_photo
from softfree.analysis.plots import save_figure
from softfree.analysis.subject import Subject, load_subject
from softfree.commands.common import check_figure, check_img_size, check_positive
from softfree.layers import SoftAttention
from softfree.training.devices import choose_device

DRAWN = 8


def convergence(
    checkpoint: Path | None = None,
    model: str | None = None,
    data_dir: Path | None = None,
    images: int = 100,
    iterations: int = 35,
    img_size: int | None = None,
    output: Path = Path("convergence.png"),
    device: str = "auto",
) -> int:
    """Draw how fast the Newton iteration converges, per stage: mean, and band from least to greatest (Fig. 5).

    Args:
        checkpoint: folder that `softfree train` wrote, such as OUT/best.
        model: name of a fresh model with random weights, see `softfree models`.
        data_dir: a folder of photos, with its subfolders; otherwise parts of a drawn picture.
        images: at most so many photos, taken evenly from the folder.
        iterations: Newton steps to follow.
        img_size: side of the square the model sees; otherwise that of its training.
        output: the file to write: .png, .svg or .pdf.
        device: 'cuda', 'cpu', or 'auto' for the GPU if there is one.
    """
    check_figure("--output", output)
    check_img_size(img_size)
    for option, value in (("--images", images), ("--iterations", iterations)):
        check_positive(option, value)
    where = choose_device(device)
    paths = None if data_dir is None else find_photos(data_dir, images)
    subject = load_subject(checkpoint, model, where)
    count = min(DRAWN, images) if paths is None else len(paths)
    pictures = drawn_parts(count) if paths is None else map(load_photo, paths)
    views = as_inputs(pictures, subject, img_size)
    progress = track(views, "images", count, console=Console(stderr=True), transient=True)
    curves = residual_curves(subject.model, progress, iterations)
    layers = [m for m in subject.model.modules() if isinstance(m, SoftAttention)]
    taken = {layer.iterations for layer in layers if layer.inverse == "newton"}
    what = f"{count} {'parts of a drawn picture' if paths is None else 'photos'}"
    save_figure(draw_convergence(curves, taken, f"{subject.title}, {what}"), output)
    return 0


def find_photos(folder: Path, count: int) -> list[Path]:
    """At most ``count`` photos of a folder and its subfolders, evenly chosen."""
    from softfree.data.images import EXTENSIONS, image_files

    if not folder.is_dir():
        raise FileNotFoundError(f"--data-dir {folder} is no folder; give one with photos")
    files = image_files(folder)
    if not files:
        raise FileNotFoundError(
            f"--data-dir {folder} has no photo; looked for {', '.join(EXTENSIONS)}"
        )
    chosen = np.linspace(0, len(files) - 1, min(count, len(files))).round().astype(int)
    return [Path(files[index]) for index in chosen]


def drawn_parts(count: int) -> Iterator[Image.Image]:
    """Different squares of a drawn picture."""
    picture = landscape(960, 720)
    generator = np.random.default_rng(0)
    for _ in range(count):
        side = int(generator.integers(240, 640))
        left = int(generator.integers(0, picture.width - side))
        top = int(generator.integers(0, picture.height - side))
        yield picture.crop((left, top, left + side, top + side))


def as_inputs(
    pictures: Iterator[Image.Image], subject: Subject, img_size: int | None
) -> Iterator[Tensor]:
    """Each picture as the model sees it."""
    for picture in pictures:
        yield subject.look(picture, img_size).pixels
