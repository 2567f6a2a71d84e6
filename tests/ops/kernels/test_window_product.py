"""The window product's kernels without a GPU: interpreted, and compiled for GPUs that are not there."""

import pytest

from .test_kernels import compiled, names, run

TOLERANCE = {"torch.float32": 1e-5, "torch.float16": 5e-3}


@pytest.mark.full
def test_interpreted_window_product_agrees_with_the_library():
    lines = run("interpreted_window_product.py")
    assert len(lines) == 13
    for line in lines:
        for name, error in line["errors"].items():
            assert error < TOLERANCE[line["dtype"]], (line, name)


@pytest.mark.full
def test_window_product_compiles_without_spilled_registers():
    shapes = (
        dict(stride=8, d=32),
        dict(stride=2, d=32),
        dict(stride=3, d=128, dtype="float16"),
        dict(stride=4, d=64, dtype="float32"),
    )
    calls = [shape | dict(architecture=number) for shape in shapes for number in (80, 90)]
    for call, kernels in compiled(calls):
        assert names(kernels) == {
            "window_product_kernel",
            "window_product_token_kernel",
            "window_product_weight_kernel",
            "part_sum_kernel",
        }
        for kernel in kernels:
            assert kernel["shared"] <= 99 * 1024, (call, kernel)  # of the smallest Ampere GPUs
            assert kernel["spilled"] == 0, (call, kernel)
