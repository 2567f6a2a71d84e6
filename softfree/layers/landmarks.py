"""Landmark samplers: from the queries of all tokens to a few landmarks that represent them.

Every sampler is a module ``sampler(q, size, mask)``:

    q      (batch, heads, tokens, head_dim), any strides
    size   (H, W) of the image behind the tokens, (T, H, W) of a volume, or None for a sequence
    mask   (batch, tokens) bool or None, True for real tokens

and returns landmarks (batch, heads, m, head_dim) and their mask (batch, m), or None if all are real.
Tokens before the ``H * W`` (``T * H * W``) tokens of the image, such as a class token, are prefix tokens.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softfree.layers.plain import is_plain
from softfree.layers.pooling import Sampled, pool_grid, pooling_matrix, smaller
from softfree.ops.norm import landmark_norm
from softfree.ops.shared.precision import compute_dtype
from softfree.ops.shared.shapes import certain
from softfree.ops.window_product import cross_the_border, window_grid, window_product, windows

Grid = tuple[int, ...]
Size = tuple[int, int] | None
AnySize = Grid | None
SamplerName = Literal["conv", "average", "random", "first", "spread"]
SAMPLERS: tuple[SamplerName, ...] = ("conv", "average", "random", "first", "spread")
DEFAULT_COUNT = 49


@dataclass(frozen=True)
class LandmarkSpec:
    """The sampler and the largest number of landmarks.

    With ``count=None`` the number of "conv" and "average" landmarks grows with the input; the others are 49.
    """

    sampler: SamplerName = "conv"
    count: int | None = None

    @classmethod
    def parse(cls, value: "Landmarks") -> "LandmarkSpec":
        """Parse ``"conv"``, ``"average:49"``, ``("conv", 49)`` or ``49`` (same as ``"conv:49"``)."""
        if isinstance(value, LandmarkSpec):
            return value
        sampler: Any
        count: Any
        if isinstance(value, int) and not isinstance(value, bool):
            sampler, count = "conv", value
        elif isinstance(value, str):
            sampler, colon, digits = value.partition(":")
            if colon and not digits.isdecimal():
                raise ValueError(
                    f"landmarks: the count after ':' must be a whole number, got {value!r}"
                )
            count = int(digits) if colon else None
        elif isinstance(value, tuple | list) and len(value) == 2:
            sampler, count = value
        else:
            raise ValueError(
                "landmarks must be a sampler name, 'name:count', (name, count) or a count, "
                f"got {value!r}"
            )
        if sampler not in SAMPLERS:
            raise ValueError(
                f"landmarks: sampler must be one of {', '.join(map(repr, SAMPLERS))}, got {sampler!r}"
            )
        if count is not None and (
            not isinstance(count, int) or isinstance(count, bool) or count < 1
        ):
            raise ValueError(f"landmarks: count must be an integer >= 1 or None, got {count!r}")
        return cls(sampler, count)


Landmarks = str | int | tuple[str, int | None] | LandmarkSpec


def create_sampler(
    spec: Landmarks,
    head_dim: int,
    stride: int,
    *,
    sequence: bool = False,
    volume: bool = False,
    strict: bool = True,
) -> nn.Module:
    """The sampler that ``spec`` names; the arguments are those of :class:`softfree.SoftAttention`."""
    parsed = LandmarkSpec.parse(spec)
    sampler, count = parsed.sampler, parsed.count
    if stride < 1:
        raise ValueError(f"stride must be >= 1, got {stride}")
    if sampler == "conv":
        return ConvLandmarks(head_dim, stride, count, sequence=sequence, volume=volume)
    if sampler == "average":
        return AverageLandmarks(stride, count)
    return _CHOOSERS[sampler](count or DEFAULT_COUNT, strict=strict)


class _WindowLandmarks(nn.Module):
    """Base of samplers that make one landmark per window, and pool them if there are more than ``count``.

    If windows are single tokens (stride 1), each prefix token is a window of its own. Otherwise prefix tokens
    do not become landmarks.
    """

    def __init__(self, stride: int, count: int | None = None):
        super().__init__()
        self.stride = stride
        self.count = count

    def extra_repr(self) -> str:
        return f"stride={self.stride}, count={self.count}"

    def reduce(self, q: Tensor, mask: Tensor | None, grid: Grid, window: Grid) -> Tensor:
        """One landmark for each window of the grid's tokens: (batch, heads, m, d)."""
        raise NotImplementedError

    def layout(self, tokens: int, size: AnySize) -> tuple[int, Grid, Grid]:
        """The number of prefix tokens, the grid of the other tokens, and the size of a window."""
        return _layout(self.stride, self.count, tokens, size)

    def windows_and_pooling(
        self, x: Tensor, size: tuple[int, int]
    ) -> tuple[Any, Any, Tensor | None]:
        """The grid of the last of tokens (batch, n, channels), the size of a window, and the pooling matrix.

        The matrix is (landmarks, windows); None if there are no more windows than landmarks.
        """
        make = _windows_and_pooling if is_ordinary(x) else _windows_and_pooling.__wrapped__
        return make(self.stride, self.count, x.shape[1], size, x.device)

    def forward(self, q: Tensor, size: AnySize, mask: Tensor | None = None) -> Sampled:
        prefix, grid, window = self.layout(q.shape[2], size)
        real = None if mask is None else mask[:, prefix:]
        landmarks = self.reduce(q[:, :, prefix:], real, grid, window)
        landmark_mask = None if real is None else _mask_windows(real, grid, window).any(-1)
        if self.count is not None:
            counts = window_grid(grid, window)
            landmarks, landmark_mask = pool_grid(landmarks, landmark_mask, counts, self.count)
        if prefix and self.stride == 1:
            real = None if mask is None else mask[:, :prefix]
            first = self.reduce(q[:, :, :prefix], real, (1, prefix), (1, 1))
            landmarks = torch.cat([first, landmarks], 2)
            if landmark_mask is not None:
                present = landmark_mask.new_ones(q.shape[0], prefix) if real is None else real
                landmark_mask = torch.cat([present, landmark_mask], 1)
        return landmarks, landmark_mask


def _layout(stride: int, count: int | None, tokens: int, size: AnySize) -> tuple[int, Grid, Grid]:
    if size is None or (stride == 1 and count is None):
        # A sequence; or each token, including prefix tokens, is a window wherever it is.
        return 0, (1, tokens), (1, stride)
    return tokens - math.prod(size), size, (stride,) * len(size)


@functools.lru_cache(maxsize=64)
def _windows_and_pooling(
    stride: int, count: int | None, tokens: int, size: tuple[int, int], device: torch.device
) -> tuple[Any, Any, Tensor | None]:
    prefix, grid, window = _layout(stride, count, tokens, size)
    if count is None:
        return grid, window, None
    single = prefix if stride == 1 else 0
    pooling = pooling_matrix(single, window_grid(grid, window), count, device)
    # If each token is a window, prefix tokens are the first windows.
    return ((1, tokens) if stride == 1 else grid), window, pooling


class AverageLandmarks(_WindowLandmarks):
    """The mean of each ``stride`` x ``stride`` window (``stride`` tokens of a sequence, a cube of a volume).

    Windows at the border, and windows with masked tokens, average the tokens that exist.

    Example:
        >>> import torch
        >>> landmarks, _ = AverageLandmarks(stride=4)(torch.randn(2, 3, 56, 32), size=(8, 7))
        >>> landmarks.shape
        torch.Size([2, 3, 4, 32])
    """

    def reduce(self, q: Tensor, mask: Tensor | None, grid: Grid, window: Grid) -> Tensor:
        by_window = windows(q, grid, window)
        if mask is None:
            if not cross_the_border(grid, window):
                return by_window.mean(3)
            mask = q.new_ones((1, q.shape[2]), dtype=torch.bool)
        present = _mask_windows(mask, grid, window)[:, None, :, :, None]
        total = torch.where(present, by_window, 0).sum(3)
        return total / present.sum(3).clamp(min=1)


class ConvLandmarks(_WindowLandmarks):
    """``GELU(LayerNorm(conv(q)))``, with a ``stride`` x ``stride`` convolution of that stride for all heads.

    As in the authors' code, the convolution sees ``q * head_dim^-1/4`` (which only matters for the norm's
    eps) and the landmarks are on that scale; they are returned on the scale of ``q``. The convolution reads 0
    beyond the border and at masked tokens.
    """

    def __init__(
        self,
        head_dim: int,
        stride: int,
        count: int | None = None,
        *,
        sequence: bool = False,
        volume: bool = False,
    ):
        super().__init__(stride, count)
        self.scale = head_dim**-0.25
        # (out, in, *window) as in a convolution, although windows that do not overlap only need a matrix
        # product.
        window = (stride,) * (1 if sequence else 3 if volume else 2)
        self.weight = nn.Parameter(torch.empty(head_dim, head_dim, *window))
        self.norm = nn.LayerNorm(head_dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        self.norm.reset_parameters()

    def reduce(self, q: Tensor, mask: Tensor | None, grid: Grid, window: Grid) -> Tensor:
        out, channels, *built_for = self.weight.shape
        if math.prod(built_for) != math.prod(window):
            built = {1: "sequences", 2: "images", 3: "volumes"}[len(built_for)]
            given = {1: "None", 2: "(H, W)", 3: "(T, H, W)"}[1 if window[0] == 1 else len(window)]
            raise ValueError(f"size: these landmarks were built for {built}, but size is {given}")
        if mask is not None:
            q = torch.where(mask[:, None, :, None], q, 0)
        landmarks = window_product(q, self.weight.view(out, channels, *window), grid)
        norm = self.norm
        if not is_plain(norm, nn.LayerNorm):
            return F.gelu(norm(landmarks * self.scale)) / self.scale
        return landmark_norm(landmarks, norm.weight, norm.bias, self.scale, norm.eps)


class _TokenLandmarks(nn.Module):
    """Base of samplers that choose ``count`` of the tokens.

    With a mask they choose among each sample's real tokens, and take all of them if there are fewer.
    """

    def __init__(self, count: int, *, strict: bool = True):
        super().__init__()
        self.count = count
        self.strict = strict

    def extra_repr(self) -> str:
        return f"count={self.count}"

    def choose(self, tokens: int | Tensor, count: int, device: torch.device) -> Tensor:
        """``count`` different positions below ``tokens``, in ascending order.

        If ``tokens`` is (batch, 1), there is one row per sample.
        """
        raise NotImplementedError

    def check(self, tokens: int) -> None:
        """Raise if there are fewer tokens than landmarks, unless that is allowed."""
        if self.strict and self.count > tokens:
            raise ValueError(
                f"landmarks: {self.count} of the tokens were asked for, but there are only {tokens}; "
                f"give a count of at most {tokens}"
            )

    def forward(self, q: Tensor, size: AnySize, mask: Tensor | None = None) -> Sampled:
        tokens = q.shape[2]
        self.check(tokens)
        count = smaller(self.count, tokens)
        if mask is None:
            return q[:, :, self.choose(tokens, count, q.device)], None
        real = mask.sum(1, keepdim=True)
        ranks = self.choose(real.clamp(min=count), count, q.device)
        real_first = mask.logical_not().to(torch.uint8).argsort(dim=1, stable=True)
        chosen = real_first.gather(1, ranks)
        return _take(q, chosen[:, None]), ranks < real


class FirstLandmarks(_TokenLandmarks):
    """The first ``count`` tokens (the papers' "biased" sampling)."""

    def choose(self, tokens: int | Tensor, count: int, device: torch.device) -> Tensor:
        ranks = torch.arange(count, device=device)
        return ranks.expand(tokens.shape[0], -1) if isinstance(tokens, Tensor) else ranks


class RandomLandmarks(_TokenLandmarks):
    """``count`` random tokens, one from each of as many equal stretches of the input.

    They are drawn anew at every training step. In evaluation the draw is fixed, so that results are
    reproducible.
    """

    fixed: Tensor

    def __init__(self, count: int, *, strict: bool = True):
        super().__init__(count, strict=strict)
        self.register_buffer("fixed", torch.empty(count, device="cpu"), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.fixed.copy_(torch.rand(self.count, generator=generator, device="cpu"))

    def choose(self, tokens: int | Tensor, count: int, device: torch.device) -> Tensor:
        within = torch.rand(count, device=device) if self.training else self.fixed[:count]
        bounds = torch.arange(count + 1, device=device) * tokens // count
        first, length = bounds[..., :-1], bounds.diff()
        # The bound matters where a product just below the length is rounded up to it.
        return first + torch.minimum((within * length).long(), length - 1)


class SpreadLandmarks(_TokenLandmarks):
    """``count`` tokens that are far apart: each head's next one is the farthest from those already chosen.

    The first is the token farthest from the mean (farthest-point sampling, or greedy k-centre). The choice
    depends only on the tokens, takes time linear in their number, and has no gradient; gradients flow through
    the chosen tokens.

    Example:
        >>> import torch
        >>> q = torch.tensor([0.0, 0.1, 5.0, 5.1, 9.0]).view(1, 1, 5, 1)
        >>> SpreadLandmarks(3)(q, None)[0].flatten()
        tensor([9., 0., 5.])
    """

    def forward(self, q: Tensor, size: AnySize, mask: Tensor | None = None) -> Sampled:
        tokens = q.shape[2]
        self.check(tokens)
        # If an exporter does not know the size, ``count`` landmarks are made, and the last ones may be
        # masked.
        known = isinstance(tokens, int) and not torch.jit.is_tracing()
        count = min(self.count, tokens) if known else self.count
        chosen = self.places(q.detach(), count, mask)
        landmarks = _take(q, chosen)
        ranks = torch.arange(count, device=q.device)
        if mask is not None:
            return landmarks, ranks < mask.sum(1, keepdim=True)
        return landmarks, None if known else (ranks < tokens).expand(q.shape[0], -1)

    @torch.no_grad()
    def places(self, q: Tensor, count: int, mask: Tensor | None) -> Tensor:
        """The positions of the landmarks, (batch, heads, count), in the order of choice.

        0 once no real token is left.
        """
        q = q.to(compute_dtype(q.dtype))
        if mask is None:
            centre = q.mean(2, keepdim=True)
            real = torch.ones_like(q[..., 0], dtype=torch.bool)
        else:
            real = mask[:, None].expand(q.shape[:3])
            q = torch.where(real[..., None], q, 0)
            centre = q.sum(2, keepdim=True) / real.sum(2)[..., None, None].clamp(min=1)
        nearest = (q - centre).square().sum(-1)
        chosen = []
        for number in range(count):
            # Chosen tokens rank below all others, so that duplicates of them are chosen before they are
            # chosen again.
            place = torch.where(real, nearest, -torch.inf).argmax(2, keepdim=True)
            chosen.append(place)
            real = real.scatter(2, place, False)
            distance = (q - _take(q, place)).square().sum(-1)
            nearest = distance if number == 0 else torch.minimum(nearest, distance)
        return torch.cat(chosen, 2)


_CHOOSERS = {"random": RandomLandmarks, "first": FirstLandmarks, "spread": SpreadLandmarks}


def pooled_share(
    sampler: nn.Module, sampled: Sampled, tokens: int, size: AnySize, mask: Tensor | None = None
) -> float | Tensor | None:
    """The number of landmarks over the number of windows; None if nothing was pooled.

    It is a number, or one per sample, (batch,), if they differ: with a mask, landmarks and windows without
    real tokens do not count.

    Example:
        >>> import torch
        >>> sampler = AverageLandmarks(stride=4, count=9)
        >>> pooled_share(sampler, sampler(torch.randn(2, 3, 576, 32), (24, 24)), 576, (24, 24))
        0.25
    """
    if not isinstance(sampler, _WindowLandmarks) or sampler.count is None:
        return None
    landmarks, landmark_mask = sampled
    prefix, grid, window = sampler.layout(tokens, size)
    single = prefix if sampler.stride == 1 else 0
    windows = single + math.prod(window_grid(grid, window))
    if certain(landmarks.shape[2] == windows):
        return None
    if landmark_mask is None:
        return landmarks.shape[2] / windows
    made = landmark_mask.sum(1).to(compute_dtype(landmarks.dtype))
    if mask is None:
        return made / windows
    with_tokens = _mask_windows(mask[:, prefix:], grid, window).any(-1).sum(1)
    return made / (mask[:, :single].sum(1) + with_tokens).clamp(min=1)


def _take(x: Tensor, places: Tensor) -> Tensor:
    """Tokens of x (batch, heads, n, d) at places (batch, heads or 1, m): (batch, heads, m, d)."""
    # take_along_dim would specialize an exported program to the sizes of its example.
    return x.gather(2, places[..., None].expand(-1, x.shape[1], -1, x.shape[3]))


def _mask_windows(mask: Tensor, grid: Grid, window: Grid) -> Tensor:
    """A mask (batch, tokens) by window: (batch, m, window). Padding at the border is masked."""
    return windows(mask[:, None, :, None], grid, window)[:, 0, :, :, 0]


def is_ordinary(x: Tensor) -> bool:
    """Whether tensors made for ``x`` may be cached: not if a tracer or a CUDA graph capture is active."""
    if type(x) is not Tensor or torch.compiler.is_compiling():
        return False
    return x.device.type != "cuda" or not torch.cuda.is_current_stream_capturing()
