"""Newton's steps of the kernels in Triton's interpreter, against plain steps in float64.

Landmarks are such that their kernel matrix is hard to invert, up to a condition above 1e12. It prints one JSON line a
case: relative errors of ``X = R Y R^T V`` by the kernel and by plain steps in float32.
"""

import json
import math
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[3]))

import torch
import triton
import triton.language as tl

from softfree.ops.attention.inverse import newton_iterate
from softfree.ops.attention.kernels.mixing import newton_inverse, newton_inverse_in_memory
from softfree.ops.attention.reference import gaussian_kernel
from softfree.ops.attention.settings import InverseSettings
from softfree.ops.shared.shapes import block
from tests.ops.attention.problems import hard_landmarks, relative_error

CASES = [
    (m, panel, start, ridge)
    for m, panel in ((1, 0), (7, 0), (49, 0), (100, 32))
    for start, ridge in (("halving", 0.0), ("halving", 0.01), ("scaled", 0.0))
]


@triton.jit
def inverse_kernel(
    p_a, p_y, p_scratch, m, iterations, ridge,
    BLOCK_M: tl.constexpr, HALVING: tl.constexpr, PANEL: tl.constexpr,
):  # fmt: skip
    """Y of one matrix, in registers, or in memory by panels."""
    offs_m = tl.arange(0, BLOCK_M)
    b_eye = offs_m[:, None] == offs_m[None, :]
    inside = (offs_m < m)[:, None] & (offs_m < m)[None, :]
    offs = offs_m[:, None] * m + offs_m[None, :]
    b_a = tl.where(b_eye, 1.0, tl.load(p_a + offs, mask=inside, other=0.0))
    if PANEL == 0:
        b_y = newton_inverse(b_a, iterations, ridge, BLOCK_M, HALVING, True)
    else:
        p_y_memory = p_scratch + BLOCK_M * BLOCK_M
        p_by = p_y_memory + BLOCK_M * BLOCK_M
        newton_inverse_in_memory(
            b_a, p_scratch, p_y_memory, p_by, iterations, ridge, BLOCK_M, PANEL, HALVING, True
        )
        b_y = tl.load(p_y_memory + offs_m[:, None] * BLOCK_M + offs_m[None, :])
    tl.store(p_y + offs, b_y, mask=inside)


def main() -> None:
    for m, panel, start, ridge in CASES:
        settings = InverseSettings("newton", 20, start, ridge)
        for kind, landmarks in hard_landmarks(m).items():
            landmarks = landmarks.float()
            scale = 1 / math.sqrt(landmarks.shape[-1])
            a = gaussian_kernel(landmarks, landmarks, scale)
            side = block(m)
            y = torch.full((m, m), math.nan)
            scratch = torch.full((3, side, side), math.nan)
            inverse_kernel[(1,)](
                a, y, scratch, m, settings.iterations, ridge,
                BLOCK_M=side, HALVING=start == "halving", PANEL=panel,
            )  # fmt: skip
            generator = torch.Generator().manual_seed(0)
            noise, v = torch.randn(2, 300, 32, generator=generator)
            tokens = landmarks[torch.arange(300) % m] + 0.3 * noise
            r = gaussian_kernel(tokens.double(), landmarks.double(), scale)
            expected, got, plain = (
                r @ (inverse.double() @ (r.mT @ v.double()))
                for inverse in (
                    newton_iterate(a.double(), settings),
                    y,
                    newton_iterate(a, settings),
                )
            )
            found = relative_error(got, expected), relative_error(plain, expected)
            print(json.dumps({"case": [kind, m, start, ridge], "errors": found}), flush=True)


if __name__ == "__main__":
    main()
