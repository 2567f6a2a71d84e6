"""Backend ``"triton"``: which kernel runs, on which blocks, in how many programs.

Forward, long inputs: collect (U = P V, in parts), mixing (inverse, W = Y' U) or factor and solve, spread (X = R W).
Backward: collect (dW = R^T G and, of few tokens, U again, in parts), mixing_backward (W, dU, the inverse's part of dL),
spread_backward (dQ, dK, dV, dL). Short inputs: one kernel each way. Landmarks that do not fit a program go
tile by tile, and the backward then takes two passes more: spread_tiled_backward (dQ, dV; again for keys of
their own) and spread_backward for dL alone.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from softfree.ops.attention import mixing as torch_mixing
from softfree.ops.attention.chunked import sums_shape
from softfree.ops.attention.inverse import add_ridge, start_value
from softfree.ops.attention.kernels.common import LOW_SCALE
from softfree.ops.attention.kernels.mixing import (
    landmark_matrix_kernel,
    mixing_backward_kernel,
    mixing_kernel,
    newton_product_kernel,
    newton_split_kernel,
)
from softfree.ops.attention.kernels.short import short_backward_kernel, short_forward_kernel
from softfree.ops.attention.kernels.solve import factor_kernel, solve_kernel
from softfree.ops.attention.kernels.tiled import spread_tiled_backward_kernel, spread_tiled_kernel
from softfree.ops.attention.kernels.tokens import (
    collect_kernel,
    spread_backward_kernel,
    spread_kernel,
)
from softfree.ops.attention.settings import AttentionSettings, Inputs, InverseSettings
from softfree.ops.attention.solve import inverse_factor
from softfree.ops.shared import devices
from softfree.ops.shared.devices import as_for_ampere
from softfree.ops.shared.launching import launch
from softfree.ops.shared.shapes import block, power_of_two, tiles_of, token_tensor

# Beyond, the m x m part is a launch for each of its products; before Hopper its float32 matrices do not fit the chip.
MAX_FUSED_LANDMARKS = {"Hopper": 128, "before": 64}
MAX_LANDMARKS_IN_REGISTERS = 64  # of the inverse
MAX_LANDMARKS_AT_ONCE = 128  # in a program of a token pass; more spill its registers
LANDMARK_TILE = {"Hopper": 32, "before": 16}  # where they do not fit one
# Of the factorisation: landmarks of a tile and warps, for up to 64 landmarks and beyond.
FACTOR_TILE = ((16, 1), (32, 4))
MAX_SPLIT_ITERATIONS = 30  # ||Y|| stays below 0.9 * 2^(T/2), within float16's range up to here
# One launch each way, a program per head, up to so many tokens while the heads are at most so many per processor.
# With more heads the token passes of their own keep more programs on a processor. One launch does not keep U, so
# its tokens are at most ``chunked.FEW_TOKENS``.
ONE_LAUNCH = ((1024, 1), (256, 4))


class Tile(NamedTuple):
    """Tokens of a tile, warps of a program, software pipeline depth, programs for each processor."""

    tokens: int
    warps: int
    stages: int
    programs: int = 2


# By the block of landmarks and whether inputs have 16 bits; tuned on an NVIDIA H200 at d = 32.
TILES = {
    "collect": {(64, True): Tile(128, 4, 3, 3)},
    "spread": {(64, True): Tile(64, 4, 3, 4)},
    "spread_backward": {(64, True): Tile(64, 4, 3)},
    "short_forward": {(64, True): Tile(64, 4, 2)},
    "short_backward": {(64, True): Tile(64, 4, 2)},
    "mixing": {(64, True): Tile(0, 4, 3)},
    "mixing_backward": {(64, True): Tile(0, 4, 3)},
}


def _tile(kernel: str, shape: "_Shape") -> Tile:
    widest = max(shape.block_d, shape.block_c)
    if kernel == "spread_backward" and widest == 64 and shape.block_m == 64 and shape.sixteen_bit:
        return Tile(32, 8, 2)  # the tile tuned at 32 channels would spill registers
    tuned = TILES[kernel].get((shape.block_m, shape.sixteen_bit))
    if tuned is not None and widest <= 64 and shape.hopper:
        return tuned
    large = shape.block_m > 64 or widest > 64
    if shape.tiles > 1 and not kernel.startswith("mixing"):
        return Tile(32, 8, 1) if shape.hopper else Tile(16, 4, 1)
    if (
        not shape.hopper
        and not shape.sixteen_bit
        and kernel in ("spread_backward", "short_backward")
    ):
        return Tile(16, 4, 1)  # 99 KiB of shared memory are all that some of these have
    if not shape.hopper and kernel == "spread_backward":
        return Tile(32, 4, 2)  # else registers spill
    return Tile(32 if large else 64, 8 if large else 4, 1 if large else 2)


class _Shape(NamedTuple):
    batch: int
    heads: int
    m: int
    d: int
    d_v: int
    block_m: int
    block_d: int
    block_c: int
    tile_m: int  # landmarks that a program of a token pass holds
    sixteen_bit: bool  # inputs
    hopper: bool

    @classmethod
    def of(cls, q: Tensor, v: Tensor, landmarks: Tensor) -> "_Shape":
        batch, heads, m, d = landmarks.shape
        d_v = v.shape[3]
        sixteen_bit = q.dtype.itemsize == 2
        blocks = block(m), block(d), block(d_v)
        hopper = devices.is_hopper(q.device)
        fits = _fits(q, blocks[0], max(blocks[1:]))
        tile_m = blocks[0] if fits else LANDMARK_TILE[_generation(hopper)]
        return cls(batch, heads, m, d, d_v, *blocks, tile_m, sixteen_bit, hopper)

    @property
    def rows(self) -> int:
        return self.batch * self.heads

    @property
    def fused(self) -> bool:
        """Whether one program does the m x m part."""
        return _fused(self.m, self.hopper)

    @property
    def tiles(self) -> int:
        """Of landmarks, in a token pass."""
        return tiles_of(self.m, self.tile_m)

    @property
    def collects_both(self) -> bool:
        """Whether a program has the registers to collect U and dW in one pass."""
        return self.tile_m * self.block_c <= 64 * 64 and (self.sixteen_bit or self.hopper)

    @property
    def target(self) -> dict[str, str]:
        """What a token pass is compiled for; nothing: the GPU at hand."""
        return as_for_ampere() if self.tiles > 1 else {}


def _generation(hopper: bool) -> str:
    return "Hopper" if hopper else "before"


def _fused(landmarks: int, hopper: bool) -> bool:
    return landmarks <= MAX_FUSED_LANDMARKS[_generation(hopper)]


def inverse_shape(landmarks: Tensor, settings: AttentionSettings) -> tuple[int, ...]:
    """Of what :func:`forward` keeps of the inverse.

    Where one program makes it that is a lower triangle, and of a solve also the normalisation.
    """
    batch, heads, m, _ = landmarks.shape
    if _fused(m, devices.is_hopper(landmarks.device)):
        return batch, heads, m * (m + (1 if settings.inverse.method == "newton" else 3)) // 2
    return batch, heads, m, m


def _fits(q: Tensor, block_m: int, widest: int) -> bool:
    """Whether a program of a token pass can hold all landmarks, by what the compiler reports it needs."""
    if block_m > MAX_LANDMARKS_AT_ONCE:
        return False
    hopper = devices.is_hopper(q.device)
    if q.dtype == torch.bfloat16:
        return block_m * widest <= (128 * 128 if hopper else 64 * 64)
    # The other dtypes keep W and dU in float32, and float32 its tokens split in two.
    if not hopper:
        return block_m <= 64 and widest <= 32
    return (widest <= 32 and block_m <= 128) or block_m <= 32


class _Call:
    """A call prepared for the kernels: tokens by rows, masks as bytes, and options that kernels share."""

    def __init__(self, inputs: Inputs, settings: AttentionSettings):
        q, k, v, landmarks, key_mask, landmark_mask = inputs
        self.settings = settings
        self.newton = settings.inverse.method == "newton"
        self.shape = _Shape.of(q, v, landmarks)
        self.cross = k is not None
        self.q, self.v = _rows(q), _rows(v)
        self.keys = self.q if k is None else _rows(k)
        self.landmarks = landmarks.contiguous()
        # Where there is no mask, a pointer that the kernels do not read.
        self.key_mask, self.landmark_mask = (
            q if mask is None else mask.contiguous().view(torch.uint8)
            for mask in (key_mask, landmark_mask)
        )
        self.has_key_mask, self.has_landmark_mask = key_mask is not None, landmark_mask is not None
        self.scale = settings.scale
        self.log2_scale = settings.scale * math.log2(math.e)
        self.flags = _flags(q)
        self.blocks = dict(
            BLOCK_M=self.shape.block_m, BLOCK_D=self.shape.block_d, BLOCK_C=self.shape.block_c,
            HAS_LANDMARK_MASK=self.has_landmark_mask,
        )  # fmt: skip

    @property
    def lengths(self) -> tuple[int, int]:
        """Of queries and keys."""
        return self.q.shape[2], self.keys.shape[2]

    def token_pass(self, tile: Tile) -> dict[str, Any]:
        """What a pass over the tokens is compiled with."""
        return self.blocks | self.flags | dict(
            BLOCK_M=self.shape.tile_m, BLOCK_N=tile.tokens,
            num_warps=tile.warps, num_stages=tile.stages, **self.shape.target,
        )  # fmt: skip

    def short(self, kernel: str) -> dict[str, Any]:
        """What the one kernel of a short input is compiled with."""
        tile = _tile(kernel, self.shape)
        return self.blocks | self.flags | dict(
            BLOCK_N=tile.tokens, HAS_KEY_MASK=self.has_key_mask, NORMALIZE=self.settings.normalize,
            num_warps=tile.warps, num_stages=tile.stages, **as_for_ampere(),
        )  # fmt: skip

    def steps(self) -> dict[str, bool]:
        """How a program takes Newton's steps."""
        inverse = self.settings.inverse
        return dict(
            HALVING=inverse.start == "halving", SPLIT=inverse.iterations <= MAX_SPLIT_ITERATIONS
        )


def forward(inputs: Inputs, settings: AttentionSettings) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`softfree.ops.attention.chunked.forward`, with the inverse in :func:`inverse_shape`."""
    call = _Call(inputs, settings)
    shape, q, keys, v, landmarks = call.shape, call.q, call.keys, call.v, call.landmarks
    x = token_tensor(q, shape.d_v)
    inverse = _float32(landmarks, *inverse_shape(landmarks, settings))
    u = _float32(landmarks, *sums_shape(v, landmarks))
    if x.numel() == 0:
        return x, inverse, u
    if call.newton and _one_launch(call):
        launch(
            short_forward_kernel, (shape.rows,),
            (q, keys, v, landmarks, call.key_mask, call.landmark_mask, x, inverse),
            (
                shape.heads, *call.lengths, shape.m, shape.d, shape.d_v,
                *_strides(q, keys, v, x), call.scale, call.log2_scale,
                settings.inverse.iterations, settings.inverse.ridge,
            ),
            **call.short("short_forward"), **call.steps(),
        )  # fmt: skip
        return x, inverse, u
    overlap = False
    if shape.fused and not call.newton:
        overlap = _factor(call, inverse)
    _, parts = _collect(call, keys, None, v, overlap)
    if shape.fused:
        mix = _mix if call.newton else _solve
        w = mix(call, parts, inverse, u)
    else:
        sums = _sum(parts, shape)
        u = sums if u.numel() > 0 else u
        a = _landmark_matrix(call)
        inverse = (
            _newton_inverse(a, settings.inverse)
            if call.newton
            else inverse_factor(a, settings.inverse.ridge)
        )
        w = torch_mixing.mix(sums, a, inverse, settings)
    _spread(call, w, x)
    return x, inverse, u


def backward(
    grad: Tensor,
    inputs: Inputs,
    inverse: Tensor,
    u: Tensor,
    settings: AttentionSettings,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As :func:`softfree.ops.attention.chunked.backward`; the gradients of q and v go ``into`` tensors given."""
    call = _Call(inputs, settings)
    shape, q, keys, v, landmarks = call.shape, call.q, call.keys, call.v, call.landmarks
    grad_q, grad_v = into or (token_tensor(q, shape.d), token_tensor(v, shape.d_v))
    grad_k = token_tensor(keys, shape.d) if call.cross else q.new_empty(0)
    grad_landmarks = torch.empty_like(landmarks)
    if grad_q.numel() == 0:
        return grad_q, grad_k, grad_v, grad_landmarks
    grad = _rows(grad)
    n, n_k = call.lengths
    tensors = (grad, q, keys, v, landmarks, call.key_mask, call.landmark_mask)
    outputs = (grad_q, grad_k if call.cross else grad_q, grad_v)
    sizes = (shape.heads, n, n_k, shape.m, shape.d, shape.d_v)
    scales = (call.scale, call.log2_scale)
    strides = _strides(grad, q, keys, v, *outputs)
    if call.newton and _one_launch(call):
        launch(
            short_backward_kernel, (shape.rows,), (*tensors, inverse, *outputs, grad_landmarks),
            (*sizes, *strides, *scales), CROSS=call.cross, **call.short("short_backward"),
        )  # fmt: skip
        return grad_q, grad_k, grad_v, grad_landmarks
    if u.numel() > 0:
        dw_parts, _ = _collect(call, q, grad, None)
        u_parts = u.view(shape.rows, 1, shape.m, shape.d_v)
    elif not call.cross and shape.collects_both:
        dw_parts, u_parts = _collect(call, q, grad, v)
    else:
        dw_parts, _ = _collect(call, q, grad, None)
        _, u_parts = _collect(call, keys, None, v)
    tile = _tile("spread_backward", shape)
    stretches, stretch = _deal(n, tile, shape.rows, q)
    key_stretches, key_stretch = _deal(n_k, tile, shape.rows, q) if call.cross else (0, 0)
    dl_parts = stretches + key_stretches
    dl = _float32(q, shape.rows, 1 + dl_parts, shape.m, shape.d)
    done = torch.empty((shape.rows, shape.tiles), dtype=torch.int32, device=q.device)
    if shape.fused:
        w, du = (_float32(q, shape.rows, shape.m, shape.d_v) for _ in range(2))
        parts = u_parts.shape[1], dw_parts.shape[1]
        launch(
            mixing_backward_kernel, (shape.rows,),
            (landmarks, call.landmark_mask, u_parts, dw_parts, inverse, w, du, dl, done),
            (
                shape.heads, shape.m, shape.d, shape.d_v, *parts, 1 + dl_parts, shape.tiles,
                call.scale, settings.inverse.ridge,
            ),
            ORDER=0 if call.newton else settings.inverse.order,
            PARTS=_parts_at_once(max(parts), shape.block_m, shape.block_c),
            NORMALIZE=settings.normalize, FLOAT32=call.flags["FLOAT32"], **call.blocks,
            num_warps=_tile("mixing_backward", shape).warps, **as_for_ampere(),
        )  # fmt: skip
    else:
        points, mask = landmarks.float(), inputs.landmark_mask
        if mask is not None:
            points = torch.where(mask[:, None, :, None], points, 0)
        w, du, through_inverse = torch_mixing.mixing_backward(
            _sum(dw_parts, shape), _sum(u_parts, shape), _landmark_matrix(call), inverse, points,
            mask, settings,
        )  # fmt: skip
        w, du = w.contiguous(), du.contiguous()
        dl[:, 0] = through_inverse.flatten(0, 1)
        done.zero_()
    options = call.token_pass(tile)
    if shape.tiles > 1:
        roles = [(q, grad_q, n, True, not call.cross)]
        if call.cross:
            roles.append((keys, grad_k, n_k, False, True))
        for tokens, out, length, as_queries, as_keys in roles:
            launch(
                spread_tiled_backward_kernel, (shape.rows * tiles_of(length, tile.tokens),),
                (tokens, grad, v, landmarks, call.key_mask, call.landmark_mask, w, du, out, grad_v),
                (
                    shape.heads, length, shape.m, shape.d, shape.d_v,
                    *_strides(tokens, grad, v, out, grad_v), *scales,
                ),
                QUERIES=as_queries, KEYS=as_keys, HAS_KEY_MASK=call.has_key_mask and as_keys,
                **options,
            )  # fmt: skip
    launch(
        spread_backward_kernel, (shape.rows * dl_parts, shape.tiles),
        (*tensors, w, du, *outputs, dl, done, grad_landmarks),
        (*sizes, dl_parts, stretches, stretch, key_stretch, *strides, *scales),
        PARTS=_parts_at_once(1 + dl_parts, shape.tile_m, shape.block_d), CROSS=call.cross,
        WRITE=shape.tiles == 1, HAS_KEY_MASK=call.has_key_mask, **options,
    )  # fmt: skip
    return grad_q, grad_k, grad_v, grad_landmarks


def _mix(call: _Call, parts: Tensor, inverse: Tensor, u: Tensor) -> Tensor:
    """Write the inverse and U, unless that is empty; return W = Y' U."""
    shape, settings = call.shape, call.settings
    w = _float32(parts, shape.rows, shape.m, shape.d_v)
    scratch, panel = w, 0
    if shape.block_m > MAX_LANDMARKS_IN_REGISTERS:
        scratch, panel = _float32(parts, shape.rows, 3, shape.block_m, shape.block_m), 32
    launch(
        mixing_kernel, (shape.rows,),
        (call.landmarks, call.landmark_mask, parts, inverse, u, w, scratch),
        (
            shape.heads, shape.m, shape.d, shape.d_v, parts.shape[1], call.scale,
            settings.inverse.iterations, settings.inverse.ridge,
        ),
        PARTS=_parts_at_once(parts.shape[1], shape.block_m, shape.block_c), PANEL=panel,
        FLOAT32=call.flags["FLOAT32"], KEEP=u.numel() > 0, NORMALIZE=settings.normalize,
        **call.blocks, **call.steps(), num_warps=_tile("mixing", shape).warps, **as_for_ampere(),
    )  # fmt: skip
    return w


def _factor(call: _Call, factor: Tensor) -> bool:
    """Write the inverse Cholesky factor; True if the next kernel runs beside it, which needs no part of it."""
    shape, inverse = call.shape, call.settings.inverse
    tile, warps = FACTOR_TILE[shape.block_m > 64]
    overlap = shape.tiles == 1 and devices.can_overlap(call.q.device)
    registers = {"maxnreg": 168} if warps == 1 and not devices.interpreted() else {}
    launch(
        factor_kernel, (shape.rows,), (call.landmarks, call.landmark_mask, factor),
        (shape.heads, shape.m, shape.d, call.scale, inverse.ridge),
        COUNT=tiles_of(shape.m, tile), TILE=tile, BLOCK_D=shape.block_d,
        HAS_LANDMARK_MASK=call.has_landmark_mask, NORMALIZE=call.settings.normalize,
        FLOAT32=call.flags["FLOAT32"], OVERLAP=overlap, num_warps=warps, **registers,
    )  # fmt: skip
    return overlap


def _solve(call: _Call, parts: Tensor, factor: Tensor, u: Tensor) -> Tensor:
    """Write U, unless that is empty; return W = Y' U."""
    shape, inverse = call.shape, call.settings.inverse
    w = _float32(parts, shape.rows, shape.m, shape.d_v)
    launch(
        solve_kernel, (shape.rows,), (parts, factor, u, w),
        (shape.m, shape.d_v, parts.shape[1], inverse.ridge),
        BLOCK_M=shape.block_m, BLOCK_C=shape.block_c,
        PARTS=_parts_at_once(parts.shape[1], shape.block_m, shape.block_c),
        NORMALIZE=call.settings.normalize, ORDER=inverse.order, KEEP=u.numel() > 0,
        num_warps=_tile("mixing", shape).warps, **as_for_ampere(),
    )  # fmt: skip
    return w


def _landmark_matrix(call: _Call) -> Tensor:
    """``A = kappa(L, L)``, (batch, heads, m, m), of landmarks too many for one program."""
    batch, heads, m, d = call.landmarks.shape
    a = _float32(call.landmarks, batch, heads, m, m)
    tiles = tiles_of(m, 64)
    launch(
        landmark_matrix_kernel, (batch * heads * tiles * tiles,),
        (call.landmarks, call.landmark_mask, a), (heads, m, d, call.scale, tiles),
        BLOCK=64, HAS_LANDMARK_MASK=call.has_landmark_mask,
    )  # fmt: skip
    return a


def _newton_inverse(a: Tensor, settings: InverseSettings) -> Tensor:
    """The inverse of matrices (batch, heads, m, m) too large for one program, two launches per step."""
    iterations = settings.iterations
    b = add_ridge(a, settings.ridge).contiguous()
    y = start_value(a, settings.start, settings.ridge) * b
    m = a.shape[-1]
    # An entry of the inverse may be as small as 1 / m^2, which two float16 lose for more landmarks.
    split = iterations <= MAX_SPLIT_ITERATIONS and m <= 512
    large = split and m > 192 and devices.is_hopper(a.device)
    options: dict[str, Any] = dict(
        BLOCK=64, BLOCK_K=32, num_warps=4, num_stages=3, **as_for_ampere()
    )
    if large:  # operands straight from memory: Hopper's matrix instructions are safe here
        options = dict(BLOCK=128, BLOCK_K=64, num_warps=8, num_stages=3)
    tiles = tiles_of(m, options["BLOCK"])
    if split:
        b, y = (_split(matrix, options["BLOCK"] * tiles) for matrix in (b, y))
    kernel = newton_split_kernel if split else newton_product_kernel
    sizes = (y.shape[-1], tiles)
    by, spare = torch.empty_like(y), torch.empty_like(y)
    grid = (a.shape[0] * a.shape[1] * tiles * tiles,)
    for _ in range(iterations):
        launch(kernel, grid, (b, y, y, by), sizes, UPDATE=False, **options)
        launch(kernel, grid, (y, by, y, spare), sizes, UPDATE=True, **options)
        y, spare = spare, y
    if split:
        high, low = y[..., :m, :m].float().unbind(2)
        y = torch.add(high, low, alpha=1 / LOW_SCALE.value)
    return y


def _split(matrices: Tensor, side: int) -> Tensor:
    """float32 matrices (batch, heads, m, m) split in two: (batch, heads, 2, side, side), float16, 0 beyond m."""
    m = matrices.shape[-1]
    parts = matrices.new_zeros((*matrices.shape[:2], 2, side, side), dtype=torch.float16)
    high = matrices.half()
    parts[..., 0, :m, :m] = high
    parts[..., 1, :m, :m] = (matrices - high) * LOW_SCALE.value
    return parts


def _spread(call: _Call, w: Tensor, x: Tensor) -> None:
    """Write ``X = kappa(Q, L) W``."""
    shape, q, n = call.shape, call.q, call.q.shape[2]
    tile = _tile("spread", shape)
    tensors = (q, call.landmarks, call.landmark_mask, w, x)
    sizes = (shape.heads, n, shape.m, shape.d, shape.d_v)
    strides, options = _strides(q, x), call.token_pass(tile)
    if shape.tiles > 1:
        grid = (shape.rows * tiles_of(n, tile.tokens),)
        launch(spread_tiled_kernel, grid, tensors, (*sizes, *strides, call.log2_scale), **options)
    else:
        count, stretch = _deal(n, tile, shape.rows, q)
        values = (*sizes, count, stretch, *strides, call.log2_scale)
        launch(spread_kernel, (shape.rows * count,), tensors, values, **options)


def _collect(
    call: _Call, tokens: Tensor, grad: Tensor | None, v: Tensor | None, overlap: bool = False
) -> tuple[Tensor, Tensor]:
    """Parts (batch * heads, parts, m, d_v) of ``dW = kappa(L, T) G`` and ``U = kappa(L, T) V``.

    Of one of them only, returned twice, where ``grad`` or ``v`` is None; the mask is for U alone. With ``overlap`` it
    begins while the kernel before it runs, and ends after it.
    """
    shape, n = call.shape, tokens.shape[2]
    tile = _tile("collect", shape)
    count, stretch = _deal(n, tile, shape.rows, tokens)
    given = [t for t in (grad, v) if t is not None]
    parts = _float32(tokens, len(given), shape.rows, count, shape.m, shape.d_v)
    launch(
        collect_kernel, (shape.rows * count, shape.tiles),
        (
            tokens, given[0], given[-1], call.landmarks, call.key_mask, call.landmark_mask,
            parts[0], parts[-1],
        ),
        (
            shape.heads, n, shape.m, shape.d, shape.d_v, count, stretch,
            *_strides(tokens, given[0], given[-1]), call.log2_scale,
        ),
        QUERIES=grad is not None, KEYS=v is not None,
        HAS_KEY_MASK=call.has_key_mask and v is not None, OVERLAP=overlap,
        **({"launch_pdl": True} if overlap else {}), **call.token_pass(tile),
    )  # fmt: skip
    return parts[0], parts[-1]


def _one_launch(call: _Call) -> bool:
    """Whether one kernel does all: few tokens per head, and few heads."""
    shape, n = call.shape, max(call.lengths)
    count = devices.processors(call.q.device)
    fits = shape.tiles == 1 and shape.block_m <= MAX_LANDMARKS_IN_REGISTERS
    return fits and any(n <= tokens and shape.rows <= heads * count for tokens, heads in ONE_LAUNCH)


def _deal(n: int, tile: Tile, rows: int, like: Tensor) -> tuple[int, int]:
    """How many programs share a head's tokens, and how many tokens each takes (whole tiles)."""
    tiles = tiles_of(n, tile.tokens)
    wanted = tiles_of(tile.programs * devices.processors(like.device), rows)
    stretch = tiles_of(tiles, min(tiles, wanted)) * tile.tokens
    return tiles_of(n, stretch), stretch


def _parts_at_once(parts: int, rows: int, columns: int) -> int:
    """How many parts of a sum a program loads together: as many as there are, while registers last."""
    return min(power_of_two(parts), max(1, 4 * 64 * 32 // (rows * columns)))


def _float32(like: Tensor, *sizes: int) -> Tensor:
    return torch.empty(sizes, dtype=torch.float32, device=like.device)


def _sum(parts: Tensor, shape: _Shape) -> Tensor:
    """(batch, heads, m, d_v) of parts (batch * heads, parts, m, d_v)."""
    return parts.sum(1).unflatten(0, (shape.batch, shape.heads))


def _flags(q: Tensor) -> dict:
    """How a token pass multiplies float32; three TF32 products are 1.3e-5 off at 128 channels, so not there."""
    if q.dtype != torch.float32:
        return dict(FLOAT32=False, PRECISION="tf32")
    return dict(FLOAT32=True, PRECISION="tf32x3" if q.shape[3] <= 64 else "ieee")


def _rows(tokens: Tensor) -> Tensor:
    """Tokens whose channels lie next to each other."""
    return tokens if tokens.stride(3) == 1 else tokens.contiguous()


def _strides(*tokens: Tensor) -> list[int]:
    return [tensor.stride(axis) for tensor in tokens for axis in range(3)]
