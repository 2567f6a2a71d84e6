"""Draw the papers' figures for a model and one of your photos.

`softfree figure heatmap` shows where a patch attends to, `convergence` how fast the Newton iteration
converges or what a solve inverts, `spectrum` the eigenvalues behind it and the effect of the
normalisation, and `resolution` the accuracy against the size of the images.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro
from PIL import Image
from rich.console import Console
from rich.markup import escape
from rich.progress import track

from softfree.analysis.capture import SoftLayer, capture_attention
from softfree.analysis.convergence import (
    draw_convergence,
    draw_shares,
    residual_curves,
    share_curves,
)
from softfree.analysis.heatmap import Group, draw_heat_maps, heat_panels, layer_title
from softfree.analysis.judgement import judge_layer
from softfree.analysis.pictures import landscape, load_photo
from softfree.analysis.plots import colour_of, draw_resolution, save_figure
from softfree.analysis.spectrum import SpectralNorms, draw_spectrum, spectral_norms
from softfree.analysis.subject import checkpoint_title, load_subjects
from softfree.commands.common import (
    SUBJECT,
    OneSubject,
    Photo,
    Repeated,
    check_figure,
    check_img_size,
    check_positive,
    make_table,
    message_console,
    newest_run,
    run_subcommand,
)
from softfree.layers import SoftAttention
from softfree.layers.factory import attention_name
from softfree.models.checks import check_at_least
from softfree.training.devices import choose_device
from softfree.training.settings import WORKERS

SMALL = 512  # pixels of an image's side
DRAWN = 8
SIZES = (224, 320, 416, 512, 640)
AROUND = (0.75, 1.25, 1.5, 2.0)  # factors of the training size, for `resolution`


def main(argv: Sequence[str]) -> int:
    """Run ``softfree figure`` with these arguments; return the exit code."""
    return run_subcommand(
        "figure", SUBCOMMANDS, argv, question="which figure?", description=__doc__
    )


def heatmap(
    photo: Photo = None,
    /,
    checkpoint: Annotated[tuple[Path, ...], Repeated] = (),
    model: Annotated[tuple[str, ...], Repeated] = (),
    attention: Annotated[tuple[str, ...], Repeated] = (),
    query: Annotated[str | None, tyro.conf.arg(metavar="X,Y")] = None,
    stage: int | None = None,
    heads: int = 4,
    img_size: int | None = None,
    draw: Path = Path("heatmap.png"),
    device: str = "auto",
) -> int:
    """Draw where a patch of a photo attends to (Fig. 4 and 7).

    One model: a row of pictures for each stage (its last block). Several models, or --stage: a column for
    each model, at one stage. Each map is a row of the attention matrix, coloured from the weight 0 (or its
    smallest weight, if that is negative) to its largest. Its range is written on it, and its total, the sum of
    the absolute weights (softmax: 1, minus the part of a class token). If its weights are all nearly zero or
    nearly equal, it says so instead of the total.

    Args:
        photo: one of your photos; otherwise one is drawn.
        checkpoint: folder that `softfree train` wrote, such as OUT/best; may be repeated to compare. If
            neither it nor --model nor --attention is given, the newest run under output/.
        model: name of a fresh model with random weights, see `softfree models`; may be repeated.
        attention: attention of a fresh model, such as softfree or softmax; may be repeated to compare.
        query: the patch, as a point in pixels of the photo; otherwise the centre.
        stage: draw only this stage, from 1; otherwise 1 when comparing models.
        heads: how many heads to draw.
        img_size: side of the square the model sees; otherwise the training size.
        draw: the file to write: .png, .svg or .pdf.
        device: 'cuda', 'cpu', or 'auto' for the GPU if there is one.
    """
    check_figure("--draw", draw)
    check_img_size(img_size)
    check_positive("--heads", heads)
    where = choose_device(device)
    if img_size is None or img_size <= SMALL:
        # Threads gain little here, and on busy cores they wait seconds for each other.
        torch.set_num_threads(1)
    point = None if query is None else parse_query(query)
    picture = load_photo(photo)
    point = point or (picture.width / 2, picture.height / 2)
    if not checkpoint and not model and not attention and (newest := newest_run()):
        checkpoint = (newest,)
    subjects = load_subjects(checkpoint, model, attention, where)
    compare = len(subjects) > 1 or stage is not None
    groups: list[Group] = []
    warned: list[str] = []
    for subject in subjects:
        seen = subject.look(picture, img_size)
        try:
            place = seen.locate(*point)
        except ValueError as error:
            raise ValueError(f"--query {query}: {error}") from error
        found = capture_attention(subject.model, seen.pixels)
        square = picture.crop(seen.box)
        title = subject.title if compare else ""
        for number in (stage or 1,) if compare else found.stages:
            layer = found.layer(number)
            panels = heat_panels(layer, place, heads)
            if text := judge_layer(layer).text:
                warned.append(f"{subject.title}: {layer.name} {text}")
            groups.append(Group(layer_title(layer, title), panels, square, place))
    heading = "Where the marked patch attends to" + ("" if compare else f": {subjects[0].title}")
    save_figure(draw_heat_maps(groups, heading, across=compare), draw)
    for text in warned:
        message_console().print(f"[yellow]warning[/] {escape(text)}")
    return 0


def parse_query(text: str) -> tuple[float, float]:
    """Parse ``"120,80"`` to (120, 80)."""
    try:
        x, y = (float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--query must be X,Y in pixels of the photo, got {text!r}") from None
    return x, y


def convergence(
    data_dir: Path | None = None,
    images: int = 100,
    iterations: int = 35,
    img_size: int | None = None,
    draw: Path = Path("convergence.png"),
    target: OneSubject = SUBJECT,
) -> int:
    """Draw how fast the Newton iteration converges, per stage: the mean, and the range as a band (Fig. 5).

    If all layers solve, it draws how far they invert each eigenvalue instead.

    Args:
        data_dir: a folder of photos, including subfolders; otherwise parts of a drawn picture.
        images: maximum number of photos, chosen evenly from the folder.
        iterations: number of Newton steps to draw; nothing if the layers solve.
        img_size: side of the square the model sees; otherwise the training size.
        draw: the file to write: .png, .svg or .pdf.
    """
    check_figure("--draw", draw)
    check_img_size(img_size)
    for option, value in (("--images", images), ("--iterations", iterations)):
        check_positive(option, value)
    paths = None if data_dir is None else find_photos(data_dir, images)
    subject = target.load()
    count = min(DRAWN, images) if paths is None else len(paths)
    pictures = drawn_parts(count) if paths is None else map(load_photo, paths)
    views = (subject.look(picture, img_size).pixels for picture in pictures)
    progress = track(views, "images", count, console=Console(stderr=True), transient=True)
    layers = [m for m in subject.model.modules() if isinstance(m, SoftAttention)]
    taken = {layer.iterations for layer in layers if layer.inverse == "newton"}
    what = f"{count} {'parts of a drawn picture' if paths is None else 'photos'}"
    title, colour = f"{subject.title}, {what}", colour_of(attention_name(subject.model))
    if layers and not taken:
        figure = draw_shares(share_curves(subject.model, progress), title, colour)
    else:
        curves = residual_curves(subject.model, progress, iterations)
        figure = draw_convergence(curves, taken, title, colour)
    save_figure(figure, draw)
    return 0


def find_photos(folder: Path, count: int) -> list[Path]:
    """At most ``count`` photos of a folder and its subfolders, evenly chosen."""
    from softfree.data.images import EXTENSIONS, image_files

    if not folder.is_dir():
        raise FileNotFoundError(f"--data-dir {folder} is not a folder; use a folder with photos")
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
        left, top = (int(generator.integers(0, length - side)) for length in picture.size)
        yield picture.crop((left, top, left + side, top + side))


def spectrum(
    photo: Photo = None,
    /,
    img_size: tuple[int, ...] = (),
    draw: Path = Path("spectrum.png"),
    target: OneSubject = SUBJECT,
) -> int:
    """Draw the eigenvalues of A, and the spectral norm with and without normalisation against m (Fig. 6).

    Args:
        photo: one of your photos; otherwise one is drawn.
        img_size: two or more image sizes for the spectral norms, since larger images have more landmarks; the
            first is also used for the eigenvalues. Otherwise 224 320 416 512 640, and the training size for
            the eigenvalues.
        draw: the file to write: .png, .svg or .pdf.
    """
    check_figure("--draw", draw)
    check_img_size(*img_size)
    if len(img_size) == 1:
        raise ValueError(f"--img-size needs two or more sizes, got {img_size[0]}")
    picture = load_photo(photo)
    subject = target.load()
    first = img_size[0] if img_size else None
    captured = capture_attention(subject.model, subject.look(picture, first).pixels)
    if not captured.soft_layers:
        raise ValueError(f"{subject.title} has no softmax-free layer, so it has no matrix A")
    norms: dict[int, list[SpectralNorms]] = {}
    sides = sorted(set(img_size or SIZES))
    for side in track(sides, "sizes", console=Console(stderr=True), transient=True):
        found = capture_attention(subject.model, subject.look(picture, side).pixels)
        last_blocks = [found.layer(stage) for stage in found.stages]
        layers = [layer for layer in last_blocks if isinstance(layer, SoftLayer)]
        # A class token may add a landmark, but the layer still belongs to the same size.
        norms.setdefault(layers[0].m, []).extend(
            spectral_norms(layer.landmarks, layer.scale) for layer in layers
        )
    colour = colour_of(attention_name(subject.model))
    save_figure(draw_spectrum(captured.soft_layers, norms, subject.title, colour), draw)
    return 0


def resolution(
    checkpoint: Annotated[tuple[Path, ...], Repeated] = (),
    data_dir: str | None = None,
    dataset: str = "",
    img_size: tuple[int, ...] = (),
    batch_size: int = 64,
    workers: int = WORKERS,
    draw: Path = Path("resolution.png"),
    device: str = "auto",
) -> int:
    """Draw the accuracy of classifiers against the size of the images (Table 6).

    Args:
        checkpoint: folder that `softfree train` wrote, such as OUT/best; may be repeated to compare.
            Otherwise the newest run under output/.
        data_dir: folder with train/ and val/; otherwise the data that each checkpoint was trained on.
        dataset: name of a data set in timm's notation, stored in --data-dir.
        img_size: sizes of the images; otherwise from three quarters to twice the training size.
        batch_size: images at a time.
        workers: processes that load images.
        draw: the file to write: .png, .svg or .pdf.
        device: 'cuda', 'cpu', or 'auto' for the GPU if there is one.
    """
    from softfree.commands.validate.base import check_classes
    from softfree.training.classification import (
        Classification,
        load_validation_images,
        score_classifier,
    )
    from softfree.training.distributed import join_processes

    check_figure("--draw", draw)
    check_positive("--batch-size", batch_size)
    check_at_least(0, workers=workers)
    check_img_size(*img_size)
    if not checkpoint and (newest := newest_run((Classification.name,))):
        checkpoint = (newest,)
    if not checkpoint:
        raise ValueError("--checkpoint is needed: a folder that `softfree train` wrote")
    with join_processes(device) as processes:
        # All are loaded before the first is scored, which may take long.
        tested: list[tuple[str, Any, dict[str, Any], Any]] = []
        for path in checkpoint:
            network, metadata = Classification.load(path)
            data = load_validation_images(path, data_dir, dataset)
            check_classes(path, metadata["class_names"], data.class_names)
            title = checkpoint_title(path, metadata)
            # Runs with the same name in two places are told apart by their paths.
            title = str(path) if title in (name for name, *_ in tested) else title
            tested.append((title, network, metadata, data))
        trained = {title: metadata["img_size"] for title, _, metadata, _ in tested}
        sizes = sorted(set(img_size or sizes_around(trained.values())))
        curves: dict[str, list[tuple[int, float]]] = {title: [] for title in trained}
        work = [(size, *one) for one in tested for size in sizes]
        console = Console(stderr=True, quiet=not processes.main)
        for size, title, network, metadata, data in track(
            work, "sizes", console=console, transient=True
        ):
            scores, _ = score_classifier(
                network.to(processes.device),
                metadata,
                data.val,
                size,
                processes,
                batch_size=batch_size,
                workers=workers,
            )
            curves[title].append((size, scores["top1"]))
        if processes.main:
            table = make_table(["top-1 (%)", *(f"{size}²" for size in sizes)])
            for title, curve in curves.items():
                table.add_row(title, *(f"{accuracy:.1f}" for _, accuracy in curve))
            Console(highlight=False).print(table)
            colours = {title: colour_of(attention_name(model)) for title, model, *_ in tested}
            save_figure(draw_resolution(curves, trained, colours), draw)
    return 0


def sizes_around(trained: Iterable[int]) -> list[int]:
    """Sizes from three quarters to twice the training sizes, including these; the others are multiples of 32.

    Example:
        >>> sizes_around([224])
        [160, 224, 288, 320, 448]
    """
    sizes = set(trained)
    sizes |= {max(round(size * part / 32) * 32, 32) for size in sizes for part in AROUND}
    return sorted(sizes)


SUBCOMMANDS: dict[str, Callable[..., int]] = {
    figure.__name__: figure for figure in (heatmap, convergence, spectrum, resolution)
}
