"""The norms without a GPU: interpreted, and compiled for GPUs that are not there."""

import pytest

from .test_kernels import compiled, names, run


@pytest.mark.full
def test_interpreted_norms_agree_with_the_library():
    lines = run("interpreted_norm.py")
    assert len(lines) == 13
    for line in lines:
        for name, error in line["errors"].items():
            assert error < 1e-3, (line, name)


@pytest.mark.slow
def test_norms_compile_without_spilled_registers():
    calls = [dict(norm=n, architecture=number) for n in (32, 128, 320) for number in (80, 90)]
    for call, kernels in compiled(calls):
        assert names(kernels) >= {"add_norm_kernel", "add_norm_backward_kernel"}
        for kernel in kernels:
            assert kernel["spilled"] == 0, (call, kernel)
