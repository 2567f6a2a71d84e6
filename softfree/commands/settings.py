"""Settings of a run from the command line: a recipe or a file, then flags."""

import argparse
import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from softfree.commands.parser import HELP, Option, parse, wants_help
from softfree.training.engine import Task
from softfree.training.settings import Given, override, read_settings


def resolve(
    argv: Sequence[str],
    task: type[Task],
    recipes: Mapping[str, Any] | None = None,
    prog: str = "",
    description: str = "",
) -> Any:
    """Settings of a task: a recipe or the file of --config, overridden by flags.

    ``recipes`` replace the task's own; their dataclass has the same parts and more.
    """
    recipes = task.recipes if recipes is None else recipes
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--recipe", default="")
    first.add_argument("--config", type=Path)
    chosen, rest = first.parse_known_args([with_hyphens(argument) for argument in argv])
    if chosen.recipe and chosen.recipe not in recipes:
        raise ValueError(f"--recipe must be one of {', '.join(recipes)}, got {chosen.recipe!r}")
    if chosen.recipe and chosen.config:
        raise ValueError(
            "--recipe and --config can't be used together: the file has its own recipe"
        )
    helping, rest = wants_help(rest), [argument for argument in rest if argument not in HELP]
    given = dict(given_in(rest))
    if chosen.recipe:
        given["recipe"] = chosen.recipe
    kind = type(next(iter(recipes.values())))
    recipe = chosen.recipe or task.usual_recipe(given)
    if chosen.config is None:
        default = recipes[recipe]
    elif chosen.config.is_file():
        default = read_settings(kind, chosen.config)
    else:
        raise FileNotFoundError(f"--config {chosen.config} does not exist")
    settings = parse(kind, rest, prog=prog, default=default)
    if chosen.config is None:
        if "batch_size" not in given:
            batch_size = share_out(default.optim.batch_size)
            settings = override(settings, {"optim": dict(batch_size=batch_size)})
        settings = task.adapt(settings, given)
    if helping:
        # The help shows the defaults of a run with these arguments.
        options: list[Option] = [
            (
                f"--recipe {{{','.join(recipes)}}}",
                "set of defaults; those below are adjusted to the data and the length of the run "
                f"(here: {'--config' if chosen.config else recipe})",
            ),
            ("--config FILE", "settings.json of an earlier run, instead of a recipe"),
        ]
        parse(kind, [*HELP], prog=prog, description=description, default=settings, options=options)
    return settings


def with_hyphens(argument: str) -> str:
    """Normalize the spelling of a flag for all parsers."""
    flag, equals, value = argument.partition("=")
    return flag.replace("_", "-") + equals + value if flag.startswith("--") else argument


def given_in(argv: Sequence[str]) -> Given:
    """The arguments given as flags, each with what follows the flag: its first value, or nothing."""
    given = {}
    for argument, following in itertools.pairwise([*argv, ""]):
        if argument.startswith("--"):
            flag, equals, value = argument.partition("=")
            given[flag[2:].replace("-", "_")] = value if equals else following
    return given


def share_out(batch: int) -> int:
    """Divide a recipe's batch size among the processes that torchrun started."""
    processes = int(os.environ.get("WORLD_SIZE", 1))
    if batch % processes:
        raise ValueError(
            f"the recipe's batch size of {batch} can't be divided among {processes} processes; "
            "set --batch-size, the batch size of one process"
        )
    return batch // processes
