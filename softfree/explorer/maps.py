"""The data behind the page: photos, captured attention and heat maps, all in a limited amount of memory."""

import contextlib
import ctypes
import hashlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from softfree.analysis.capture import AttentionCapture, AttentionLayer, SoftLayer, capture_attention
from softfree.analysis.judgement import WORDS, judge_layer, judge_maps, scale_maps
from softfree.analysis.pictures import seen_box
from softfree.analysis.subject import Subject
from softfree.data.images import open_image

SIZES = range(32, 513, 32)
MOST_STEPS = 40
TOP = 5
# A photo is kept as its central square, at most this wide.
WIDEST = 1024
KEPT_PHOTOS = 8
# A capture at 512 x 512 takes about 30 MB, a kernel about 70 MB.
KEPT_CAPTURES = 8
KEPT_KERNELS = 4
KEPT_MIXINGS = 256


class Place(NamedTuple):
    """One attention layer of a model, on a photo, at an image size."""

    model: int
    photo: str
    size: int
    stage: int
    block: int


class Explorer:
    """Photos, and what the models' attention layers do with them.

    A photo's capture, a layer's kernel and the inverse for a number of Newton steps are cached for a while,
    so that moving the query costs two small products. Calls may come from any thread; only one computes at a
    time.

    Args:
        subjects: the models.
        samples: the initial photos, by name.
    """

    def __init__(self, subjects: Sequence[Subject], samples: Mapping[str, Image.Image]):
        self.subjects = subjects
        self.sample_names = {f"sample-{n}": name for n, name in enumerate(samples, 1)}
        self._samples = dict(zip(self.sample_names, map(_square, samples.values()), strict=True))
        self._uploads: dict[str, Image.Image] = {}
        # Also needed because two threads that capture from one model would record each other's layers.
        self._computing = threading.RLock()
        self._decoding = threading.Lock()
        self._capture = lru_cache(KEPT_CAPTURES)(self._run)
        self._kernel = lru_cache(KEPT_KERNELS)(lambda place: self._soft_layer(place).kernel)
        self._mixing = lru_cache(KEPT_MIXINGS)(
            lambda place, **settings: replace(self._soft_layer(place), **settings).mixing
        )

    def add_photo(self, content: bytes) -> str:
        """Keep a photo, given the bytes of its file; return its name.

        If there are too many, the oldest is dropped. Raises
        :class:`softfree.data.images.UnreadableImageError` with the reason.
        """
        with self._decoding:  # a large photo takes hundreds of megabytes for a moment
            try:
                square = _square(open_image(BytesIO(content)))
            finally:
                give_memory_back()
            name = hashlib.sha256(content).hexdigest()[:16]
            self._uploads.pop(name, None)
            self._uploads[name] = square
            while len(self._uploads) > KEPT_PHOTOS:
                del self._uploads[next(iter(self._uploads))]
        return name

    def photo(self, name: str, model: int | None = None) -> Image.Image:
        """The central square of a photo, or what a model sees of it.

        Raises ValueError if it is no longer kept.
        """
        square = self._samples.get(name) or self._uploads.get(name)
        if square is None:
            raise ValueError("that photo is no longer kept; open it again")
        if model is None:
            return square
        crop_pct = self.subjects[model].metadata.get("crop_pct", 1.0)
        return square.crop(seen_box(square.size, crop_pct))

    def describe(self, model: int, photo: str, size: int) -> dict[str, Any]:
        """The layers of a model on a photo, and the likeliest classes (None if the model has no classes)."""
        with self._computing:
            captured = self._capture(model, photo, size)
            layers = [_describe_layer(layer) for layer in captured.layers if layer.size]
            metadata = self.subjects[model].metadata
            return {"layers": layers, "top": top_classes(captured.output, metadata)}

    def inverse(self, place: Place) -> dict[str, list]:
        """What a layer's inverse keeps of A, each figure of the head that is worst by it.

        - ``residuals``: after 0, 1, ... Newton steps, up to the layer's own at least; a single one for a solve.
        - ``kept``: with each of them, the number of eigenvalues that are inverted by more than half.
        - ``shares``: how far the layer inverts each eigenvalue, the largest first: 1 fully, 0 not at all.

        The lists are empty unless the layer is softmax-free.
        """
        with self._computing:
            layer = self.layer(place)
            if not isinstance(layer, SoftLayer):
                return {"residuals": [], "kept": [], "shares": []}
            if layer.method == "solve":
                residuals = layer.residual()[:, None]
            else:
                residuals = layer.expected_residuals(max(MOST_STEPS, layer.iterations))
            kept = [int(layer.kept_eigenvalues(steps).min()) for steps in range(residuals.shape[1])]
            shares = layer.inverted_share()[layer.kept_eigenvalues().argmin()]
            return {
                "residuals": residuals.amax(0).tolist(),
                "kept": kept,
                "shares": shares.tolist(),
            }

    def layer(self, place: Place) -> AttentionLayer:
        """The layer at a place; raises ValueError if the model has none."""
        with self._computing:
            return self._capture(*place[:3]).layer(place.stage, place.block)

    def heat_maps(self, place: Place, x: float, y: float, steps: int | None = None) -> Tensor:
        """The maps (variants, heads, H, W) of the patch at (x, y), as fractions of the image.

        They are float64, on the CPU. ``steps`` is the number of Newton steps; None: as many as the layer uses.
        """
        with self._computing:
            layer = self.layer(place)
            token = layer.token_at(x, y)
            if not isinstance(layer, SoftLayer):
                return layer.heat_map(token)[None].double().cpu()
            kernel = self._kernel(place)
            taken = layer.iterations if steps is None else steps
            mixings = [self._mixing(place, iterations=taken, normalize=n) for n in (False, True)]
            soft = [layer.lay_out(layer.rows([token], kernel, y)[:, 0]) for y in mixings]
            return torch.stack([*soft, layer.as_softmax().heat_map(token).double()]).cpu()

    def _run(self, model: int, photo: str, size: int) -> AttentionCapture:
        subject = self.subjects[model]
        return capture_attention(subject.model, subject.look(self.photo(photo), size).pixels)

    def _soft_layer(self, place: Place) -> SoftLayer:
        layer = self.layer(place)
        assert isinstance(layer, SoftLayer)
        return layer


def top_classes(output: Any, metadata: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The likeliest classes in descending order; None for models that don't classify, or are untrained."""
    names = metadata.get("class_names")
    if metadata.get("task") != "classification" or names is None:
        return None
    chances = output[0].float().softmax(-1)
    best = chances.topk(min(TOP, len(chances)))
    return [
        {"label": names[index], "probability": chance}
        for chance, index in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    ]


def pack(maps: Tensor) -> bytes:
    """Pack maps (..., H, W) for the page.

    First the smallest and the largest value of each map as float32; then for each map a byte, the index of
    its judgement in WORDS; then all maps as bytes, scaled from 0 to 255 by :func:`scale_maps`.
    """
    ranges = torch.stack([maps.amin((-2, -1)), maps.amax((-2, -1))], -1).numpy().astype("<f4")
    words = bytes(WORDS.index(judged.word) for judged in judge_maps(maps))
    scaled = (255 * scale_maps(maps)).round().numpy().astype(np.uint8)
    return ranges.tobytes() + words + scaled.tobytes()


def _variants(layer: AttentionLayer) -> list[str]:
    """Names of the maps of a layer: a softmax-free one shows three ways to attend with its queries."""
    if not isinstance(layer, SoftLayer):
        return [layer.kind]
    return ["SOFT", layer.kind if layer.normalize else "SOFT++", "softmax"]


def _describe_layer(layer: AttentionLayer) -> dict[str, Any]:
    soft = {}
    if isinstance(layer, SoftLayer):
        soft["landmarks"] = layer.m
        if layer.method == "newton":
            soft["steps"] = layer.iterations
    return {
        "stage": layer.stage,
        "block": layer.block,
        "kind": layer.kind,
        "heads": layer.heads,
        "grid": layer.size,
        "warning": judge_layer(layer).text,
        "variants": _variants(layer),
        **soft,
    }


def give_memory_back() -> None:
    """Return freed memory to the system; otherwise the C library keeps it for each thread."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)  # only in glibc


def _square(photo: Image.Image) -> Image.Image:
    """The central square, which is all that models see, at most WIDEST wide."""
    square = photo.crop(seen_box(photo.size, 1.0))
    square.thumbnail((WIDEST, WIDEST))
    return square
