"""The learning rate: where it begins, rises, falls and ends."""

import itertools

import pytest

from softfree.training.schedule import Schedule
from softfree.training.settings import OptimSettings


def rates(**changes):
    optim = OptimSettings(**{"epochs": 10, "lr": 1.0, "min_lr": 0.1, "warmup_epochs": 2, **changes})
    schedule = Schedule.of(optim, steps_per_epoch=5)
    return [schedule(step) for step in range(schedule.total)]


@pytest.mark.parametrize("sched", ["cosine", "linear"])
def test_it_rises_in_a_straight_line_and_falls_to_the_least(sched):
    found = rates(sched=sched, warmup_lr=0.2)
    assert len(found) == 50
    assert found[:10] == pytest.approx([0.2 + 0.08 * (i + 1) for i in range(10)])
    assert max(found) == found[9] == found[10] == pytest.approx(1.0)
    assert all(a > b for a, b in itertools.pairwise(found[10:]))
    assert 0.1 < found[-1] < 0.13
    assert found[30] == pytest.approx(0.55)  # half way


def test_drops_come_at_the_milestones():
    found = rates(sched="multistep", warmup_epochs=0, decay_milestones=(8, 9), decay_rate=0.5)
    assert found == [1.0] * 40 + [0.5] * 5 + [0.25] * 5


def test_steps_count_where_given():
    found = rates(steps=20, warmup_steps=4, sched="multistep", decay_milestones=(10,))
    assert len(found) == 20
    assert found[3:] == pytest.approx([1.0] * 7 + [0.1] * 10)


def test_a_warm_up_as_long_as_the_run_is_refused():
    with pytest.raises(ValueError, match="warm-up of 50 steps .* the run of 50"):
        rates(warmup_epochs=10)
