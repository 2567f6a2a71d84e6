"""Captures what the attention layers of a model do with an image, as factors.

The attention matrix of a layer is n x n and is never formed. The factors grow linearly with the image, and
any row of the matrix can be computed from them: where the token of a patch attends to.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from softfree.analysis.complexity import evaluating
from softfree.layers.agent import AgentAttention
from softfree.layers.attention import SoftAttention, SoftmaxAttention
from softfree.layers.focused import FocusedLinearAttention
from softfree.layers.landmarks import Size, pooled_share
from softfree.layers.linformer import LinformerAttention
from softfree.layers.nystromformer import NystromformerAttention, iterative_inverse
from softfree.layers.performer import RELU_OFFSET, PerformerAttention
from softfree.ops.attention.inverse import newton_inverse, newton_residuals, start_value
from softfree.ops.attention.reference import gaussian_kernel, normalize_inverse
from softfree.ops.attention.solve import ridge_solve, solve_residual, solve_spectrum

# Number of values of a kernel matrix that are held at once.
CHUNK = 2**22
# Below this residual a Newton iteration counts as converged (Fig. 5 of the papers).
CONVERGED = 1e-2
MOST_STEPS = 60
OWN = "softfree"  # the kind of SOFT++ layers that normalise their queries, too
SAMPLED = 256  # tokens between which the error of the kernel is computed
SAMPLED_ROWS = 32  # of the attention matrix, in float32; each is as long as the image has tokens


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """One attention layer on one image. Subclasses compute rows of the attention matrix from factors.

    Attributes:
        name: name of the module in the model, e.g. ``"stages.0.blocks.1.attn"``.
        kind: the attention in words, e.g. ``"SOFT++"``.
        size: (H, W) of the token grid; None for a sequence.
        queries: (heads, tokens, d), float32.
        keys: (heads, tokens, d), float32.
    """

    name: str
    kind: str
    size: tuple[int, int] | None
    queries: Tensor
    keys: Tensor

    @property
    def heads(self) -> int:
        return self.queries.shape[0]

    @property
    def tokens(self) -> int:
        return self.queries.shape[1]

    def is_finite(self) -> bool:
        """Whether all tensors of the layer are finite."""
        return all(t.isfinite().all() for t in vars(self).values() if isinstance(t, Tensor))

    @property
    def prefix(self) -> int:
        """The number of tokens before those of the image: 1 if there is a class token."""
        return 0 if self.size is None else self.tokens - self.size[0] * self.size[1]

    @property
    def stage(self) -> int:
        """The stage of a pyramid, from 1; 1 for models without stages."""
        return self._number("stages")

    @property
    def block(self) -> int:
        """The block within the stage, from 1."""
        return self._number("blocks")

    def _number(self, part: str) -> int:
        found = re.search(rf"{part}\.(\d+)\.", self.name)
        return int(found[1]) + 1 if found else 1

    def rows(self, queries: Sequence[int]) -> Tensor:
        """Rows of the attention matrix for these query tokens, (heads, queries, tokens)."""
        raise NotImplementedError("subclasses must implement rows()")

    def row(self, query: int) -> Tensor:
        """The row of the attention matrix for one query token, (heads, tokens)."""
        if not -self.tokens <= query < self.tokens:
            raise ValueError(f"query must be a token below {self.tokens}, got {query}")
        return self.rows([query])[:, 0]

    def sampled_rows(self) -> Tensor:
        """Rows for evenly chosen query tokens, (heads, at most SAMPLED_ROWS, tokens)."""
        return self.rows(self._evenly(SAMPLED_ROWS))

    def _evenly(self, count: int) -> list[int]:
        """At most ``count`` tokens: the first, the last, and others evenly spaced between them."""
        return torch.linspace(0, self.tokens - 1, min(count, self.tokens)).long().tolist()

    def heat_map(self, query: int) -> Tensor:
        """The row of ``query`` as a map of the image, without prefix tokens: (heads, H, W)."""
        return self.lay_out(self.row(query))

    def lay_out(self, row: Tensor) -> Tensor:
        """Reshape a row (heads, tokens) to a map of the image, without prefix tokens: (heads, H, W)."""
        return row[:, self.prefix :].unflatten(1, self._grid())

    def token_at(self, x: float, y: float) -> int:
        """The token of the patch at ``x`` across and ``y`` down, as fractions of the image in [0, 1]."""
        if not (0 <= x <= 1 and 0 <= y <= 1):
            raise ValueError(f"x and y must lie in [0, 1], got {x} and {y}")
        height, width = self._grid()
        down, across = min(int(y * height), height - 1), min(int(x * width), width - 1)
        return self.prefix + down * width + across

    def _grid(self) -> tuple[int, int]:
        if self.size is None:
            raise ValueError(f"{self.name} attends over a sequence, which has no map; use row()")
        return self.size


@dataclass(frozen=True, eq=False)
class SoftLayer(AttentionLayer):
    r"""Softmax-free attention: row i is :math:`\kappa(q_i, L) \, Y' \, \kappa(L, K)`, times ``share``.

    ``dataclasses.replace`` gives variants: ``replace(layer, iterations=5)``, ``normalize=False``.

    Attributes:
        landmarks: (heads, m, d), float32.
        scale, normalize, iterations, start, ridge, order: see :func:`softfree.soft_attention`.
        method: its ``inverse``.
        share: factor that rows are multiplied by, see :func:`softfree.layers.landmarks.pooled_share`.
    """

    landmarks: Tensor
    scale: float
    normalize: bool
    iterations: int
    start: str
    ridge: float
    method: str = "newton"
    order: int = 2
    share: float = 1.0

    @property
    def m(self) -> int:
        """The number of landmarks."""
        return self.landmarks.shape[1]

    @cached_property
    def a(self) -> Tensor:
        """``A = kappa(L, L)``, (heads, m, m), float64."""
        return self._kernel(self.landmarks, self.landmarks)

    @cached_property
    def inverse(self) -> Tensor:
        """``Y``, after ``iterations`` Newton steps or by the solve, (heads, m, m)."""
        if self.method == "solve":
            eye = torch.eye(self.m, dtype=self.a.dtype, device=self.a.device)
            return ridge_solve(self.a, eye.expand_as(self.a), ridge=self.ridge, order=self.order)
        return newton_inverse(self.a, self.iterations, start=self.start, ridge=self.ridge)

    @cached_property
    def mixing(self) -> Tensor:
        """``Y'``: ``Y``, or ``D^-1/2 Y D^-1/2`` with ``normalize``; (heads, m, m)."""
        return normalize_inverse(self.inverse, self.a) if self.normalize else self.inverse

    @property
    def kernel(self) -> Tensor:
        """``kappa(K, L)``, (heads, tokens, m), float64; not cached, because it is large."""
        return self._kernel(self.keys, self.landmarks)

    def rows(
        self, queries: Sequence[int], kernel: Tensor | None = None, mixing: Tensor | None = None
    ) -> Tensor:
        """Rows as above; ``kernel`` and ``mixing`` are cached values of the properties of the same names.

        ``mixing`` may also belong to another number of Newton steps.
        """
        mixing = self.mixing if mixing is None else mixing
        left = self._kernel(self.queries[:, queries], self.landmarks) @ mixing * self.share
        if kernel is not None:
            return left @ kernel.mT
        out = self.queries.new_empty(self.heads, len(queries), self.tokens)
        step = max(1, CHUNK // (self.heads * self.m))
        for first in range(0, self.tokens, step):
            keys = self.keys[:, first : first + step]
            out[:, :, first : first + step] = left @ self._kernel(self.landmarks, keys)
        return out

    def _kernel(self, x: Tensor, y: Tensor) -> Tensor:
        # In float64, because Y' may have a norm of 100, and errors from large terms that cancel would be
        # visible.
        return gaussian_kernel(x.double(), y.double(), self.scale)

    @cached_property
    def eigenvalues(self) -> Tensor:
        """Eigenvalues of ``A`` in descending order, (heads, m), float64.

        Negative rounding errors become 0.
        """
        return torch.linalg.eigvalsh(self.a).flip(-1).clamp(min=0)

    def condition(self) -> Tensor:
        """The condition number of ``A``, largest over smallest eigenvalue, (heads,).

        It is inf if ``A`` is singular.
        """
        return self.eigenvalues[:, 0] / self.eigenvalues[:, -1]

    def residual(self) -> Tensor:
        """How far ``Y`` is from an inverse, (heads,): ``||B Y B - B|| / ||B||``.

        For the Newton iteration ``B = A + ridge I``; for a solve ``B = A``.
        """
        if self.method == "solve":
            return solve_residual(self.a, ridge=self.ridge, order=self.order)
        return self.residuals()[:, -1]

    def residuals(self, iterations: int | None = None) -> Tensor:
        """:func:`softfree.newton_residuals` of ``A``, (heads, iterations + 1); constant for a solve."""
        steps = self.iterations if iterations is None else iterations
        if self.method == "solve":
            return self.residual()[:, None].expand(-1, steps + 1)
        return newton_residuals(self.a, steps, start=self.start, ridge=self.ridge)

    def expected_residuals(self, iterations: int) -> Tensor:
        """The result of :meth:`residuals` in exact arithmetic, from the eigenvalues: (heads, iterations + 1).

        After k steps ``B Y B - B`` has the eigenvalues ``-lam (1 - alpha lam^2)^(2^k)``, ``B = A + ridge I``.
        """
        lam = (self.eigenvalues + self.ridge)[..., None]
        powers = torch.exp2(torch.arange(iterations + 1, dtype=lam.dtype, device=lam.device))
        return (lam * self._cut_off()[..., None] ** powers).amax(1) / lam[:, :1, 0]

    def kept_eigenvalues(self, iterations: int | None = None) -> Tensor:
        """The number of eigenvalues that are inverted by more than half, (heads,).

        The others are mostly cut off. ``iterations`` is as in :meth:`inverted_share`.
        """
        return (self.inverted_share(iterations) > 0.5).sum(-1)

    def inverted_share(self, iterations: int | None = None) -> Tensor:
        """Each eigenvalue ``lam`` times that of ``Y``, (heads, m): 1 if inverted, 0 if cut off.

        ``iterations`` is the number of Newton steps; None: as many as the layer takes. A solve takes none.
        """
        if self.method == "solve":
            return self.eigenvalues * solve_spectrum(
                self.eigenvalues, ridge=self.ridge, order=self.order
            )
        steps = self.iterations if iterations is None else iterations
        return 1 - self._cut_off() ** (2.0**steps)

    def _cut_off(self) -> Tensor:
        """``|1 - alpha lam^2|`` of every eigenvalue, (heads, m)."""
        alpha = start_value(self.a, self.start, self.ridge)[..., 0]
        return (1 - alpha * (self.eigenvalues + self.ridge).square()).abs()

    def steps_needed(self) -> int | None:
        """The fewest Newton steps after which every head has converged.

        Returns None for a solve, or if more than MOST_STEPS are needed.
        """
        if self.method == "solve":
            return None
        enough = (self.expected_residuals(MOST_STEPS) <= CONVERGED).all(0)
        return int(enough.int().argmax()) if enough.any() else None

    def spectral_norm(self, normalize: bool | None = None) -> Tensor:
        """``||Y'||_2`` (Fig. 6b), (heads,); ``normalize`` overrides that of the layer."""
        layer = self if normalize is None else replace(self, normalize=normalize)
        return torch.linalg.matrix_norm(layer.mixing, 2)

    def nystrom_error(self) -> Tensor:
        """The error of the kernel that is rebuilt from the landmarks, on evenly chosen tokens: (heads,).

        ``||S - kappa(Q, L) Y kappa(L, Q)||_F / ||S||_F`` with ``S = kappa(Q, Q)``, without normalisation.
        """
        tokens = self.queries[:, self._evenly(SAMPLED)]
        exact = self._kernel(tokens, tokens)
        left = self._kernel(tokens, self.landmarks)
        error = exact - left @ self.inverse @ left.mT
        return torch.linalg.matrix_norm(error) / torch.linalg.matrix_norm(exact)

    def as_softmax(self) -> "SoftmaxLayer":
        """Softmax attention with the same queries."""
        return SoftmaxLayer(self.name, "softmax", self.size, self.queries, self.keys)


@dataclass(frozen=True, eq=False)
class SoftmaxLayer(AttentionLayer):
    """Softmax attention: row i is ``softmax(q_i K^T / sqrt d)``."""

    def rows(self, queries: Sequence[int]) -> Tensor:
        return _softmax_scores(self.queries[:, queries], self.keys)


@dataclass(frozen=True, eq=False)
class FactoredLayer(AttentionLayer):
    """Another attention that is linear in the tokens: row i is ``left_i right^T``.

    Attributes:
        left: (heads, tokens, r).
        right: (heads, tokens, r), or (1, tokens, r) if the heads share it.
    """

    left: Tensor
    right: Tensor

    def rows(self, queries: Sequence[int]) -> Tensor:
        return self.left[:, queries] @ self.right.mT


@dataclass(frozen=True, eq=False)
class AttentionCapture:
    """The attention layers of one forward pass, in the order they ran, and the model's output.

    Attributes:
        layers: see :class:`AttentionLayer`.
        output: the model's result, e.g. logits (1, classes).
    """

    layers: tuple[AttentionLayer, ...]
    output: Any

    @property
    def stages(self) -> tuple[int, ...]:
        """The numbers of the stages, ascending."""
        return tuple(sorted({layer.stage for layer in self.layers}))

    @property
    def soft_layers(self) -> tuple[SoftLayer, ...]:
        """The softmax-free layers."""
        return tuple(layer for layer in self.layers if isinstance(layer, SoftLayer))

    def layer(self, stage: int, block: int = -1) -> AttentionLayer:
        """A layer by its stage and block, both from 1; block -1 is the last."""
        blocks = [layer for layer in self.layers if layer.stage == stage]
        if not blocks:
            raise ValueError(
                f"stage must be one of {', '.join(map(str, self.stages))}, got {stage}"
            )
        if block != -1 and not 1 <= block <= len(blocks):
            raise ValueError(
                f"block must be at most {len(blocks)} in stage {stage} (-1 for the last), got {block}"
            )
        return blocks[block if block == -1 else block - 1]


def capture_attention(model: nn.Module, image: Tensor) -> AttentionCapture:
    """Run an image through a model and keep what its attention layers did, as factors.

    Memory grows linearly with the image, as the model's own does. The model is run in evaluation mode and
    left as it was.

    Args:
        model: any model with attention layers of softfree.
        image: (channels, H, W) or (1, channels, H, W), normalised as the model expects.

    Example:
        >>> import timm, torch, softfree
        >>> model = timm.create_model("softpp_tiny")
        >>> layer = capture_attention(model, torch.randn(3, 64, 96)).layer(stage=1)
        >>> layer.heat_map(layer.token_at(0.5, 0.5)).shape  # where each of two heads looks from the centre
        torch.Size([2, 16, 24])
        >>> layer.residuals().shape  # of each Newton step, the start value first
        torch.Size([2, 21])
    """
    if not isinstance(image, Tensor) or image.ndim not in (3, 4):
        given = tuple(image.shape) if isinstance(image, Tensor) else type(image).__name__
        raise ValueError(f"image must be a tensor (channels, H, W), got {given}")
    if image.ndim == 4 and image.shape[0] != 1:
        raise ValueError(f"image must be one image, got a batch of {image.shape[0]}")
    return _capture(model, (image[None] if image.ndim == 3 else image).to(next(model.parameters())))


def capture_sequence(model: nn.Module, tokens: Tensor) -> AttentionCapture:
    """Like :func:`capture_attention`, for a sequence encoder and one sample: tokens (n,), or (n, channels).

    For a pair, (2, n), the first sequence is captured.

    Example:
        >>> import torch
        >>> from softfree.models.sequence import SequenceClassifier
        >>> model = SequenceClassifier(vocab_size=9, length=40, num_classes=2)
        >>> capture_sequence(model, torch.randint(9, (40,))).layers[0].row(3).shape
        torch.Size([2, 40])
    """
    like = next(model.parameters())
    return _capture(model, tokens[None].to(like if tokens.is_floating_point() else like.device))


def _capture(model: nn.Module, sample: Tensor) -> AttentionCapture:
    """Capture the attention layers on a batch of one sample."""
    layers: list[AttentionLayer] = []

    def hooks(name: str, module: nn.Module) -> Iterator[RemovableHandle]:
        """Record a layer from the output of its projection, so that this is computed only once."""
        grids: list[Size] = []

        def note_grid(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            grids[:] = [_grid_of(name, *args, **kwargs)]

        def record(_: nn.Module, __: tuple, projected: Tensor) -> None:
            with torch.autocast(projected.device.type, enabled=False):
                layer = _read(name, module, projected, *grids)
            if not layer.is_finite():
                raise ValueError(
                    f"{name}: its queries, keys or landmarks are not finite; the weights are damaged, or their "
                    "training diverged"
                )
            layers.append(layer)

        yield module.register_forward_pre_hook(note_grid, with_kwargs=True)
        projection: Any = module.qv if isinstance(module, SoftAttention) else module.qkv
        yield projection.register_forward_hook(record)

    handles = [
        handle
        for name, module in model.named_modules()
        if type(module) in KNOWN
        for handle in hooks(name, module)
    ]
    if not handles:
        known = ", ".join(kind.__name__ for kind in KNOWN)
        raise ValueError(
            f"model: {type(model).__name__} has no attention layer of softfree ({known})"
        )
    try:
        with evaluating(model), torch.no_grad():
            output = model(sample)
    finally:
        for handle in handles:
            handle.remove()
    return AttentionCapture(tuple(layers), output)


def _grid_of(
    name: str,
    x: Tensor,
    size: Size = None,
    mask: Tensor | None = None,
    context: Tensor | None = None,
) -> Size:
    """The grid, from the arguments that an attention layer was called with."""
    if mask is not None or context is not None:
        raise ValueError(f"{name}: attention with a mask or a context can't be captured")
    return size


def _read(name: str, module: Any, projected: Tensor, size: Size) -> AttentionLayer:
    if isinstance(module, SoftAttention):
        return _read_soft(name, module, projected, size)
    q, k, _ = projected[0].unflatten(-1, (3, module.num_heads, -1)).permute(1, 2, 0, 3).float()
    if isinstance(module, SoftmaxAttention):
        return SoftmaxLayer(name, "softmax", size, q, k)
    kind, factors = FACTORS[type(module)]
    return FactoredLayer(name, kind, size, q, k, *factors(module, q, k, size))


def _read_soft(name: str, module: SoftAttention, projected: Tensor, size: Size) -> SoftLayer:
    q = projected.unflatten(-1, (2, module.num_heads, module.head_dim))[:, :, 0].transpose(1, 2)
    q, sampled = module.keys_and_landmarks(q, size)
    landmarks, present = sampled
    share = pooled_share(module.sampler, sampled, q.shape[2], size)
    # Leaving out a landmark that is masked changes nothing.
    landmarks = landmarks[0] if present is None else landmarks[0][:, present[0]]
    tokens = q[0].float()
    return SoftLayer(
        name,
        _kind(module),
        size,
        tokens,
        tokens,
        landmarks.float(),
        scale=1 / math.sqrt(module.head_dim),
        normalize=module.normalize,
        iterations=module.iterations,
        start=module.start,
        ridge=module.ridge,
        method=module.inverse,
        order=module.order,
        share=1.0 if share is None else float(share),
    )


def _kind(module: SoftAttention) -> str:
    if not module.normalize:
        return "SOFT"
    return OWN if module.query_norm else "SOFT++"


# The factors ``left`` and ``right`` of a layer, from queries and keys (heads, tokens, d) in float32.
Factors = tuple[Tensor, Tensor]


def _nystromformer(module: NystromformerAttention, q: Tensor, k: Tensor, size: Size) -> Factors:
    landmark_queries, landmark_keys = (module.sampler(t[None], size)[0][0] for t in (q, k))
    between = _softmax_scores(landmark_queries, landmark_keys)
    left = _softmax_scores(q, landmark_keys) @ iterative_inverse(between, module.inverse_steps)
    return left, _softmax_scores(landmark_queries, k).mT


def _performer(module: PerformerAttention, q: Tensor, k: Tensor, size: Size) -> Factors:
    directions = module.features.float().T * module.head_dim**-0.25
    on_queries, on_keys = q @ directions, k @ directions
    if module.kernel == "softmax":
        on_keys = on_keys - k.square().sum(-1, keepdim=True) * (0.5 * module.head_dim**-0.5)
        totals = on_keys.logsumexp(-2, keepdim=True)
        return (on_queries + totals).softmax(-1), (on_keys - totals).exp()
    left, right = (t.relu() + RELU_OFFSET for t in (on_queries, on_keys))
    return left / (left @ right.sum(-2)[..., None]), right


def _linformer(module: LinformerAttention, q: Tensor, k: Tensor, size: Size) -> Factors:
    prefix = 0 if size is None else q.shape[1] - size[0] * size[1]
    mixtures = module.matrix(q.shape[1] - prefix, size).float()
    mixtures = torch.block_diag(torch.eye(prefix, device=q.device), mixtures)
    return _softmax_scores(q, mixtures @ k), mixtures.mT[None]


def _agent(module: AgentAttention, q: Tensor, k: Tensor, size: Size) -> Factors:
    agents = module.pool(q[None], size, None)[0][0]
    bias = module.biases(q.shape[1], size)
    to_queries, to_keys = (0.0, 0.0) if bias is None else (bias[0].mT.float(), bias[1].float())
    return _softmax_scores(q, agents, to_queries), _softmax_scores(agents, k, to_keys).mT


def _focused(module: FocusedLinearAttention, q: Tensor, k: Tensor, size: Size) -> Factors:
    left, right = (module.features(t[None])[0] for t in (q, k))
    return left / (left @ right.sum(-2)[..., None]), right


def _softmax_scores(q: Tensor, k: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    return torch.softmax(q.shape[-1] ** -0.5 * q @ k.mT + bias, -1)


FACTORS: dict[type[nn.Module], tuple[str, Callable[..., Factors]]] = {
    NystromformerAttention: ("Nyströmformer", _nystromformer),
    PerformerAttention: ("Performer", _performer),
    LinformerAttention: ("Linformer", _linformer),
    AgentAttention: ("agent attention", _agent),
    FocusedLinearAttention: ("FLatten", _focused),
}
KNOWN = (SoftAttention, SoftmaxAttention, *FACTORS)
