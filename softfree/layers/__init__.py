"""Modules made of :mod:`softfree.ops`: landmark samplers, attentions, blocks, embeddings."""

from softfree.layers.agent import AgentAttention
from softfree.layers.attention import SoftAttention, SoftmaxAttention
from softfree.layers.block import Block, SoftBlock
from softfree.layers.factory import ATTENTIONS, create_attention
from softfree.layers.focused import FocusedLinearAttention
from softfree.layers.linformer import LinformerAttention
from softfree.layers.nystromformer import NystromformerAttention
from softfree.layers.performer import PerformerAttention
from softfree.layers.reformer import ReformerAttention
from softfree.layers.torch_interface import MultiheadSoftAttention

__all__ = [
    "ATTENTIONS",
    "AgentAttention",
    "Block",
    "FocusedLinearAttention",
    "LinformerAttention",
    "MultiheadSoftAttention",
    "NystromformerAttention",
    "PerformerAttention",
    "ReformerAttention",
    "SoftAttention",
    "SoftBlock",
    "SoftmaxAttention",
    "create_attention",
]
