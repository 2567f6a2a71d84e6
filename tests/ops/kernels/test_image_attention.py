"""The layer as one operator without a GPU: interpreted."""

import pytest

from .test_kernels import run


@pytest.mark.slow
def test_interpreted_layer_agrees_with_its_parts_in_float64():
    lines = run("interpreted_image_attention.py")
    assert len(lines) == 22
    for line in lines:
        for name, error in line["errors"].items():
            assert error < 5e-3, (line, name)
