"""softfree: softmax-free attention (SOFT, SOFT++) for PyTorch, and the backbones built on it.

y = softfree.soft_attention(q, None, v, landmarks)         # the operator
model = timm.create_model("softfree_tiny")                   # the backbones, registered by this import
model = softfree.detection.mask_rcnn("softfree_tiny", ...)   # dense prediction: also softfree.segmentation
"""

import importlib
from typing import Any

from softfree.analysis import capture_attention
from softfree.layers import MultiheadSoftAttention, SoftAttention, SoftBlock
from softfree.models import capture, fold_batch_norms, load_release_checkpoint, replace_attention
from softfree.ops import (
    newton_inverse,
    newton_residuals,
    ridge_solve,
    soft_attention,
    solve_residual,
    solve_spectrum,
)

__version__ = "0.2.0"
__all__ = [
    "MultiheadSoftAttention",
    "SoftAttention",
    "SoftBlock",
    "capture",
    "capture_attention",
    "fold_batch_norms",
    "load_release_checkpoint",
    "newton_inverse",
    "newton_residuals",
    "replace_attention",
    "ridge_solve",
    "soft_attention",
    "solve_residual",
    "solve_spectrum",
]

# Imported when they are first used: they need packages of the extra "dense", and seconds.
_LATE = ("detection", "segmentation")


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return importlib.import_module(f"softfree.{name}")
    raise AttributeError(f"module 'softfree' has no attribute {name!r}")
