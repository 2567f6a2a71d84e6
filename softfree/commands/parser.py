"""Parsing of arguments with tyro; help is laid out here, for terminals of 80 columns.

:func:`parse` prints the help of a command. Help without further arguments is stored in ``texts/`` next to
this file, so that `softfree COMMAND --help` does not import torch; ``make texts`` writes it.
"""

import ast
import dataclasses
import inspect
import itertools
import re
import shlex
import shutil
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

Result = TypeVar("Result")
Option = tuple[str, str]  # how it is typed, and what it does
HELP = {"-h", "--help"}
# Flags of a group of arguments have no prefix.
FLAT = (tyro.conf.OmitArgPrefixes,)
COLUMN = 22  # where the explanations start
MOST_COLUMNS = 80
SHOW_HELP: Option = ("-h, --help", "this text")
# Defaults that differ from machine to machine.
BY_MACHINE = {"--workers": "the recipe's, or one for each core, at most 4"}
# Values that are not shown as defaults; "" is an empty tuple.
NO_DEFAULT = {"", "None", "''", "False"}

REGISTRY = ConstructorRegistry()


@REGISTRY.primitive_rule
def _optional(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """``int | None`` is an optional INT."""
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
    """Call ``what(...)`` with the arguments in ``argv``; with --help, print its help and exit.

    Args:
        description: the start of the help text; otherwise the documentation of ``what`` without its
            arguments.
        default: an instance of the dataclass ``what`` with the defaults to use.
        options: further options to list, which the caller has already parsed.
    """
    known: dict[str, Any] = {} if default is None else {"default": default}
    if wants_help(argv):
        print_help(what, prog, description or _summary(what), options, default)
        raise SystemExit(0)
    return tyro.cli(what, args=argv, prog=prog, config=FLAT, registry=REGISTRY, **known)


def print_help(
    what: Callable[..., Any],
    prog: str,
    description: str,
    options: Iterable[Option],
    default: Any = None,
) -> None:
    arguments: list[Option] = []
    plain: list[Option] = []
    groups: list[tuple[str, str, list[Option]]] = []
    for name, annotation, value, text in _parameters(what, default):
        if dataclasses.is_dataclass(annotation):
            described = [_describe(*parameter) for parameter in _parameters(annotation, value)]
            about = " ".join((text or annotation.__doc__ or "").split())
            groups.append((f"{name} options", about, list(filter(None, described))))
        elif row := _describe(name, annotation, value, text):
            (plain if row[0].startswith("-") else arguments).append(row)
    groups.insert(0, ("options", "", [SHOW_HELP, *options, *plain]))
    names = [name for name, _ in arguments]
    print(layout(" ".join([prog, "[options]", *names]), description, arguments, groups))


def print_subcommands(prog: str, subcommands: Mapping[str, Any], description: str) -> None:
    """Print the help of a command with subcommands, each given as a function, a class or its summary."""
    summaries = [what if isinstance(what, str) else _summary(what) for what in subcommands.values()]
    rows = [
        (name, " ".join(summary.partition("\n\n")[0].split()))
        for name, summary in zip(subcommands, summaries, strict=True)
    ]
    usage = f"{prog} COMMAND [options]"
    ending = f"`{prog} COMMAND --help` lists the options of a command."
    print(layout(usage, description, [], [("commands", "", rows)]), "\n" + fill(ending), sep="\n")


def layout(
    usage: str,
    description: str,
    arguments: Sequence[Option],
    groups: Iterable[tuple[str, str, Sequence[Option]]],
) -> str:
    """A help text whose lines are no longer than the terminal or 80 columns."""
    parts = [fill(f"usage: {usage}", "       "), paragraphs(description)]
    for title, about, rows in [("arguments", "", arguments), *groups]:
        if rows:
            heading = f"{title}: {about}" if about else f"{title}:"
            parts.append("\n".join([fill(heading), *(_row(*row) for row in rows)]))
    return "\n\n".join(parts)


def columns() -> int:
    return min(MOST_COLUMNS, shutil.get_terminal_size((MOST_COLUMNS, 24)).columns)


def fill(text: str, indent: str = "", first: str = "") -> str:
    """Wrap ``text`` into lines between words."""
    return textwrap.fill(
        text,
        columns(),
        initial_indent=first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def paragraphs(text: str) -> str:
    """Wrap the paragraphs of ``text`` again; in a list of commands each is its own paragraph."""
    found = [re.split(r"\n(?=`)", paragraph) for paragraph in text.strip().split("\n\n")]
    return "\n\n".join("\n".join(fill(" ".join(p.split())) for p in parts) for parts in found)


def _row(name: str, text: str) -> str:
    indent = " " * COLUMN
    if len(name) <= COLUMN - 4:
        return fill(text, indent, f"  {name}".ljust(COLUMN))
    # The spellings of a flag are separated by commas only.
    return f"{fill(name, '    ', '  ')}\n{fill(text, indent, indent)}"


def _parameters(what: Any, default: Any) -> Iterator[tuple[str, Any, Any, str]]:
    """Name, annotation, default and explanation of each parameter of a function, or field of a dataclass.

    Parameters are explained in the docstring under Args, and each field by the string that follows it.
    ``default`` is an instance of the dataclass.
    """
    hints = get_type_hints(what, include_extras=True)
    texts = _explained(what)
    for name, parameter in inspect.signature(what).parameters.items():
        value = parameter.default if default is None else getattr(default, name)
        yield name, hints[name], value, texts.get(name, "")


def _explained(what: Any) -> dict[str, str]:
    if not isinstance(what, type):
        _, _, below = inspect.cleandoc(what.__doc__ or "").partition("\nArgs:\n")
        return dict(re.findall(r"^ {4}(\w+): (.*?)(?=^ {4}\w|^\S|\Z)", below, re.M | re.S))
    found: dict[str, str] = {}
    for base in reversed(inspect.getmro(what)):
        if not dataclasses.is_dataclass(base):
            continue
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(body, ast.ClassDef)
        for field, text in itertools.pairwise(body.body):
            match field, text:
                case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(str(explanation))):
                    found[name] = explanation
    return found


def _describe(name: str, annotation: Any, value: Any, text: str) -> Option | None:
    """How an argument is typed, and what it does, with its default.

    Returns None if it is not a command-line argument.
    """
    marks = getattr(annotation, "__metadata__", ())
    kind = annotation.__origin__ if marks else annotation
    if tyro.conf.Suppress in marks:
        return None
    given: Any = next((mark for mark in marks if hasattr(mark, "metavar")), None)
    flag = "--" + (getattr(given, "name", None) or name).replace("_", "-")
    repeated = tyro.conf.UseAppendAction in marks
    if kind is bool:
        typed = flag if tyro.conf.FlagCreatePairsOff in marks else f"{flag}, --no-{flag[2:]}"
    else:
        typed = getattr(given, "metavar", None) or _metavar(kind, repeated)
        if tyro.conf.Positional not in marks:
            typed = f"{flag} {typed}"
    text = " ".join(text.split()).removesuffix(".")
    if repeated:
        return typed, text if "repeated" in text else f"{text} (may be repeated)"
    values = value if isinstance(value, tuple) else (value,)
    shown = BY_MACHINE.get(flag, shlex.join(map(str, values)))
    if value is inspect.Parameter.empty or shown in NO_DEFAULT:
        return typed, text
    shown = re.sub(r"\d+\.\d{6,}", lambda digits: f"{float(digits[0]):.4g}", shown)
    return typed, f"{text} (default: {shown})".lstrip()


def _metavar(kind: Any, repeated: bool = False) -> str:
    """The placeholder for values of a type: INT, {one,other}, [PATH [PATH ...]]."""
    if isinstance(kind, type):
        return kind.__name__.upper()
    origin, given = get_origin(kind), get_args(kind)
    if origin is Literal:
        return f"{{{','.join(given)}}}"
    if origin is not tuple:  # or None
        return _metavar(given[0])
    if given[-1] is not ...:
        return " ".join(map(_metavar, given))
    one = _metavar(given[0])
    return one if repeated else f"[{one} [{one} ...]]"


def _summary(what: Callable[..., Any]) -> str:
    """The documentation without its list of arguments."""
    return re.split(r"\n\s*Args:\n", textwrap.dedent(what.__doc__ or ""))[0].strip()
