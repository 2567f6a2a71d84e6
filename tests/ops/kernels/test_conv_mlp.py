"""The MLP with a convolution as one operator without a GPU: interpreted, and compiled for GPUs that are not there."""

import pytest

from .test_kernels import compiled, run


@pytest.mark.slow
def test_interpreted_mlp_with_a_convolution_agrees_with_the_library():
    lines = run("interpreted_conv_mlp.py")
    assert len(lines) == 5
    for line in lines:
        for name, error in line["errors"].items():
            assert error < 2e-3, (line, name)


@pytest.mark.slow
def test_its_kernels_compile_without_spilled_registers():
    calls = [  # four columns per program, seven, and another processor
        dict(conv_mlp=384, side=56),
        dict(conv_mlp=1280, side=14),
        dict(conv_mlp=512, side=4, architecture=80),
    ]
    for _, kernels in compiled(calls):
        names = [kernel["name"] for kernel in kernels]
        assert names == [
            "conv_gelu_kernel", "conv_gelu_backward_kernel", "part_sum_kernel",
            "conv_backward_kernel", "part_sum_kernel",
        ]  # fmt: skip
        for kernel in kernels:
            assert kernel["spilled"] == 0, kernel
            assert kernel["registers"] <= 168, kernel  # six programs of two warps a processor
