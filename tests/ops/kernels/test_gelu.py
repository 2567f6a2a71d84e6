"""The linear layer with GELU without a GPU: interpreted, and compiled for GPUs that are not there."""

import json

import pytest

from .test_kernels import run


@pytest.mark.slow
def test_interpreted_gelu_gradient_agrees_with_the_library():
    lines = run("interpreted_gelu.py")
    assert len(lines) == 5
    for line in lines:
        for name, error in line["errors"].items():
            assert error < 1e-3, (line, name)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [80, 90])
def test_gelu_gradient_compiles_without_spilled_registers(architecture):
    (kernel,) = run("ahead_of_time.py", json.dumps({"architecture": architecture, "hidden": 384}))
    assert kernel["name"] == "gelu_backward_kernel"
    assert kernel["spilled"] == 0, kernel
    assert kernel["registers"] <= 128, kernel  # enough programs to keep the memory busy
