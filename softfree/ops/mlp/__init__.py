"""Two linear layers with GELU between them."""

from softfree.ops.mlp.operator import mlp

__all__ = ["mlp"]
