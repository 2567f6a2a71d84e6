"""The MLP as one operator without a GPU: interpreted, and compiled for GPUs that are not there."""

import pytest

from .test_kernels import compiled, run


@pytest.mark.full
def test_interpreted_mlp_agrees_with_the_library_and_keeps_its_hidden_layer_once():
    lines = run("interpreted_mlp.py")
    assert len(lines) == 6
    for line in lines:
        assert line["kept"] == 1, line
        for name, error in line["errors"].items():
            assert error < 2e-3, (line, name)


@pytest.mark.slow
def test_mlp_gradient_compiles_without_spilled_registers():
    for _, kernels in compiled([dict(hidden=384, architecture=number) for number in (80, 90)]):
        kernel, of_sum = kernels
        assert [kernel["name"], of_sum["name"]] == ["mlp_backward_kernel", "part_sum_kernel"]
        assert kernel["spilled"] == of_sum["spilled"] == 0, kernels
        assert kernel["registers"] <= 128, kernel  # enough programs to keep the memory busy
