"""Attention layers behind one interface: ``layer(x, size, mask=None, context=None)``.

x        (batch, tokens, channels)
size     (H, W) of the image behind the tokens, (T, H, W) of a volume, None for sequences
mask     (batch, keys) bool, True for the tokens that may be attended to
context  (batch, keys, channels), attended to instead of ``x``; ``size`` and ``mask`` then describe these

An image may have more than H * W tokens: those before the image are prefix tokens (such as a class token).
"""

import contextlib
import functools
import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softfree.layers.landmarks import (
    AnySize,
    AverageLandmarks,
    ConvLandmarks,
    Landmarks,
    Size,
    create_sampler,
    is_ordinary,
    pooled_share,
)
from softfree.layers.multihead import (
    MultiHeadAttention,
    check_heads,
    check_image,
    check_size,
    check_tokens,
    query_projection,
    refuse_keys_and_values,
)
from softfree.layers.plain import are_plain, is_plain, parameter, weight_and_bias
from softfree.layers.pooling import Sampled
from softfree.ops import image_attention, soft_attention
from softfree.ops.attention import check_backend
from softfree.ops.attention.settings import InverseSettings
from softfree.ops.query_norm import query_norm as normed
from softfree.ops.shared.precision import compute_dtype
from softfree.ops.value_conv import value_conv

LEARNED = "learned"
KERNELS = ("auto", "triton")  # backends


class SoftHeads(nn.Module):
    """Softmax-free attention of already projected heads; the base class of layers that project them.

    A subclass creates its projections to queries and values, then calls :meth:`create_sampler`. The settings
    are those of :class:`SoftAttention`.
    """

    sampler: nn.Module
    value_conv: "ValueConv | None"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        sequence: bool = False,
        volume: bool = False,
        normalize: bool = True,
        inverse: str = "newton",
        iterations: int = 20,
        start: str = "halving",
        ridge: float | None = None,
        order: int = 2,
        query_norm: bool = False,
        bandwidth: float | str = 1.0,
        landmark_norm: bool = False,
        dropout: float = 0.0,
        backend: str = "auto",
    ):
        super().__init__()
        check_heads(dim, num_heads)
        check_backend(backend)
        if sequence and volume:
            raise ValueError("sequence and volume: tokens are one or the other")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must lie in [0, 1), got {dropout}")
        settings = InverseSettings.of(inverse, iterations, start, ridge, order)
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.sequence = sequence
        self.volume = volume
        self.normalize = normalize
        self.inverse, self.iterations, self.start, self.ridge, self.order = settings
        self.backend = backend
        if landmark_norm and not query_norm:
            raise ValueError("landmark_norm is for normed queries: give query_norm=True, too")
        self.query_norm, self.landmark_norm = query_norm, landmark_norm
        self.dropout = dropout
        self.bandwidth, learned = parse_bandwidth(bandwidth)
        self.log_bandwidth = nn.Parameter(torch.empty(num_heads)) if learned else None
        self.reset_bandwidth()

    def create_sampler(
        self, landmarks: Landmarks, stride: int, value_conv: int, strict: bool = True
    ) -> None:
        """Create the landmark sampler and the convolution of the values."""
        kind = dict(sequence=self.sequence, volume=self.volume)
        self.sampler = create_sampler(landmarks, self.head_dim, stride, strict=strict, **kind)
        self.value_conv = create_value_conv(self.num_heads, value_conv, **kind)

    def reset_bandwidth(self) -> None:
        """Set learned bandwidths to their start value."""
        if self.log_bandwidth is not None:
            nn.init.constant_(self.log_bandwidth, math.log(self.bandwidth))

    @property
    def inverse_settings(self) -> InverseSettings:
        """The settings of the operator's inverse, as one record."""
        return InverseSettings(self.inverse, self.iterations, self.start, self.ridge, self.order)

    def extra_repr(self) -> str:
        kind = "SOFT++" if self.normalize else "SOFT"
        how = f"iterations={self.iterations}, start={self.start}"
        if self.inverse == "solve":
            how = f"inverse=solve, order={self.order}, ridge={self.ridge:g}"
        if self.query_norm:
            how += ", query_norm" + ", landmark_norm" * self.landmark_norm
        if self.log_bandwidth is not None or self.bandwidth != 1:
            how += f", bandwidth={self.bandwidth:g}"
        if self.log_bandwidth is not None:
            how += ", learned"
        return f"{kind}, heads={self.num_heads}, {how}"

    def attend(
        self,
        q: Tensor | None,
        k: Tensor,
        v: Tensor,
        size: AnySize = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Apply the attention to projected heads.

        Args:
            q: (batch, heads, n_q, d); None: the keys are the queries, and the values are also convolved.
            k, v: (batch, heads, n, d), with ``size`` and ``mask`` (batch, n).

        Returns:
            (batch, n_q, heads * d)
        """
        keys, sampled = self.keys_and_landmarks(k, size, mask)
        queries = keys if q is None else self._compared(q)
        landmarks, landmark_mask = sampled
        out = soft_attention(
            queries,
            keys,
            v,
            landmarks.to(v.dtype),
            key_mask=mask,
            landmark_mask=landmark_mask,
            normalize=self.normalize,
            # To get the attention matrix itself, values are unit vectors, one per token: too wide for the
            # kernels.
            backend=self.backend if v.shape[3] == self.head_dim else "torch",
            inverse=self.inverse,
            iterations=self.iterations,
            start=self.start,
            ridge=self.ridge,
            order=self.order,
        )
        out = out.transpose(1, 2).flatten(2)
        share = pooled_share(self.sampler, sampled, k.shape[2], size, mask)
        if share is not None:
            out = out * (share.to(out.dtype)[:, None, None] if isinstance(share, Tensor) else share)
        if self.value_conv is not None and q is None:
            out = self.value_conv(v.transpose(1, 2).flatten(2), size, mask, out)
        return F.dropout(out, self.dropout, self.training) if self.dropout else out

    def split(self, x: Tensor) -> Tensor:
        """(batch, tokens, heads * d) to (batch, heads, tokens, d)."""
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def keys_and_landmarks(
        self, q: Tensor, size: AnySize = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Sampled]:
        """Keys as the kernel takes them, and landmarks with their mask, from (batch, heads, n, d)."""
        keys = self._compared(q)
        landmarks, landmark_mask = self.sampler(keys, size, mask)
        if self.landmark_norm:
            landmarks = self._compared(landmarks)
        elif isinstance(self.sampler, ConvLandmarks):  # its norm has undone the bandwidth
            landmarks = _scaled(landmarks, self._scale(q.device))
        return keys, (landmarks, landmark_mask)

    def _compared(self, q: Tensor) -> Tensor:
        """Projected queries as the kernel takes them: normed if so set, and divided by the bandwidth."""
        scale = self._scale(q.device)
        return normed(q, scale) if self.query_norm else _scaled(q, scale)

    def _scale(self, device: torch.device) -> Tensor | None:
        """1 over each head's bandwidth, (heads,), in at least float32; None if it is 1."""
        if self.log_bandwidth is not None:
            return (-self.log_bandwidth.to(compute_dtype(self.log_bandwidth.dtype))).exp()
        if self.bandwidth == 1:
            return None
        return torch.full((self.num_heads,), 1 / self.bandwidth, device=device)


def _scaled(x: Tensor, scale: Tensor | None) -> Tensor:
    """(batch, heads, tokens, d) times a number per head."""
    return x if scale is None else x * scale.to(x.dtype)[:, None, None]


class SoftAttention(SoftHeads):
    r"""Softmax-free attention for images, sequences or volumes (SOFT++, or SOFT with ``normalize=False``).

    Queries double as keys, :math:`W_q = W_k`; per head :math:`X = \kappa(Q, L) Y' (\kappa(L, Q) V)` with
    landmarks L sampled from Q (see :func:`softfree.soft_attention`), plus a depthwise convolution of V.

    X is a sum over n tokens, normalised by the landmarks. If there are more windows than the largest count of
    landmarks, n grows with the image but the landmarks do not. X is then multiplied by landmarks over
    windows, so that an enlarged image has the same output as the original.

    There is no causal mask: every token attends through the landmarks, and these are made from all tokens.

    Args:
        dim: channels; a multiple of ``num_heads``.
        num_heads: heads.
        landmarks: sampler and count. The sampler is ``"conv"``, ``"average"``, ``"random"``, ``"first"`` or
            ``"spread"``. With a largest count, such as ``"conv:49"``, the cost is linear in the tokens at any
            size. Without one, ``"conv"`` and ``"average"`` give one landmark per ``stride`` x ``stride``
            window, so their number grows with the input; the others give 49.
        stride: side of the window behind one landmark (its length, for sequences).
        value_conv: side of the depthwise convolution of V over the image (one filter per head); 0: none.
            Cross-attention leaves it out, because its values have other positions than the queries.
        sequence: tokens are a sequence (``size=None``); ``value_conv`` then runs along it.
        volume: tokens are a video or a volume (``size=(T, H, W)``): windows and convolutions are cubes.
        normalize: SOFT++ (True) or SOFT (False).
        inverse, iterations, start, ridge, order, backend: see :func:`softfree.soft_attention`.
        query_norm: norm each head's queries over its channels before landmarks are sampled from them.
            Distances between tokens then start, and stay, in a range that the kernel can resolve.
        bandwidth: width of the kernel; queries and landmarks are divided by it. A number, or ``"learned"``
            for one per head that starts at 1 (``"learned:1.4"``: at 1.4).
        landmark_norm: norm the landmarks in the same way. Means of normed queries lie inside the queries'
            sphere, close to each other if windows are mixed; the norm moves them back onto the sphere.
        context_dim: channels of the ``context``. If set, a context is required, and queries have their own
            projection.
        dropout: dropout of the heads' outputs, before the last projection; there is no weight matrix whose
            entries could be dropped.
        qv_bias: whether the projections to queries and values have biases.
        query_gain: factor of the initial query weights; above 1, tokens start further apart.
        output_gain: factor of the initial weights of the last projection.
        landmark_gain: initial weight of the norm of convolution landmarks. With 1, as in the authors' code,
            landmarks start far from all tokens and the attention starts close to 0; with 0.25 they start
            among the tokens.
        strict_landmarks: "random", "first" and "spread" raise when there are fewer tokens than landmarks.

    Example:
        >>> import torch, softfree
        >>> layer = softfree.SoftAttention(dim=64, num_heads=2, stride=8, value_conv=9)
        >>> layer(torch.randn(1, 56 * 56, 64), size=(56, 56)).shape
        torch.Size([1, 3136, 64])
        >>> words = softfree.SoftAttention(dim=64, num_heads=2, landmarks="average", stride=4, sequence=True)
        >>> words(torch.randn(2, 100, 64), mask=torch.rand(2, 100) > 0.1).shape
        torch.Size([2, 100, 64])
        >>> video = softfree.SoftAttention(dim=64, num_heads=2, stride=2, value_conv=3, volume=True)
        >>> video(torch.randn(1, 8 * 14 * 14, 64), size=(8, 14, 14)).shape
        torch.Size([1, 1568, 64])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        landmarks: Landmarks = "conv",
        stride: int = 8,
        value_conv: int = 0,
        sequence: bool = False,
        volume: bool = False,
        normalize: bool = True,
        inverse: str = "newton",
        iterations: int = 20,
        start: str = "halving",
        ridge: float | None = None,
        order: int = 2,
        query_norm: bool = False,
        bandwidth: float | str = 1.0,
        landmark_norm: bool = False,
        context_dim: int | None = None,
        dropout: float = 0.0,
        qv_bias: bool = True,
        query_gain: float = 1.0,
        output_gain: float = 1.0,
        landmark_gain: float = 1.0,
        backend: str = "auto",
        strict_landmarks: bool = True,
    ):
        gains = dict(query_gain=query_gain, output_gain=output_gain, landmark_gain=landmark_gain)
        for name, gain in gains.items():
            if not gain > 0:
                raise ValueError(f"{name} must be > 0, got {gain}")
        super().__init__(
            dim,
            num_heads,
            sequence=sequence,
            volume=volume,
            normalize=normalize,
            inverse=inverse,
            iterations=iterations,
            start=start,
            ridge=ridge,
            order=order,
            query_norm=query_norm,
            bandwidth=bandwidth,
            landmark_norm=landmark_norm,
            dropout=dropout,
            backend=backend,
        )
        self.qv = nn.Linear(context_dim or dim, 2 * dim, bias=qv_bias)
        self.q = nn.Linear(dim, dim, bias=qv_bias) if context_dim else None
        self.create_sampler(landmarks, stride, value_conv, strict_landmarks)
        self.proj = nn.Linear(dim, dim)
        if landmark_gain != 1 and not isinstance(self.sampler, ConvLandmarks):
            raise ValueError(
                f"landmark_gain is for convolution landmarks, got {landmark_gain} "
                f"with landmarks={landmarks!r}"
            )
        self.query_gain, self.output_gain, self.landmark_gain = gains.values()
        self.apply_gains()

    @torch.no_grad()
    def apply_gains(self) -> None:
        """Multiply newly initialised weights by the gains, and reset learned bandwidths.

        A model that initialises the weights again must call this again.
        """
        self.qv.weight[: self.proj.in_features].mul_(self.query_gain)
        if self.q is not None:
            self.q.weight.mul_(self.query_gain)
        self.proj.weight.mul_(self.output_gain)
        if isinstance(self.sampler, ConvLandmarks):
            nn.init.constant_(self.sampler.norm.weight, self.landmark_gain)
        self.reset_bandwidth()

    def forward(
        self,
        x: Tensor,
        size: AnySize = None,
        mask: Tensor | None = None,
        context: Tensor | None = None,
    ) -> Tensor:
        refuse_keys_and_values(size)
        source = x if context is None else context
        if self.q is not None and context is None:
            raise ValueError("context: this layer was built with context_dim, give the tokens")
        if context is None and mask is None and isinstance(x, Tensor):
            operands = self.operands(x, size)
            if operands is not None:
                return self.attend_at_once(x, operands)
        else:
            check_tokens(x, source, mask, self.proj.in_features, self.qv.in_features)
            check_size(size, source.shape[1], self.sequence, self.volume)
        k, v = self.qv(source).unflatten(-1, (2, self.num_heads, self.head_dim)).unbind(2)
        q = None
        if self.q is not None:
            q = self.split(self.q(x))
        elif context is not None:
            q = self.split(query_projection(self.qv, x))
        out = self.attend(q, k.transpose(1, 2), v.transpose(1, 2), size, mask)
        return self.proj(out)

    def operands(self, x: Tensor, size: AnySize) -> "Operands | None":
        """The operands of :meth:`attend_at_once`; None if the layer has to be computed in parts.

        Raises if the shape of the tokens or the size is invalid.
        """
        channels = self.num_heads * self.head_dim
        check_image(x.shape, size, channels, self.sequence, self.volume)
        if size is None or self._modules.get("q") is not None or not self._is_one_operator(x):
            return None
        return self._operands(x, (size[0], size[1]))

    def attend_at_once(self, x: Tensor, operands: "Operands", unseen: bool = False) -> Tensor:
        """Compute the layer as one operator.

        For ``unseen`` see :func:`softfree.ops.shared.registration.unseen`.
        """
        return image_attention.image_attention(
            x,
            *operands,
            landmark_norm=self.landmark_norm,
            normalize=self.normalize,
            inverse=self.inverse_settings,
            unseen=unseen,
        )

    def _is_one_operator(self, x: Tensor) -> bool:
        """Whether :func:`softfree.ops.image_attention.image_attention` can compute the layer."""
        if self.volume or (self.dropout and self.training) or self.backend not in KERNELS:
            return False
        parts = self._modules  # attribute access would search three places for each
        qv: Any = parts["qv"]
        conv: Any = parts.get("value_conv")
        sampler: Any = parts["sampler"]
        kind = AverageLandmarks if self.query_norm else ConvLandmarks
        if not are_plain((qv, nn.Linear), (parts["proj"], nn.Linear), (sampler, kind)):
            return False
        if conv is not None and not is_plain(conv, ValueConv):
            return False
        if not (self.query_norm or self._samples_in_operator(sampler)):
            return False
        filters: Tensor | None = None if conv is None else parameter(conv, "weight")
        if not image_attention.fits(x, self.num_heads, filters):
            return False
        # The operator computes every gradient, which is wasted on frozen weights.
        return not torch.is_grad_enabled() or (
            qv.weight.requires_grad
            and (filters is None or filters.requires_grad)
            and (self.query_norm or sampler.weight.requires_grad)
        )

    def _samples_in_operator(self, sampler: Any) -> bool:
        """Whether convolution landmarks are as in the papers, from queries that are not scaled."""
        return (
            self.bandwidth == 1
            and parameter(self, "log_bandwidth") is None
            and is_plain(sampler.norm, nn.LayerNorm)
            and sampler.norm.bias is not None
        )

    def _operands(self, x: Tensor, size: tuple[int, int]) -> "Operands":
        """The operands of a layer that one operator can compute."""
        parts: Any = self._modules
        sampler, conv = parts["sampler"], parts.get("value_conv")
        grid, window, pooling = sampler.windows_and_pooling(x, size)
        width: Tensor | None = parameter(self, "log_bandwidth")
        weight, norm_weight, norm_bias, eps = None, None, None, 0.0
        if not self.query_norm:
            weight = sampler.weight.view(self.head_dim, self.head_dim, *window)
            norm_weight, norm_bias, eps = sampler.norm.weight, sampler.norm.bias, sampler.norm.eps
        elif width is None:
            make = _log_bandwidths if is_ordinary(x) else _log_bandwidths.__wrapped__
            width = make(self.num_heads, self.bandwidth, x.device)
        weights = image_attention.Weights(
            *weight_and_bias(parts["qv"]),
            width,
            weight,
            norm_weight,
            norm_bias,
            None if conv is None else parameter(conv, "weight"),
            *weight_and_bias(parts["proj"]),
        )
        return Operands(weights, pooling, grid, window, size, eps)


class Operands(NamedTuple):
    """What a layer passes to :func:`softfree.ops.image_attention.image_attention` besides its settings."""

    weights: image_attention.Weights
    pooling: Tensor | None
    grid: tuple[int, int]
    window: tuple[int, int]
    size: tuple[int, int]
    eps: float


@functools.lru_cache(maxsize=64)
def _log_bandwidths(num_heads: int, bandwidth: float, device: torch.device) -> Tensor:
    """A fixed bandwidth in the form of a learned one: its logarithm for each head, float32."""
    with torch.inference_mode(False):  # the cached tensor may be used in training later
        return torch.full((num_heads,), math.log(bandwidth), device=device)


class ValueConv(nn.Module):
    """Depthwise convolution of the values over the image, with one filter per head, shared by its channels.

    Prefix tokens (a class token) pass unchanged. Masked tokens count as 0.
    """

    def __init__(
        self, num_heads: int, kernel_size: int, sequence: bool = False, volume: bool = False
    ):
        super().__init__()
        window = (kernel_size,) * (1 if sequence else 3 if volume else 2)
        self.weight = nn.Parameter(torch.empty(num_heads, 1, *window))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)

    def extra_repr(self) -> str:
        return f"heads={self.weight.shape[0]}, kernel_size={self.weight.shape[-1]}"

    def forward(
        self, v: Tensor, size: AnySize, mask: Tensor | None = None, base: Tensor | None = None
    ) -> Tensor:
        """(batch, tokens, channels) to the same shape, added to ``base`` if given."""
        if mask is not None:
            v = torch.where(mask[..., None], v, 0)
        if size is None:
            channels = v.shape[2]
            weight = self.weight.repeat_interleave(channels // self.weight.shape[0], 0)
            padding = self.weight.shape[-1] // 2
            out = F.conv1d(v.mT, weight, padding=padding, groups=channels).mT
            return out if base is None else base + out
        prefix = v.shape[1] - math.prod(size)
        if not prefix:
            return value_conv(v, self.weight, size, base)
        first, image = v[:, :prefix], v[:, prefix:]
        if base is not None:
            first, base = base[:, :prefix] + first, base[:, prefix:]
        return torch.cat([first, value_conv(image, self.weight, size, base)], 1)


def parse_bandwidth(bandwidth: float | str) -> tuple[float, bool]:
    """The (initial) width of the kernel, and whether it is learned.

    Example:
        >>> parse_bandwidth(0.5), parse_bandwidth("learned"), parse_bandwidth("learned:1.4")
        ((0.5, False), (1.0, True), (1.4, True))
    """
    width: Any = bandwidth
    learned = isinstance(bandwidth, str) and bandwidth.startswith(LEARNED)
    if isinstance(bandwidth, str):
        start = "1" if bandwidth == LEARNED else bandwidth.removeprefix(f"{LEARNED}:")
        with contextlib.suppress(ValueError):
            width = float(start)
    if isinstance(width, bool) or not isinstance(width, int | float) or not 0 < width < math.inf:
        raise ValueError(
            "bandwidth must be a finite number > 0, 'learned' or 'learned:' with the number it starts at, "
            f"got {bandwidth!r}"
        )
    return float(width), learned


def create_value_conv(
    num_heads: int, kernel_size: int, sequence: bool, volume: bool = False
) -> ValueConv | None:
    """The convolution of an attention's values; None for 0."""
    if kernel_size < 0 or (kernel_size and kernel_size % 2 == 0):
        raise ValueError(f"value_conv must be 0 or an odd number, got {kernel_size}")
    return ValueConv(num_heads, kernel_size, sequence, volume) if kernel_size else None


class SoftmaxAttention(MultiHeadAttention):
    """Softmax attention through torch's fused kernel, for comparison; arguments as in the base class."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, size: Size, mask: Tensor | None) -> Tensor:
        key_mask = None if mask is None else mask[:, None, None, :]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=key_mask)
