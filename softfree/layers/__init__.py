"""Modules made of :mod:`softfree.ops`: landmark samplers, attentions, blocks, embeddings."""

from softfree.layers.attention import SoftAttention, SoftmaxAttention
from softfree.layers.block import Block, SoftBlock

__all__ = ["Block", "SoftAttention", "SoftBlock", "SoftmaxAttention"]
