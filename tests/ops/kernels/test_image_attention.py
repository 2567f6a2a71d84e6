"""The layer as one operator without a GPU: interpreted, and its norm compiled for GPUs that are not there."""

import json

import pytest

from .test_kernels import run


@pytest.mark.slow
def test_interpreted_layer_and_norm_agree_with_the_parts_in_float64():
    lines = run("interpreted_image_attention.py")
    assert len(lines) == 7
    for line in lines:
        for name, error in line["errors"].items():
            assert error < (1e-3 if "norm" in line["case"] else 5e-3), (line, name)


@pytest.mark.slow
@pytest.mark.parametrize("channels", [32, 128])
@pytest.mark.parametrize("architecture", [80, 90])
def test_landmark_norm_compiles_without_spilled_registers(architecture, channels):
    kernels = run("ahead_of_time.py", json.dumps({"architecture": architecture, "norm": channels}))
    assert {kernel["name"] for kernel in kernels} == {
        "landmark_norm_kernel",
        "landmark_norm_backward_kernel",
    }
    for kernel in kernels:
        assert kernel["spilled"] == 0, kernel
