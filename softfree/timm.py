"""Run one of timm's scripts with the models of this package known to timm, as they are after ``import softfree``.

    python -m softfree.timm validate.py --model softpp_tiny --checkpoint model.safetensors DATA
    torchrun --nproc-per-node 8 -m softfree.timm train.py --model softpp_tiny --data-dir DATA

The script is a file of yours, from timm's repository; nothing in it changes.
"""

import os
import runpy
import sys
from collections.abc import Sequence

USAGE = "usage: python -m softfree.timm SCRIPT [its arguments]; SCRIPT is a file, such as timm's validate.py"


def main(argv: Sequence[str]) -> None:
    """Run the script ``argv[0]`` with the rest as its arguments, as Python itself would."""
    if not argv or not os.path.isfile(argv[0]):
        found = f"there is no file {argv[0]}\n" if argv else ""
        sys.exit(found + USAGE)
    sys.argv = list(argv)
    # Its neighbours are importable, as for a script that Python is given.
    sys.path[0] = os.path.dirname(os.path.abspath(argv[0]))
    runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
