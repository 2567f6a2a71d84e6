r"""Performer: softmax or ReLU attention by random features (FAVOR+), linear in the tokens.

.. math:: X = \frac{\phi(Q)\, (\phi(K)^T V)}{\phi(Q)\, (\phi(K)^T 1)}

Softmax kernel: :math:`\phi_f(x) = \exp(\omega_f \cdot x - \|x\|^2 / 2)` of ``x`` scaled by ``d^-1/4``, whose
products have the mean :math:`\exp(q \cdot k / \sqrt d)`. ReLU kernel:
:math:`\phi_f(x) = \max(\omega_f \cdot x, 0) + 10^{-3}`. The directions :math:`\omega` are Gaussian,
orthogonal in blocks of ``d``.

Choromanski et al., Rethinking Attention with Performers, ICLR 2021.
"""

import math

import torch
from torch import Tensor

from softfree.layers.landmarks import Size
from softfree.layers.multihead import MultiHeadAttention
from softfree.ops.shared.precision import compute_dtype

KERNELS = ("softmax", "relu")
RELU_OFFSET = 1e-3


class PerformerAttention(MultiHeadAttention):
    """Attention by random features, which all heads share.

    The random directions are saved with the layer's state. Published comparisons keep the directions as first
    drawn, and so does this layer. With ``redraw``, every training step draws new ones, and evaluation uses
    the saved ones.

    Features are computed in float32 (float64 for float64). Those of the softmax kernel are never formed:
    with :math:`s_f = \\log \\sum_j \\phi_f(k_j)`, the result is the product of two softmaxes, which neither
    overflow nor vanish: ``softmax_f(q . w_f + s_f) @ (softmax_j(w_f . k_j - |k_j|^2 / 2) @ V)``.

    Args:
        dim, num_heads, qkv_bias: as in :class:`softfree.layers.multihead.MultiHeadAttention`.
        features: number of features; None: ``d log d`` for heads with d channels, rounded up to a multiple of
            8.
        kernel: ``"softmax"`` or ``"relu"``.
        redraw: draw new features at every training step.

    Example:
        >>> import torch
        >>> layer = PerformerAttention(dim=64, num_heads=2, kernel="relu")
        >>> layer(torch.randn(1, 100, 64)).shape
        torch.Size([1, 100, 64])
    """

    features: Tensor

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        features: int | None = None,
        kernel: str = "softmax",
        redraw: bool = False,
        qkv_bias: bool = True,
    ):
        super().__init__(dim, num_heads, qkv_bias=qkv_bias)
        if kernel not in KERNELS:
            raise ValueError(
                f"kernel must be one of {', '.join(map(repr, KERNELS))}, got {kernel!r}"
            )
        if features is None:
            features = max(8, 8 * math.ceil(self.head_dim * math.log(self.head_dim) / 8))
        if features < 1:
            raise ValueError(f"features must be >= 1, got {features}")
        self.kernel = kernel
        self.redraw = redraw
        self.register_buffer("features", torch.empty(features, self.head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.features.copy_(
            orthogonal_gaussian(len(self.features), self.head_dim, self.features.device)
        )

    def extra_repr(self) -> str:
        count = self.features.shape[0]
        return f"heads={self.num_heads}, features={count}, kernel={self.kernel}"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, size: Size, mask: Tensor | None) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):
            dtype = compute_dtype(q.dtype)
            features = self.features
            if self.redraw and self.training:
                # Nothing is kept from step to step, so resumed and distributed runs need no special care.
                features = orthogonal_gaussian(len(features), self.head_dim, features.device)
            directions = features.to(dtype).T * self.head_dim**-0.25
            k = k.to(dtype)
            on_queries, on_keys = q.to(dtype) @ directions, k @ directions
            present = None if mask is None else mask[:, None, :, None]
            if self.kernel == "softmax":
                half_squares = k.square().sum(-1, keepdim=True) * (0.5 * self.head_dim**-0.5)
                on_keys = on_keys - half_squares
                if present is not None:
                    on_keys = on_keys.masked_fill(~present, -torch.inf)
                totals = on_keys.logsumexp(-2, keepdim=True)
                key_weights = (on_keys - totals).exp().to(v.dtype)
                query_weights = (on_queries + totals).softmax(-1).to(v.dtype)
                return query_weights @ (key_weights.mT @ v)
            phi_k, phi_q = (t.relu() + RELU_OFFSET for t in (on_keys, on_queries))
            if present is not None:
                phi_k = torch.where(present, phi_k, 0)
            return linear_attention(phi_q, phi_k, v)


def linear_attention(phi_q: Tensor, phi_k: Tensor, v: Tensor) -> Tensor:
    """Average the values with weights that are products of features, (..., n_q, f) and (..., n_k, f)."""
    # Means instead of sums, so that half precision does not overflow; their ratio is the same.
    totals = phi_k.mean(-2)[..., None].to(v.dtype)
    phi_k, phi_q = phi_k.to(v.dtype), phi_q.to(v.dtype)
    return phi_q @ (phi_k.mT @ (v / v.shape[-2])) / (phi_q @ totals)


def orthogonal_gaussian(rows: int, columns: int, device: torch.device | None = None) -> Tensor:
    """(rows, columns): each row a standard normal vector, orthogonal to the others of its block.

    A block has ``columns`` rows, the last one perhaps fewer.
    """
    blocks = -(-rows // columns)
    q, r = torch.linalg.qr(torch.randn(blocks, columns, columns, device=device))
    # QR algorithms favour certain signs. Undoing that makes all directions equally likely.
    q = q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None, :]
    directions = q.mT.flatten(0, 1)[:rows]
    lengths = torch.randn(rows, columns, device=device).norm(dim=1, keepdim=True)
    return directions * lengths
