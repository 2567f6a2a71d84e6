"""Checks of a model file's metadata (``metadata.json``, ONNX properties) before a model is built from them.

Such files come from strangers. They may name an architecture and its plain settings, and nothing else: no
weights to download, no file, folder or address, and no network larger than its own weights.
"""

import inspect
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import timm
from timm.models import model_entrypoint
from torch import nn

from softfree.layers.factory import ATTENTIONS, option_names
from softfree.models.registry import is_ours
from softfree.models.sequence import SequenceClassifier

MAX_BYTES = 64 * 2**20  # size of a file, most of it class names
MAX_NUMBER = 2**16  # channels, heads, pixels per side
MAX_COUNT = 1000  # total number of things that are built or computed one after the other
COUNTS = re.compile(r"depth|layer|block|stage|step|iteration|round|rep|level|branch|scale")
MAX_ITEMS, MAX_NESTING = 64, 3  # for lists and mappings
WORD = re.compile(r"[\w.:,+ -]{0,64}")  # no slash: no path, no address

# Arguments that timm's models take besides those of their classes, and arguments that are not architecture
# settings.
ALWAYS = {"img_size", "num_classes", "in_chans", "global_pool", "drop_rate", "drop_path_rate"}
NEVER = {"self", "args", "kwargs", "device", "dtype"}

Check = Callable[[Any], str | None]  # returns what a value must be, or None if valid


def read_json(file: Path) -> dict[str, Any]:
    """The mapping in a JSON file; raises ``ValueError`` for anything else."""
    if file.stat().st_size > MAX_BYTES:
        raise ValueError(f"it is larger than {MAX_BYTES // 2**20} MiB")
    return parse_json(file.read_text(encoding="utf-8"))


def parse_json(text: str) -> dict[str, Any]:
    """The mapping in a JSON text; raises ``ValueError`` for anything else."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"it must be a mapping, and is {_shown(value)}")
    return value


def check_fields(source: object, metadata: Mapping[str, Any], required: Iterable[str]) -> None:
    """Refuse metadata that lack a required field or have a field of the wrong kind.

    ``source`` is the file, for the message. Unknown fields are ignored.
    """
    for field in required:
        if field not in metadata:
            raise ValueError(f"{source}: the field {field!r} is missing")
    for field, check in FIELDS.items():
        if field in metadata and (wanted := check(metadata[field])) is not None:
            raise ValueError(
                f"{source}: the field {field!r} must be {wanted}, got {_shown(metadata[field])}"
            )


def check_buildable(source: object, metadata: Mapping[str, Any]) -> None:
    """Refuse a checkpoint's metadata unless they only describe a model that can be built."""
    task = metadata["task"]
    check_fields(source, metadata, REQUIRED[task])
    if task == "longrange":
        arguments = metadata["model_kwargs"]
        options = arguments.get("attention_options") or {}
        known = set(inspect.signature(SequenceClassifier).parameters)
        _check_named(f"{source}: 'model_kwargs'", arguments, known)
        _check_named(f"{source}: 'attention_options'", options, attention_options())
        return
    model = metadata["model"]
    if not timm.is_model(model):
        raise ValueError(f"{source}: timm knows no model {_shown(model)}")
    if task == "classification":
        check_arguments(model, metadata["model_kwargs"], f"{source}: ")
        return
    _check_named(f"{source}: 'arguments'", metadata["arguments"], DENSE_ARGUMENTS)
    backbone = metadata["arguments"].get("backbone_kwargs", {})
    # Dense models leave landmarks out for a backbone that has none.
    _check_named(f"{source}: {model}", backbone, argument_names(model) | {"landmarks"})


def check_arguments(name: str, arguments: Mapping[str, Any], source: str = "") -> None:
    """Refuse arguments of the model ``name`` that are not plain settings of its architecture.

    Example:
        >>> check_arguments("softpp_tiny", {"depths": (1, 1, 2, 1), "landmarks": "conv:49"})
        >>> check_arguments("resnet18", {"checkpoint_path": "a.pth"})
        Traceback (most recent call last):
        ...
        ValueError: resnet18 takes no argument 'checkpoint_path' from a file or the command line
    """
    _check_named(f"{source}{name}", arguments, argument_names(name))


def argument_names(name: str) -> set[str]:
    """The names of the architecture settings of timm's model ``name``.

    timm's functions take any keyword. The settings are the parameters of the classes in the function's
    module.
    """
    classes = {
        base
        for value in vars(sys.modules[model_entrypoint(name).__module__]).values()
        if isinstance(value, type) and issubclass(value, nn.Module)
        for base in value.__mro__
        if base.__module__.startswith(("timm.", "softfree."))
    }
    names = ALWAYS.union(*(inspect.signature(c).parameters for c in classes))
    return (names | attention_options() if is_ours(name) else names) - NEVER


def attention_options() -> set[str]:
    """The names of all attentions' options."""
    return set().union(*map(option_names, ATTENTIONS))


def _check_named(owner: str, arguments: Any, names: set[str]) -> None:
    if (wanted := _mapping(arguments)) is not None:
        raise ValueError(f"{owner} must be {wanted}, got {_shown(arguments)}")
    for name, value in arguments.items():
        if name not in names:
            flag = "; `pretrained` is an option of its own" if name == "pretrained" else ""
            raise ValueError(
                f"{owner} takes no argument {_shown(name)} from a file or the command line{flag}"
            )
        wanted = _number_of(value) if COUNTS.search(name) else _plain(value)
        if wanted is not None:
            raise ValueError(f"{owner}: {name} must be {wanted}, got {_shown(value)}")


def _plain(value: Any, nesting: int = MAX_NESTING) -> str | None:
    """What a value must be if it is not plain data of a reasonable size; None if it is."""
    if isinstance(value, list | tuple | dict):
        items: Iterable[Any] = value
        if isinstance(value, dict):
            items = [*value.keys(), *value.values()]
        if not nesting or len(value) > MAX_ITEMS:
            return f"no longer than {MAX_ITEMS} items, nested no deeper than {MAX_NESTING}"
        return next(filter(None, (_plain(item, nesting - 1) for item in items)), None)
    if isinstance(value, str):
        return None if WORD.fullmatch(value) else "a short word without slashes"
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float):
        fine = math.isfinite(value) and abs(value) <= MAX_NUMBER
        return None if fine else f"a number of at most {MAX_NUMBER:,}"
    return "a number, a word, or a list of them"


def _number_of(value: Any) -> str | None:
    """The same for a count: its total must not exceed what can be built."""
    if (wanted := _plain(value)) is not None:
        return wanted
    return None if _total(value) <= MAX_COUNT else f"at most {MAX_COUNT:,} in all"


def _total(value: Any) -> float:
    if isinstance(value, list | tuple):
        return sum(map(_total, value))
    return abs(value) if isinstance(value, int | float) else 0


def _mapping(value: Any) -> str | None:
    named = isinstance(value, Mapping) and all(isinstance(name, str) for name in value)
    return None if named else "a mapping of names to values"


def _text(value: Any) -> str | None:
    return None if isinstance(value, str) else "a text"


def _whole(least: int) -> Check:
    def check(value: Any) -> str | None:
        whole = isinstance(value, int) and not isinstance(value, bool)
        if whole and least <= value <= MAX_NUMBER:
            return None
        return f"a whole number from {least} to {MAX_NUMBER:,}"

    return check


def _texts(value: Any) -> str | None:
    fine = isinstance(value, list) and all(isinstance(item, str) for item in value)
    return None if fine and value else "a list of texts, at least one"


def _ids(value: Any) -> str | None:
    fine = isinstance(value, list) and all(type(item) is int for item in value)
    return None if fine and value else "a list of whole numbers, at least one"


def _numbers(above: float) -> Check:
    def check(value: Any) -> str | None:
        channels = value if isinstance(value, list) and len(value) == 3 else []
        fine = [_is_number(item) and above < item for item in channels]
        wanted = "a list of 3 finite numbers"
        return None if fine and all(fine) else wanted if above < 0 else f"{wanted} above {above:g}"

    return check


def _share(value: Any) -> str | None:
    return None if _is_number(value) and 0 < value <= 10 else "a number above 0, at most 10"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _one_of(*words: str) -> Check:
    def check(value: Any) -> str | None:
        return None if value in words else f"one of {', '.join(words)}"

    return check


def _shown(value: Any) -> str:
    """A value as shown in a message: short, on one line, without terminal control characters."""
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


FIELDS: dict[str, Check] = {
    "task": _text,
    "model": _text,
    "model_kwargs": _mapping,
    "arguments": _mapping,
    "detector": _one_of("retinanet", "mask-rcnn"),
    "class_names": _texts,
    "category_ids": _ids,
    "img_size": _whole(1),
    "crop_pct": _share,
    "interpolation": _one_of(
        "bicubic", "bilinear", "box", "hamming", "lanczos", "nearest", "random"
    ),
    "mean": _numbers(-math.inf),
    "std": _numbers(0.0),
    "short_side": _whole(0),
    "window": _whole(0),
    "length": _whole(1),
    "longrange_task": _text,
    "run": _mapping,
    "crc32": _mapping,
}
PICTURES = ("img_size", "crop_pct", "interpolation", "mean", "std")
REQUIRED: dict[str, tuple[str, ...]] = {
    "classification": ("model", "model_kwargs", "class_names", *PICTURES),
    "detection": ("model", "detector", "arguments", "class_names"),
    "segmentation": (
        "model", "arguments", "class_names", "short_side", "window", "mean", "std",
    ),
    "longrange": ("model_kwargs", "longrange_task", "class_names"),
}  # fmt: skip
DENSE_ARGUMENTS = {
    "min_size", "max_size", "head", "width", "anchor_size", "frozen_bn", "backbone_kwargs", "head_norm",
    "box_batch_size_per_image", "rpn_batch_size_per_image", "rpn_pre_nms_top_n_train",
    "rpn_post_nms_top_n_train", "rpn_pre_nms_top_n_test", "rpn_post_nms_top_n_test",
}  # fmt: skip
