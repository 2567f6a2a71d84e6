"""Whole networks. Importing this package registers them with timm."""

from softfree.models.checkpoints import load_release_checkpoint
from softfree.models.folding import fold_batch_norms
from softfree.models.graphs import capture
from softfree.models.isotropic import SoftVisionTransformer
from softfree.models.pyramid import SoftPyramid
from softfree.models.replace import replace_attention

__all__ = [
    "SoftPyramid",
    "SoftVisionTransformer",
    "capture",
    "fold_batch_norms",
    "load_release_checkpoint",
    "replace_attention",
]
