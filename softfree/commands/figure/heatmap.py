"""`softfree figure heatmap`: where a patch of a photo attends to, per head (Fig. 4 and 7 of the papers)."""

from pathlib import Path
from typing import Annotated

import torch
import tyro

from softfree.analysis.capture import capture_attention
from softfree.analysis.heatmap import Group, draw_heat_maps, heat_panels, layer_title
from softfree.analysis.pictures import load_photo
from softfree.analysis.plots import save_figure
from softfree.analysis.subject import load_subjects
from softfree.commands.common import Photo, Repeated, check_figure, check_img_size, check_positive
from softfree.training.devices import choose_device

SMALL = 512  # pixels of an image's side


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
    output: Path = Path("heatmap.png"),
    device: str = "auto",
) -> int:
    """Draw where a patch of a photo attends to (Fig. 4 and 7).

    One model: a row of pictures for each stage (its last block). Several models, or --stage: a column for
    each, at one stage. Each map is a row of the attention matrix, scaled to 0-1, as in the papers; its
    total is what the sizes of its weights add up to (softmax: 1, less what a class token has).

    Args:
        photo: a photo of yours; otherwise one is drawn.
        checkpoint: folder that `softfree train` wrote, such as OUT/best; may be repeated to compare.
        model: name of a fresh model with random weights, see `softfree models`; may be repeated.
        attention: attention of a fresh model, such as softpp or softmax; may be repeated to compare.
        query: the patch, as a point in pixels of the photo; its centre if not given.
        stage: only this stage, from 1; side by side 1 if not given.
        heads: how many heads to draw.
        img_size: side of the square the model sees; otherwise that of its training.
        output: the file to write: .png, .svg or .pdf.
        device: 'cuda', 'cpu', or 'auto' for the GPU if there is one.
    """
    check_figure("--output", output)
    check_img_size(img_size)
    check_positive("--heads", heads)
    where = choose_device(device)
    if img_size is None or img_size <= SMALL:
        # Threads gain little here, and on cores that are busy otherwise they wait seconds for each other.
        torch.set_num_threads(1)
    point = None if query is None else parse_query(query)
    picture = load_photo(photo)
    point = point or (picture.width / 2, picture.height / 2)
    subjects = load_subjects(checkpoint, model, attention, where)
    compare = len(subjects) > 1 or stage is not None
    groups: list[Group] = []
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
            groups.append(Group(layer_title(layer, title), panels, square, place))
    heading = "Where the marked patch attends to" + ("" if compare else f": {subjects[0].title}")
    save_figure(draw_heat_maps(groups, heading, across=compare), output)
    return 0


def parse_query(text: str) -> tuple[float, float]:
    """``"120,80"`` as (120, 80)."""
    try:
        x, y = (float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--query must be X,Y in pixels of the photo, got {text!r}") from None
    return x, y
