"""The norms without a GPU: interpreted, and compiled for GPUs that are not there."""

import json

import pytest

from .test_kernels import run


@pytest.mark.slow
def test_interpreted_norms_agree_with_the_library():
    lines = run("interpreted_norm.py")
    assert len(lines) == 13
    for line in lines:
        for name, error in line["errors"].items():
            assert error < 1e-3, (line, name)


@pytest.mark.slow
@pytest.mark.parametrize("channels", [32, 128, 320])
@pytest.mark.parametrize("architecture", [80, 90])
def test_norms_compile_without_spilled_registers(architecture, channels):
    kernels = run("ahead_of_time.py", json.dumps({"architecture": architecture, "norm": channels}))
    assert {kernel["name"] for kernel in kernels} >= {"add_norm_kernel", "add_norm_backward_kernel"}
    for kernel in kernels:
        assert kernel["spilled"] == 0, kernel
