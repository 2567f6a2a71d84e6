"""The sequence encoder: padding changes nothing with any attention, pairs are compared as they should be."""

import pytest
import torch

from softfree.layers import ATTENTIONS
from softfree.models.sequence import DEFAULTS, EMBED_DROPOUTS, SequenceClassifier

# Chunks and landmarks of a size that several of them fit into 40 tokens.
SMALL = {
    "soft": dict(stride=4),
    "linformer": dict(slots=8),
    "nystromformer": dict(landmarks=8, value_conv=5),
    "reformer": dict(buckets=4, chunk=8),
}


def build(attention="softpp", **options):
    torch.manual_seed(0)
    options = {**SMALL.get(attention, {}), **options}
    model = SequenceClassifier(20, 40, 3, attention, **options).double().eval()
    # Embeddings of the size they have after training: at the start attention hardly matters.
    with torch.no_grad():
        for weight in (model.embedding.weight, model.positions):
            weight.normal_()
    return model


def draw(batch=3, tokens=40, pair=False):
    generator = torch.Generator().manual_seed(1)
    shape = (batch, 2, tokens) if pair else (batch, tokens)
    return torch.randint(1, 20, shape, generator=generator)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_padded_batch_gives_the_logits_of_the_unpadded_samples(attention, pooling):
    model = build(attention, pooling=pooling)
    tokens = draw()
    lengths = torch.tensor([40, 23, 5])
    mask = torch.arange(40) < lengths[:, None]
    expected = torch.cat(
        [model(row[None, :n]) for row, n in zip(tokens, lengths.tolist(), strict=True)]
    )
    torch.testing.assert_close(model(torch.where(mask, tokens, 0), mask), expected)
    torch.testing.assert_close(model(torch.where(mask, tokens, 7), mask), expected)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_padded_pair_gives_the_logits_of_the_unpadded_pair(attention):
    model = build(attention, pair=True)
    tokens = draw(2, pair=True)
    mask = torch.arange(40) < torch.tensor([[31], [9]])
    padded = model(tokens, mask.expand(2, -1, -1))
    a, b = (model.forward_features(t) for t in (tokens[:, 0, :31], tokens[:, 1, :9]))
    expected = model.head(torch.cat([a, b, a * b, a - b], -1))
    torch.testing.assert_close(padded, expected)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_without_pooling_every_real_token_has_the_logits_it_has_unpadded(attention):
    model = build(attention, channels=6, pooling="none")
    tokens = torch.randn(2, 40, 6, dtype=torch.float64)
    logits = model(tokens, torch.arange(40) < torch.tensor([[40], [23]]))
    assert logits.shape == (2, 40, 3)
    torch.testing.assert_close(logits[1, :23], model(tokens[1:, :23])[0])


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_tokens_change_the_features_of_others_through_the_attention(attention):
    model = build(attention, pooling="cls")
    tokens = draw(1)
    other = tokens.clone()
    other[:, 20:] = (other[:, 20:] + 5) % 19 + 1
    assert not torch.allclose(model(tokens), model(other), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_every_parameter_learns(attention):
    model = build(attention, pooling="cls").train()
    tokens = torch.arange(40).expand(2, -1) % 20
    model(tokens, torch.arange(40) < torch.tensor([[40], [30]])).square().sum().backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert missing == []


def test_order_matters_by_the_positions_alone():
    model = build("softmax")
    tokens = draw(1)
    turned = tokens.flip(1)
    assert not torch.allclose(model(tokens), model(turned))
    torch.nn.init.zeros_(model.positions)
    torch.testing.assert_close(model(tokens), model(turned))


def test_the_encoder_has_the_size_of_the_papers():
    model = SequenceClassifier(vocab_size=512, length=1024, num_classes=10, attention="softmax")
    embeddings = (512 + 1024) * 64
    attention = 4 * (64 * 64 + 64)
    mlp = 64 * 128 + 128 + 128 * 64 + 64
    head = 64 * 128 + 128 + 128 * 10 + 10
    expected = embeddings + 2 * (attention + mlp + 4 * 64) + 2 * 64 + head
    assert sum(p.numel() for p in model.parameters()) == expected
    assert model.blocks[0].attn.num_heads == 2


def test_soft_has_a_landmark_for_each_window_of_four_unless_told_otherwise():
    def count(**options):
        model = SequenceClassifier(20, 40, 3, "softpp", **options)
        return model.blocks[0].attn.sampler(torch.randn(1, 2, 40, 32), None)[0].shape[2]

    assert count() == 10 and count(stride=20) == 2
    assert set(DEFAULTS) | {"softmax"} == set(ATTENTIONS)


@pytest.mark.parametrize(
    ("attention", "gains"),
    [("soft", dict(query_gain=2)), ("softpp", dict(query_gain=2, output_gain=30))],
)
def test_with_gains_most_of_what_soft_adds_before_training_differs_between_tokens(attention, gains):
    tokens = torch.randint(1, 16, (2, 500), generator=torch.Generator().manual_seed(0))

    def differing_share(**options):
        torch.manual_seed(0)
        model = SequenceClassifier(16, 500, 10, attention, **options)
        block = model.blocks[0]
        added = block.attn(block.norm1(model.embedding(tokens) + model.positions))
        return ((added - added.mean(1, keepdim=True)).norm() / added.norm()).item()

    assert differing_share(query_gain=1) < 0.5 < differing_share(**gains)


def test_soft_starts_with_larger_queries_unless_told_otherwise():
    def queries(**options):
        torch.manual_seed(0)
        model = SequenceClassifier(16, 50, 10, "soft", **options)
        return model.blocks[0].attn.qv.weight[:64]

    torch.testing.assert_close(queries(), 2 * queries(query_gain=1), rtol=0, atol=0)


def test_gains_multiply_the_initial_weights():
    def weights(**options):
        torch.manual_seed(0)
        attention = SequenceClassifier(16, 50, 10, landmarks="conv", **options).blocks[1].attn
        return attention.qv.weight[:64], attention.proj.weight, attention.sampler.norm.weight

    gained = weights(query_gain=2, output_gain=4, landmark_gain=0.25)
    for plain, gain, weight in zip(weights(), (2, 4, 0.25), gained, strict=True):
        assert torch.equal(gain * plain, weight)


def test_dropout_acts_in_training_and_not_in_evaluation():
    model = build()
    tokens = draw()
    torch.testing.assert_close(model(tokens), model(tokens))
    model.train()
    assert not torch.allclose(model(tokens), model(tokens))


@pytest.mark.parametrize(
    ("tokens", "pair", "message"),
    [
        (draw(tokens=41), False, "at most 40, got 41"),
        (draw(pair=True), False, r"shape \(batch, tokens\)"),
        (draw(), True, r"shape \(batch, 2, tokens\)"),
    ],
)
def test_tokens_of_a_wrong_shape_are_refused(tokens, pair, message):
    with pytest.raises(ValueError, match=message):
        build(pair=pair)(tokens)


@pytest.mark.parametrize("shape", [(2, 40), (2, 40, 5)])
def test_tokens_without_their_channels_are_refused(shape):
    with pytest.raises(ValueError, match=r"shape \(batch, tokens, 6\), got"):
        build(channels=6)(torch.randn(shape))


def test_pairs_are_pooled_tokens_of_a_vocabulary():
    for options in (dict(pooling="none"), dict(channels=6)):
        with pytest.raises(ValueError, match="pair is for pooled sequences of a vocabulary, got"):
            SequenceClassifier(20, 40, 3, pair=True, **options)


def test_an_unknown_pooling_is_refused():
    with pytest.raises(ValueError, match="pooling must be one of mean, cls, none, got 'max'"):
        build(pooling="max")


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_the_encoder_runs_under_autocast_with_masks(attention):
    model = build(attention).float()
    mask = torch.arange(40) < torch.tensor([[40], [17], [1]])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(draw(), mask)
    assert logits.isfinite().all()
    torch.testing.assert_close(logits.float(), model(draw(), mask), rtol=0.1, atol=0.1)


@pytest.mark.parametrize("name", ["vocab_size", "length", "num_classes", "depth", "mlp_dim"])
def test_sizes_of_none_are_refused_by_name(name):
    sizes = {"vocab_size": 20, "length": 40, "num_classes": 3, name: 0}
    with pytest.raises(ValueError, match=f"`{name}` must be at least 1, got 0"):
        SequenceClassifier(**sizes)


def test_options_that_the_attention_does_not_know_are_refused():
    with pytest.raises(TypeError, match="'softmax' has no option 'stride'; there are 'qkv_bias'"):
        SequenceClassifier(20, 40, 3, "softmax", stride=4)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_dropout_of_channels_keeps_equal_tokens_equal_and_softfree_has_it_by_default(attention):
    torch.manual_seed(0)
    options = SMALL.get(attention, {})
    kinds = {
        kind: SequenceClassifier(20, 40, 3, attention, dropout=0.5, embed_dropout=kind, **options)
        for kind in EMBED_DROPOUTS
    }
    x = torch.ones(4, 40, 64)
    same = {
        kind: bool((dropped == dropped[:, :1]).all())
        for kind, model in kinds.items()
        if (dropped := model.train().dropout(x)).unique().tolist() == [0, 2]
    }
    assert same == {"auto": attention == "softfree", "tokens": False, "channels": True}
    assert all(torch.equal(model.eval().dropout(x), x) for model in kinds.values())
    samples = kinds["channels"].train().dropout(x)[:, 0]
    assert not torch.equal(samples[0], samples[1])


def test_an_unknown_dropout_of_the_embedding_is_refused_with_those_there_are():
    with pytest.raises(
        ValueError, match="embed_dropout must be one of auto, tokens, channels, got 'all'"
    ):
        SequenceClassifier(20, 40, 3, embed_dropout="all")
