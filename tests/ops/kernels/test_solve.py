"""The kernels that solve, without a GPU: interpreted on the CPU."""

import pytest

from .test_kernels import run


@pytest.mark.slow
def test_interpreted_solve_agrees_with_float64():
    lines = run("interpreted_solve.py")
    assert len(lines) > 12
    for line in lines:
        half = "torch.float16" in line["case"]  # distances from products: 1e-5 of them
        for name, (found, rounding) in line["errors"].items():
            if name == "x":
                bound = 5e-5 if half else 1e-5
            else:
                bound = 1e-3 if half else max(2e-4, 6 * rounding)
            assert found < bound, (line["case"], name, found, rounding)
