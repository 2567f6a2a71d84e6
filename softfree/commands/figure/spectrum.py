"""`softfree figure spectrum`: eigenvalues of A, and the spectral norm against m (Fig. 6 of the papers)."""

from pathlib import Path

from rich.console import Console
from rich.progress import track

from softfree.analysis.capture import SoftLayer, capture_attention
from softfree.analysis.pictures import load_photo
from softfree.analysis.plots import save_figure
from softfree.analysis.spectrum import SpectralNorms, draw_spectrum, spectral_norms
from softfree.analysis.subject import load_subject
from softfree.commands.common import Photo, check_figure, check_img_size
from softfree.training.devices import choose_device

SIZES = (224, 320, 416, 512, 640)


def spectrum(
    photo: Photo = None,
    /,
    checkpoint: Path | None = None,
    model: str | None = None,
    img_size: tuple[int, ...] = (),
    output: Path = Path("spectrum.png"),
    device: str = "auto",
) -> int:
    """Draw the eigenvalues of A, and the spectral norm with and without normalisation against m (Fig. 6).

    Args:
        photo: a photo of yours; otherwise one is drawn.
        checkpoint: folder that `softfree train` wrote, such as OUT/best.
        model: name of a fresh model with random weights, see `softfree models`.
        img_size: two or more sides of the squares behind the spectral norms, for larger ones have more
            landmarks; the first is also behind the eigenvalues. Otherwise 224 320 416 512 640, and the
            training's for the eigenvalues.
        output: the file to write: .png, .svg or .pdf.
        device: 'cuda', 'cpu', or 'auto' for the GPU if there is one.
    """
    check_figure("--output", output)
    check_img_size(*img_size)
    if len(img_size) == 1:
        raise ValueError(f"--img-size must be two or more, got {img_size[0]}")
    where = choose_device(device)
    picture = load_photo(photo)
    subject = load_subject(checkpoint, model, where)
    first = img_size[0] if img_size else None
    captured = capture_attention(subject.model, subject.look(picture, first).pixels)
    if not captured.soft_layers:
        raise ValueError(f"{subject.title} has no softmax-free layer, and so no matrix A")
    norms: dict[int, list[SpectralNorms]] = {}
    progress = track(
        sorted(set(img_size or SIZES)), "sizes", console=Console(stderr=True), transient=True
    )
    for side in progress:
        found = capture_attention(subject.model, subject.look(picture, side).pixels)
        last_blocks = [found.layer(stage) for stage in found.stages]
        layers = [layer for layer in last_blocks if isinstance(layer, SoftLayer)]
        # Where a class token is one landmark more, the layer still belongs to the same size.
        norms.setdefault(layers[0].m, []).extend(
            spectral_norms(layer.landmarks, layer.scale) for layer in layers
        )
    save_figure(draw_spectrum(captured.soft_layers, norms, subject.title), output)
    return 0
