"""Performer: its features, its convergence to softmax attention, and its numerics."""

import pytest
import torch

from softfree.layers import PerformerAttention, SoftmaxAttention
from softfree.layers.performer import orthogonal_gaussian

DIM, HEADS = 12, 3


def layer(**options) -> PerformerAttention:
    return PerformerAttention(DIM, HEADS, **options).double().eval()


def tokens(count: int = 20) -> torch.Tensor:
    return torch.randn(2, count, DIM, dtype=torch.float64)


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(2, (HEADS, -1)).transpose(1, 2)


def by_definition(attention: PerformerAttention, x: torch.Tensor, mask: torch.Tensor):
    """phi(Q) (phi(K)^T V) / (phi(Q) phi(K)^T 1), with the features themselves."""
    q, k, v = (heads(t) for t in attention.qkv(x).chunk(3, -1))
    d = DIM // HEADS
    q, k = q * d**-0.25, k * d**-0.25
    if attention.kernel == "softmax":
        phi_q, phi_k = (
            torch.exp(t @ attention.features.T - t.square().sum(-1, keepdim=True) / 2)
            for t in (q, k)
        )
    else:
        phi_q, phi_k = ((t @ attention.features.T).relu() + 1e-3 for t in (q, k))
    phi_k = phi_k * mask[:, None, :, None]
    weights = phi_q @ phi_k.mT
    out = weights @ v / weights.sum(-1, keepdim=True)
    return attention.proj(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("kernel", ["softmax", "relu"])
def test_it_is_the_kernel_of_its_features(kernel):
    attention, x = layer(kernel=kernel, features=10), tokens()
    mask = torch.rand(2, 20) > 0.3
    expected = by_definition(attention, torch.where(mask[..., None], x, 0), mask)
    torch.testing.assert_close(attention(x, None, mask), expected)


def test_its_estimate_converges_to_softmax_attention_as_features_grow():
    exact = SoftmaxAttention(DIM, HEADS).double()
    x = tokens()
    expected = exact(x)
    errors = []
    for features in (16, 256, 4096, 65536):
        attention = layer(features=features)
        attention.load_state_dict(exact.state_dict(), strict=False)
        errors.append(((attention(x) - expected).norm() / expected.norm()).item())
    assert errors == sorted(errors, reverse=True)
    # Sixteen times the features, a quarter of the error; 256 times between the second and the last.
    assert errors[-1] < errors[1] / 8 and errors[-1] < 0.02


def test_features_are_orthogonal_in_blocks_and_as_long_as_gaussian_vectors():
    features = orthogonal_gaussian(2000, 8).double()
    first = features[:8]
    products = first @ first.T
    torch.testing.assert_close(products, torch.diag(products.diagonal()), atol=1e-5, rtol=0)
    assert features.square().sum(1).mean().item() == pytest.approx(8, rel=0.05)
    assert features.mean(0).abs().max() < 0.1
    assert orthogonal_gaussian(11, 8).shape == (11, 8)


def test_there_are_d_log_d_features_unless_told_otherwise():
    assert PerformerAttention(64, 2).features.shape == (112, 32)
    assert PerformerAttention(2, 2).features.shape == (8, 1)
    assert "features=5, kernel=relu" in repr(layer(features=5, kernel="relu"))


def test_features_stay_unless_redrawn_in_training_and_are_saved():
    fixed, x = layer(), tokens()
    evaluated = fixed(x)
    assert torch.equal(fixed.train()(x), evaluated)
    redrawn = layer(redraw=True)
    redrawn.load_state_dict(fixed.state_dict())
    redrawn.train()
    assert not torch.allclose(redrawn(x), redrawn(x))
    # Training leaves the features of evaluation alone.
    assert torch.equal(redrawn.eval()(x), evaluated)


@pytest.mark.parametrize("scale", [1e-3, 1e2, 1e4])
def test_the_softmax_kernel_neither_overflows_nor_vanishes(scale):
    attention, x = layer().float(), (scale * tokens()).float().requires_grad_()
    out = attention(x)
    out.sum().backward()
    assert out.isfinite().all() and x.grad.isfinite().all()
    # A weighted mean of the values is no larger than the largest.
    v = attention.qkv(x).chunk(3, -1)[2]
    attention.proj = torch.nn.Identity()
    attention.proj.in_features = DIM
    assert attention(x).abs().max() <= v.abs().max() * (1 + 1e-5)
