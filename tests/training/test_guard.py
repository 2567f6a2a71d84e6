"""Steps with bad numbers are left out; the layer these come from is found, also in a compiled model."""

import copy
import math

import pytest
import torch
from torch import nn

from softfree.training.distributed import Processes
from softfree.training.guard import GuardedOptimizer, find_nonfinite
from softfree.training.settings import OptimSettings

ALONE = Processes(0, 1, torch.device("cpu"))


def guarded(model, clip):
    groups = [{"params": list(model.parameters())}]
    return GuardedOptimizer(model, groups, OptimSettings(clip_grad=clip), ALONE)


def step(guard, passes):
    guard.set_lr(1e-3)
    guard.note([*passes, {"grad_norm": guard.update()}])


def give_gradients(model, length):
    """A gradient of this norm, the same for every model of this shape."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    for parameter in model.parameters():
        parameter.grad *= length / norm


@pytest.mark.parametrize("clip", [0.0, 0.5, 5.0])
def test_long_gradients_are_clipped_as_torch_clips_them(clip):
    ours = nn.Linear(3, 2)
    theirs = copy.deepcopy(ours)
    optimizer = torch.optim.AdamW(theirs.parameters(), betas=(0.9, 0.999))
    guard = guarded(ours, clip)
    # AdamW forgets the length of one gradient; of several it shows.
    for length in (2.0, 1.0, 0.1):
        give_gradients(ours, length)
        give_gradients(theirs, length)
        if clip:
            nn.utils.clip_grad_norm_(theirs.parameters(), clip)
        step(guard, [])
        optimizer.step()
    torch.testing.assert_close(ours.weight, theirs.weight)
    assert guard.read()[0]["grad_norm"] == pytest.approx(3.1 / 3)


def test_bad_steps_change_nothing_and_are_counted_but_not_averaged():
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    guard = guarded(model, clip=1.0)
    mean = model[1].running_mean
    for number, bad in enumerate((math.nan, 1.0, math.inf, math.nan)):
        give_gradients(model, 2.0)
        model[0].bias.grad *= bad
        before = copy.deepcopy(model.state_dict())
        step(guard, [{"loss": torch.tensor(number * bad)}, {"loss": torch.tensor(3.0)}])
        changed = not torch.equal(before["0.weight"], model[0].weight)
        assert changed == math.isfinite(bad)
    mean.fill_(math.nan)
    means, skipped, in_a_row = guard.read()
    assert means == pytest.approx({"loss": 2.0, "grad_norm": 2.0}) and (skipped, in_a_row) == (3, 2)
    assert mean.tolist() == [0.0, 0.0]
    give_gradients(model, math.inf)
    step(guard, [{"loss": torch.tensor(math.inf)}])
    means, skipped, in_a_row = guard.read()
    assert math.isnan(means["loss"]) and (skipped, in_a_row) == (1, 3)


def test_the_first_layer_with_a_bad_number_is_found_in_a_compiled_model():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1))
    model.compile(backend="eager")
    x = torch.randn(2, 3)
    model(x).sum().backward()
    with torch.no_grad():
        model[1].weight.fill_(float("inf"))
    where = find_nonfinite(model, lambda: model(x).sum(), ALONE)
    assert where == "the first layer with non-finite output is 1 (Linear; its input is finite)"
