"""FLatten: the formula, lengths that the focus keeps, angles that it widens, the rank that the convolution restores."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from softfree.layers import FocusedLinearAttention
from softfree.layers.focused import focused

DIM, HEADS = 12, 3


def layer(**options) -> FocusedLinearAttention:
    torch.manual_seed(0)
    attention = FocusedLinearAttention(DIM, HEADS, **options).double().eval()
    torch.nn.init.normal_(attention.scale)
    return attention


def tokens(count: int) -> torch.Tensor:
    return torch.randn(2, count, DIM, dtype=torch.float64)


def test_it_is_the_formula_of_the_paper_and_a_convolution_shared_by_the_heads():
    attention, x = layer(), tokens(24)
    scale = F.softplus(attention.scale).flatten()
    q, k, v = attention.qkv(x).chunk(3, -1)
    q, k = ((t.relu() + 1e-6) / scale for t in (q, k))
    q, k = (t**3 * t.norm(dim=-1, keepdim=True) / (t**3).norm(dim=-1, keepdim=True) for t in (q, k))
    q, k, v = (t.unflatten(2, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
    weights = q @ k.mT
    out = weights / weights.sum(-1, keepdim=True) @ v
    image, conv = v.mT.unflatten(3, (6, 4)).flatten(0, 1), attention.value_conv
    convolved = F.conv2d(image, conv.weight, conv.bias, padding=2, groups=DIM // HEADS)
    out = out + convolved.flatten(2).mT.unflatten(0, (2, HEADS))
    torch.testing.assert_close(attention(x, (6, 4)), attention.proj(out.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("power", [1, 2, 3, 8])
def test_the_focus_keeps_the_length_and_the_order_of_channels(power):
    x = torch.rand(2, HEADS, 20, 4, dtype=torch.float64) + 1e-6
    turned = focused(x, power)
    torch.testing.assert_close(
        turned.transpose(1, 2).flatten(2).norm(dim=2), x.transpose(1, 2).flatten(2).norm(dim=2)
    )
    assert torch.equal(turned.argsort(-1), x.argsort(-1))
    if power == 1:
        torch.testing.assert_close(turned, x)


def test_the_focus_parts_tokens_with_different_largest_channels_and_joins_those_with_the_same():
    a, b, c = torch.tensor([[3.0, 2.0], [2.0, 3.0], [3.0, 1.0]]).double().view(3, 1, 1, 1, 2)

    def cosine(x, y, power):
        return F.cosine_similarity(focused(x, power).flatten(), focused(y, power).flatten(), 0)

    assert cosine(a, b, 3) < cosine(a, b, 1) and cosine(a, c, 3) > cosine(a, c, 1)


@pytest.mark.parametrize("factor", [1e-15, 1e15])
def test_features_of_any_size_are_finite(factor):
    x = factor * torch.rand(1, HEADS, 20, 4)
    assert focused(x + 1e-20, 3).isfinite().all()


def test_the_convolution_restores_the_rank_that_the_features_limit():
    count, head_dim = 30, DIM // HEADS

    def matrix(attention) -> torch.Tensor:
        """What head 0 makes of values that are 1 at one token, in channel 0."""
        q, k, _ = (
            t.unflatten(2, (HEADS, -1)).transpose(1, 2) for t in attention.qkv(x).chunk(3, -1)
        )
        values = torch.zeros(count, HEADS, count, head_dim).double()
        values[:, 0, :, 0] = torch.eye(count)
        q, k = (t.expand(count, -1, -1, -1) for t in (q, k))
        out = attention.attend(q, k, values, None, None)[:, 0, :, 0].T
        return out if attention.value_conv is None else out - attention.value_conv.bias[0]

    x = tokens(count)[:1]
    rank = torch.linalg.matrix_rank(matrix(layer(sequence=True, value_conv=0)), rtol=1e-9)
    restored = torch.linalg.matrix_rank(matrix(layer(sequence=True)), rtol=1e-9)
    assert rank <= head_dim and restored == count


def test_its_cost_is_linear_in_the_tokens():
    attention = layer(sequence=True)

    def flops(count: int) -> int:
        with FlopCounterMode(display=False) as counter:
            attention(tokens(count))
        return counter.get_total_flops()

    assert flops(256) == 2 * flops(128)
