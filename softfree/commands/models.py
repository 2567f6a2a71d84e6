"""List the backbones: parameters, multiply-adds, and the papers' figures for comparison."""

import fnmatch
import functools
import json
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import timm
import torch
import tyro
from rich.console import Console
from rich.progress import track

from softfree.analysis import count_macs, count_parameters
from softfree.commands.common import NOTHING, check_img_size, command, make_table
from softfree.models.registry import is_ours
from softfree_cli import TEXTS, text_name


class Published(NamedTuple):
    """Figures from the papers: millions of parameters, GFLOPs at 224² (multiply-adds), top-1 in percent."""

    params: float | None = None
    gflops: float | None = None
    top1: float | None = None


# Softmax-free Linear Transformers (IJCV 2024), Table 3; for the release, Table 10 (Tiny) and the
# parameter counts of the authors' code; for the isotropic model, Table 11a.
PUBLISHED = {
    "soft_tiny": Published(13, 1.9, 80.9),
    "soft_small": Published(27, 4.5, 82.5),
    "soft_medium": Published(48, 8.7, 83.2),
    "soft_large": Published(85, 15.4, 83.6),
    "softpp_tiny": Published(13, 1.9, 80.9),
    "softpp_small": Published(27, 4.5, 82.6),
    "softpp_medium": Published(48, 8.7, 83.7),
    "softpp_large": Published(85, 15.4, 84.1),
    "softpp_vit_small": Published(top1=80.1),
    **{
        f"{family}_{size}_release": Published(params, gflops, top1)
        for family in ("soft", "softpp")
        for size, params, gflops, top1 in (
            ("tiny", 13.07, 2.0, 80.9),
            ("small", 38.86, None, None),
            ("medium", 45.81, None, None),
            ("large", 64.70, None, None),
            ("huge", 87.11, None, None),
        )
    },
}
NOTES = """\
GMACs: billions of multiply-adds for one image, including the attention's matrix inverse; papers call them \
FLOPs, and theirs seem to leave the inverse out.
The papers' Tiny figures were measured on the released depths, soft_tiny_release here. Release rows: \
parameters of the authors' code.
Top-1: ImageNet-1k accuracy the papers report at 224². softfree ships no trained weights; it loads the \
authors' (softfree.load_release_checkpoint)."""
FAMILIES = ("softfree", "soft", "softpp")
SIZES = ("tiny", "small", "medium", "large", "huge")


def models(
    pattern: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="PATTERN")] = "*",
    /,
    img_size: int = 224,
    as_json: Annotated[bool, tyro.conf.arg(name="json"), tyro.conf.FlagCreatePairsOff] = False,
) -> int:
    """Print the list of models.

    Args:
        pattern: only names that match, e.g. 'softfree_*' or '*_release'.
        img_size: side of the square image the multiply-adds are counted for.
        as_json: print JSON, for programs.
    """
    names = matching_names(pattern)
    check_img_size(img_size)
    progress = track(names, "counting", console=Console(stderr=True), transient=True)
    rows = [describe(name, img_size) for name in progress]
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        print_table(rows, img_size)
    return 0


main = command(models, __doc__)


def matching_names(pattern: str) -> list[str]:
    """Names of our models that match a glob pattern, small before large, variants together."""
    ours = [name for name in timm.list_models() if is_ours(name)]
    names = [name for name in ours if fnmatch.fnmatchcase(name, pattern)]
    if not names:
        raise ValueError(
            f"no model matches {pattern!r}; `softfree models` lists all {len(ours)}, "
            "and patterns look like 'softfree_*'"
        )
    return sorted(names, key=_order)


def _order(name: str) -> tuple[bool, bool, int, int]:
    family, *rest = name.split("_")
    size = next((SIZES.index(part) for part in rest if part in SIZES), len(SIZES))
    return "release" in rest, "vit" in rest, FAMILIES.index(family), size


def describe(name: str, img_size: int) -> dict[str, object]:
    """One row: our counts and the published figures, None if there are none."""
    parameters, macs = counted().get((name, img_size)) or count(name, img_size)
    published = PUBLISHED.get(name, Published())
    return {
        "name": name,
        "img_size": img_size,
        "parameters": parameters,
        "macs": macs,
        "paper_params_millions": published.params,
        "paper_gflops_at_224": published.gflops,
        "paper_top1_at_224": published.top1,
    }


@functools.cache
def counted() -> dict[tuple[str, int], tuple[int, int]]:
    """Stored parameters and multiply-adds by name and image size, since counting takes seconds."""
    file = TEXTS / text_name(["models", "--json"])
    rows = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    return {(row["name"], row["img_size"]): (row["parameters"], row["macs"]) for row in rows}


def count(name: str, img_size: int) -> tuple[int, int]:
    """Parameters and multiply-adds of a model."""
    # SOFT and SOFT++ have the same parameters and the same products, so one count is enough.
    return _count(name.replace("softpp_", "soft_"), img_size)


@functools.cache
def _count(name: str, img_size: int) -> tuple[int, int]:
    with torch.device("meta"):
        model = timm.create_model(name)
    return count_parameters(model), count_macs(model, img_size)


def print_table(rows: Sequence[dict], img_size: int) -> None:
    """Print the rows as a table."""
    titles = ("params\n(M)", f"GMACs\nat {img_size}²", "paper\nparams (M)", "paper\nGFLOPs",
              "paper\ntop-1 (%)")  # fmt: skip
    table = make_table(["model", *titles])
    group = None
    for row in rows:
        release, isotropic, family, _ = _order(str(row["name"]))
        this_group = (release, isotropic, 0 if isotropic else family)
        if group not in (None, this_group):
            table.add_section()
        group = this_group
        table.add_row(
            row["name"],
            f"{row['parameters'] / 1e6:.2f}",
            f"{row['macs'] / 1e9:.2f}",
            _cell(row["paper_params_millions"], 2 if release else 0),
            _cell(row["paper_gflops_at_224"], 1),
            _cell(row["paper_top1_at_224"], 1),
        )
    console = Console()
    console.print(table)
    console.print(NOTES, style="dim", highlight=False)


def _cell(value: float | None, digits: int) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"
