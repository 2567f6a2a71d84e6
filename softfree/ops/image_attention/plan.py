"""The launches of a layer's passes, planned from sizes only.

Everything between the two projections is one :class:`Chain` with few tensors: intermediate results that are
not kept share a :class:`Room`. The chain is split where PyTorch has work to do: if landmarks are pooled, or
if there are too many for one program.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from softfree.ops.attention.kernels import launch as attention
from softfree.ops.attention.settings import AttentionSettings, Inputs
from softfree.ops.image_attention.places import Places, split
from softfree.ops.norm import operator as norm
from softfree.ops.query_norm import operator as query_norm
from softfree.ops.shared import devices, sums
from softfree.ops.shared.launching import Chain, Part, Room, Step
from softfree.ops.value_conv import operator as value_conv
from softfree.ops.window_product import operator as window_product

Tensors = list[Tensor]
Work = Callable[[Tensors, Any], None]  # takes a program's tensors and the pooling matrix


class Program:
    """A pass: chains of launches with PyTorch's work in between, on the same tensors, and scratch memory.

    names: names of the tensors that the program is called with; the third one, "room", is the scratch memory.
    """

    def __init__(self, names: Sequence[str]):
        self.names = [*names]
        self.room = Room(self.names.index("room"))
        self.work: list[Chain | Work] = []
        self.steps: list[Step] = []

    def part(self, name: str, offset: int = 0) -> Part:
        """The part of a named tensor that starts at byte ``offset``."""
        return Part(self.names.index(name), offset)

    def add(self, run: Any, *parts: Part) -> None:
        self.steps.append((run, parts))

    def pause(self, work: Work | None = None) -> None:
        """End the chain and schedule other work."""
        if self.steps:
            self.work.append(Chain(self.steps))
            self.steps = []
        if work is not None:
            self.work.append(work)

    def __call__(self, tensors: Tensors, pooling: Tensor | None) -> None:
        for work in self.work:
            if isinstance(work, Chain):
                work(*tensors)
            else:
                work(tensors, pooling)


class Sampled(NamedTuple):
    """Landmarks as the attention takes them, and 1 over the deviations that their norm divided by."""

    landmarks: Part
    deviations: Part | None


class Plan:
    """The plan for a layer at one size; each pass is planned when it is first needed."""

    def __init__(
        self,
        size: torch.Size,
        dtype: torch.dtype,
        device: torch.device,
        heads: int,
        filters: torch.Size | None,
        windows: torch.Size | None,
        biases: tuple[bool, bool],
        places: Places,
        pooled: int | None,
        eps: float,
        landmark_norm: bool,
        settings: AttentionSettings,
        outputs: int,
    ):
        self.dtype, self.device, self.places, self.outputs = dtype, device, places, outputs
        self.filters, self.windows, self.biases = filters, windows, biases
        self.pooled, self.eps, self.landmark_norm = pooled is not None, eps, landmark_norm
        self.normed = windows is None  # whether queries are normed
        q, v = split(torch.empty(size, dtype=dtype, device="meta"), heads)
        self.strides = q.stride()
        self.batch, self.heads, self.n, self.d = q.shape
        self.channels = self.heads * self.d
        # Bytes from one token to the next in the projection.
        self.token = 2 * self.channels * dtype.itemsize
        self.rows = (self.n * self.channels, self.channels)  # strides of the result
        self.before_grid, self.before_image = (
            places.before_grid(self.n),
            places.before_image(self.n),
        )
        down, across = window_product.window_grid(places.grid, places.window)
        count = down * across if pooled is None else pooled
        self.sampled = (self.batch, self.heads, down * across, self.d)
        self.landmarks = (self.batch, self.heads, count, self.d)
        self.deviations = (self.batch, self.heads, self.n)
        self.share = places.share(count)
        by_head = (self.rows[0], self.d, self.rows[1], 1)
        of_q, of_v = q.stride(), v.stride()
        self.call = attention.remembered_call(
            (q.shape, None, v.shape, torch.Size(self.landmarks)), (False, False), dtype, device, settings,
            ("q", "keys", "v", "x", "grad", "grad_q", "grad_k", "grad_v"),
            (of_q, of_q, of_v, by_head, by_head, of_q, of_q, of_v),
        )  # fmt: skip
        self.out = (self.batch, self.n, self.channels)
        self.inverse, self.u, self.fused = self.call.inverse, self.call.sums, self.call.fused
        # Sizes of the tensors kept in float32. PyTorch may allocate the inverse and U itself.
        inverse = self.inverse if self.fused else (0,)
        u = self.u if self.fused or not self.call.keeps_sums else (0,)
        self.kept = inverse, u, *([self.deviations] if self.normed else [])

    @property
    def weights(self) -> list[str]:
        """Names of the weights that kernels read."""
        of_landmarks = ["bandwidth"] if self.normed else ["windows", "norm_weight", "norm_bias"]
        return [*["filters"] * (self.filters is not None), *of_landmarks]

    @functools.cached_property
    def passing(self) -> Program:
        """The forward pass without a gradient.

        Its tensors are the projection, the result, scratch memory, the filters and the weights of the
        landmarks.
        """
        return self._forward(["qv", "out", "room", *self.weights])

    @functools.cached_property
    def keeping(self) -> Program:
        """The forward pass that keeps tensors for the gradient.

        These follow the tensors of :attr:`passing`: the sampled windows, the inverse, U and, for normed
        queries, the deviations.
        """
        kept = ["sampled", "inverse", "u"] + ["deviations"] * self.normed
        return self._forward(["qv", "out", "room", *self.weights, *kept])

    def _forward(self, names: list[str]) -> Program:
        program = Program(names)
        if self.batch == 0:
            return program
        part, room = program.part, program.room

        def kept(name: str, sizes: Sequence[int], dtype: torch.dtype = torch.float32) -> Part:
            return part(name) if name in names else room.part(sizes, dtype)

        qv, out, of_grid = part("qv"), part("out"), part("qv", self.before_grid * self.token)
        sampled = kept("sampled", self.sampled, self.dtype)
        if self.normed:
            deviations, width = kept("deviations", self.deviations), part("bandwidth")
            after = deviations._replace(offset=deviations.offset + 4 * self.before_grid)
            run = self._norm(self.n - self.before_grid, self.places.grid, self.places.window, True)
            program.add(run, of_grid, width, of_grid, after, sampled)
            if self.before_grid:
                run = self._norm(self.before_grid, (1, self.before_grid), (1, 1), False)
                program.add(run, qv, width, qv, deviations, sampled)
        else:
            run = window_product.forward_launch(
                torch.Size(self.sampled), self.dtype, self.device, self.windows, *self.places.grid,
                self.strides,
            )  # fmt: skip
            program.add(run, of_grid, self._matrices(program), sampled)
        landmarks = self._landmarks(program, sampled).landmarks
        inverse, u = kept("inverse", self.inverse), kept("u", self.u)
        values = part("qv", self.channels * self.dtype.itemsize)
        if self.fused:
            # There are no masks; the tensors in their place are not read.
            tokens = qv, qv, values, landmarks, qv, qv
            program.steps += self.call.forward_steps(tokens, out, inverse, u, room)
        else:
            program.pause(functools.partial(self._attend, program, landmarks))
        self._convolve(program, values, out, flip=False)
        program.pause()
        return program

    @functools.cached_property
    def backward(self) -> Program:
        """The backward pass.

        Its tensors are the projection, its gradient, scratch memory, the gradients of the layer's result and
        of the input of the last projection, the filters, the weights of the landmarks, and the tensors kept
        by the forward pass. The outputs follow: the gradients of the filters, of the landmarks' weights
        (weight and bias of the norm in one tensor) and of the biases that exist.
        """
        names = ["qv", "grad_qv", "room", "grad", "grad_out", *self.weights]
        names += ["sampled", "inverse", "u"] + ["deviations"] * self.normed
        names += ["grad_filters"] * (self.filters is not None)
        names += ["grad_bandwidth"] if self.normed else ["grad_windows", "grad_norm"]
        names += [name for name, there in zip(BIASES, self.biases, strict=True) if there]
        program = Program(names)
        part, room = program.part, program.room
        qv, grad_out, grad_qv = part("qv"), part("grad_out"), part("grad_qv")
        sampled = self._landmarks(program, part("sampled"))
        grad_landmarks = room.part(self.landmarks, self.dtype)
        half = self.channels * self.dtype.itemsize
        values, grad_values = part("qv", half), part("grad_qv", half)
        if self.fused:
            given = grad_out, qv, qv, values, sampled.landmarks, qv, qv
            found = grad_qv, grad_qv, grad_values, grad_landmarks
            program.steps += self.call.backward_steps(
                given, part("inverse"), part("u"), found, room
            )
        else:
            work = functools.partial(
                self._attend_backward, program, sampled.landmarks, grad_landmarks
            )
            program.pause(work)
        self._sample_backward(program, sampled, grad_landmarks)
        self._convolve(program, grad_out, grad_values, flip=True)
        sizes: tuple[int, ...]
        if self.filters is not None:
            run, sizes = value_conv.weight_launch(
                torch.Size((self.batch, self.n - self.before_image, self.channels)), self.filters,
                (*self.rows, *self._projection_rows), self.places.height, self.places.width,
                devices.processors(self.device),
            )  # fmt: skip
            parts = room.part(sizes)
            image = part("grad_out", self.before_image * self.rows[1] * self.dtype.itemsize)
            program.add(run, image, part("qv", half + self.before_image * self.token), parts)
            self._sum(program, parts, sizes, (0, 2, 3), "grad_filters")
        for bias, of in zip(BIASES, ("grad_qv", "grad"), strict=True):
            if bias in names:
                columns = 2 * self.channels if of == "grad_qv" else self.outputs
                rows, processors = self.batch * self.n, devices.processors(self.device)
                sizes, run = sums.column_sum_launch(rows, columns, processors)
                parts = room.part(sizes)
                program.add(run, part(of), parts)
                self._sum(program, parts, sizes, (1,), bias)
        program.pause()
        return program

    @property
    def _projection_rows(self) -> tuple[int, int]:
        """Strides of samples and tokens in the projection."""
        return 2 * self.rows[0], 2 * self.rows[1]

    def _norm(self, tokens: int, *where: Any) -> Any:
        sizes = torch.Size((self.batch, self.heads, tokens, self.d))
        return query_norm.norm_launch(sizes, self.strides, self.strides, self.n, *where, True)

    def _matrices(self, program: Program) -> Part:
        """The windows' weight in the layout that the kernels take."""
        assert self.windows is not None
        matrices = program.room.part(self.windows, self.dtype)
        run = window_product.matrices_launch(self.windows)
        program.add(run, program.part("windows"), program.part("windows"), matrices)
        return matrices

    def _landmarks(self, program: Program, sampled: Part) -> Sampled:
        """Turn what was sampled from each window into landmarks."""
        room, made = program.room, sampled
        if not self.normed:
            made = room.part(self.sampled, self.dtype)
            run = norm.landmark_launch(
                torch.Size(self.sampled).numel(), self.d, self.d**-0.25, self.eps
            )
            program.add(run, sampled, program.part("norm_weight"), program.part("norm_bias"), made)
        landmarks = made
        if self.pooled:
            landmarks = room.part(self.landmarks, self.dtype)

            def pool(tensors: Tensors, pooling: Tensor) -> None:
                windows = _shaped(made, tensors, self.sampled)
                weights = pooling.to(self.dtype)
                torch.matmul(weights, windows, out=_shaped(landmarks, tensors, self.landmarks))

            program.pause(pool)
        if not self.landmark_norm:
            return Sampled(landmarks, None)
        normed, deviations = (
            room.part(self.landmarks, self.dtype),
            room.part(self.landmarks[:3]),
        )
        run = query_norm.norm_launch(
            torch.Size(self.landmarks), *(self._landmark_strides,) * 2, self.landmarks[2],
            (1, self.landmarks[2]), (1, 1), False, True,
        )  # fmt: skip
        # No means are written, so the last tensor is not used.
        program.add(run, landmarks, program.part("bandwidth"), normed, deviations, normed)
        return Sampled(normed, deviations)

    @property
    def _landmark_strides(self) -> tuple[int, ...]:
        _, heads, count, d = self.landmarks
        return heads * count * d, count * d, d, 1

    def _convolve(self, program: Program, source: Part, target: Part, *, flip: bool) -> None:
        """Multiply ``target`` by the share and add the values' convolution, or with ``flip`` its gradient.

        Tokens before the image are added without a convolution. Without filters only the share is applied.
        """
        first, itemsize = self.before_image, self.dtype.itemsize
        inner, outer = self._projection_rows, self.rows
        of_source, of_target = (outer, inner) if flip else (inner, outer)
        if self.filters is None:
            if self.share != 1:
                run = sums.token_sum_launch(
                    self.batch, self.n, self.channels, of_target, None, self.share
                )
                program.add(run, target, target)
            return
        band_size, write_band, run = value_conv.launches(
            torch.Size((self.batch, self.n - first, self.channels)), self.filters,
            (*of_source, *of_target, *of_target), self.places.height, self.places.width, self.share,
            True, flip,
        )  # fmt: skip
        band = program.room.part(band_size, self.dtype)
        program.add(write_band, program.part("filters"), band)
        image = source._replace(offset=source.offset + first * of_source[1] * itemsize)
        after = target._replace(offset=target.offset + first * of_target[1] * itemsize)
        program.add(run, image, band, after, after)
        if first:
            run = sums.token_sum_launch(
                self.batch, first, self.channels, of_target, of_source, self.share
            )
            program.add(run, target, source)

    def _sum(
        self, program: Program, parts: Part, sizes: Sequence[int], kept: tuple[int, ...],
        result: str, order: tuple[int, ...] | None = None,
    ) -> None:  # fmt: skip
        run = sums.part_sum_launch((*sizes,), kept, order)
        program.add(run, parts, parts, program.part(result))

    def _sample_backward(self, program: Program, sampled: Sampled, grad_landmarks: Part) -> None:
        """The gradient of the projected queries, from those of the landmarks and the attention's queries."""
        part, room = program.part, program.room
        of_width: list[tuple[Part, tuple[int, ...]]] = []  # parts of the bandwidths' gradient
        if sampled.deviations is not None:
            run, sizes = query_norm.gradient_launch(
                torch.Size(self.landmarks), (self._landmark_strides,) * 3, self.landmarks[2],
                (1, self.landmarks[2]), (1, 1), False, self.share, True,
            )  # fmt: skip
            of_width.append((room.part(sizes), sizes))
            program.add(
                run, grad_landmarks, sampled.landmarks, part("bandwidth"), sampled.deviations,
                grad_landmarks, grad_landmarks, of_width[0][0],
            )  # fmt: skip
        grad_made = grad_landmarks
        if self.pooled:
            grad_made = room.part(self.sampled, self.dtype)

            def spread(tensors: Tensors, pooling: Tensor) -> None:
                grad = _shaped(grad_landmarks, tensors, self.landmarks)
                weights = pooling.T if self.landmark_norm else pooling.T * self.share
                found = _shaped(grad_made, tensors, self.sampled)
                torch.matmul(weights.to(self.dtype), grad, out=found)

            program.pause(spread)
        before = self.before_grid
        of_grid, grad_of_grid = (
            part("qv", before * self.token),
            part("grad_qv", before * self.token),
        )
        if not self.normed:
            self._window_backward(program, grad_made, of_grid, grad_of_grid)
            return
        for first, tokens, grid, window in (
            (before, self.n - before, self.places.grid, self.places.window),
            (0, before, (1, before), (1, 1)),
        ):
            if tokens:
                means = first == before
                run, sizes = query_norm.gradient_launch(
                    torch.Size((self.batch, self.heads, tokens, self.d)), (self.strides,) * 3,
                    self.n, grid, window, means, self.share, True,
                )  # fmt: skip
                of_width.append((room.part(sizes), sizes))
                q, grad_q = part("qv", first * self.token), part("grad_qv", first * self.token)
                program.add(
                    run, grad_q, q, part("bandwidth"), part("deviations", 4 * first),
                    grad_made, grad_q, of_width[-1][0],
                )  # fmt: skip
        total = of_width[0][0]  # not read
        for number, (parts, parts_size) in enumerate(of_width):
            last = number == len(of_width) - 1
            run = sums.part_sum_launch(parts_size, (1,), None, number > 0)
            found = part("grad_bandwidth") if last else room.part((self.heads,))
            program.add(run, parts, total, found)
            total = found

    def _window_backward(
        self, program: Program, grad_made: Part, of_grid: Part, grad_of_grid: Part
    ) -> None:
        """The same through the landmarks' norm and the window product."""
        part, room = program.part, program.room
        assert self.windows is not None
        numel, processors = torch.Size(self.sampled).numel(), devices.processors(self.device)
        sizes: tuple[int, ...]
        run, sizes = norm.landmark_backward_launch(
            numel, self.d, self.d**-0.25, self.eps, processors
        )
        grad_products, parts = room.part(self.sampled, self.dtype), room.part(sizes)
        program.add(
            run, grad_made, part("sampled"), part("norm_weight"), part("norm_bias"), grad_products,
            parts,
        )  # fmt: skip
        self._sum(program, parts, sizes, (1, 2), "grad_norm")
        about = (
            torch.Size(self.sampled), self.dtype, self.device, self.windows, *self.places.grid,
            self.strides,
        )  # fmt: skip
        run = window_product.token_launch(*about, self.share)
        program.add(run, grad_products, self._matrices(program), grad_of_grid)
        run, sizes = window_product.weight_launch(*about)
        parts = room.part(sizes)
        program.add(run, of_grid, grad_products, parts)
        self._sum(program, parts, sizes, (1, 2, 3), "grad_windows", (0, 2, 1))
        if self.before_grid and self.share != 1:
            strides = self._projection_rows
            run = sums.token_sum_launch(
                self.batch, self.before_grid, self.channels, strides, None, self.share
            )
            program.add(run, part("grad_qv"), part("grad_qv"))

    def _attend(self, program: Program, landmarks: Part, tensors: Tensors, _: Any) -> None:
        """The attention with more landmarks than one program takes."""
        names = program.names
        q, v = split(tensors[0], self.heads)
        inputs = Inputs(q, None, v, _shaped(landmarks, tensors, self.landmarks))
        u = tensors[names.index("u")] if "u" in names else q.new_empty(self.u, dtype=torch.float32)
        x = tensors[1].view(self.batch, self.n, self.heads, self.d).transpose(1, 2)
        _, inverse, u = attention.forward_in_parts(self.call, inputs, x, u)
        if "u" in names:
            tensors[names.index("inverse")], tensors[names.index("u")] = inverse, u

    def _attend_backward(
        self, program: Program, landmarks: Part, grad_landmarks: Part, tensors: Tensors, _: Any
    ) -> None:
        def named(name: str) -> Tensor:
            return tensors[program.names.index(name)]

        q, v = split(named("qv"), self.heads)
        grad_q, grad_v = split(named("grad_qv").view(named("qv").shape), self.heads)
        grad = named("grad_out").view(self.batch, self.n, self.heads, self.d).transpose(1, 2)
        inputs = Inputs(q, None, v, _shaped(landmarks, tensors, self.landmarks))
        found = grad_q, grad_q, grad_v, _shaped(grad_landmarks, tensors, self.landmarks)
        attention.backward_in_parts(self.call, grad, inputs, named("inverse"), named("u"), found)


BIASES = "grad_qv_bias", "grad_proj_bias"
remembered_plan = functools.lru_cache(maxsize=1024)(Plan)


def _shaped(part: Part, tensors: Tensors, sizes: tuple[int, ...]) -> Tensor:
    return part.of(tensors).flatten()[: torch.Size(sizes).numel()].view(sizes)
