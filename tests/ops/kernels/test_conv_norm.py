"""What follows a convolution, and blocks without a gradient, without a GPU."""

import pytest

from .test_kernels import compiled, names, run


@pytest.mark.slow
def test_interpreted_norm_agrees_with_the_library_and_a_block_with_its_parts():
    lines = run("interpreted_conv_norm.py")
    assert len(lines) == 15
    for line in lines:
        for name, error in line["errors"].items():
            assert error < 1e-3, (line, name)


@pytest.mark.slow
def test_it_compiles_without_spilled_registers():
    calls = [dict(conv_norm=n, architecture=number) for n in (32, 320) for number in (80, 90)]
    for call, kernels in compiled(calls):
        assert names(kernels) == {"norm_relu_kernel"}
        for kernel in kernels:
            assert kernel["spilled"] == 0, (call, kernel)
