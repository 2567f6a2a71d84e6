"""What a user imports."""

import subprocess
import sys

import pytest

import softfree


@pytest.mark.parametrize("statement", ["import softfree.{0}", "from softfree import {0}"])
@pytest.mark.parametrize(
    ("module", "function"),
    [("detection", "mask_rcnn"), ("detection", "retinanet"), ("segmentation", "upernet")],
)
def test_dense_prediction_is_a_module(statement, module, function):
    exec(statement.format(module))
    assert sys.modules[f"softfree.{module}"] is getattr(softfree, module)
    assert callable(getattr(getattr(softfree, module), function))


def test_the_package_imports_what_dense_prediction_needs_only_when_it_is_used():
    script = (
        "import sys, softfree\n"
        "late = [f'softfree{room}.{name}' for room in ('', '.models')\n"
        "        for name in ('detection', 'segmentation')]\n"
        "assert not {*late, 'segmentation_models_pytorch', 'faster_coco_eval'} & sys.modules.keys()\n"
        "softfree.detection\n"
        "assert 'softfree.detection' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_name_that_the_package_lacks_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'softfree' has no attribute 'detector'"):
        softfree.detector  # noqa: B018
