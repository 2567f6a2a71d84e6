"""Read weights: the authors' released checkpoints, and ours at another image size."""

import argparse
import logging
import math
import re
from collections.abc import Container
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from softfree.layers.embeddings import PositionEmbedding, resize_positions

logger = logging.getLogger(__name__)
_NESTED = ("model", "state_dict")

# Modules of a block: our name, and the authors' names, each with its share of our rows.
_SOFT_BLOCK = {
    "attn.qv": (("att.mha.W_q", 1), ("att.mha.W_v", 1)),
    "attn.proj": (("att.mha.ff", 1),),
    "attn.sampler": (("att.mha.attn.Qlandmark_op", 1),),
    "attn.sampler.norm": (("att.mha.attn.Qnorm_act.0", 1),),
    "attn.value_conv": (("att.mha.attn.conv", 1),),
    "mlp.fc1": (("att.ff1", 1),),
    "mlp.fc2": (("att.ff2", 1),),
    "norm1": (("att.norm1", 1),),
    "norm2": (("att.norm2", 1),),
}
_SOFTMAX_BLOCK = {"attn.qkv": (("attn.q", 1), ("attn.kv", 2))}


class _Piece(NamedTuple):
    """A tensor in a file that forms one tensor of the model, on its own or stacked with others."""

    name: str
    shape: tuple[int, ...]


_Layout = dict[str, list[_Piece]]


def load_release_checkpoint(model: nn.Module, path: str | Path) -> nn.Module:
    """Load a checkpoint of the authors' code into one of the ``*_release`` models, in place.

    Reads ``.safetensors`` and ``.pth`` files (weights only: nothing in the file is executed). The weights may
    be nested under ``"model"`` or ``"state_dict"`` and may have a ``"module."`` prefix. Position embeddings
    are resized to the model's image size.

    Args:
        model: e.g. ``timm.create_model("soft_tiny_release")``.
        path: the file.

    Returns:
        ``model``.

    Raises:
        ValueError: the file does not fit the model; the message lists every key that is missing, unexpected,
            or of another shape or kind. The model is then unchanged.
    """
    path = Path(path)
    state = read_state_dict(path)
    layout = _layout(state, model)
    own = model.state_dict()
    floating = {piece.name: own[key].is_floating_point() for key in layout for piece in layout[key]}
    other_kind = [
        f"{name}: {state[name].dtype}"
        for name in sorted(floating.keys() & state.keys())
        if state[name].is_floating_point() != floating[name]
    ]
    if not other_kind:
        state = _resize_positions(state, layout, model)
    expected = {piece.name: piece.shape for pieces in layout.values() for piece in pieces}
    missing = sorted(expected.keys() - state.keys())
    unexpected = sorted(state.keys() - expected.keys())
    other_shape = [
        f"{name}: {tuple(state[name].shape)} in the file, {expected[name]} in the model"
        for name in sorted(expected.keys() & state.keys())
        if state[name].shape != expected[name]
    ]
    problems = [
        f"{title}:\n  " + "\n  ".join(keys)
        for title, keys in (
            ("missing in the file", missing),
            ("not in the model", unexpected),
            ("of another shape", other_shape),
            ("of another kind", other_kind),
        )
        if keys
    ]
    spoiled = [key for key, t in state.items() if t.is_floating_point() and not t.isfinite().all()]
    if spoiled:
        logger.warning(
            "%s: %s of its tensors are not finite, e.g. %s", path, len(spoiled), spoiled[0]
        )
    if problems:
        raise ValueError(
            f"{path} does not fit this {type(model).__name__}: is it the right size, and the release "
            "variant (soft_tiny_release, ...)?\n" + "\n".join(problems)
        )
    model.load_state_dict(_assemble(state, layout))
    return model


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """The weights in a file, without nesting or ``"module."`` prefix."""
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}")
    state: Any
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            state = load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path} is no readable safetensors file: {error}") from error
    else:
        try:
            # Training scripts often store their arguments next to the weights: plain data, no code.
            with torch.serialization.safe_globals([argparse.Namespace]):
                state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises whatever its unpickler encountered
            # Its message advises loading the file in a way that may run code.
            raise ValueError(
                f"{path} can't be read as weights alone: it must be a .safetensors file, or a .pth file "
                "that holds tensors and no code, whole and undamaged"
            ) from error
    for _ in _NESTED:
        for name in _NESTED:
            if isinstance(state, dict) and isinstance(state.get(name), dict):
                state = state[name]
    if not isinstance(state, dict) or not all(
        isinstance(key, str) and isinstance(tensor, Tensor) for key, tensor in state.items()
    ):
        raise ValueError(
            f"{path} holds no state dict of tensors (nor one under 'model' or 'state_dict')"
        )
    for key, tensor in state.items():
        plain = tensor.layout == torch.strided and tensor.device.type == "cpu"
        if not plain or tensor.is_quantized or tensor.is_complex():
            raise ValueError(f"{path}: {key!a:.80} is no plain tensor of numbers")
    return {key.removeprefix("module."): tensor for key, tensor in state.items()}


def filter_checkpoint(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Weights under this model's names: the authors' keys are mapped, positions resized to the model's size.

    Whatever does not fit is left unchanged, so that the loader reports it.
    """
    layout = _layout(state, model)
    return _assemble(_resize_positions(state, layout, model), layout)


def _layout(state: dict[str, Tensor], model: nn.Module) -> _Layout:
    """What a file must contain, by the model's names: in the authors' layout if ``state`` is, or in ours."""
    expected = model.state_dict()
    release = any(key.startswith(("patch_embed1.", "pos_embed1", "block1.")) for key in state)
    layout: _Layout = {}
    for key, tensor in expected.items():
        names = _release_names(key, expected) if release else ((key, 1),)
        parts = sum(part for _, part in names)
        layout[key] = [
            _Piece(
                name,
                (tensor.shape[0] * part // parts, *tensor.shape[1:])
                if parts > 1
                else tuple(tensor.shape),
            )
            for name, part in names
        ]
    return layout


def _release_names(key: str, keys: Container[str]) -> tuple[tuple[str, int], ...]:
    """The authors' names for our ``key``, each with its share of the rows; ``keys`` are all our keys."""
    if match := re.fullmatch(r"stem\.(\d)\.(conv|bn)\.(\w+)", key):
        step = 3 * int(match[1]) + (match[2] == "bn")
        return ((f"patch_embed1.proj.{step}.{match[3]}", 1),)
    if match := re.fullmatch(r"downsamples\.(\d)\.(conv|bn)\.(\w+)", key):
        step = int(match[2] == "bn")
        return ((f"patch_embed{int(match[1]) + 2}.proj.{step}.{match[3]}", 1),)
    if match := re.fullmatch(r"stages\.(\d)\.pos_embed\.weight", key):
        return ((f"pos_embed{int(match[1]) + 1}", 1),)
    if match := re.fullmatch(r"stages\.\d\.cls_token", key):
        return (("cls_token", 1),)
    if match := re.fullmatch(r"stages\.(\d)\.blocks\.(\d+)\.(.+)\.(\w+)", key):
        stage, block, module, kind = match.groups()
        softmax = f"stages.{stage}.blocks.{block}.attn.qkv.weight" in keys
        names = (_SOFTMAX_BLOCK if softmax else _SOFT_BLOCK).get(module, ((module, 1),))
        return tuple((f"block{int(stage) + 1}.{block}.{name}.{kind}", part) for name, part in names)
    return ((key, 1),)


def _resize_positions(
    state: dict[str, Tensor], layout: _Layout, model: nn.Module
) -> dict[str, Tensor]:
    """``state`` with position embeddings of a square grid resized to the model's."""
    state = dict(state)
    for module_name, module in model.named_modules():
        if not isinstance(module, PositionEmbedding):
            continue
        key = f"{module_name}.weight"
        (piece,) = layout[key]
        given = state.get(piece.name)
        if given is None or given.ndim != 3:
            continue
        # The authors' grids are all square. Ours may not be: one with the same number of positions is not
        # resized.
        authors = piece.name != key
        side = math.isqrt(max(0, given.shape[1] - module.prefix))
        square = side > 0 and side * side == given.shape[1] - module.prefix
        if square and (authors or given.shape[1] != piece.shape[1]) and module.grid != (side, side):
            state[piece.name] = resize_positions(given, (side, side), module.grid, module.prefix)
    return state


def _assemble(state: dict[str, Tensor], layout: _Layout) -> dict[str, Tensor]:
    """The tensors of a file under the model's names; those that the model does not use keep theirs."""
    assembled = dict(state)
    for key, pieces in layout.items():
        if all(piece.name in state for piece in pieces):
            tensors = [assembled.pop(piece.name) for piece in pieces]
            assembled[key] = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    return assembled
