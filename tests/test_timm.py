"""``python -m softfree.timm SCRIPT``: a script of timm's knows our models, and is run as by Python itself."""

import subprocess
import sys

SCRIPT = """
import sys, timm
import neighbour
print(__name__, sys.argv[1:], timm.is_model("softpp_tiny"), neighbour.VALUE)
sys.exit(3)
"""


def run(*words):
    command = [sys.executable, "-m", "softfree.timm", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_script_finds_our_models_its_arguments_and_its_neighbours(tmp_path):
    (tmp_path / "validate.py").write_text(SCRIPT)
    (tmp_path / "neighbour.py").write_text("VALUE = 7")
    done = run(tmp_path / "validate.py", "--model", "softpp_tiny")
    assert done.stdout == "__main__ ['--model', 'softpp_tiny'] True 7\n"
    assert (done.returncode, done.stderr) == (3, "")


def test_a_script_that_is_not_there_is_named(tmp_path):
    done = run(tmp_path / "validate.py")
    assert done.returncode == 1
    assert "there is no file" in done.stderr and "usage: python -m softfree.timm" in done.stderr
