"""The norm of each head's queries over its channels."""

import torch.nn.functional as F
from torch import Tensor

from softfree.ops.shared.precision import compute_dtype

EPS = 1e-5


def query_norm(q: Tensor) -> Tensor:
    """``(q - mean) / sqrt(variance + 1e-5)`` over the last dimension, rounded to the dtype of ``q``.

    All queries then lie on one sphere, so that the kernel compares directions alone, at a distance that neither
    depth nor training changes.

    Example:
        >>> import torch
        >>> query_norm(torch.tensor([[1.0, 3.0], [-20.0, 20.0]]))
        tensor([[-1.0000,  1.0000],
                [-1.0000,  1.0000]])
    """
    x = q.to(compute_dtype(q.dtype))
    return F.layer_norm(x, (x.shape[-1],), eps=EPS).to(q.dtype)
