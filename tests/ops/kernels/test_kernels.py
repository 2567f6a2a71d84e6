"""The kernels without a GPU: interpreted on the CPU, and compiled for GPUs that are not there."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernels need the package triton")

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[2]


def run(script: str, *arguments: str) -> list[dict]:
    command = [sys.executable, str(FOLDER / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def compiled(calls: list[dict]) -> list[tuple[dict, list[dict]]]:
    """Each call with what its kernels need, compiled in one process."""
    lines = run("ahead_of_time.py", *map(json.dumps, calls))
    return [
        (call, [line for line in lines if line["call"] == number])
        for number, call in enumerate(calls)
    ]


def names(kernels: list[dict]) -> set[str]:
    return {kernel["name"] for kernel in kernels}


@pytest.mark.parametrize("which", ["some", pytest.param("all", marks=pytest.mark.full)])
@pytest.mark.slow
def test_interpreted_kernels_agree_with_the_reference(which):
    lines = run("interpreted.py", which)
    assert {line["path"] for line in lines} == {"one launch", "three launches"}
    for line in lines:
        for name, (error, allowed) in line["errors"].items():
            assert error <= allowed, (line, name)


@pytest.mark.full
def test_interpreted_value_convolution_agrees_with_the_library():
    lines = run("interpreted_value_conv.py")
    assert len(lines) == 4
    for line in lines:
        for name, error in line["errors"].items():
            assert error < 1e-3, (line, name)


@pytest.mark.slow
def test_value_convolution_compiles_and_fits_the_chip():
    shapes = dict(kernel=9, side=56, d=32), dict(kernel=3, side=7, d=128)
    calls = [shape | dict(architecture=number) for shape in shapes for number in (80, 90)]
    for call, kernels in compiled(calls):
        assert names(kernels) == {
            "value_band_kernel",
            "value_conv_kernel",
            "value_conv_weight_kernel",
            "part_sum_kernel",
        }
        for kernel in kernels:
            assert kernel["shared"] <= 99 * 1024, (call, kernel)  # of the smallest Ampere GPUs
            assert kernel["spilled"] == 0, (call, kernel)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [80, 90])
def test_kernels_compile_and_fit_the_chip(architecture):
    common = dict(architecture=architecture, m=49, d=32, masked=True)
    (_, short), (_, long) = compiled([common | dict(n=196), common | dict(n=3136)])
    assert names(short) == {"short_forward_kernel", "short_backward_kernel"}
    assert names(long) == {
        "collect_kernel",
        "mixing_kernel",
        "spread_kernel",
        "mixing_backward_kernel",
        "spread_backward_kernel",
    }
    shared_memory = {80: 163 * 1024, 90: 227 * 1024}[architecture]
    for kernel in short + long:
        assert kernel["shared"] <= shared_memory, kernel
        # The passes over the tokens must not spill (on sm_80 a few numbers that wait for the end of the loop
        # do no harm); the m x m part, once per head, may.
        token_pass = kernel["name"] in {"collect_kernel", "spread_kernel", "spread_backward_kernel"}
        allowed = {80: 128, 90: 0}[architecture] if token_pass else 1024
        assert kernel["spilled"] <= allowed, kernel


@pytest.mark.full
def test_kernels_for_many_short_heads_hardly_spill():
    calls = [
        dict(architecture=90, n=196, m=49, d=32, batch=300, inverse="solve", masked=masked)
        for masked in (False, True)
    ]
    for call, kernels in compiled(calls):
        assert {"collect_kernel", "spread_backward_kernel"} < names(kernels)
        for kernel in kernels:
            if kernel["name"] in {"collect_kernel", "spread_kernel", "spread_backward_kernel"}:
                # Both smaller tiles together are faster, measured without a mask, in spite of what one spills.
                assert kernel["spilled"] <= (0 if call["masked"] else 96), (call, kernel)


@pytest.mark.full
def test_kernels_of_a_solve_compile_and_fit_the_chip():
    calls = [
        dict(architecture=architecture, n=n, m=m, d=32, masked=True, inverse="solve")
        for n, m, architecture in (
            (196, 49, 80),
            (196, 49, 90),
            (3136, 49, 80),
            (3136, 49, 90),
            (3136, 100, 90),
        )
    ]
    # Some for the factor, which is held to fewer registers than it would take, for more programs on a processor.
    allowed = {"short_forward_kernel": 0, "short_backward_kernel": 2048, "factor_kernel": 256}
    for call, kernels in compiled(calls):
        if call["n"] == 196:
            assert names(kernels) == {"short_forward_kernel", "short_backward_kernel"}, call
        else:
            assert {"factor_kernel", "solve_kernel", "mixing_backward_kernel"} < names(kernels), (
                call
            )
        for kernel in kernels:
            assert kernel["shared"] <= 163 * 1024, (call, kernel)
            if call["m"] == 49 and kernel["name"] in allowed:
                assert kernel["spilled"] <= allowed[kernel["name"]], (call, kernel)


@pytest.mark.full
def test_float32_fits_every_gpu_since_ampere():
    common = dict(architecture=80, m=64, d=32, dtype="float32")
    for call, kernels in compiled([common | dict(n=196), common | dict(n=3136)]):
        assert kernels
        for kernel in kernels:
            assert kernel["shared"] <= 99 * 1024, (call, kernel)


@pytest.mark.full
def test_landmarks_in_tiles_fit_the_chip():
    shared_memory = {80: 99 * 1024, 90: 227 * 1024}  # 99 KiB: all GPUs since Ampere
    common = dict(n=500, m=100, d=128, dtype="float32")
    for call, kernels in compiled([common | dict(architecture=number) for number in shared_memory]):
        assert "spread_tiled_backward_kernel" in names(kernels)
        for kernel in kernels:
            assert kernel["shared"] <= shared_memory[call["architecture"]], (call, kernel)


@pytest.mark.full
def test_large_inverses_compile_without_spilled_registers():
    kinds = {500: "newton_split_kernel", 600: "newton_product_kernel"}
    for call, kernels in compiled([dict(n=700, m=m, d=32) for m in kinds]):
        assert kinds[call["m"]] in names(kernels)
        for kernel in kernels:
            assert kernel["spilled"] == 0, (call, kernel)
