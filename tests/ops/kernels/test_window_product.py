"""The window product's kernels without a GPU: interpreted, and compiled for GPUs that are not there."""

import json

import pytest

from .test_kernels import TOLERANCE, run


@pytest.mark.slow
def test_interpreted_window_product_agrees_with_the_library():
    lines = run("interpreted_window_product.py")
    assert len(lines) == 13
    for line in lines:
        for name, error in line["errors"].items():
            assert error < TOLERANCE[line["dtype"]], (line, name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"stride": 8, "d": 32},
        {"stride": 2, "d": 32},
        {"stride": 3, "d": 128, "dtype": "float16"},
        {"stride": 4, "d": 64, "dtype": "float32"},
    ],
    ids=str,
)
@pytest.mark.parametrize("architecture", [80, 90])
def test_window_product_compiles_without_spilled_registers(settings, architecture):
    kernels = run("ahead_of_time.py", json.dumps({"architecture": architecture, **settings}))
    assert {kernel["name"] for kernel in kernels} == {
        "window_product_kernel",
        "window_product_token_kernel",
        "window_product_weight_kernel",
    }
    for kernel in kernels:
        assert kernel["shared"] <= 99 * 1024, kernel  # of the smallest Ampere GPUs
        assert kernel["spilled"] == 0, kernel
