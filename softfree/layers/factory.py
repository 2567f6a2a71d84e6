"""Create any attention by name: ``create_attention("performer", dim, num_heads)``."""

import inspect
import numbers
import typing
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from softfree.layers.agent import AgentAttention
from softfree.layers.attention import SoftAttention, SoftmaxAttention
from softfree.layers.focused import FocusedLinearAttention
from softfree.layers.linformer import LinformerAttention
from softfree.layers.nystromformer import NystromformerAttention
from softfree.layers.performer import PerformerAttention
from softfree.layers.reformer import ReformerAttention

CLASSES: dict[str, Callable[..., nn.Module]] = {
    "softfree": SoftAttention,
    "soft": SoftAttention,
    "softpp": SoftAttention,
    "softmax": SoftmaxAttention,
    "linformer": LinformerAttention,
    "performer": PerformerAttention,
    "nystromformer": NystromformerAttention,
    "reformer": ReformerAttention,
    "agent": AgentAttention,
    "flatten": FocusedLinearAttention,
}
ATTENTIONS = tuple(CLASSES)
# The settings that distinguish SOFT from SOFT++, as in the authors' code, and those of our own, with normed
# queries.
SETTINGS: dict[str, dict[str, Any]] = {
    "softfree": dict(
        query_norm=True, bandwidth="learned", landmarks="average:128", inverse="solve"
    ),
    "soft": dict(normalize=False, start="scaled", ridge=0.01),
    "softpp": dict(normalize=True, start="halving", ridge=0.0),
}
# Options that a model sets itself, not its user.
GIVEN = {"context_dim", "grid", "sequence", "volume"}
NUMBERS: dict[Any, tuple[type, str]] = {
    int: (numbers.Integral, "a whole number"),
    int | None: (numbers.Integral, "a whole number"),
    float: (numbers.Real, "a number"),
}


def create_attention(
    name: str, dim: int, num_heads: int = 8, *, sequence: bool = False, **options: Any
) -> nn.Module:
    """Create the attention called ``name``, which is called as ``layer(x, size, mask)``.

    The options of all classes are accepted. An attention uses its own and ignores the others, so one set of
    options works for every name. An option that is None counts as not given.

    Args:
        name: ``"softfree"``, ``"soft"``, ``"softpp"``, ``"softmax"``, ``"linformer"``, ``"performer"``,
            ``"nystromformer"``, ``"agent"``, ``"flatten"``, or, for sequences only, ``"reformer"``.
        dim: channels; a multiple of ``num_heads``.
        num_heads: heads.
        sequence: tokens are a sequence, not an image.
        options: e.g. ``landmarks``, ``stride``, ``value_conv`` (SOFT, Nyströmformer), ``grid``, ``slots``
            (Linformer), ``features``, ``kernel``, ``redraw`` (Performer), ``rounds``, ``buckets``, ``chunk``
            (Reformer), ``agent_bias`` (agent), ``focus`` (FLatten).

    Example:
        >>> import torch
        >>> layer = create_attention("linformer", 64, num_heads=2, sequence=True, grid=200, stride=4)
        >>> layer(torch.randn(2, 150, 64)).shape
        torch.Size([2, 150, 64])
    """
    check_attention(name)
    own = option_names(name)
    _check_known("attention", options, set().union(*map(option_names, CLASSES)))
    given = {key: value for key, value in options.items() if value is not None}
    settings = dict(SETTINGS.get(name, {}))
    if given.get("inverse", settings.get("inverse", "newton")) != "newton":
        for key in settings.keys() & {"start", "ridge"}:  # the authors' are for Newton's steps
            del settings[key]
    chosen = {**settings, "sequence": sequence, **given}
    taken = {key: value for key, value in chosen.items() if key in own}
    _check_kinds(CLASSES[name], taken)
    return CLASSES[name](dim, num_heads, **taken)


def check_attention(name: str) -> None:
    """Raise if there is no attention of that name."""
    if name not in CLASSES:
        raise ValueError(
            f"attention must be one of {', '.join(map(repr, ATTENTIONS))}, got {name!r}"
        )


def check_options(
    name: str, options: Mapping[str, Any], model: type[nn.Module] | None = None
) -> None:
    """Raise if the attention ``name`` lacks one of these options.

    If they are keywords of a ``model``, which also has its own, the error lists the model's as well.
    """
    check_attention(name)
    known, what = option_names(name) - GIVEN, f"attention {name!r}"
    if model is not None:
        parameters = inspect.signature(model).parameters.values()
        known |= {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
        # One value for all stages would silently override those given per stage.
        known -= {name for name in known if f"{name}s" in known}
        what = f"{model.__name__} with {what}"
    _check_known(what, options, known)


def option_names(name: str) -> set[str]:
    """The options that the attention ``name`` takes."""
    parameters = inspect.signature(CLASSES[name]).parameters.values()
    return {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}


def attention_name(model: nn.Module) -> str | None:
    """The name of a model's attention; None if it has none.

    It is the first one that is not softmax, if any, because pyramids may end in softmax attention.

    Example:
        >>> attention_name(create_attention("softpp", 64)), attention_name(nn.Linear(2, 2))
        ('softpp', None)
    """
    names = [_name_of(module) for module in model.modules()]
    return next((name for name in names if name not in (None, "softmax")), None) or next(
        (name for name in names if name), None
    )


def _name_of(module: nn.Module) -> str | None:
    if isinstance(module, SoftAttention):
        return "softfree" if module.query_norm else "softpp" if module.normalize else "soft"
    return next((name for name, kind in CLASSES.items() if type(module) is kind), None)


def default_mlp_ratio(name: str) -> float:
    """The ratio of hidden channels to channels in a block's MLP.

    It is chosen so that blocks with different attentions have equally many parameters. SOFT and Reformer use
    their queries as keys. The other attentions have one more projection with dim² parameters. To compensate,
    their MLP ratio is 3.5 instead of 4, because half a unit of the ratio is dim² parameters.
    """
    return 4.0 if CLASSES[name] in (SoftAttention, ReformerAttention) else 3.5


def _check_known(what: str, options: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(options.keys() - known)
    if unknown:
        raise TypeError(
            f"{what} has no option {', '.join(map(repr, unknown))}; "
            f"there are {', '.join(map(repr, sorted(known)))}; "
            f"got {', '.join(f'{key}={options[key]!r}' for key in unknown)}"
        )


def _check_kinds(attention: Any, options: dict[str, Any]) -> None:
    """Raise if an option has to be a number and is not."""
    hints = typing.get_type_hints(attention.__init__)
    for key, value in options.items():
        kind, words = NUMBERS.get(hints[key], (object, ""))
        if not isinstance(value, kind):
            raise ValueError(f"{key} must be {words}, got {value!r}")
