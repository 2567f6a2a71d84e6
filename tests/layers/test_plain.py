"""Which layers may be computed by an operator that knows their weights alone."""

import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from softfree.layers.plain import is_plain


def test_a_layer_of_its_kind_is_plain():
    assert is_plain(nn.Linear(2, 2), nn.Linear)
    assert is_plain(nn.Linear(2, 2, bias=False), nn.Linear)


def test_another_kind_hooks_a_forward_of_its_own_or_wrapped_weights_are_not():
    class Adapted(nn.Linear):
        pass

    hooked, patched, wrapped = (nn.Linear(2, 2) for _ in range(3))
    hooked.register_forward_pre_hook(print)
    patched.forward = lambda x: x
    weight = torch.randn(2, 2)
    wrapped.weight = nn.Parameter(TwoTensor(weight, weight))
    for module in (Adapted(2, 2), hooked, patched, wrapped):
        assert not is_plain(module, nn.Linear)
