"""Devices: those that a flag may name."""

import pytest
import torch

from softfree.training.devices import choose_device


def pretend(monkeypatch, gpus, usable=True):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: usable)


def test_a_gpu_is_chosen_by_itself_where_there_is_one(monkeypatch):
    pretend(monkeypatch, 2)
    assert choose_device("auto") == choose_device("cuda") == torch.device("cuda")
    assert choose_device("cuda:1") == torch.device("cuda:1")
    assert choose_device("cpu") == torch.device("cpu")
    pretend(monkeypatch, 2, usable=False)
    assert choose_device("auto") == torch.device("cpu")


@pytest.mark.parametrize(
    "name, message",
    [
        ("tpu", "`device` must be 'auto', 'cuda' or 'cpu', got 'tpu'"),
        ("cuda:x", "`device` must be 'auto', 'cuda' or 'cpu', got 'cuda:x'"),
        ("cuda:2", "`device` cuda:2: PyTorch finds no such GPU here; try `device` cpu"),
    ],
)
def test_a_device_that_is_not_there_is_named(monkeypatch, name, message):
    pretend(monkeypatch, 2)
    with pytest.raises(ValueError, match=message):
        choose_device(name)
