"""Nyströmformer: the formula, all tokens as landmarks, its inverse and its landmarks."""

import pytest
import torch

from softfree.layers import NystromformerAttention, SoftmaxAttention
from softfree.layers.nystromformer import SegmentMeans, iterative_inverse

DIM, HEADS = 12, 3


def layer(**options) -> NystromformerAttention:
    return NystromformerAttention(DIM, HEADS, **options).double().eval()


def tokens(count: int) -> torch.Tensor:
    return torch.randn(2, count, DIM, dtype=torch.float64)


@pytest.mark.parametrize(("size", "prefix"), [((4, 5), 0), ((4, 5), 1), (None, 0)])
def test_with_all_tokens_as_landmarks_it_is_softmax_attention(size, prefix):
    attention = layer(landmarks=64, stride=1, sequence=size is None, value_conv=0, inverse_steps=40)
    # Sharper scores: otherwise the softmax matrix is nearly singular, and 40 steps don't invert it.
    attention.qkv.weight.data *= 5
    exact = SoftmaxAttention(DIM, HEADS).double()
    exact.load_state_dict(attention.state_dict())
    x = tokens(prefix + 20)
    torch.testing.assert_close(attention(x, size), exact(x), atol=1e-8, rtol=1e-8)
    if size is None:
        mask = torch.arange(20) < torch.tensor([[20], [13]])
        padded, wanted = attention(x, None, mask), exact(x, None, mask)
        torch.testing.assert_close(padded[mask], wanted[mask], atol=1e-8, rtol=1e-8)


def test_it_is_the_product_of_three_softmaxes_and_a_convolution():
    attention = layer(landmarks=5, sequence=True, value_conv=3)
    x = tokens(20)
    q, k, v = (t.unflatten(2, (HEADS, -1)).transpose(1, 2) for t in attention.qkv(x).chunk(3, -1))
    q_mean, k_mean = (t.unflatten(2, (5, 4)).mean(3) for t in (q, k))

    def weights(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a @ b.mT / (DIM // HEADS) ** 0.5).softmax(-1)

    inverse = iterative_inverse(weights(q_mean, k_mean), 6)
    out = weights(q, k_mean) @ inverse @ weights(q_mean, k) @ v
    out = out.transpose(1, 2).flatten(2)
    convolved = attention.value_conv(v.transpose(1, 2).flatten(2), None)
    torch.testing.assert_close(attention(x), attention.proj(out + convolved))


def test_images_have_a_landmark_per_window_and_at_most_the_number_given():
    counts = []
    for options in (dict(), dict(landmarks="conv"), dict(landmarks="conv:9"), dict(landmarks=4)):
        attention = layer(stride=2, **options)
        attention.sampler.register_forward_hook(lambda m, i, out: counts.append(out[0].shape[2]))
        attention(tokens(64), (8, 8))
    assert counts[::2] == counts[1::2] == [16, 16, 9, 4]


def test_segments_share_out_the_real_tokens_as_evenly_as_can_be():
    q = torch.arange(7.0).view(1, 1, 7, 1)
    means, mask = SegmentMeans(3)(q)
    assert mask is None
    assert means.flatten().tolist() == [1.0, 3.5, 5.5]
    assert SegmentMeans(7)(q)[0].flatten().tolist() == list(range(7))
    real = torch.tensor([[True, False, True, True, False, True, False]])
    means, mask = SegmentMeans(2)(q, None, real)
    assert means.flatten().tolist() == [1.0, 4.0] and mask.all()
    means, mask = SegmentMeans(6)(q, None, real)
    assert mask.tolist() == [[True] * 4 + [False] * 2]
    assert means[..., :4, 0].flatten().tolist() == [0.0, 2.0, 3.0, 5.0]


@pytest.mark.parametrize("m", [1, 2, 7, 16])
def test_the_iteration_converges_to_the_pseudoinverse(m):
    a = (4 * torch.randn(5, m, m, dtype=torch.float64)).softmax(-1)
    torch.testing.assert_close(iterative_inverse(a, 40), torch.linalg.pinv(a), atol=1e-6, rtol=1e-6)
    singular = torch.full((m, m), 1 / m, dtype=torch.float64)
    torch.testing.assert_close(iterative_inverse(singular, 40), singular)
    torch.testing.assert_close(iterative_inverse(torch.eye(m)), torch.eye(m))


def test_the_start_value_is_each_matrix_own():
    a = torch.randn(3, 8, 8, dtype=torch.float64).softmax(-1)
    worst = torch.zeros(1, 8, 8, dtype=torch.float64)
    worst[..., 0] = 1  # the largest column sum there is
    together = iterative_inverse(torch.cat([a, worst]), 3)
    torch.testing.assert_close(together[:3], iterative_inverse(a, 3), atol=0, rtol=1e-12)
