"""The definition of softmax-free attention. Every faster path is tested against this file.

It is written to be read: whole matrices, plain autograd, no chunks. Use it to check results, not to train.
"""

import torch
from torch import Tensor

from softfree.ops.attention.inverse import invert, newton_iterate
from softfree.ops.attention.settings import AttentionSettings, Inputs
from softfree.ops.attention.solve import iterated_solve, ridge_solve
from softfree.ops.shared.precision import compute_dtype

BY_DIFFERENCES = "donot_use_mm_for_euclid_dist"


def squared_distance(x: Tensor, y: Tensor) -> Tensor:
    """``||x_i - y_j||^2`` of (..., n, d) and (..., m, d): (..., n, m).

    Computed from differences, so it is never negative, and exactly 0 for equal points. Finite where the
    differences are: a square that would overflow is as good as any other distance whose kernel is 0.
    """
    return _distance(x, y).square()


def _distance(x: Tensor, y: Tensor) -> Tensor:
    largest = torch.finfo(x.dtype).max ** 0.5 / 2
    return torch.cdist(x, y, compute_mode=BY_DIFFERENCES).clamp(max=largest)


def gaussian_kernel(x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
    """``exp(-scale / 2 * ||x_i - y_j||^2)`` of (..., n, d) and (..., m, d): (..., n, m)."""
    # Compiled programs only need first gradients, and dynamo accepts no autograd function with a ``jvp``.
    distance = squared_distance if torch.compiler.is_compiling() else _SquaredDistance.apply
    return torch.exp(-0.5 * scale * distance(x, y))


class _SquaredDistance(torch.autograd.Function):
    """:func:`squared_distance` with derivatives of every order and mode.

    ``torch.cdist`` has only a first gradient.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        return squared_distance(x, y)

    @staticmethod
    def setup_context(ctx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, grad: Tensor):
        if not torch.is_grad_enabled():
            with torch.enable_grad():
                x, y = (t.detach().requires_grad_() for t in ctx.saved_tensors)
                distance = _distance(x, y)
                return torch.autograd.grad(distance, (x, y), 2 * distance.detach() * grad)
        x, y = _centred(*ctx.saved_tensors)
        grad_x = 2 * (grad.sum(-1, keepdim=True) * x - grad @ y)
        grad_y = 2 * (grad.mT.sum(-1, keepdim=True) * y - grad.mT @ x)
        return grad_x.sum_to_size(x.shape), grad_y.sum_to_size(y.shape)

    @staticmethod
    def jvp(ctx, dx: Tensor, dy: Tensor) -> Tensor:
        x, y = _centred(*ctx.saved_tensors)
        own = (x * dx).sum(-1, keepdim=True) + (y * dy).sum(-1, keepdim=True).mT
        return 2 * (own - x @ dy.mT - dx @ y.mT)


def _centred(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Both minus the mean of ``y``: the distances stay the same, and little cancels."""
    centre = y.detach().mean(-2, keepdim=True)
    return x - centre, y - centre


def product_kernel(x: Tensor, y: Tensor, scale: float) -> Tensor:
    """:func:`gaussian_kernel` from one matrix product, for exporters.

    The mean of ``y`` is subtracted first, so that little cancels.
    """
    centre = y.mean(-2, keepdim=True)
    x, y = x - centre, y - centre
    norms = x.square().sum(-1, keepdim=True) + y.square().sum(-1, keepdim=True).mT
    return torch.exp(-0.5 * scale * (norms - 2 * (x @ y.mT)).clamp(min=0))


def landmark_kernel(
    landmarks: Tensor, mask: Tensor | None, scale: float, exportable: bool = False
) -> Tensor:
    """``A = kappa(L, L)``, (..., m, m); a masked landmark is similar only to itself."""
    if exportable:  # there are few enough landmarks to form all differences
        differences = landmarks[..., :, None, :] - landmarks[..., None, :, :]
        a = torch.exp(-0.5 * scale * differences.square().sum(-1))
    else:
        a = gaussian_kernel(landmarks, landmarks, scale)
    return a if mask is None else among_present(a, mask)


def among_present(a: Tensor, mask: Tensor) -> Tensor:
    """A (..., m, m) where both landmarks are present in the mask (..., m), the identity elsewhere."""
    both = mask[..., :, None] & mask[..., None, :]
    return torch.where(both, a, torch.eye(a.shape[-1], dtype=a.dtype, device=a.device))


def normalizers(a: Tensor, normalize: bool) -> Tensor:
    """``D^-1/2`` with ``D = diag(A 1)`` as a column, (..., m, 1); without ``normalize``, 1."""
    return a.sum(-1, keepdim=True).rsqrt() if normalize else a.new_ones(())


def normalize_inverse(inverse: Tensor, a: Tensor) -> Tensor:
    """``D^-1/2 Y D^-1/2`` with ``D = diag(A 1)`` (Eq. 17)."""
    root = a.sum(-1).rsqrt()
    return root[..., :, None] * inverse * root[..., None, :]


def soft_attention(
    inputs: Inputs,
    settings: AttentionSettings,
    *,
    unrolled_gradient: bool = False,
    exportable: bool = False,
) -> Tensor:
    """``X = kappa(Q, L) Y' (P V)`` with ``P = kappa(L, K)``, ``A = kappa(L, L)``, ``Y = inverse(A)``.

    ``Y'`` is ``Y`` (SOFT, Eq. 9) or ``D^-1/2 Y D^-1/2`` with ``D = diag(A 1)`` (SOFT++, Eq. 17).

    Args:
        inputs, settings: as in :func:`softfree.soft_attention`.
        unrolled_gradient: differentiate through the Newton steps instead of using Eq. 12.
        exportable: for programs that leave Python (torch.export, ONNX). Uses only operations that every
            exporter translates, which excludes Eq. 12 and the differences of all tokens.

    Returns:
        (batch, heads, n_q, d_v) of ``q``'s dtype.
    """
    q, k, v, landmarks, key_mask, landmark_mask = inputs
    scale, normalize, inverse = settings
    kernel = product_kernel if exportable else gaussian_kernel
    invert_by = newton_iterate if unrolled_gradient or exportable else invert
    with torch.autocast(q.device.type, enabled=False):
        out_dtype, dtype = q.dtype, compute_dtype(q.dtype)
        q, v, landmarks = (t.to(dtype) for t in (q, v, landmarks))
        k = q if k is None else k.to(dtype)
        if landmark_mask is not None:
            landmarks = torch.where(landmark_mask[:, None, :, None], landmarks, 0)
        a = landmark_kernel(landmarks, _per_head(landmark_mask), scale, exportable)
        r = kernel(q, landmarks, scale)
        if key_mask is not None:  # the contents of a masked key must not matter, not even NaN
            k, v = (torch.where(key_mask[:, None, :, None], t, 0) for t in (k, v))
        p = r.mT if k is q else kernel(k, landmarks, scale).mT
        if key_mask is not None:
            p = torch.where(key_mask[:, None, None, :], p, 0)
        if landmark_mask is not None:
            p = torch.where(landmark_mask[:, None, :, None], p, 0)
            r = torch.where(landmark_mask[:, None, None, :], r, 0)
        u = p @ v
        if inverse.method == "solve":
            root = normalizers(a, normalize)
            solve = iterated_solve if exportable else ridge_solve
            w = root * solve(a, root * u, ridge=inverse.ridge, order=inverse.order)
        else:
            y = invert_by(a, inverse)
            w = (normalize_inverse(y, a) if normalize else y) @ u
        return (r @ w).to(out_dtype)


def _per_head(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask[:, None, :]
