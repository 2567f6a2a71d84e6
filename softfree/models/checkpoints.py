"""Reading weights: the authors' released checkpoints, and ours at another image size."""

import re
from pathlib import Path

import torch
from torch import Tensor, nn

from softfree.layers.embeddings import PositionEmbedding, resize_positions

_NESTED = ("model", "state_dict")

# The authors' names, first match wins; {0}, {1} are the numbers found, counted from 0 where they count
# stages from 1.
_RELEASE_NAMES = [
    (r"patch_embed1\.proj\.0\.(.*)", "stem.0.conv.{0}"),
    (r"patch_embed1\.proj\.1\.(.*)", "stem.0.bn.{0}"),
    (r"patch_embed1\.proj\.3\.(.*)", "stem.1.conv.{0}"),
    (r"patch_embed1\.proj\.4\.(.*)", "stem.1.bn.{0}"),
    (r"patch_embed1\.proj\.6\.(.*)", "stem.2.conv.{0}"),
    (r"patch_embed1\.proj\.7\.(.*)", "stem.2.bn.{0}"),
    (r"patch_embed(\d)\.proj\.0\.(.*)", "downsamples.{stage-1}.conv.{1}"),
    (r"patch_embed(\d)\.proj\.1\.(.*)", "downsamples.{stage-1}.bn.{1}"),
    (r"pos_embed(\d)", "stages.{stage}.pos_embed.weight"),
    (r"cls_token", "stages.3.cls_token"),
    (r"block(\d)\.(\d+)\.att\.mha\.W_q\.(.*)", "stages.{stage}.blocks.{1}.attn.q.{2}"),
    (r"block(\d)\.(\d+)\.att\.mha\.W_v\.(.*)", "stages.{stage}.blocks.{1}.attn.v.{2}"),
    (r"block(\d)\.(\d+)\.att\.mha\.ff\.(.*)", "stages.{stage}.blocks.{1}.attn.proj.{2}"),
    (
        r"block(\d)\.(\d+)\.att\.mha\.attn\.Qlandmark_op\.(.*)",
        "stages.{stage}.blocks.{1}.attn.sampler.{2}",
    ),
    (
        r"block(\d)\.(\d+)\.att\.mha\.attn\.Qnorm_act\.0\.(.*)",
        "stages.{stage}.blocks.{1}.attn.sampler.norm.{2}",
    ),
    (
        r"block(\d)\.(\d+)\.att\.mha\.attn\.conv\.(.*)",
        "stages.{stage}.blocks.{1}.attn.value_conv.{2}",
    ),
    (r"block(\d)\.(\d+)\.att\.ff1\.(.*)", "stages.{stage}.blocks.{1}.mlp.fc1.{2}"),
    (r"block(\d)\.(\d+)\.att\.ff2\.(.*)", "stages.{stage}.blocks.{1}.mlp.fc2.{2}"),
    (r"block(\d)\.(\d+)\.att\.(norm[12])\.(.*)", "stages.{stage}.blocks.{1}.{2}.{3}"),
    (r"block(\d)\.(\d+)\.(.*)", "stages.{stage}.blocks.{1}.{2}"),
]


def load_release_checkpoint(model: nn.Module, path: str | Path) -> nn.Module:
    """Load a checkpoint of the authors' code into one of the ``*_release`` models, in place.

    Reads ``.safetensors`` and ``.pth`` (weights only: nothing in the file is executed), also where the
    weights are nested under ``"model"`` or ``"state_dict"`` or carry a ``"module."`` prefix. Position
    embeddings are resized to the model's image size.

    Args:
        model: e.g. ``timm.create_model("soft_tiny_release")``.
        path: the file.

    Returns:
        ``model``.

    Raises:
        ValueError: the file does not fit the model; the message names every key that is missing,
            unexpected or of another shape. The model is then unchanged.
    """
    path = Path(path)
    state = filter_checkpoint(read_state_dict(path), model)
    expected = model.state_dict()
    missing = sorted(expected.keys() - state.keys())
    unexpected = sorted(state.keys() - expected.keys())
    other_shape = [
        f"{key}: {tuple(state[key].shape)} in the file, {tuple(expected[key].shape)} in the model"
        for key in sorted(expected.keys() & state.keys())
        if state[key].shape != expected[key].shape
    ]
    problems = [
        f"{title}:\n  " + "\n  ".join(keys)
        for title, keys in (
            ("missing in the file", missing),
            ("not in the model", unexpected),
            ("of another shape", other_shape),
        )
        if keys
    ]
    if problems:
        raise ValueError(
            f"{path} does not fit this {type(model).__name__}: is it the right size, and the release "
            "variant (soft_tiny_release, ...)?\n" + "\n".join(problems)
        )
    model.load_state_dict(state)
    return model


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """The weights in a file, without nesting or ``"module."`` prefix."""
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}")
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            state = load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path} is no readable safetensors file: {error}") from error
    else:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises whatever its unpickler met
            raise ValueError(
                f"{path} can't be read as weights alone ({error}); files that need more than that are "
                "not loaded, since they could run code"
            ) from error
    for _ in _NESTED:
        for name in _NESTED:
            if isinstance(state, dict) and isinstance(state.get(name), dict):
                state = state[name]
    if not isinstance(state, dict) or not all(isinstance(t, Tensor) for t in state.values()):
        raise ValueError(
            f"{path} holds no state dict of tensors (nor one under 'model' or 'state_dict')"
        )
    return {key.removeprefix("module."): tensor for key, tensor in state.items()}


def filter_checkpoint(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Weights under this model's names: the authors' keys mapped, positions at the model's size."""
    if "pos_embed1" in state or any(key.startswith("block1.") for key in state):
        state = _from_release(state)
    expected = model.state_dict()
    for name, module in model.named_modules():
        key = f"{name}.weight"
        if not isinstance(module, PositionEmbedding) or key not in state:
            continue
        given, wanted = state[key], expected[key]
        side = round((given.shape[1] - module.prefix) ** 0.5)
        same_grid = given.shape[1] == wanted.shape[1]
        if not same_grid and side * side == given.shape[1] - module.prefix:
            state = {
                **state,
                key: resize_positions(given, (side, side), module.grid, module.prefix),
            }
    return state


def _from_release(state: dict[str, Tensor]) -> dict[str, Tensor]:
    renamed = {_rename(key): tensor for key, tensor in state.items()}
    merged: dict[str, Tensor] = {}
    for key, tensor in renamed.items():
        if match := re.fullmatch(r"(.*\.attn)\.q\.(weight|bias)", key):
            prefix, kind = match.groups()
            partners = [("v", "qv"), ("kv", "qkv")]
            for partner, together in partners:
                other = renamed.get(f"{prefix}.{partner}.{kind}")
                if other is not None:
                    merged[f"{prefix}.{together}.{kind}"] = torch.cat([tensor, other])
                    break
            else:
                merged[key] = tensor
        elif re.fullmatch(r".*\.attn\.k?v\.(weight|bias)", key):
            query = re.sub(r"\.k?v\.(weight|bias)$", r".q.\1", key)
            if query not in renamed:
                merged[key] = tensor
        elif key.endswith("sampler.weight") and tensor.ndim == 2:
            merged[key] = tensor[..., None, None]  # their 1x1 sampling is a linear layer
        else:
            merged[key] = tensor
    return merged


def _rename(key: str) -> str:
    for pattern, target in _RELEASE_NAMES:
        if match := re.fullmatch(pattern, key):
            groups = list(match.groups())
            stage = int(groups[0]) - 1 if groups and groups[0].isdigit() else 0
            target = target.replace("{stage-1}", str(stage - 1)).replace("{stage}", str(stage))
            for i, group in enumerate(groups):
                target = target.replace(f"{{{i}}}", group)
            return target
    return key
