"""Who sees which sample when."""

import pytest
import torch

from softfree.training.sampling import Augmented, EvalSampler, StepSampler, seed_all


def batches(samples=23, batch=4, passes=1, rank=0, processes=1, seed=0, start=0, stop=10):
    return list(StepSampler(samples, batch, passes, rank, processes, seed, start, stop))


def test_an_epoch_has_each_sample_at_most_once_in_a_new_order():
    epochs = {}
    for batch in batches():
        for epoch, index in batch:
            epochs.setdefault(epoch, []).append(index)
    assert list(epochs) == [0, 1]
    assert all(len(set(seen)) == len(seen) == 20 for seen in epochs.values())
    assert epochs[0] != epochs[1]


def test_an_item_that_is_shown_again_is_varied_anew():
    class Noise:
        def __len__(self):
            return 5

        def __getitem__(self, index):
            return index, torch.rand(()).item()

    data = Augmented(Noise(), seed=0)
    first, again = data[0, 3], data[0, 8]
    assert first[0] == again[0] == 3 and first[1] != again[1]
    assert data[0, 8] == again


def test_a_later_start_gives_the_rest_of_the_same_batches():
    assert batches(start=7) == batches()[7:]


@pytest.mark.parametrize("processes, passes", [(2, 1), (1, 2), (2, 2)])
def test_processes_and_passes_share_out_one_global_batch(processes, passes):
    whole = batches(batch=4 * processes * passes, stop=4)
    parts = [
        batches(batch=4, passes=passes, rank=rank, processes=processes, stop=4)
        for rank in range(processes)
    ]
    for step, expected in enumerate(whole):
        found = [key for part in parts for b in part[step * passes :][:passes] for key in b]
        assert sorted(found) == sorted(expected)


@pytest.mark.parametrize("start", [0, 7])
def test_indices_on_a_device_are_those_of_the_keys(start):
    sampler = StepSampler(23, 4, 2, 1, 1, 0, start, 10)
    expected = [[index for _, index in keys] for keys in sampler]
    planned = sampler.on_device(torch.device("cpu"), lambda order: torch.stack([order, -order]))
    assert [batch.tolist() for batch in planned] == [[x, [-i for i in x]] for x in expected]
    shares = EvalSampler(11, 3, 1, 2)
    assert [indices.tolist() for indices in shares.on_device(torch.device("cpu"))] == list(shares)


def test_evaluation_takes_each_sample_once_also_with_more_processes_than_samples():
    for samples, processes in ((11, 2), (11, 4), (1, 3)):
        parts = [list(EvalSampler(samples, 3, rank, processes)) for rank in range(processes)]
        seen = [index for part in parts for batch in part for index in batch]
        assert sorted(seen) == list(range(samples))


def test_a_step_that_takes_more_than_there_is_gets_advice():
    with pytest.raises(ValueError, match="takes 32 samples .*only 23 .*`batch_size` smaller"):
        batches(batch=8, passes=2, processes=2)


def test_seeds_of_neighbouring_steps_are_not_alike():
    drawn = set()
    for key in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (2, 3, 0), (3, 2, 0)):
        seed_all(*key)
        drawn.add(torch.rand(()).item())
    assert len(drawn) == 5
