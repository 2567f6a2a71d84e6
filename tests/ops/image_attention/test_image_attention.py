"""The layer as one operator: what it counts and what it gives, by shapes alone."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import softfree
from softfree.ops import image_attention

OWN = dict(query_norm=True, bandwidth="learned", landmarks="average", inverse="solve")


@pytest.mark.parametrize("value_conv", [3, 0])
@pytest.mark.parametrize("options", [{}, OWN], ids=["papers", "own"])
@pytest.mark.parametrize(("stride", "prefix"), [(4, 0), (1, 1)])
def test_it_counts_the_products_of_the_layer_it_stands_for(
    stride, prefix, options, value_conv, monkeypatch
):
    size, options = (12, 8), dict(options, value_conv=value_conv)
    layer = softfree.SoftAttention(32, 2, stride=stride, **options)
    x = torch.randn(2, prefix + 96, 32, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        layer(x, size).sum().backward()
    counts = counter.get_flop_counts()["Global"]
    # Torch counts the gradient of a grouped convolution as if it had one group.
    if torch.ops.aten.convolution in counts:
        counts[torch.ops.aten.convolution_backward] = 2 * counts[torch.ops.aten.convolution]
    expected = sum(counts.values())
    monkeypatch.setattr(image_attention, "fits", lambda *_: True)
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        x = torch.empty(2, prefix + 96, 32, requires_grad=True)
        layer = softfree.SoftAttention(32, 2, stride=stride, **options)
        out = layer(x, size)
        out.sum().backward()
    assert counter.get_total_flops() == expected
    assert counter.get_flop_counts()["Global"].keys() == {
        torch.ops.softfree.image_attention,
        torch.ops.softfree.image_attention_backward,
    }
    assert out.shape == x.grad.shape == x.shape
