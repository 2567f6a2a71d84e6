"""Commands that are several: `softfree benchmark memory`, `softfree validate detection`."""

from collections.abc import Callable, Mapping, Sequence

import tyro


def run_subcommand(
    command: str,
    subcommands: Mapping[str, Callable[..., int]],
    argv: Sequence[str],
    *,
    question: str,
    description: str | None,
) -> int:
    """Run that of ``softfree COMMAND`` which ``argv`` begins with; return its exit code.

    ``question`` begins the error where it is none; ``description`` heads the help of all.
    """
    name = argv[0] if argv else ""
    prog = f"softfree {command}"
    if name in ("-h", "--help"):
        return tyro.extras.subcommand_cli_from_dict(
            dict(subcommands), args=argv, prog=prog, description=description
        )
    if name not in subcommands:
        given = f"got {name!r}" if argv else f"e.g. `{prog} {next(iter(subcommands))}`"
        raise ValueError(f"{question} One of {', '.join(subcommands)}; {given}")
    # On its own, so that errors point to its own --help.
    return tyro.cli(subcommands[name], args=argv[1:], prog=f"{prog} {name}")
