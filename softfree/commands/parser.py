"""From arguments to a call: tyro parses, and help is laid out here, for terminals of 80 columns.

:func:`parse` prints the help of what is called. What it prints where nothing else is given is kept in
``texts/`` beside this file, so that `softfree COMMAND --help` need not import torch; ``make texts`` writes it.
"""

import argparse
import re
import shutil
import textwrap
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

Result = TypeVar("Result")
Option = tuple[str, str]  # as it is typed, and what it does
HELP = {"-h", "--help"}
# Flags of a group of arguments have no prefix.
FLAT = (tyro.conf.OmitArgPrefixes,)
COLUMN = 22  # where the explanations begin
MOST_COLUMNS = 80
SHOW_HELP: Option = ("-h, --help", "this text")
# Defaults that differ from machine to machine.
BY_MACHINE = {"--workers": "the recipe's, or one for each core, at most 4"}
# "" for what need not be given and has no value then.
NO_DEFAULT = {"", "None", "''", "False"}

REGISTRY = ConstructorRegistry()


@REGISTRY.primitive_rule
def _optional(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """``int | None`` is typed as an INT, which need not be given."""
    given: Any = info.type
    kind: Any = next((kind for kind in (str, int, float, Path) if given == kind | None), None)
    if kind is None:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=kind.__name__.upper(),
        instance_from_str=lambda given: None if given[0] == "None" else kind(given[0]),
        is_instance=lambda value: value is None or isinstance(value, kind),
        str_from_instance=lambda value: [str(value)],
    )


def wants_help(argv: Iterable[str]) -> bool:
    return not HELP.isdisjoint(argv)


def parse(
    what: Callable[..., Result],
    argv: Sequence[str],
    *,
    prog: str,
    description: str | None = None,
    default: Any = None,
    options: Iterable[Option] = (),
) -> Result:
    """``what(...)`` with the arguments in ``argv``; or print its help and leave, if they ask for it.

    Args:
        description: heads the help; otherwise the documentation of ``what`` without its arguments.
        default: an instance of the dataclass ``what``, from which its defaults are.
        options: more to be listed, which the caller has parsed.
    """
    known: dict[str, Any] = {} if default is None else {"default": default}
    if wants_help(argv):
        print_help(what, prog, description or _summary(what), options, known)
        raise SystemExit(0)
    return tyro.cli(what, args=argv, prog=prog, config=FLAT, registry=REGISTRY, **known)


def print_help(
    what: Callable[..., Any],
    prog: str,
    description: str,
    options: Iterable[Option],
    known: Mapping[str, Any],
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that tyro.cli should be called
        parser = tyro.extras.get_parser(what, config=FLAT, registry=REGISTRY, **known)
    arguments: list[Option] = []
    groups: list[tuple[str, str, list[Option]]] = []
    for group in parser._action_groups:
        described = [_describe(action) for action in group._group_actions]
        if group.title == "positional arguments":
            arguments = described
        elif group.title == "options":
            groups.insert(0, ("options", "", [SHOW_HELP, *options, *described[1:]]))
        elif described:
            groups.append((f"{group.title}", group.description or "", described))
    names = [name for name, _ in arguments]
    print(layout(" ".join([prog, "[options]", *names]), description, arguments, groups))


def print_subcommands(prog: str, subcommands: Mapping[str, Any], description: str) -> None:
    """The help of a command that has others below it, each a function, a class or its summary."""
    summaries = [what if isinstance(what, str) else _summary(what) for what in subcommands.values()]
    rows = [
        (name, " ".join(summary.partition("\n\n")[0].split()))
        for name, summary in zip(subcommands, summaries, strict=True)
    ]
    usage = f"{prog} COMMAND [options]"
    ending = f"`{prog} COMMAND --help` lists the options of one."
    print(layout(usage, description, [], [("commands", "", rows)]), "\n" + fill(ending), sep="\n")


def layout(
    usage: str,
    description: str,
    arguments: Sequence[Option],
    groups: Iterable[tuple[str, str, Sequence[Option]]],
) -> str:
    """A help text, no line of which is longer than the terminal, nor than 80 columns."""
    parts = [fill(f"usage: {usage}", "       "), paragraphs(description)]
    for title, about, rows in [("arguments", "", arguments), *groups]:
        if rows:
            heading = f"{title}: {about}" if about else f"{title}:"
            parts.append("\n".join([fill(heading), *(_row(*row) for row in rows)]))
    return "\n\n".join(parts)


def columns() -> int:
    return min(MOST_COLUMNS, shutil.get_terminal_size((MOST_COLUMNS, 24)).columns)


def fill(text: str, indent: str = "", first: str = "") -> str:
    """``text`` in lines that break between words."""
    return textwrap.fill(
        text,
        columns(),
        initial_indent=first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def paragraphs(text: str) -> str:
    """``text`` with its paragraphs filled anew; in a list of commands each has its own."""
    found = [re.split(r"\n(?=`)", paragraph) for paragraph in text.strip().split("\n\n")]
    return "\n\n".join("\n".join(fill(" ".join(p.split())) for p in parts) for parts in found)


def _row(name: str, text: str) -> str:
    indent = " " * COLUMN
    if len(name) <= COLUMN - 4:
        return fill(text, indent, f"  {name}".ljust(COLUMN))
    # Commas alone separate the spellings of a flag.
    return f"{fill(name, '    ', '  ')}\n{fill(text, indent, indent)}"


def _describe(action: argparse.Action) -> Option:
    """How an argument is typed, and what it does, with its default."""
    name = ", ".join(action.option_strings)
    metavar = action.metavar
    if isinstance(metavar, str):
        name = f"{name} {metavar}".lstrip()
    text = " ".join(str(action.help or "").split())
    match = re.fullmatch(r"(.*?)\.? ?\((default: (.*)|repeatable|required)\)", text)
    if match is None:
        return name, text
    text, hint, value = match.groups()
    flag = action.option_strings[0] if action.option_strings else ""
    value = BY_MACHINE.get(flag, value)
    if hint == "repeatable":
        return name, f"{text} (may be repeated)" if "repeated" not in text else text
    if hint == "required" or value in NO_DEFAULT:
        return name, text
    value = re.sub(r"\d+\.\d{6,}", lambda digits: f"{float(digits[0]):.4g}", value)
    return name, f"{text} (default: {value})".lstrip()


def _summary(what: Callable[..., Any]) -> str:
    """The documentation without its list of arguments."""
    return re.split(r"\n\s*Args:\n", textwrap.dedent(what.__doc__ or ""))[0].strip()
