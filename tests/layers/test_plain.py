"""Which layers may be computed by an operator that knows their weights alone."""

import torch
from timm.layers import DropPath
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from softfree.layers.plain import (
    are_all_hooked,
    are_plain,
    does_nothing,
    is_plain,
    parameter,
    weight_and_bias,
)


def test_a_layer_of_its_kind_is_plain():
    assert is_plain(nn.Linear(2, 2), nn.Linear)
    assert is_plain(nn.Linear(2, 2, bias=False), nn.Linear)


def test_another_kind_hooks_a_forward_of_its_own_or_wrapped_weights_are_not():
    class Adapted(nn.Linear):
        pass

    hooked, patched, wrapped, compiled = (nn.Linear(2, 2) for _ in range(4))
    hooked.register_forward_pre_hook(print)
    compiled.compile(backend="eager")
    patched.forward = lambda x: x
    weight = torch.randn(2, 2)
    wrapped.weight = nn.Parameter(TwoTensor(weight, weight))
    for module in (None, Adapted(2, 2), hooked, patched, wrapped, compiled):
        assert not is_plain(module, nn.Linear)
        assert not are_plain((nn.Linear(2, 2), nn.Linear), (module, nn.Linear))


def test_identities_and_in_evaluation_dropouts_do_nothing():
    hooked, half, path = nn.Identity(), nn.Dropout(0.5), DropPath(0.5)
    hooked.register_forward_hook(print)
    assert does_nothing(nn.Identity())
    for module in (None, hooked, nn.Linear(2, 2), half, path):
        assert not does_nothing(module)
    assert does_nothing(half.eval()) and does_nothing(path.eval())


def test_hooks_that_all_modules_share_are_known():
    shared = nn.modules.module
    for register in (
        shared.register_module_forward_hook,
        shared.register_module_forward_pre_hook,
        shared.register_module_full_backward_hook,
        shared.register_module_full_backward_pre_hook,
    ):
        assert not are_all_hooked()
        handle = register(lambda *_: None)
        try:
            assert are_all_hooked() and not does_nothing(nn.Identity())
        finally:
            handle.remove()


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
    assert parameter(without, "weight") is view and parameter(without, "bias") is None
    assert parameter(layer, "weight") is layer.weight
