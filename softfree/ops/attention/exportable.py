"""The operator as ordinary ATen calls, for programs that leave Python (torch.export, ONNX).

An exported program should run where softfree is not installed, so the custom operator must not appear
in it. Same mathematics as the reference; squared distances come from products, which every exporter
translates, with the same centring as in :mod:`softfree.ops.attention.chunked`.
"""

import torch
from torch import Tensor

from softfree.ops.attention.inverse import newton_iterate
from softfree.ops.attention.reference import normalize_inverse
from softfree.ops.shared.precision import compute_dtype


def soft_attention(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    landmarks: Tensor,
    key_mask: Tensor | None,
    landmark_mask: Tensor | None,
    scale: float,
    normalize: bool,
    iterations: int,
    start: str,
    ridge: float,
) -> Tensor:
    """Arguments and result as in :func:`softfree.ops.attention.reference.soft_attention`."""
    out_dtype, dtype = q.dtype, compute_dtype(q.dtype)
    q, v, landmarks = q.to(dtype), v.to(dtype), landmarks.to(dtype)
    if landmark_mask is not None:
        landmarks = torch.where(landmark_mask[:, None, :, None], landmarks, 0)
    centre = landmarks.mean(2, keepdim=True)
    points = landmarks - centre
    differences = points[..., :, None, :] - points[..., None, :, :]
    a = torch.exp(-0.5 * scale * differences.square().sum(-1))
    r = _kernel(q - centre, points, scale)
    p = (r if k is None else _kernel(k.to(dtype) - centre, points, scale)).mT
    if landmark_mask is not None:
        rows = landmark_mask[:, None, :, None]
        eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
        a = torch.where(rows & rows.mT, a, eye)
        r = torch.where(rows.mT, r, 0)
        p = torch.where(rows, p, 0)
    if key_mask is not None:
        p = torch.where(key_mask[:, None, None, :], p, 0)
        v = torch.where(key_mask[:, None, :, None], v, 0)
    y = newton_iterate(a, iterations, start, ridge)
    if normalize:
        y = normalize_inverse(y, a)
    return (r @ (y @ (p @ v))).to(out_dtype)


def _kernel(x: Tensor, points: Tensor, scale: float) -> Tensor:
    norms = x.square().sum(-1, keepdim=True) + points.square().sum(-1, keepdim=True).mT
    return torch.exp(-0.5 * scale * (norms - 2 * (x @ points.mT)).clamp(min=0))
