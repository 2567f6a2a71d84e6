"""Functions that remember their results."""

import functools
from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


def computed_once(function: Callable[..., Result]) -> Callable[..., Result]:
    """Cache a function of positional arguments; arguments of different types count as different.

    Calls are not cached if an argument has no hash, such as a symbolic size, or under ``torch.compile``,
    which evaluates them once itself. Errors are not cached: they are raised anew on each call.
    """
    known = functools.lru_cache(maxsize=1024, typed=True)(function)

    @functools.wraps(function)
    def call(*arguments):
        if torch.compiler.is_dynamo_compiling():
            return function(*arguments)
        try:
            return known(*arguments)
        except TypeError:
            return function(*arguments)

    call.forget = known.cache_clear  # type: ignore[attr-defined]
    return call
