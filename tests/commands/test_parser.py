"""The help that is laid out here has the flags that the parser takes, with their explanations and defaults."""

import dataclasses
import re
from pathlib import Path
from typing import Annotated, Literal

import pytest
import tyro

from softfree.commands import parser, texts

# Those with subcommands list these alone.
COMMANDS = [
    (command, *rest)
    for command, *rest in texts.kept()
    if rest[-1:] == ["--help"] and (rest[1:] or not hasattr(texts.load(command), "SUBCOMMANDS"))
]


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_the_flags_shown_are_those_that_are_parsed(arguments, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(parser, "print_help", lambda what, *_: asked.append((what, *_)))
    texts.printed(*arguments)
    ((what, *_, options, default),) = asked
    monkeypatch.undo()
    parser.print_help(what, "prog", "", options, default)
    shown = flags(r"^  (--\S.*)", capsys.readouterr().out)
    known = {} if default is None else {"default": default}
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        tyro.cli(what, args=["--help"], config=parser.FLAT, registry=parser.REGISTRY, **known)
    parsed = flags(r"^\W? ?(?:-h, )?(--[a-z].*)", capsys.readouterr().out)
    own = {name.split()[0] for name, _ in options}
    assert shown - own == parsed - {"--help"}


def flags(line: str, text: str) -> set[str]:
    """Those with which lines begin, as a pair or alone."""
    return {
        flag
        for spelled in re.findall(line, text, re.M)
        for flag in re.match(r"--\S+?(?:, --\S+)?(?= |$)", spelled)[0].split(", ")
    }


@dataclasses.dataclass(frozen=True)
class Base:
    """Of others, too."""

    images: int = 3
    """how many."""


@dataclasses.dataclass(frozen=True)
class Settings(Base):
    """What it reads."""

    kind: Literal["a", "b"] = "a"
    """one of
    two"""
    hidden: Annotated[str, tyro.conf.Suppress] = ""


def draw(
    photo: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="[PHOTO]")] = None,
    sizes: tuple[int, ...] = (32, 64),
    corner: tuple[float, float] = (0.5, 1 / 3),
    fast: bool = False,
    data: Settings = Settings(images=5),  # noqa: B008
) -> None:
    """Draw.

    Args:
        photo: yours
        sizes: of the picture,
            in pixels.
        fast: sooner
    """


def test_functions_and_dataclasses_explain_themselves(capsys):
    parser.print_help(draw, "prog", "Draw.", [], None)
    assert (
        capsys.readouterr().out
        == """\
usage: prog [options] [PHOTO]

Draw.

arguments:
  [PHOTO]             yours

options:
  -h, --help          this text
  --sizes [INT [INT ...]]
                      of the picture, in pixels (default: 32 64)
  --corner FLOAT FLOAT
                      (default: 0.5 0.3333)
  --fast, --no-fast   sooner

data options: What it reads.
  --images INT        how many (default: 5)
  --kind {a,b}        one of two (default: a)
"""
    )
