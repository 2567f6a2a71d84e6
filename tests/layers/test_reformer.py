"""Reformer: one bucket, hashing by definition, chunks, rounds, and its fixed hashes in evaluation."""

import pytest
import torch

from softfree.layers import ReformerAttention

DIM, HEADS = 12, 3


def layer(**options) -> ReformerAttention:
    return ReformerAttention(DIM, HEADS, **options).double().eval()


def tokens(count: int) -> torch.Tensor:
    return torch.randn(2, count, DIM, dtype=torch.float64)


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(2, (HEADS, -1)).transpose(1, 2)


def masked_attention(attention: ReformerAttention, x: torch.Tensor, allowed: torch.Tensor):
    """Softmax attention with unit queries as keys; the own token counts where there is no other."""
    q, v = (heads(t) for t in attention.qv(x).chunk(2, -1))
    scores = q @ torch.nn.functional.normalize(q, dim=-1).mT / (DIM // HEADS) ** 0.5
    own = torch.eye(x.shape[1], dtype=torch.bool)
    alone = ~(allowed & ~own).any(-1, keepdim=True)
    scores = scores.masked_fill(~torch.where(alone, own, allowed & ~own), -torch.inf)
    return attention.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("chunk", [20, 64])
def test_with_one_bucket_it_is_softmax_attention_on_shared_queries_and_keys(rounds, chunk):
    attention, x = layer(buckets=1, rounds=rounds, chunk=chunk), tokens(20)
    expected = masked_attention(attention, x, torch.ones(20, 20, dtype=torch.bool))
    torch.testing.assert_close(attention(x), expected)
    mask = torch.arange(20) < torch.tensor([[20], [1]])
    expected = masked_attention(attention, x, mask[:, None, None, :].expand(-1, HEADS, 20, -1))
    torch.testing.assert_close(attention(x, None, mask)[mask], expected[mask])


def test_a_token_looks_at_those_of_its_bucket():
    attention, x = layer(buckets=4, rounds=1, chunk=64), tokens(20)
    q = heads(attention.qv(x).chunk(2, -1)[0])
    rotated = q @ attention.rotations[:, 0]
    bucket = torch.cat([rotated, -rotated], -1).argmax(-1)
    assert len(bucket.unique()) == 4
    same = bucket[..., :, None] == bucket[..., None, :]
    torch.testing.assert_close(attention(x), masked_attention(attention, x, same))


@pytest.mark.parametrize("chunk", [1, 3, 4, 7])
def test_in_one_bucket_a_token_sees_its_chunk_and_the_one_before(chunk):
    attention, x = layer(buckets=1, rounds=2, chunk=chunk), tokens(20)
    number = torch.arange(20) // chunk
    distance = number[:, None] - number
    allowed = (distance == 0) | (distance == 1)
    torch.testing.assert_close(attention(x), masked_attention(attention, x, allowed))


def test_rounds_are_averaged_by_the_sums_of_their_exponentials():
    """So several rounds are one softmax over the tokens of all rounds' buckets, each as often as it occurs."""
    attention, x = layer(buckets=4, rounds=5, chunk=64), tokens(20)
    q, v = (heads(t) for t in attention.qv(x).chunk(2, -1))
    rotated = q[:, :, None] @ attention.rotations
    bucket = torch.cat([rotated, -rotated], -1).argmax(-1)
    own = torch.eye(20, dtype=torch.bool)
    times = ((bucket[..., :, None] == bucket[..., None, :]) & ~own).sum(2)
    assert (times.sum(-1) > 0).all() and times.max() > 1
    scores = q @ torch.nn.functional.normalize(q, dim=-1).mT / (DIM // HEADS) ** 0.5
    weights = times * scores.exp()
    out = weights / weights.sum(-1, keepdim=True) @ v
    torch.testing.assert_close(attention(x), attention.proj(out.transpose(1, 2).flatten(2)))


def test_hashes_change_in_training_and_are_fixed_and_saved_for_evaluation():
    attention, other, x = layer(buckets=4, chunk=4), layer(buckets=4, chunk=4), tokens(40)
    expected = attention(x)
    assert torch.equal(attention(x), expected)
    attention.train()
    assert not torch.allclose(attention(x), attention(x))
    other.load_state_dict(attention.state_dict())
    assert torch.equal(other(x), expected)
    assert "rounds=2, buckets=4, chunk=4" in repr(other)
