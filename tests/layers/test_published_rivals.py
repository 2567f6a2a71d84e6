"""Our rivals against well-known packages on shared weights, where these are installed."""

import pytest
import torch

from softfree.layers import (
    LinformerAttention,
    NystromformerAttention,
    PerformerAttention,
    ReformerAttention,
)

DIM, HEADS = 16, 2


def tokens(count: int) -> torch.Tensor:
    return torch.randn(2, count, DIM, dtype=torch.float64)


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(2, (HEADS, -1)).transpose(1, 2)


def merged(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("length", [20, 13])
def test_linformer_is_the_packages_with_one_projection_for_keys_and_values(length):
    package = pytest.importorskip("linformer", reason="the package linformer is not installed")
    ours = LinformerAttention(DIM, HEADS, grid=20, slots=6, sequence=True, qkv_bias=False).double()
    theirs = package.LinformerSelfAttention(DIM, seq_len=20, k=6, heads=HEADS).double()
    for part, weight in zip("qkv", ours.qkv.weight.chunk(3), strict=True):
        getattr(theirs, f"to_{part}").weight.data = weight.data
    theirs.proj_k.data = theirs.proj_v.data = ours.projection.data.T
    theirs.to_out.load_state_dict(ours.proj.state_dict())
    x = tokens(length)
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("kernel", ["softmax", "relu"])
def test_performer_is_the_packages_with_the_same_features(kernel):
    package = pytest.importorskip(
        "performer_pytorch.performer_pytorch", reason="performer-pytorch is not installed"
    )
    ours, x = PerformerAttention(DIM, HEADS, kernel=kernel).double(), tokens(20)
    q, k, v = (heads(t) for t in ours.qkv(x).chunk(3, -1))
    features = dict(projection_matrix=ours.features)
    if kernel == "softmax":
        # Without the package's offset of 1e-4, which is no part of the kernel.
        phi_q = package.softmax_kernel(q, is_query=True, eps=0, **features)
        phi_k = package.softmax_kernel(k, is_query=False, eps=0, **features)
    else:
        phi_q, phi_k = (package.generalized_kernel(t, **features) for t in (q, k))
    out = package.linear_attention(phi_q, phi_k, v)
    torch.testing.assert_close(ours(x), ours.proj(merged(out)))


def test_nystromformer_is_that_of_transformers_with_its_start_value_per_matrix():
    pytest.importorskip("transformers", reason="the package transformers is not installed")
    from transformers import NystromformerConfig
    from transformers.models.nystromformer import modeling_nystromformer

    config = NystromformerConfig(
        hidden_size=DIM, num_attention_heads=HEADS, num_landmarks=5, segment_means_seq_len=20,
        conv_kernel_size=7, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    theirs = modeling_nystromformer.NystromformerSelfAttention(config).double()
    theirs.init_option = "exact"
    ours = NystromformerAttention(DIM, HEADS, landmarks=5, value_conv=7, sequence=True).double()
    parts = zip(ours.qkv.weight.chunk(3), ours.qkv.bias.chunk(3), strict=True)
    for name, (weight, bias) in zip(("query", "key", "value"), parts, strict=True):
        getattr(theirs, name).weight.data = weight.data
        getattr(theirs, name).bias.data = bias.data
    theirs.conv.weight.data = ours.value_conv.weight.data[..., None]
    x = tokens(20)
    torch.testing.assert_close(ours(x), ours.proj(theirs(x)[0]), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("rounds", [1, 3])
def test_reformer_is_the_packages_within_buckets_for_the_same_hashes(rounds):
    package = pytest.importorskip("reformer_pytorch", reason="reformer-pytorch is not installed")
    ours = ReformerAttention(DIM, HEADS, rounds=rounds, buckets=8, chunk=8).double().eval()
    theirs = package.LSHAttention(bucket_size=8, n_hashes=rounds, attend_across_buckets=False)
    x = tokens(64)
    q, v = (heads(t).flatten(0, 1) for t in ours.qv(x).chunk(2, -1))
    buckets = ours._hash(q.unflatten(0, (2, HEADS)), None).flatten(0, 1)
    assert len(buckets.unique()) == 8
    # The package tells the rounds' buckets apart by their numbers.
    numbers = (buckets + 8 * torch.arange(rounds)[:, None]).flatten(1)
    theirs.hash_vectors = lambda n_buckets, vectors, **_: numbers
    out = theirs(q, v)[0].unflatten(0, (2, HEADS))
    torch.testing.assert_close(ours(x), ours.proj(merged(out)))
