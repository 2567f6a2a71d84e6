"""Linformer: the formula, identity projections, and what happens at other lengths and sizes."""

import pytest
import torch

from softfree.layers import LinformerAttention, SoftmaxAttention

DIM, HEADS = 12, 3


def tokens(count: int) -> torch.Tensor:
    return torch.randn(2, count, DIM, dtype=torch.float64)


def softmax_twin(attention: LinformerAttention) -> SoftmaxAttention:
    twin = SoftmaxAttention(DIM, HEADS).double()
    twin.load_state_dict({k: v for k, v in attention.state_dict().items() if k != "projection"})
    return twin


@pytest.mark.parametrize(("size", "prefix"), [((7, 5), 0), ((7, 5), 1), (None, 0)])
def test_with_identity_projections_it_is_softmax_attention(size, prefix):
    grid = 35 if size is None else size
    attention = LinformerAttention(DIM, HEADS, grid=grid, stride=1, sequence=size is None).double()
    attention.projection.data = torch.eye(35, dtype=torch.float64).view(
        35, *attention.projection.shape[1:]
    )
    x = tokens(prefix + 35)
    torch.testing.assert_close(attention(x, size), softmax_twin(attention)(x))


def test_keys_and_values_are_mixed_along_the_length():
    attention = LinformerAttention(DIM, 1, grid=10, slots=4, sequence=True).double()
    x = tokens(10)
    q, k, v = attention.qkv(x).chunk(3, -1)
    k, v = attention.projection @ k, attention.projection @ v
    expected = attention.proj((q @ k.mT / DIM**0.5).softmax(-1) @ v)
    torch.testing.assert_close(attention(x), expected)


def test_there_is_a_slot_for_each_window_of_the_grid():
    assert LinformerAttention(DIM, grid=(56, 56), stride=8, num_heads=3).projection.shape[0] == 49
    assert LinformerAttention(DIM, grid=(15, 8), stride=4, num_heads=3).projection.shape[0] == 8
    attention = LinformerAttention(DIM, HEADS, grid=1001, stride=4, sequence=True)
    assert attention.projection.shape == (251, 1001)
    assert "slots=251, grid=(1001,)" in repr(attention)


def test_a_longer_sequence_repeats_the_projection():
    attention = LinformerAttention(DIM, HEADS, grid=10, slots=4, sequence=True).double()
    whole = attention.matrix(24, None)
    assert torch.equal(whole[:, :10], attention.projection)
    assert torch.equal(whole[:, 10:20], attention.projection)
    assert torch.equal(whole[:, 20:], attention.projection[:, :4])


def test_an_image_of_twice_the_size_has_about_the_same_slots():
    """Of a smooth projection and a smooth image, where resizing loses nothing to speak of."""
    attention = LinformerAttention(DIM, HEADS, grid=(16, 16), slots=3).double()
    down, across = torch.meshgrid(
        *(torch.linspace(0, 1, 16, dtype=torch.float64),) * 2, indexing="ij"
    )
    attention.projection.data = torch.stack([1 + 0 * down, down, down * across]) / 256
    coarse = (down + across).flatten()
    fine = torch.nn.functional.interpolate((down + across)[None, None], (32, 32), mode="bilinear")
    slots = attention.matrix(256, (16, 16)) @ coarse
    torch.testing.assert_close(
        attention.matrix(1024, (32, 32)) @ fine.flatten(), slots, rtol=0.01, atol=0
    )
    torch.testing.assert_close(attention.matrix(256, (16, 16)).sum(1)[:1], slots.new_ones(1))
