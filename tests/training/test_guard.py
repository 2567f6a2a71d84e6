"""Bad numbers: the layer they come from is found, also in a model that was compiled."""

import torch
from torch import nn

from softfree.training.distributed import Processes
from softfree.training.guard import find_nonfinite


def test_the_first_layer_with_a_bad_number_is_found_in_a_compiled_model():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1))
    model.compile(backend="eager")
    x = torch.randn(2, 3)
    model(x).sum().backward()
    with torch.no_grad():
        model[1].weight.fill_(float("inf"))
    where = find_nonfinite(model, lambda: model(x).sum(), Processes(0, 1, torch.device("cpu")))
    assert where == "the first layer with one is 1 (Linear; its input is finite)"
