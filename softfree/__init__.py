"""softfree: softmax-free attention (SOFT, SOFT++) for PyTorch, and the backbones built on it.

y = softfree.soft_attention(q, v, landmarks)          # the operator
model = timm.create_model("softpp_tiny")              # the backbones, registered by this import
"""

from softfree.layers import SoftAttention, SoftBlock
from softfree.models import load_release_checkpoint
from softfree.ops import newton_inverse, newton_residuals, soft_attention

__version__ = "0.1.0"
__all__ = [
    "SoftAttention",
    "SoftBlock",
    "load_release_checkpoint",
    "newton_inverse",
    "newton_residuals",
    "soft_attention",
]
