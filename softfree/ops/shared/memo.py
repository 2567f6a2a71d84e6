"""Functions that remember what they found."""

import functools
from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


def computed_once(function: Callable[..., Result]) -> Callable[..., Result]:
    """A function of positional arguments that is computed once for each of them, types included.

    Anew for what has no hash, such as a symbolic size, and under ``torch.compile``, which computes its calls once itself.
    An error is raised again each time.
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
