"""benchmarks/: what scripts do that no command does."""

import importlib.util
from pathlib import Path

import torch

from softfree.layers import attention

FOLDER = Path(__file__).parent.parent / "benchmarks"


def test_without_attention_a_layer_is_its_projections_and_the_convolution_of_its_values(
    monkeypatch,
):
    spec = importlib.util.spec_from_file_location("script", FOLDER / "without_attention.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    # Set to what they are, these are set back after the test.
    monkeypatch.setattr(attention, "soft_attention", attention.soft_attention)
    whole = attention.SoftAttention
    monkeypatch.setattr(whole, "_is_one_operator", whole._is_one_operator)
    layer = attention.SoftAttention(dim=12, num_heads=3, stride=2, value_conv=3, landmark_gain=0.25)
    x = torch.randn(2, 24, 12)
    values = layer.qv(x)[..., 12:]
    expected = layer.proj(layer.value_conv(values, (6, 4)))
    assert not torch.allclose(layer(x, (6, 4)), expected)
    script.leave_attention_out()
    torch.testing.assert_close(layer(x, (6, 4)), expected)
