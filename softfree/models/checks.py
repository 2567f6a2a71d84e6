"""Checks of arguments.

Errors name an argument in `backticks`; the commands show it as the flag that the user types.
"""

import contextlib
import difflib
from collections.abc import Iterator

import timm

SMALLEST_IMAGE = 32  # side of the smallest images that a pyramid takes


def check_at_least(least: float, **arguments: float) -> None:
    """Refuse lower values: ``check_at_least(1, width=width)``."""
    for name, value in arguments.items():
        if not value >= least:
            raise ValueError(f"`{name}` must be at least {least}, got {value}")


def check_model_name(name: str, option: str = "`model`") -> None:
    """Refuse names that timm does not know."""
    if not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models(), n=1)
        advice = f"did you mean {near[0]!r}?" if near else "`softfree models` lists ours"
        raise ValueError(f"{option}: timm knows no model {name!r}; {advice}")


def check_pretrained(name: str) -> None:
    """Refuse a model that timm has no weights for."""
    if not timm.models.is_model_pretrained(name):
        raise ValueError(
            f"`pretrained`: timm has no weights of {name}; timm.list_models(pretrained=True) lists the "
            "models that have weights"
        )


@contextlib.contextmanager
def fetching(name: str) -> Iterator[None]:
    """A context for downloading the weights of ``name``: any error becomes a ValueError of one line."""
    try:
        yield
    except Exception as error:  # timm and the hub raise many kinds of errors
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"`pretrained`: the weights of {name} can't be fetched ({reason})"
        ) from error


def check_grouped(**arguments: int) -> None:
    """Refuse channels that RetinaNet's GroupNorm can't divide into groups: at most 32 groups of 8 or more."""
    for name, channels in arguments.items():
        groups = min(32, channels // 8)
        if groups < 1 or channels % groups:
            unit = 8 if channels < 256 else 32
            raise ValueError(
                f"`{name}` must be a multiple of {unit} where the heads have GroupNorm, got {channels}"
            )


@contextlib.contextmanager
def mistakes_in(argument: str) -> Iterator[None]:
    """A context in which errors are attributed to this argument: their message starts with its name."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise ValueError(f"`{argument}`: {error}") from error
