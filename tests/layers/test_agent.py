"""Agent attention: the formula, all tokens and a single one as agents, biases at other sizes, linear cost."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from softfree.layers import AgentAttention

DIM, HEADS = 12, 3


def layer(**options) -> AgentAttention:
    torch.manual_seed(0)
    return AgentAttention(DIM, HEADS, **options).double().eval()


def tokens(count: int) -> torch.Tensor:
    return torch.randn(2, count, DIM, dtype=torch.float64)


def projected(attention: AgentAttention, x: torch.Tensor) -> list[torch.Tensor]:
    return [t.unflatten(2, (HEADS, -1)).transpose(1, 2) for t in attention.qkv(x).chunk(3, -1)]


def finish(attention: AgentAttention, out: torch.Tensor) -> torch.Tensor:
    return attention.proj(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("prefix", [0, 1])
def test_it_is_the_product_of_two_biased_softmaxes_and_a_convolution(prefix):
    attention = layer(landmarks=4, grid=(6, 4))
    x = tokens(prefix + 24)
    q, k, v = projected(attention, x)
    image = q[:, :, prefix:].mT.unflatten(3, (6, 4))
    agents = F.adaptive_avg_pool2d(image.flatten(0, 1), 2).flatten(2).mT.unflatten(0, (2, HEADS))
    coarse = F.interpolate(attention.coarse_bias.flatten(0, 1), (6, 4), mode="bilinear")
    lines = (attention.row_bias + attention.column_bias).flatten(0, 1)
    bias = F.pad((coarse + lines).flatten(2), (prefix, 0)).unflatten(0, (2, HEADS))
    scale = (DIM // HEADS) ** -0.5
    collected = (agents @ k.mT * scale + bias[1]).softmax(-1) @ v
    out = (q @ agents.mT * scale + bias[0].mT).softmax(-1) @ collected
    values = v[:, :, prefix:].mT.unflatten(3, (6, 4)).flatten(1, 2)
    conv = attention.value_conv
    convolved = F.conv2d(values, conv.weight, conv.bias, padding=1, groups=DIM)
    out[:, :, prefix:] += convolved.unflatten(1, (HEADS, -1)).flatten(3).mT
    torch.testing.assert_close(attention(x, (6, 4)), finish(attention, out))


def test_with_all_tokens_as_agents_it_is_softmax_attention_to_queries_and_then_to_keys():
    attention = layer(landmarks=20, sequence=True, value_conv=0)
    x = tokens(20)
    q, k, v = projected(attention, x)
    collected = F.scaled_dot_product_attention(q, k, v)
    out = F.scaled_dot_product_attention(q, q, collected)
    torch.testing.assert_close(attention(x), finish(attention, out))


def test_with_one_agent_all_tokens_get_what_it_collects():
    attention = layer(landmarks=1, agent_bias=False, value_conv=0)
    x = tokens(24)
    q, k, v = projected(attention, x)
    out = F.scaled_dot_product_attention(q.mean(2, keepdim=True), k, v).expand_as(v)
    torch.testing.assert_close(attention(x, (6, 4)), finish(attention, out))


@pytest.mark.parametrize("size", [(6, 4), (9, 11), (1, 3)])
def test_weights_of_a_token_add_up_to_one_at_any_size(size):
    attention = layer(landmarks=9, grid=(6, 4), value_conv=0)
    q, k, _ = projected(attention, tokens(size[0] * size[1]))
    out = attention.attend(q, k, torch.ones_like(q), size, None)
    torch.testing.assert_close(out, torch.ones_like(out))


def test_biases_of_a_picture_twice_as_large_are_those_of_the_picture_resized():
    attention = layer(landmarks=4, grid=(6, 4))
    small, large = attention.biases(24, (6, 4)), attention.biases(96, (12, 8))
    blurred = F.avg_pool2d(large.unflatten(3, (12, 8)).flatten(0, 2), 2).flatten(1)
    # Bilinear: not the same to the last digit, but the same picture.
    flat = torch.stack([small.flatten(), blurred.flatten()])
    assert torch.corrcoef(flat)[0, 1] > 0.95


def test_its_cost_is_linear_in_the_tokens():
    attention = layer(landmarks=8, sequence=True)

    def flops(count: int) -> int:
        with FlopCounterMode(display=False) as counter:
            attention(tokens(count))
        return counter.get_total_flops()

    # Some operations are not counted, none of which is a product with an n x n matrix.
    assert flops(256) == 2 * flops(128) == 4 * flops(64)
