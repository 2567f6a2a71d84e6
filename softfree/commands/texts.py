"""Texts that commands print without importing torch: ``python -m softfree.commands.texts`` writes ``texts/``.

They are the help of every command and subcommand, and the list of models.
"""

import contextlib
import importlib
import io
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

from softfree_cli import COLUMNS, COMMANDS, TEXTS, text_name


def kept() -> Iterator[tuple[str, ...]]:
    """The arguments whose output is stored."""
    yield from (("models",), ("models", "--json"))
    for command in COMMANDS:
        yield (command, "--help")
        subcommands = getattr(load(command), "SUBCOMMANDS", ())
        yield from ((command, name, "--help") for name in subcommands)


def load(command: str) -> Any:
    return importlib.import_module(f"softfree.commands.{command.replace('-', '_')}")


def printed(command: str, *rest: str) -> str:
    """What ``softfree COMMAND REST`` prints, obtained by running the command."""
    out = io.StringIO()
    with (
        mock.patch.dict(os.environ, COLUMNS=str(COLUMNS)),
        contextlib.redirect_stdout(out),
        contextlib.suppress(SystemExit),
    ):
        load(command).main(rest)
    return out.getvalue()


def write() -> None:
    """Write all texts, and remove files that are no longer needed."""
    from softfree.commands.models import counted

    TEXTS.mkdir(exist_ok=True)
    for file in TEXTS.iterdir():
        file.unlink()
    counted.cache_clear()
    for arguments in kept():
        (TEXTS / text_name(arguments)).write_text(printed(*arguments), encoding="utf-8")


if __name__ == "__main__":
    write()
