"""The norm of queries without a GPU: interpreted, and compiled for GPUs that are not there."""

import pytest

from .test_kernels import compiled, names, run


@pytest.mark.full
def test_interpreted_norm_means_and_gradients_agree_with_the_library():
    lines = run("interpreted_query_norm.py")
    assert len(lines) == 10
    for line in lines:
        for name, error in line["errors"].items():
            assert error < 1e-3, (line, name)


@pytest.mark.full
def test_norm_of_queries_compiles_without_spilled_registers():
    windows = ((8, 32), (4, 32), (2, 32), (1, 32), (3, 20), (2, 128))
    calls = [
        dict(query_norm=stride, d=d, architecture=number)
        for stride, d in windows
        for number in (80, 90)
    ]
    for call, kernels in compiled(calls):
        expected = {"query_norm_kernel", "query_norm_backward_kernel", "part_sum_kernel"}
        assert names(kernels) == expected
        for kernel in kernels:
            assert kernel["spilled"] == 0, (call, kernel)
