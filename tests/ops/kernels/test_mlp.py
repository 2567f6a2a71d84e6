"""The MLP as one operator without a GPU: interpreted, and compiled for GPUs that are not there."""

import json

import pytest

from .test_kernels import run


@pytest.mark.slow
def test_interpreted_mlp_agrees_with_the_library_and_keeps_its_hidden_layer_once():
    lines = run("interpreted_mlp.py")
    assert len(lines) == 6
    for line in lines:
        assert line["kept"] == 1, line
        for name, error in line["errors"].items():
            assert error < 2e-3, (line, name)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [80, 90])
def test_mlp_gradient_compiles_without_spilled_registers(architecture):
    (kernel,) = run("ahead_of_time.py", json.dumps({"architecture": architecture, "hidden": 384}))
    assert kernel["name"] == "mlp_backward_kernel"
    assert kernel["spilled"] == 0, kernel
    assert kernel["registers"] <= 128, kernel  # enough programs to keep the memory busy
