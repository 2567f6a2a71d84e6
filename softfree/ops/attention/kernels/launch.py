"""Backend ``"triton"``: which kernels run, with which blocks, in how many programs.

Forward, long inputs: collect (U = P V, in parts), mixing (inverse, W = Y' U) or factor and solve, spread
(X = R W).
Backward, long inputs: collect (dW = R^T G and, for few tokens, U again, in parts), mixing_backward (W, dU,
the inverse's part of dL), spread_backward (dQ, dK, dV, dL).
Short inputs: one kernel each way.

Landmarks that do not fit into a program are processed in tiles. The backward pass then also runs
spread_tiled_backward for dQ and dV (and again for dK and dV of separate keys), and spread_backward computes
only dL.
"""

import functools
import itertools
import math
from collections.abc import Sequence
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
from softfree.ops.shared.launching import Chain, Launch, Part, Room, Step, launch
from softfree.ops.shared.precision import exactly
from softfree.ops.shared.registration import LEFT_OUT
from softfree.ops.shared.shapes import block, power_of_two, tiles_of, token_layout

# Beyond this, the m x m part takes one launch per product. Before Hopper, its float32 matrices do not fit on
# the chip.
MAX_FUSED_LANDMARKS = {"Hopper": 128, "before": 64}
MAX_LANDMARKS_IN_REGISTERS = 64  # for the inverse
MAX_LANDMARKS_AT_ONCE = 128  # in one program of a token pass; more would spill registers
LANDMARK_TILE = {"Hopper": 32, "before": 16}  # per program, if not all landmarks fit
# For the factorisation: landmarks per tile and warps, for up to 64 landmarks and beyond.
FACTOR_TILE = ((16, 1), (32, 4))
MAX_SPLIT_ITERATIONS = 30  # ||Y|| stays below 0.9 * 2^(T/2), within float16's range up to here
# One launch each way with one program per head: pairs of the most tokens and the most heads per processor.
# With more heads, separate token passes keep more programs on a processor. One launch does not keep U, so the
# tokens are at most ``chunked.FEW_TOKENS``.
ONE_LAUNCH = ((1024, 1), (256, 4))


class Tile(NamedTuple):
    """Tokens per tile, warps per program, software pipeline depth, programs per processor."""

    tokens: int
    warps: int
    stages: int
    programs: int = 2


# Keyed by the block of landmarks and whether inputs have 16 bits; tuned on an NVIDIA H200 at d = 32.
TILES = {
    "collect": {(64, True): Tile(64, 4, 3, 3)},
    "spread": {(64, True): Tile(64, 4, 3, 4)},
    "spread_backward": {(64, True): Tile(64, 4, 3)},
    "short_forward": {(64, True): Tile(64, 4, 2)},
    "short_backward": {(64, True): Tile(64, 4, 2)},
    "mixing": {(64, True): Tile(0, 4, 3)},
    "mixing_backward": {(64, True): Tile(0, 4, 3)},
}

# Instead of these for up to so many tokens, which would leave much of larger tiles empty.
SHORT = 256
SHORT_TILES = {"collect": Tile(32, 4, 3, 3), "spread_backward": Tile(32, 2, 3)}


def _tile(kernel: str, shape: "_Shape", tokens: int | None = None) -> Tile:
    widest = max(shape.block_d, shape.block_c)
    tuned_for = widest <= 32 and shape.block_m == 64 and shape.sixteen_bit and shape.hopper
    if tuned_for and tokens is not None and tokens <= SHORT:
        return SHORT_TILES[kernel]
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
        return Tile(16, 4, 1)  # some of these GPUs have only 99 KiB of shared memory
    if not shape.hopper and kernel == "spread_backward":
        return Tile(32, 4, 2)  # otherwise registers spill
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
    sixteen_bit: bool  # whether the inputs are
    hopper: bool

    @classmethod
    def of(
        cls, landmarks: torch.Size, d_v: int, dtype: torch.dtype, device: torch.device
    ) -> "_Shape":
        batch, heads, m, d = landmarks
        sixteen_bit = dtype.itemsize == 2
        blocks = block(m), block(d), block(d_v)
        hopper = devices.is_hopper(device)
        fits = _fits(dtype, hopper, blocks[0], max(blocks[1:]))
        tile_m = blocks[0] if fits else LANDMARK_TILE[_generation(hopper)]
        return cls(batch, heads, m, d, d_v, *blocks, tile_m, sixteen_bit, hopper)

    @property
    def rows(self) -> int:
        return self.batch * self.heads

    @property
    def fused(self) -> bool:
        """Whether one program computes the m x m part."""
        return _fused(self.m, self.hopper)

    @property
    def tiles(self) -> int:
        """The number of landmark tiles in a token pass."""
        return tiles_of(self.m, self.tile_m)

    @property
    def collects_both(self) -> bool:
        """Whether a program has the registers to collect U and dW in one pass."""
        return self.tile_m * self.block_c <= 64 * 64 and (self.sixteen_bit or self.hopper)

    @property
    def target(self) -> dict[str, str]:
        """The target that a token pass is compiled for; empty for the current GPU."""
        return as_for_ampere() if self.tiles > 1 else {}


def _generation(hopper: bool) -> str:
    return "Hopper" if hopper else "before"


def _fused(landmarks: int, hopper: bool) -> bool:
    return landmarks <= MAX_FUSED_LANDMARKS[_generation(hopper)]


def inverse_shape(landmarks: Tensor, settings: AttentionSettings) -> tuple[int, ...]:
    """The shape of the inverse that :func:`forward` keeps.

    If one program computes it, only the lower triangle is kept, and for a solve also the normalisation.
    """
    return _inverse_shape(landmarks.shape, devices.is_hopper(landmarks.device), settings)


def _inverse_shape(
    landmarks: torch.Size, hopper: bool, settings: AttentionSettings
) -> tuple[int, ...]:
    batch, heads, m, _ = landmarks
    if _fused(m, hopper):
        return batch, heads, m * (m + (1 if settings.inverse.method == "newton" else 3)) // 2
    return batch, heads, m, m


def _fits(dtype: torch.dtype, hopper: bool, block_m: int, widest: int) -> bool:
    """Whether a program of a token pass can hold all landmarks, judging by what the compiler reports."""
    if block_m > MAX_LANDMARKS_AT_ONCE:
        return False
    if dtype == torch.bfloat16:
        return block_m * widest <= (128 * 128 if hopper else 64 * 64)
    # The other dtypes keep W and dU in float32, and float32 also splits its tokens in two.
    if not hopper:
        return block_m <= 64 and widest <= 32
    return (widest <= 32 and block_m <= 128) or block_m <= 32


class _Call:
    """Everything that follows from sizes, strides and settings: blocks, grids, and launches without tensors.

    :func:`remembered_call` creates it once; each property is computed when it is first needed.
    """

    def __init__(
        self,
        sizes: tuple[torch.Size, torch.Size | None, torch.Size, torch.Size],
        masks: tuple[bool, bool],
        dtype: torch.dtype,
        device: torch.device,
        settings: AttentionSettings,
        strides: dict[str, tuple[int, ...]],
    ):
        q, k, v, landmarks = sizes
        self.settings, self.device = settings, device
        self.newton = settings.inverse.method == "newton"
        self.order = 0 if self.newton else settings.inverse.order
        self.shape = shape = _Shape.of(landmarks, v[3], dtype, device)
        self.rows, self.fused = shape.rows, shape.fused
        self.cross = k is not None
        self.n, self.n_k = q[2], v[2]
        self.has_key_mask, self.has_landmark_mask = masks
        self.scale = settings.scale
        self.log2_scale = settings.scale * math.log2(math.e)
        self.flags = _flags(dtype, shape.d)
        self.blocks = dict(
            BLOCK_M=shape.block_m, BLOCK_D=shape.block_d, BLOCK_C=shape.block_c,
            HAS_LANDMARK_MASK=self.has_landmark_mask,
        )  # fmt: skip
        self.small = (shape.rows, shape.m, shape.d_v)  # of W and dU
        self.x = token_layout(q[0], q[1], q[2], v[3])
        self.grad_q, self.grad_v = token_layout(*q), token_layout(*v)
        self.grad_k = self.grad_q if k is None else token_layout(*k)
        results = "x", "grad_q", "grad_k", "grad_v"
        self.strides = {name: getattr(self, name)[1] for name in results} | strides
        self.inverse = _inverse_shape(landmarks, shape.hopper, settings)
        self.sums = sums_shape(*(torch.empty(size, device="meta") for size in (v, landmarks)))
        self.keeps_sums = math.prod(self.sums) > 0

    @functools.cached_property
    def one_launch(self) -> bool:
        """Whether one kernel does everything: few tokens per head, and few heads."""
        shape, n = self.shape, max(self.n, self.n_k)
        count = devices.processors(self.device)
        fits = shape.tiles == 1 and shape.block_m <= MAX_LANDMARKS_IN_REGISTERS
        few = any(n <= tokens and shape.rows <= heads * count for tokens, heads in ONE_LAUNCH)
        return fits and few

    def deal(self, n: int, tile: Tile, least: int = 1) -> tuple[int, int]:
        """The number of programs that share a head's tokens, and the tokens for each (whole tiles)."""
        tiles = tiles_of(n, tile.tokens)
        wanted = tiles_of(tile.programs * devices.processors(self.device), self.shape.rows)
        wanted = max(wanted, least)
        stretch = tiles_of(tiles, min(tiles, wanted)) * tile.tokens
        return tiles_of(n, stretch), stretch

    def deal_for_sums(self, n: int) -> tuple[int, int]:
        """The same if each program computes a part of a sum.

        A head with enough tiles gets at least four programs, or fewer if two rounds of programs are fewer.
        """
        two_rounds = 8 * devices.processors(self.device) // self.shape.rows
        return self.deal(n, _tile("collect", self.shape, n), min(4, two_rounds))

    def strides_of(self, *names: str) -> list[int]:
        return [stride for name in names for stride in self.strides[name][:3]]

    def token_pass(self, tile: Tile) -> dict[str, Any]:
        """The compile-time options of a pass over the tokens."""
        return self.blocks | self.flags | dict(
            BLOCK_M=self.shape.tile_m, BLOCK_N=tile.tokens,
            num_warps=tile.warps, num_stages=tile.stages, **self.shape.target,
        )  # fmt: skip

    def short(self, kernel: str) -> dict[str, Any]:
        """The compile-time options of a kernel that does everything in one launch."""
        tile = _tile(kernel, self.shape)
        return self.blocks | self.flags | dict(
            BLOCK_N=tile.tokens, HAS_KEY_MASK=self.has_key_mask, NORMALIZE=self.settings.normalize,
            ORDER=self.order, num_warps=tile.warps, num_stages=tile.stages, **as_for_ampere(),
        )  # fmt: skip

    @property
    def steps(self) -> dict[str, bool]:
        """The compile-time options for Newton's steps."""
        inverse = self.settings.inverse
        return dict(
            HALVING=inverse.start == "halving", SPLIT=inverse.iterations <= MAX_SPLIT_ITERATIONS
        )

    @functools.cached_property
    def short_forward(self) -> Launch:
        shape, inverse = self.shape, self.settings.inverse
        values = (
            shape.heads, self.n, self.n_k, shape.m, shape.d, shape.d_v,
            *self.strides_of("q", "keys", "v", "x"), self.scale, self.log2_scale,
            inverse.iterations, inverse.ridge,
        )  # fmt: skip
        options = self.short("short_forward") | self.steps | self.factor_tiles
        return Launch(short_forward_kernel, (shape.rows,), values, **options)

    @functools.cached_property
    def query_parts(self) -> tuple[int, ...]:
        """The shape of dW's parts as collected from the queries."""
        count, _ = self.deal_for_sums(self.n)
        return self.shape.rows, count, self.shape.m, self.shape.d_v

    @functools.cached_property
    def key_parts(self) -> tuple[int, ...]:
        """The shape of U's parts as collected from the keys."""
        count, _ = self.deal_for_sums(self.n_k)
        return self.shape.rows, count, self.shape.m, self.shape.d_v

    @functools.cached_property
    def collect_values(self) -> Launch:
        """U = kappa(L, K) V, in parts."""
        return self._collect("keys", self.n_k, "v", "v")

    @functools.cached_property
    def collect_values_beside(self) -> Launch:
        """The same; it may start while the kernel before it still runs, but it ends after that one."""
        return self._collect("keys", self.n_k, "v", "v", **self.early)

    @functools.cached_property
    def collect_gradient(self) -> Launch:
        """dW = kappa(L, Q) G, in parts."""
        return self._collect("q", self.n, "grad", "grad")

    @functools.cached_property
    def collect_both(self) -> Launch:
        """dW and U in one pass, if the queries are the keys."""
        return self._collect("q", self.n, "grad", "v")

    def _collect(self, tokens: str, n: int, first: str, second: str, **beside: bool) -> Launch:
        shape, tile = self.shape, _tile("collect", self.shape, n)
        count, stretch = self.deal_for_sums(n)
        values = (
            shape.heads, n, shape.m, shape.d, shape.d_v, count, stretch,
            *self.strides_of(tokens, first, second), self.log2_scale,
        )  # fmt: skip
        keys = second == "v"  # the mask only applies to U
        return Launch(
            collect_kernel, (shape.rows * count, shape.tiles), values,
            QUERIES=first == "grad", KEYS=keys, HAS_KEY_MASK=self.has_key_mask and keys,
            **dict(OVERLAP=False) | beside, **self.token_pass(tile),
        )  # fmt: skip

    @functools.cached_property
    def panel(self) -> int:
        """The panel size for an inverse that does not fit into the registers; 0 if it fits."""
        return 32 if self.shape.block_m > MAX_LANDMARKS_IN_REGISTERS else 0

    @functools.cached_property
    def mix(self) -> Launch:
        """The inverse, W = Y' U and, if it is kept, U."""
        shape, settings, parts = self.shape, self.settings, self.key_parts[1]
        values = (
            shape.heads, shape.m, shape.d, shape.d_v, parts, self.scale,
            settings.inverse.iterations, settings.inverse.ridge,
        )  # fmt: skip
        return Launch(
            mixing_kernel, (shape.rows,), values,
            PARTS=_parts_at_once(parts, shape.block_m, shape.block_c), PANEL=self.panel,
            FLOAT32=self.flags["FLOAT32"], KEEP=self.keeps_sums,
            NORMALIZE=settings.normalize, **self.blocks, **self.steps,
            num_warps=_tile("mixing", shape).warps, **as_for_ampere(),
        )  # fmt: skip

    @functools.cached_property
    def overlap(self) -> bool:
        """Whether a token pass may start before the preceding kernel ends, and wait for it only where needed.

        The preceding kernel is launched as usual, so everything before it has ended by then.
        """
        return self.shape.tiles == 1 and devices.can_overlap(self.device)

    @property
    def early(self) -> dict[str, bool]:
        """The options that launch such a pass."""
        return dict(OVERLAP=True, launch_pdl=True) if self.overlap else dict(OVERLAP=False)

    @property
    def factor_tiles(self) -> dict[str, int]:
        """The tiles of a factorisation; none for Newton's steps."""
        tile, _ = FACTOR_TILE[self.shape.block_m > 64]
        return dict(COUNT=0 if self.newton else tiles_of(self.shape.m, tile), TILE=tile)

    @functools.cached_property
    def factor(self) -> Launch:
        """The inverse Cholesky factor."""
        shape = self.shape
        _, warps = FACTOR_TILE[shape.block_m > 64]
        values = (shape.heads, shape.m, shape.d, self.scale, self.settings.inverse.ridge)
        registers = {"maxnreg": 168} if warps == 1 and not devices.interpreted() else {}
        return Launch(
            factor_kernel, (shape.rows,), values,
            BLOCK_D=shape.block_d, **self.factor_tiles,
            HAS_LANDMARK_MASK=self.has_landmark_mask, NORMALIZE=self.settings.normalize,
            FLOAT32=self.flags["FLOAT32"], OVERLAP=self.overlap, num_warps=warps, **registers,
        )  # fmt: skip

    @functools.cached_property
    def solve(self) -> Launch:
        """W = Y' U and, if it is kept, U."""
        shape, inverse, parts = self.shape, self.settings.inverse, self.key_parts[1]
        values = (shape.m, shape.d_v, parts, inverse.ridge)
        return Launch(
            solve_kernel, (shape.rows,), values, BLOCK_M=shape.block_m, BLOCK_C=shape.block_c,
            PARTS=_parts_at_once(parts, shape.block_m, shape.block_c),
            NORMALIZE=self.settings.normalize, ORDER=inverse.order, KEEP=self.keeps_sums,
            FLOAT32=self.flags["FLOAT32"], num_warps=_tile("mixing", shape).warps, **as_for_ampere(),
        )  # fmt: skip

    @functools.cached_property
    def spread(self) -> Launch:
        """X = kappa(Q, L) W."""
        shape, n, tile = self.shape, self.n, _tile("spread", self.shape)
        sizes = (shape.heads, n, shape.m, shape.d, shape.d_v)
        strides = (*self.strides_of("q", "x"), self.log2_scale)
        options = self.token_pass(tile)
        if shape.tiles > 1:
            grid = (shape.rows * tiles_of(n, tile.tokens),)
            return Launch(spread_tiled_kernel, grid, (*sizes, *strides), **options)
        count, stretch = self.deal(n, tile)
        values = (*sizes, count, stretch, *strides)
        return Launch(spread_kernel, (shape.rows * count,), values, **options, **self.early)

    @functools.cached_property
    def given(self) -> tuple[list[Part], int]:
        """The tokens, landmarks and masks as parts of a chain's tensors, and their number.

        A chain is called with the tensors that exist; an absent one points at q and is never read.
        """
        there = True, self.cross, True, True, self.has_key_mask, self.has_landmark_mask
        numbers = itertools.count()
        return [Part(next(numbers) if one else 0) for one in there], sum(there)

    @functools.cached_property
    def forward_chain(self) -> tuple[Chain, Room]:
        """The forward pass, called with the inputs, x, the inverse and, if needed, U and scratch memory."""
        tokens, count = self.given
        x, inverse = Part(count), Part(count + 1)
        u = Part(count + 2) if self.keeps_sums else inverse  # not read
        room = Room(count + 2 + self.keeps_sums)
        return Chain(self.forward_steps(tokens, x, inverse, u, room)), room

    @functools.cached_property
    def passing_chain(self) -> tuple[Chain, Room]:
        """The forward pass without a gradient, called with the input tensors, x and scratch memory.

        The inverse and U are in the scratch memory, because they are not kept.
        """
        tokens, count = self.given
        room = Room(count + 1)
        inverse, u = room.part(self.inverse), room.part(self.sums)
        return Chain(self.forward_steps(tokens, Part(count), inverse, u, room)), room

    def forward_steps(
        self, tokens: Sequence[Part], x: Part, inverse: Part, u: Part, room: Room
    ) -> list[Step]:
        """The forward pass if one program computes the m x m part."""
        if self.one_launch:
            return [(self.short_forward, (*tokens, x, inverse))]
        q, keys, v, landmarks, key_mask, landmark_mask = tokens
        parts, w = room.part(self.key_parts), room.part(self.small)
        sources = keys, v, v, landmarks, key_mask, landmark_mask, parts, parts
        steps: list[Step] = []
        if self.newton:
            side = self.shape.block_m
            scratch = room.part((self.shape.rows, 3, side, side)) if self.panel else w
            steps += [(self.collect_values, sources)]
            steps += [(self.mix, (landmarks, landmark_mask, parts, inverse, u, w, scratch))]
        else:
            steps += [(self.factor, (landmarks, landmark_mask, inverse))]
            steps += [(self.collect_values_beside, sources)]
            steps += [(self.solve, (parts, inverse, u, w))]
        return [*steps, (self.spread, (q, landmarks, landmark_mask, w, x))]

    @functools.cached_property
    def short_backward(self) -> Launch:
        values = (
            *self.backward_sizes, *self.backward_strides, self.scale, self.log2_scale,
            self.settings.inverse.ridge,
        )  # fmt: skip
        options = self.short("short_backward") | dict(CROSS=self.cross)
        return Launch(short_backward_kernel, (self.shape.rows,), values, **options)

    @functools.cached_property
    def backward_chain(self) -> tuple[Chain, Room]:
        """The backward pass.

        It is called with the input tensors, the result's gradient, the inverse, the gradients of q, v and
        landmarks and, if needed, the gradient of k, U and scratch memory.
        """
        tokens, count = self.given
        grad, inverse, grad_q, grad_v, grad_landmarks = map(Part, range(count, count + 5))
        grad_k = Part(count + 5) if self.cross else grad_q
        u = Part(count + 5 + self.cross) if self.keeps_sums else inverse  # not read
        room = Room(count + 5 + self.cross + self.keeps_sums)
        gradients = grad_q, grad_k, grad_v, grad_landmarks
        return Chain(self.backward_steps((grad, *tokens), inverse, u, gradients, room)), room

    def backward_steps(
        self,
        given: Sequence[Part],
        inverse: Part,
        u: Part,
        gradients: Sequence[Part],
        room: Room,
    ) -> list[Step]:
        """The backward pass if one program computes the m x m part.

        ``given`` is the result's gradient, followed by the tokens, landmarks and masks.
        """
        if self.one_launch:
            return [(self.short_backward, (*given, inverse, *gradients))]
        shape = self.shape
        *_, landmarks, _, landmark_mask = given
        grad_q, grad_k, grad_v, grad_landmarks = gradients
        dw_parts = room.part(self.query_parts)
        u_parts = u if self.keeps_sums else room.part(self.key_parts)
        steps = self.collect_steps(given, dw_parts, u_parts)
        w, du = room.part(self.small), room.part(self.small)
        dl = room.part((shape.rows, self.written_parts, shape.m, shape.d))
        done = room.part((shape.rows, shape.tiles), torch.int32)
        sources = landmarks, landmark_mask, u_parts, dw_parts, inverse, w, du, dl, done
        steps += [(self.mixing_backward, sources)]
        return steps + self.token_gradients(
            given, w, du, grad_q, grad_k, grad_v, dl, done, grad_landmarks
        )

    def collect_steps(self, given: Sequence[Part], dw_parts: Part, u_parts: Part) -> list[Step]:
        """The first pass over the tokens; U is collected again if it was not kept."""
        grad, q, keys, v, *masked = given
        if self.shape.collects_both and not self.keeps_sums and not self.cross:
            return [(self.collect_both, (q, grad, v, *masked, dw_parts, u_parts))]
        steps: list[Step] = [(self.collect_gradient, (q, grad, grad, *masked, dw_parts, dw_parts))]
        if not self.keeps_sums:
            steps += [(self.collect_values, (keys, v, v, *masked, u_parts, u_parts))]
        return steps

    @functools.cached_property
    def passes(self) -> tuple[Chain, Chain]:
        """Both passes over the tokens as separate chains, with PyTorch's work between them."""
        given = [*map(Part, range(7))]
        first = self.collect_steps(given, Part(7), Part(8))
        return Chain(first), Chain(self.token_gradients(given, *map(Part, range(7, 15))))

    def token_gradients(
        self,
        given: Sequence[Part],
        w: Part,
        du: Part,
        grad_q: Part,
        grad_k: Part,
        grad_v: Part,
        dl: Part,
        done: Part,
        grad_landmarks: Part,
    ) -> list[Step]:
        """The second pass over the tokens."""
        grad, q, keys, v, *masked = given
        steps: list[Step] = []
        if self.shape.tiles > 1:
            sources = q, grad, v, *masked, w, du, grad_q, grad_v
            steps += [(self.spread_tiled_backward, sources)]
            if self.cross:
                sources = keys, grad, v, *masked, w, du, grad_k, grad_v
                steps += [(self.spread_tiled_keys_backward, sources)]
        results = grad_q, grad_k, grad_v, dl, done, grad_landmarks
        return [*steps, (self.spread_backward, (*given, w, du, *results))]

    @property
    def backward_sizes(self) -> tuple[int, ...]:
        shape = self.shape
        return shape.heads, self.n, self.n_k, shape.m, shape.d, shape.d_v

    @property
    def backward_strides(self) -> list[int]:
        return self.strides_of("grad", "q", "keys", "v", "grad_q", "grad_k", "grad_v")

    @functools.cached_property
    def landmark_parts(self) -> tuple[int, int, int, int]:
        """The number of dL's parts, how many are from queries, and the tokens per query part and key part."""
        tile = self.spread_backward_tile
        stretches, stretch = self.deal(self.n, tile)
        key_stretches, key_stretch = self.deal(self.n_k, tile) if self.cross else (0, 0)
        return stretches + key_stretches, stretches, stretch, key_stretch

    @property
    def spread_backward_tile(self) -> Tile:
        # A mask, or keys that are not queries, would have the smaller tile spill many registers.
        plain = not (self.cross or self.has_key_mask)
        return _tile("spread_backward", self.shape, self.n if plain else None)

    @property
    def written_parts(self) -> int:
        """The number of dL's parts in memory, including the inverse's.

        A single part from the tokens is added directly.
        """
        parts = self.landmark_parts[0]
        return 1 if parts == 1 else 1 + parts

    @functools.cached_property
    def mixing_backward(self) -> Launch:
        """W, dU and the inverse's part of dL."""
        shape, settings = self.shape, self.settings
        parts = 1 if self.keeps_sums else self.key_parts[1], self.query_parts[1]
        values = (
            shape.heads, shape.m, shape.d, shape.d_v, *parts, self.written_parts,
            shape.tiles, self.scale, settings.inverse.ridge,
        )  # fmt: skip
        return Launch(
            mixing_backward_kernel, (shape.rows,), values, ORDER=self.order,
            PARTS=_parts_at_once(max(parts), shape.block_m, shape.block_c),
            NORMALIZE=settings.normalize, FLOAT32=self.flags["FLOAT32"], **self.blocks,
            num_warps=_tile("mixing_backward", shape).warps, **as_for_ampere(),
        )  # fmt: skip

    @functools.cached_property
    def spread_backward(self) -> Launch:
        """dL and, for landmarks that fit into a program, dQ, dK and dV."""
        shape, (parts, *stretches) = self.shape, self.landmark_parts
        values = (
            *self.backward_sizes, parts, *stretches, *self.backward_strides,
            self.scale, self.log2_scale,
        )  # fmt: skip
        return Launch(
            spread_backward_kernel, (shape.rows * parts, shape.tiles), values,
            PARTS=_parts_at_once(1 + parts, shape.tile_m, shape.block_d), ALONE=parts == 1,
            CROSS=self.cross, WRITE=shape.tiles == 1, HAS_KEY_MASK=self.has_key_mask,
            **self.token_pass(self.spread_backward_tile), **self.early,
        )  # fmt: skip

    @functools.cached_property
    def spread_tiled_backward(self) -> Launch:
        """dQ, and dV if the queries are the keys, for landmarks in tiles."""
        return self._spread_tiled("q", "grad_q", self.n, queries=True, keys=not self.cross)

    @functools.cached_property
    def spread_tiled_keys_backward(self) -> Launch:
        """dK and dV of separate keys, for landmarks in tiles."""
        return self._spread_tiled("keys", "grad_k", self.n_k, queries=False, keys=True)

    def _spread_tiled(self, tokens: str, out: str, n: int, *, queries: bool, keys: bool) -> Launch:
        shape, tile = self.shape, _tile("spread_backward", self.shape)
        values = (
            shape.heads, n, shape.m, shape.d, shape.d_v,
            *self.strides_of(tokens, "grad", "v", out, "grad_v"), self.scale, self.log2_scale,
        )  # fmt: skip
        return Launch(
            spread_tiled_backward_kernel, (shape.rows * tiles_of(n, tile.tokens),), values,
            QUERIES=queries, KEYS=keys, HAS_KEY_MASK=self.has_key_mask and keys,
            **self.token_pass(tile),
        )  # fmt: skip


FORWARD_NAMES = "q", "keys", "v"
BACKWARD_NAMES = "grad", *FORWARD_NAMES


@functools.lru_cache(maxsize=1024)
def remembered_call(sizes, masks, dtype, device, settings, names, strides):
    """The call for these sizes, settings and token strides.

    Results have the token layout unless strides are given.
    """
    return _Call(sizes, masks, dtype, device, settings, dict(zip(names, strides, strict=True)))


def _tensors(inputs: Inputs) -> Inputs:
    """Inputs as kernels take them: tokens with contiguous channels, contiguous landmarks, masks as bytes."""
    q, k, v, landmarks, key_mask, landmark_mask = inputs
    if (
        q.stride(3) == v.stride(3) == 1
        and k is key_mask is landmark_mask is None
        and landmarks.is_contiguous()
    ):
        return inputs
    return Inputs(
        _rows(q),
        None if k is None else _rows(k),
        _rows(v),
        landmarks.contiguous(),
        None if key_mask is None else key_mask.contiguous().view(torch.uint8),
        None if landmark_mask is None else landmark_mask.contiguous().view(torch.uint8),
    )


def _there(inputs: Inputs) -> list[Tensor]:
    return [tensor for tensor in inputs if tensor is not None]


def _filled(inputs: Inputs) -> tuple[Tensor, ...]:
    """The inputs, with the queries in place of absent tensors."""
    return (*[inputs.q if tensor is None else tensor for tensor in inputs],)


def _needed(call: _Call, u: Tensor, room: Room, like: Tensor) -> list[Tensor]:
    """U and scratch memory, if the chain takes them."""
    needed = [u] if call.keeps_sums else []
    if room.bytes:
        needed.append(room.empty(like))
    return needed


def forward(
    inputs: Inputs, settings: AttentionSettings, keep: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`softfree.ops.attention.chunked.forward`, with the inverse in :func:`inverse_shape`.

    Without ``keep``, the inverse and U are left out.
    """
    q, k, v, landmarks, key_mask, landmark_mask = inputs = _tensors(inputs)
    strides = q.stride()
    call = remembered_call(
        (q.shape, None if k is None else k.shape, v.shape, landmarks.shape),
        (key_mask is not None, landmark_mask is not None), q.dtype, q.device, settings,
        FORWARD_NAMES, (strides, strides if k is None else k.stride(), v.stride()),
    )  # fmt: skip
    x = q.new_empty_strided(*call.x)
    if call.fused and not keep and call.rows > 0:
        chain, room = call.passing_chain
        chain(*_there(inputs), x, room.empty(q))
        return x, LEFT_OUT, LEFT_OUT
    inverse, u = _float32(q, call.inverse), _float32(q, call.sums)
    if call.rows == 0:
        return x, inverse, u
    if call.fused:
        chain, room = call.forward_chain
        chain(*_there(inputs), x, inverse, *_needed(call, u, room, q))
        return x, inverse, u
    with exactly(q.device):
        return forward_in_parts(call, inputs, x, u)


def forward_in_parts(
    call: _Call, inputs: Inputs, x: Tensor, u: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The forward pass if the m x m part takes more than one program."""
    q, keys, v, landmarks, key_mask, landmark_mask = _filled(inputs)
    settings = call.settings
    parts = _float32(q, call.key_parts)
    call.collect_values(keys, v, v, landmarks, key_mask, landmark_mask, parts, parts)
    sums = _sum(parts, call.shape)
    u = sums if call.keeps_sums else u
    a = _landmark_matrix(call, landmarks, landmark_mask)
    inverse = (
        _newton_inverse(a, settings.inverse)
        if call.newton
        else inverse_factor(a, settings.inverse.ridge).contiguous()
    )
    w = torch_mixing.mix(sums, a, inverse, settings)
    call.spread(q, landmarks, landmark_mask, w, x)
    return x, inverse, u


def backward(
    grad: Tensor,
    inputs: Inputs,
    inverse: Tensor,
    u: Tensor,
    settings: AttentionSettings,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As :func:`softfree.ops.attention.chunked.backward`; the gradient of k is left out if k is None."""
    q, k, v, landmarks, key_mask, landmark_mask = inputs = _tensors(inputs)
    grad, strides = _rows(grad), q.stride()
    call = remembered_call(
        (q.shape, None if k is None else k.shape, v.shape, landmarks.shape),
        (key_mask is not None, landmark_mask is not None), q.dtype, q.device, settings,
        BACKWARD_NAMES,
        (grad.stride(), strides, strides if k is None else k.stride(), v.stride()),
    )  # fmt: skip
    grad_q, grad_v = q.new_empty_strided(*call.grad_q), q.new_empty_strided(*call.grad_v)
    grad_k = LEFT_OUT if k is None else q.new_empty_strided(*call.grad_k)
    found = grad_q, grad_k, grad_v, torch.empty_like(landmarks)
    if call.rows == 0:
        return found
    if call.fused:
        chain, room = call.backward_chain
        of_keys = () if k is None else (grad_k,)
        chain(
            *_there(inputs), grad, inverse, grad_q, grad_v, found[3], *of_keys,
            *_needed(call, u, room, q),
        )  # fmt: skip
        return found
    with exactly(q.device):
        backward_in_parts(call, grad, inputs, inverse, u, found)
    return found


def backward_in_parts(
    call: _Call,
    grad: Tensor,
    inputs: Inputs,
    inverse: Tensor,
    u: Tensor,
    found: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    """The backward pass if the m x m part takes more than one program; writes the gradients ``found``."""
    tokens = q, *_, landmarks, _, landmark_mask = _filled(inputs)
    grad_q, grad_k, grad_v, grad_landmarks = found
    shape = call.shape
    dw_parts = _float32(q, call.query_parts)
    if call.keeps_sums:
        u_parts = u.view(shape.rows, 1, shape.m, shape.d_v)
    else:
        u_parts = _float32(q, call.key_parts)
    collect, spread = call.passes
    collect(grad, *tokens, dw_parts, u_parts)
    dl = _float32(q, (shape.rows, call.written_parts, shape.m, shape.d))
    done = torch.zeros((shape.rows, shape.tiles), dtype=torch.int32, device=q.device)
    points, mask = landmarks.float(), inputs.landmark_mask
    if mask is not None:
        mask = mask.view(torch.bool)[:, None]
        points = torch.where(mask[..., None], points, 0)
    w, du, through_inverse = torch_mixing.mixing_backward(
        _sum(dw_parts, shape), _sum(u_parts, shape),
        _landmark_matrix(call, landmarks, landmark_mask), inverse, points, mask, call.settings,
    )  # fmt: skip
    w, du = w.contiguous(), du.contiguous()
    dl[:, 0] = through_inverse.flatten(0, 1)
    grad_k = grad_k if call.cross else grad_q
    spread(grad, *tokens, w, du, grad_q, grad_k, grad_v, dl, done, grad_landmarks)


def _landmark_matrix(call: _Call, landmarks: Tensor, landmark_mask: Tensor) -> Tensor:
    """``A = kappa(L, L)``, (batch, heads, m, m), for more landmarks than one program takes."""
    batch, heads, m, d = landmarks.shape
    a = _float32(landmarks, (batch, heads, m, m))
    tiles = tiles_of(m, 64)
    launch(
        landmark_matrix_kernel, (batch * heads * tiles * tiles,),
        (landmarks, landmark_mask, a), (heads, m, d, call.scale, tiles),
        BLOCK=64, HAS_LANDMARK_MASK=call.has_landmark_mask,
    )  # fmt: skip
    return a


def _newton_inverse(a: Tensor, settings: InverseSettings) -> Tensor:
    """The inverse of matrices (batch, heads, m, m) too large for one program, with two launches per step."""
    iterations = settings.iterations
    b = add_ridge(a, settings.ridge).contiguous()
    y = start_value(a, settings.start, settings.ridge) * b
    m = a.shape[-1]
    # An entry of the inverse may be as small as 1 / m^2. With more landmarks, two float16 numbers would lose
    # it.
    split = iterations <= MAX_SPLIT_ITERATIONS and m <= 512
    large = split and m > 192 and devices.is_hopper(a.device)
    options: dict[str, Any] = dict(
        BLOCK=64, BLOCK_K=32, num_warps=4, num_stages=3, **as_for_ampere()
    )
    if large:  # operands come straight from memory, so Hopper's matrix instructions are safe here
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
    """float32 matrices (batch, heads, m, m) split into float16: (batch, heads, 2, side, side), 0 beyond m."""
    m = matrices.shape[-1]
    parts = matrices.new_zeros((*matrices.shape[:2], 2, side, side), dtype=torch.float16)
    high = matrices.half()
    parts[..., 0, :m, :m] = high
    parts[..., 1, :m, :m] = (matrices - high) * LOW_SCALE.value
    return parts


def _parts_at_once(parts: int, rows: int, columns: int) -> int:
    """The number of parts of a sum that a program loads together: all of them, if the registers suffice."""
    return min(power_of_two(parts), max(1, 4 * 64 * 32 // (rows * columns)))


def _float32(like: Tensor, sizes: tuple[int, ...]) -> Tensor:
    return like.new_empty(sizes, dtype=torch.float32)


def _sum(parts: Tensor, shape: _Shape) -> Tensor:
    """(batch, heads, m, d_v) of parts (batch * heads, parts, m, d_v)."""
    return parts.sum(1).unflatten(0, (shape.batch, shape.heads))


def _flags(dtype: torch.dtype, channels: int) -> dict[str, Any]:
    """How a token pass multiplies float32.

    Beyond 64 channels not by three TF32 products: at 128 they are off by 1.3e-5.
    """
    if dtype != torch.float32:
        return dict(FLOAT32=False, PRECISION="tf32")
    return dict(FLOAT32=True, PRECISION="tf32x3" if channels <= 64 else "ieee")


def _rows(tokens: Tensor) -> Tensor:
    """Tokens with contiguous channels."""
    return tokens if tokens.stride(3) == 1 else tokens.contiguous()
