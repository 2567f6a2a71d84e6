"""AdamW with fewer calls: weights, moments and counts are torch's, bit by bit."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from softfree.training.adamw import FusedAdamW

SHAPES = ((3, 4), (4,), (2, 3), (5,), ())
BETAS = (0.9, 0.98)


def groups_of(weights):
    """As the engine has them: with decay and without, with rates of their own; one may be empty."""
    return [
        {"params": weights[:2], "weight_decay": 0.1, "lr": 3e-3},
        {"params": [], "weight_decay": 0.0},
        {"params": weights[2:], "weight_decay": 0.0, "lr": 1e-3},
    ]


def both(dtypes=(torch.float32,)):
    """Ours and torch's, on the same weights."""
    torch.manual_seed(0)
    ours = [
        nn.Parameter(torch.randn(shape, dtype=dtypes[index % len(dtypes)]))
        for index, shape in enumerate(SHAPES)
    ]
    theirs = copy.deepcopy(ours)
    return FusedAdamW(groups_of(ours), BETAS), torch.optim.AdamW(
        groups_of(theirs), lr=0.0, betas=BETAS, fused=True
    )


def step(ours, theirs, number, without=(), bad=False, scale=None):
    """Step ``number`` of both; weights ``without`` have no gradient in it."""
    torch.manual_seed(number)
    others = [p for group in theirs.param_groups for p in group["params"]]
    for index, pair in enumerate(zip(ours.weights, others, strict=True)):
        gradient = torch.randn_like(pair[0])
        for weight in pair:
            weight.grad = None if index in without else gradient.clone()
    for optimizer in (ours, theirs):
        optimizer.found_inf = torch.tensor(float(bad))
        optimizer.grad_scale = None if scale is None else torch.tensor(scale)
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
    ours.advance([p.grad for p in ours.weights if p.grad is not None])
    theirs.step()


def assert_same(ours, theirs):
    ours, theirs = (copy.deepcopy(optimizer.state_dict()) for optimizer in (ours, theirs))
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for index, expected in theirs["state"].items():
        assert ours["state"][index].keys() == expected.keys()
        for name, tensor in expected.items():
            found = ours["state"][index][name]
            assert found.dtype == tensor.dtype and torch.equal(found, tensor), (index, name)


def assert_same_weights(ours, theirs):
    others = [p for group in theirs.param_groups for p in group["params"]]
    for weight, other in zip(ours.weights, others, strict=True):
        assert torch.equal(weight, other)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {2: dict(scale=3.5), 4: dict(scale=1.0)},
        {0: dict(bad=True), 3: dict(bad=True)},
        {3: dict(without=(1, 4)), 4: dict(without=range(5))},
        {0: dict(without=(2,))},
        {0: dict(without=(2,)), 1: dict(without=(2,)), 3: dict(bad=True)},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.float32, torch.float64)], ids=str)
def test_steps_are_those_of_torch_whichever_weights_have_a_gradient(changes, dtypes):
    ours, theirs = both(dtypes)
    for number in range(7):
        step(ours, theirs, number, **changes.get(number, {}))
        assert_same(ours, theirs)
        assert_same_weights(ours, theirs)


def test_steps_are_those_of_torch_with_learning_rates_on_the_device():
    ours, theirs = both()
    for optimizer in (ours, theirs):
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(group["lr"])
    for number in range(4):
        step(ours, theirs, number)
    assert_same_weights(ours, theirs)


def test_a_state_that_is_loaded_is_gone_on_from():
    ours, theirs = both()
    for number in range(3):
        step(ours, theirs, number)
    kept = copy.deepcopy(theirs.state_dict())
    step(ours, theirs, 3)
    for optimizer in (ours, theirs):
        optimizer.load_state_dict(copy.deepcopy(kept))
    for number in range(4, 7):
        step(ours, theirs, number)
        assert_same(ours, theirs)
    again = FusedAdamW(groups_of(copy.deepcopy(ours.weights)), BETAS)
    again.load_state_dict(copy.deepcopy(ours.state_dict()))
    for number in range(7, 9):
        step(again, theirs, number)
    assert_same(again, theirs)


def test_a_step_is_a_call_for_each_group_and_two_for_the_counts():
    names = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    ours, theirs = both()
    step(ours, theirs, 0)
    gradients = [torch.randn_like(weight) for weight in ours.weights]
    with Calls():
        ours.advance(gradients)
    assert names == ["add_", "_fused_adamw_", "_fused_adamw_", "sub_"]
