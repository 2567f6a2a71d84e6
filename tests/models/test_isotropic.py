"""The isotropic models' architecture and keywords."""

import pytest
import torch
from torch import nn

from softfree.layers import create_attention
from softfree.models import SoftVisionTransformer

from .small import small


def test_patches_are_padded_to_whole_ones():
    model = small("softpp_vit_small").eval()
    x = torch.randn(1, 3, 61, 50)
    padded = nn.functional.pad(x, (0, 6, 0, 3))
    torch.testing.assert_close(model(x), model(padded))


def test_there_are_49_landmarks_at_224():
    model = SoftVisionTransformer(embed_dim=32, num_heads=2, depth=1).eval()
    counts = []
    model.blocks[0].attn.sampler.register_forward_hook(lambda m, i, o: counts.append(o[0].shape[2]))
    model(torch.randn(1, 3, 224, 224))
    assert counts == [49]


@pytest.mark.parametrize("landmarks", ["conv", "average", "random:9", "first:9", ("average", 9), 9])
@pytest.mark.parametrize("size", [(32, 32), (97, 65)])
def test_every_sampler_works_at_any_size(landmarks, size):
    model = small("softpp_vit_small", landmarks=landmarks)
    out = model(torch.randn(2, 3, *size))
    out.square().sum().backward()
    assert out.isfinite().all()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []


def test_every_block_is_a_feature_and_the_last_three_are_the_default_of_an_extractor():
    model = small("softpp_vit_small", depth=5)
    assert [info["module"] for info in model.feature_info] == [f"blocks.{i}" for i in range(5)]
    extractor = small("softpp_vit_small", depth=5, features_only=True)
    assert extractor.feature_info.module_name() == ["blocks.2", "blocks.3", "blocks.4"]
    assert [f.shape for f in extractor(torch.randn(1, 3, 64, 64))] == [(1, 32, 8, 8)] * 3


@pytest.mark.parametrize(
    "attention", ["soft", "softmax", "linformer", "performer", "nystromformer"]
)
@pytest.mark.parametrize("size", [(64, 64), (97, 65)])
def test_any_attention_takes_the_place_of_softs_own(attention, size):
    model = small("softpp_vit_small", attention=attention)
    kinds = {type(block.attn) for block in model.blocks}
    assert kinds == {type(create_attention(attention, 32, 2))}
    out = model(torch.randn(2, 3, *size))
    out.square().sum().backward()
    assert out.isfinite().all()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []
