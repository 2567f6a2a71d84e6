"""replace_attention: other people's models, layer by layer, with their weights, prefix tokens and masks."""

import copy

import pytest
import timm
import torch
from timm.layers import Attention
from torch import nn

import softfree
from softfree.layers import MultiheadSoftAttention
from softfree.models.replace import TimmSoftAttention

SMALL = dict(embed_dim=16, num_heads=2, depth=2, num_classes=5)


def vit(name: str = "vit_tiny_patch16_224", **kwargs):
    torch.manual_seed(0)
    return timm.create_model(name, **{"img_size": 64, **SMALL, **kwargs}).eval()


def soft_layers(model: nn.Module) -> list[TimmSoftAttention]:
    return [m for m in model.modules() if isinstance(m, TimmSoftAttention)]


@pytest.mark.parametrize(
    ("name", "prefix"),
    [
        ("vit_tiny_patch16_224", 1),
        ("deit_tiny_distilled_patch16_224", 2),
        ("vit_small_patch14_reg4_dinov2", 5),
        ("vit_base_patch16_siglip_gap_224", 0),
    ],
)
def test_layers_of_timm_are_soft_attention_over_the_patches_with_their_weights(name, prefix):
    side = 56 if "patch14" in name else 64
    model = vit(name, img_size=side)
    before = copy.deepcopy(model)
    report = softfree.replace_attention(model)
    assert [layer.name for layer in report.replaced] == ["blocks.0.attn", "blocks.1.attn"]
    assert report.left == () or "vit_base" in name  # a pooling attention at its end
    assert not any(type(m) is Attention for m in model.modules())
    old, new = before.blocks[0].attn, model.blocks[0].attn
    q, _, v = old.qkv.weight.chunk(3)
    assert torch.equal(new.attention.qv.weight, torch.cat([q, v]))
    assert torch.equal(new.attention.proj.weight, old.proj.weight)
    x = torch.randn(2, prefix + 16, 16)
    torch.testing.assert_close(new(x), new.attention(x, (4, 4)))
    out = model(torch.randn(2, 3, side, side))
    assert out.shape == (2, 5) and out.isfinite().all()
    out.sum().backward()
    assert all(p.grad is not None for p in new.parameters())


def test_settings_reach_the_layers_and_those_not_given_are_our_own_attention_s():
    model = vit(attn_drop_rate=0.1, proj_drop_rate=0.2)
    softfree.replace_attention(model, landmarks="conv:9", stride=2, value_conv=3)
    layer = model.blocks[1].attn
    assert layer.attention.sampler.count == 9 and layer.attention.value_conv is not None
    assert layer.attention.query_norm and layer.attention.inverse == "solve"
    assert layer.attention.log_bandwidth is not None
    assert (layer.attention.dropout, layer.proj_drop.p) == (0.1, 0.2)


def test_training_mode_dtype_device_and_freezing_are_kept():
    model = vit().to(torch.bfloat16)
    model.blocks[0].attn.requires_grad_(False)
    model.blocks[1].train()
    softfree.replace_attention(model)
    first, second = soft_layers(model)
    assert not first.training and second.training
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not first.attention.qv.weight.requires_grad
    assert second.attention.qv.weight.requires_grad
    assert first.attention.log_bandwidth.requires_grad  # new, and of no use untrained
    on_meta = vit(device="meta")
    softfree.replace_attention(on_meta)
    assert all(p.is_meta for p in on_meta.parameters())


def test_images_of_changing_sizes_have_their_own_grid_also_in_copies_of_the_model():
    model = vit(dynamic_img_size=True)
    softfree.replace_attention(model)
    twin = copy.deepcopy(model)
    sizes = []
    for layer in (model.blocks[0].attn, twin.blocks[0].attn):
        layer.attention.register_forward_pre_hook(lambda _, inputs: sizes.append(inputs[1]))
    model(torch.randn(1, 3, 32, 96))
    twin(torch.randn(1, 3, 96, 32))
    model(torch.randn(1, 3, 48, 64))
    assert sizes == [(2, 6), (6, 2), (3, 4)]


def test_another_input_size_and_dropped_patches_are_followed():
    model = vit(patch_drop_rate=0.5)
    softfree.replace_attention(model)
    sizes = []
    model.blocks[0].attn.attention.register_forward_pre_hook(
        lambda _, inputs: sizes.append(inputs[1])
    )
    model.train()(torch.randn(1, 3, 64, 64))
    model.set_input_size((32, 96))
    model.eval()(torch.randn(1, 3, 32, 96))
    assert sizes == [(1, 8), (2, 6)]


def test_tokens_are_a_sequence_without_a_grid():
    model = vit()
    report = softfree.replace_attention(model, grid=False)
    assert "sequence" in report.replaced[0].note
    layer, x = model.blocks[0].attn, torch.randn(2, 17, 16)
    assert layer.attention.sequence
    torch.testing.assert_close(layer(x), layer.attention(x))


def test_a_mask_of_keys_is_taken_and_one_of_pairs_refused():
    model = vit()
    softfree.replace_attention(model)
    layer, x = model.blocks[0].attn, torch.randn(2, 17, 16)
    keep = torch.rand(2, 17) > 0.4
    expected = layer.attention(x, (4, 4), keep)
    torch.testing.assert_close(layer(x, attn_mask=keep[:, None, None]), expected)
    additive = torch.zeros(2, 1, 1, 17).masked_fill(~keep[:, None, None], -torch.inf)
    torch.testing.assert_close(layer(x, attn_mask=additive), expected)
    with pytest.raises(ValueError, match="landmarks, and these are made of all tokens"):
        layer(x, attn_mask=torch.ones(17, 17, dtype=torch.bool))
    with pytest.raises(ValueError, match="causal"):
        layer(x, is_causal=True)


def test_norms_of_queries_give_way_to_our_own_and_the_report_says_so():
    model = vit("vit_tiny_patch16_224", qk_norm=True)
    report = softfree.replace_attention(model)
    assert "norms of queries and keys" in report.replaced[0].note
    assert model(torch.randn(1, 3, 64, 64)).isfinite().all()


def test_what_can_t_be_replaced_is_left_and_named_with_the_reason():
    model = vit(scale_attn_norm=True)
    with pytest.raises(ValueError, match="blocks.0-1.attn .Attention.: a norm of what is attended"):
        softfree.replace_attention(model)
    rotary = timm.create_model("eva02_tiny_patch14_224", img_size=56, **SMALL)
    with pytest.raises(ValueError, match="EvaAttention.: rotary positions"):
        softfree.replace_attention(rotary)
    windows = timm.create_model("swin_tiny_patch4_window7_224", depths=(1, 1, 1, 1), embed_dim=24)
    with pytest.raises(ValueError, match="WindowAttention.: another kind"):
        softfree.replace_attention(windows)
    with pytest.raises(ValueError, match="Linear has no attention that can be replaced"):
        softfree.replace_attention(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="it is the model itself"):
        softfree.replace_attention(nn.MultiheadAttention(8, 2))
    softfree_model = timm.create_model("softfree_vit_small", **SMALL)
    with pytest.raises(ValueError, match="has no attention that can be replaced$"):
        softfree.replace_attention(softfree_model)


def test_layers_may_be_left_alone_by_name():
    model = vit(depth=3)
    report = softfree.replace_attention(model, skip=["blocks.1.*"])
    assert [layer.name for layer in report.replaced] == ["blocks.0.attn", "blocks.2.attn"]
    assert type(model.blocks[1].attn) is Attention and "skip" in report.left[0].note


def test_a_layer_that_is_used_twice_stays_one():
    model = vit()
    model.blocks[1].attn = model.blocks[0].attn
    assert len(softfree.replace_attention(model).replaced) == 2
    assert model.blocks[1].attn is model.blocks[0].attn


@pytest.mark.parametrize("norm_first", [True, False])
def test_torch_s_encoder_computes_the_same_in_training_and_evaluation(norm_first):
    torch.manual_seed(0)
    one = nn.TransformerEncoderLayer(
        16, 2, 32, dropout=0.0, batch_first=True, norm_first=norm_first
    )
    encoder = nn.TransformerEncoder(one, 2, enable_nested_tensor=not norm_first)
    report = softfree.replace_attention(encoder)
    assert [layer.name for layer in report.replaced] == ["layers.0.self_attn", "layers.1.self_attn"]
    assert report.left == ()
    x, padded = torch.randn(2, 10, 16), torch.arange(10) >= torch.tensor([[7], [10]])
    for mask in (None, padded):
        training = encoder.train()(x, src_key_padding_mask=mask)
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                evaluation = encoder.eval()(x, src_key_padding_mask=mask)
            torch.testing.assert_close(training, evaluation)
    short = encoder(x[:1, :7])
    torch.testing.assert_close(training[:1, :7], short)
    with pytest.raises(ValueError, match="causal"):
        encoder(x, mask=nn.Transformer.generate_square_subsequent_mask(10))


def test_a_decoder_keeps_its_causal_attention_and_attends_to_the_memory_without_softmax():
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, 32, batch_first=True), 2)
    report = softfree.replace_attention(decoder)
    assert {layer.name for layer in report.replaced} == {
        "layers.0.multihead_attn", "layers.1.multihead_attn",
    }  # fmt: skip
    assert "causal" in report.left[0].note
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    out = decoder.eval()(torch.randn(1, 5, 16), torch.randn(1, 9, 16), tgt_mask=causal)
    assert out.shape == (1, 5, 16)


def test_torchvision_s_transformer_is_replaced_too():
    from torchvision.models import VisionTransformer

    model = VisionTransformer(32, 16, 2, 2, 16, 32, num_classes=4)
    report = softfree.replace_attention(model)
    assert {layer.kind for layer in report.replaced} == {"MultiheadAttention"}
    assert sum(isinstance(m, MultiheadSoftAttention) for m in model.modules()) == 2
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 4)


def test_the_report_fits_80_columns_and_takes_layers_together():
    model = vit(depth=12)
    text = str(softfree.replace_attention(model, skip=["*.3.attn"]))
    assert text.splitlines()[:2] == [
        "replaced: 11",
        "  blocks.0-2,4-11.attn (Attention): landmarks over 4 x 4 patches, 1 prefix token",
    ]
    assert max(map(len, text.splitlines())) <= 80
    assert "blocks.3.attn" in text


def test_replaced_layers_can_be_looked_at():
    model = vit()
    softfree.replace_attention(model)
    found = softfree.capture_attention(model, torch.randn(1, 3, 64, 64))
    assert [layer.size for layer in found.layers] == [(4, 4), (4, 4)]


def test_replaced_models_compile_whole_and_export():
    model = vit(dynamic_img_size=True)
    softfree.replace_attention(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        for size in ((64, 64), (32, 96)):
            image = torch.randn(2, 3, *size)
            torch.testing.assert_close(compiled(image), model(image))
        image = torch.randn(2, 3, 64, 64)
        program = torch.export.export(model, (image,))
        torch.testing.assert_close(program.module()(image), model(image))
