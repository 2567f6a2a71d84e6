"""Compile the kernels that a call would launch for a GPU that is not there, and read what they need.

Run as a program, so that neither the interpreter's setting nor a GPU of the test's process matters:

    python tests/ops/kernels/ahead_of_time.py '{"dtype": "bfloat16", "n": 3136, "m": 49, "d": 32}' [MORE ...]

or {"stride": 8, "d": 32} for the window product, {"kernel": 9, "side": 56, "d": 32} for the value convolution,
{"hidden": 384} for the MLP's GELU, {"conv_mlp": 384, "side": 56} for that with a convolution, {"norm": 32} for the norms and the sums of columns, {"query_norm": 8, "d": 32}
for the norm of queries with means of windows of that side, {"conv_norm": 32} for what follows a convolution.
It prints one JSON line per kernel: number of the argument, name, shared memory in bytes, registers per
thread, bytes spilled.
"""

import functools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from softfree.ops.attention.kernels import launch
from softfree.ops.attention.settings import AttentionSettings, Inputs, InverseSettings
from softfree.ops.conv_mlp import operator as conv_mlp
from softfree.ops.conv_norm import operator as conv_norm
from softfree.ops.mlp import operator as mlp
from softfree.ops.norm import operator as norm
from softfree.ops.query_norm import operator as query_norm
from softfree.ops.shared import devices, sums
from softfree.ops.value_conv import operator as value_conv
from softfree.ops.window_product import operator as window_product

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
    torch.int32: "*i32",
}
ARCHITECTURE = 90
CALL = 0


def compile_instead(
    self: JITFunction, *args, grid, warmup, num_warps=4, num_stages=3, arch=None, **kwargs
):
    """What ``kernel[grid](...)`` calls, with the launch left out."""
    values = dict(zip(self.arg_names, args, strict=False)) | kwargs
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(self.params):
        value = values[parameter.name]
        kind = "constexpr"
        if parameter.is_constexpr or (isinstance(value, int) and value == 1):
            constants[(index,)] = value
        elif isinstance(value, torch.Tensor):
            kind = TYPES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            kind = "i32"
            if value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            kind = "fp32"
        signature[parameter.name] = kind
    compiled = triton.compile(
        ASTSource(self, signature, constants, attributes),
        target=GPUTarget("cuda", ARCHITECTURE, 32),
        options={
            "num_warps": num_warps,
            "num_stages": num_stages,
            **({} if arch is None else {"arch": arch}),
        },
    )
    registers, spilled = assembled(compiled.asm["ptx"])
    line = {
        "call": CALL,
        "name": self.__name__,
        "shared": compiled.metadata.shared,
        "registers": registers,
        "spilled": spilled,
    }
    print(json.dumps(line), flush=True)


@functools.cache
def assembled(ptx: str) -> tuple[int, int]:
    """Registers per thread and bytes spilled, as NVIDIA's assembler (part of Triton) reports them."""
    assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        suffix = "a" if ARCHITECTURE >= 90 else ""
        command = [
            assembler,
            "-v",
            f"--gpu-name=sm_{ARCHITECTURE}{suffix}",
            source,
            "-o",
            "/dev/null",
        ]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = sum(int(size) for size in re.findall(r"(\d+) bytes spill", log))
    return int(re.search(r"Used (\d+) registers", log).group(1)), spilled


def compile_window_product(dtype: torch.dtype, stride: int, d: int) -> None:
    """At a side that the stride divides, enough windows for the tiles of a large batch."""
    side = 7 * stride
    q = torch.zeros(2, 2, side * side, d, dtype=dtype)
    weight = torch.zeros(d, d, stride, stride)
    out = window_product.forward(q, weight, side, side)
    window_product.write_gradient(out, q, weight, side, side, q, kept=1.0)


def compile_value_conv(dtype: torch.dtype, kernel: int, side: int, d: int) -> None:
    v = torch.zeros(2, side * side, 2 * d, dtype=dtype)
    weight = torch.zeros(2, 1, kernel, kernel)
    value_conv._forward(v, weight, v, side, side)
    value_conv._backward(v, v, weight, side, side)


def compile_call(architecture: int = 90, **settings) -> None:
    global ARCHITECTURE
    ARCHITECTURE = architecture
    launch.remembered_call.cache_clear()
    dtype = getattr(torch, settings.get("dtype", "bfloat16"))
    if "stride" in settings:
        compile_window_product(dtype, settings["stride"], settings["d"])
        return
    if "kernel" in settings:
        compile_value_conv(dtype, settings["kernel"], settings["side"], settings["d"])
        return
    if "hidden" in settings:
        hidden = torch.zeros(64, settings["hidden"], dtype=dtype)
        mlp._gelu_backward(hidden.clone(), hidden)
        return
    if "conv_mlp" in settings:
        channels, side = settings["conv_mlp"], settings["side"]
        hidden = torch.zeros(2 * side * side, channels, dtype=dtype)
        of_convolution = torch.zeros(channels, 1, 3, 3), torch.zeros(channels)
        conv_mlp._conv_gelu(hidden, *of_convolution, 2, side, side)
        conv_mlp._conv_gelu_backward(hidden.clone(), hidden, *of_convolution, 2, side, side)
        conv_mlp._conv_backward(hidden, hidden, of_convolution[0], 2, side, side)
        return
    if "query_norm" in settings:
        stride, d = settings["query_norm"], settings["d"]
        grid, window = (7 * stride, 7 * stride), (stride, stride)
        q, scale = torch.zeros(2, 2, 49 * stride**2, d, dtype=dtype), torch.ones(2)
        inverse = query_norm.inverse_deviations(q)
        means = query_norm.norm(q, scale, q, inverse, grid, window, means=True, log=True)
        query_norm.write_gradient(q, q, scale, inverse, means, q, grid, window, 0.5, log=True)
        return
    if "conv_norm" in settings:
        channels = settings["conv_norm"]
        x = torch.zeros(1, channels, 14, 14, dtype=dtype)
        conv_norm._forward(x, *torch.zeros(5, channels, dtype=dtype), 1e-5)
        return
    if "norm" in settings:
        x = torch.zeros(640, settings["norm"], dtype=dtype)
        weight = torch.zeros(settings["norm"])
        if settings["norm"] <= 128:
            norm.landmark_forward(x, weight, weight, 0.5, 1e-5)
            norm.landmark_backward(x, x, weight, weight, 0.5, 1e-5)
        norm._add_forward(x, x, weight, weight, 1e-5, True)
        norm._add_backward(x, x, weight, 1e-5)
        sums.column_sums(x)
        sums.part_sum_launch((3, 640), (1,), None, True)(weight, weight, weight)
        sums.token_sum_launch(2, 1, 64, (640, 64), (1280, 128), 0.5)(x, x)
        return
    n, m, d = settings["n"], settings["m"], settings["d"]
    d_v = settings.get("d_v", d)
    cross = settings.get("cross", False)
    masked = settings.get("masked", False)
    batch = settings.get("batch", 2)
    q, v = torch.zeros(batch, 2, n, d, dtype=dtype), torch.zeros(batch, 2, n, d_v, dtype=dtype)
    landmarks = torch.zeros(batch, 2, m, d, dtype=dtype)
    k = q.clone() if cross else None
    masks = (torch.ones(batch, n, dtype=torch.bool), torch.ones(batch, m, dtype=torch.bool))
    masks = masks if masked else (None, None)
    inputs = Inputs(q, k, v, landmarks, *masks)
    inverse = InverseSettings()
    if settings.get("inverse") == "solve":
        inverse = InverseSettings.solve(None, 2)
    attention = AttentionSettings(0.2, inverse=inverse)
    _, *kept = launch.forward(inputs, attention)
    launch.backward(v, inputs, *kept, attention)


def main() -> None:
    global CALL
    JITFunction.run = compile_instead
    devices.is_hopper = lambda device: ARCHITECTURE >= 90
    for CALL, settings in enumerate(sys.argv[1:]):  # noqa: B007
        compile_call(**json.loads(settings))


if __name__ == "__main__":
    main()
