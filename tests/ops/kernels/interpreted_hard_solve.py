"""A solve by the kernels on hard landmarks, in Triton's interpreter, against float64.

For each kind and order it prints one JSON line: relative errors of the result and of each gradient, beside
what the float32 definition is off.
"""

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch

from softfree.ops.shared import devices
from tests.ops.attention.problems import BACKENDS, errors, hard_problems, solve


def main(m: int) -> None:
    devices.processors = lambda device: 6
    BACKENDS["triton"] = "cpu"
    for kind, near, problem in hard_problems(m):
        for order in (1, 2) if near else ():
            settings = dict(inverse="solve", order=order)
            exact = solve(problem, **settings)
            found, plain = (
                errors(solve(problem, backend, torch.float32, **settings), exact)
                for backend in ("triton", "reference")
            )
            both = {name: [found[name], plain[name]] for name in exact}
            print(json.dumps(dict(kind=kind, order=order, errors=both)))


if __name__ == "__main__":
    main(int(sys.argv[1]))
