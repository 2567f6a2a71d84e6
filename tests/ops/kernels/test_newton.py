"""Newton's steps of the kernels, without a GPU: interpreted on the CPU."""

import pytest

from .test_kernels import run


@pytest.mark.full
def test_interpreted_steps_are_within_5e_5_of_plain_ones_where_hard_to_invert():
    lines = run("interpreted_newton.py")
    assert len(lines) == 4 * 3 * 7
    for line in lines:
        found, plain = line["errors"]
        assert found < max(5e-5, 2 * plain), line
