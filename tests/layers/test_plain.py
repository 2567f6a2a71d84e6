"""Which layers may be computed by an operator that knows their weights alone."""

import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from softfree.layers.plain import is_plain, weight_and_bias


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


def test_weight_and_bias_are_those_the_layer_would_compute_with():
    layer, without = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
    assert weight_and_bias(layer)[0] is layer.weight and weight_and_bias(layer)[1] is layer.bias
    assert weight_and_bias(without)[1] is None
    given = {"weight": torch.ones(2, 2), "bias": torch.zeros(2)}
    seen = []
    layer.forward = lambda x: seen.append(weight_and_bias(layer)) or x
    torch.func.functional_call(layer, given, torch.ones(2))
    assert seen[0][0] is given["weight"] and seen[0][1] is given["bias"]
    view = torch.arange(4.0).view(2, 2)
    del without.weight
    without.weight = view  # as libraries do that keep all parameters in one
    assert weight_and_bias(without)[0] is view
