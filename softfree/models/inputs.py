"""The inputs of exported programs: named tensors, their dynamic sizes, and the sizes to check a file with.

inputs = inputs_of(model, img_size=224)
inputs.names                # ("image",), or ("tokens", "mask") for a sequence encoder
inputs.example()            # tensors, one for each name
inputs.free_sizes()         # the dynamic dimensions of each, as torch.export wants them
inputs.checked()            # sizes such as (batch, height, width), for inputs.make(*size)
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from softfree.layers.landmarks import (
    AverageLandmarks,
    ConvLandmarks,
    FirstLandmarks,
    RandomLandmarks,
    SpreadLandmarks,
)
from softfree.layers.reformer import ReformerAttention
from softfree.models.boxes import BoxProgram
from softfree.models.sequence import SequenceClassifier

# Below this the last map of a pyramid has a side of 1, which exporters treat as a constant.
SMALLEST_FREE = 33  # the smallest dynamic side
WIDEST = 8192
LARGEST_BATCH = 65536
DETECTOR_EXAMPLE = (160, 288)  # large enough that the coarsest map of a RetinaNet has sides above 1
SHORTEST = 2  # length of a sequence, for the same reason


class Inputs(ABC):
    """The inputs of one kind of model."""

    names: tuple[str, ...]
    axes: str
    """the meaning of the numbers in a size"""

    @abstractmethod
    def make(self, *size: int) -> tuple[Tensor, ...]:
        """Random inputs of a size, the same at every call."""

    @abstractmethod
    def example(self) -> tuple[Tensor, ...]:
        """The inputs that the program is traced with."""

    @abstractmethod
    def free_sizes(self) -> tuple[dict[int, Any], ...]:
        """The dynamic dimensions of each input, with their ranges."""

    @abstractmethod
    def checked(self) -> list[tuple[int, ...]]:
        """The input sizes that a file is checked with."""

    @abstractmethod
    def describe(self, *size: int) -> str:
        """A size in words."""


class Pictures(Inputs):
    """Images (batch, channels, H, W).

    Args:
        channels: channels of an image.
        side: side of the images that the model was trained on.
        single: the model takes one image at a time, and sizes are always dynamic.
    """

    names = ("image",)
    axes = "batch x height x width"

    def __init__(self, channels: int, side: int, single: bool = False):
        self.channels, self.single = channels, single
        self.side = max(side, SMALLEST_FREE) if single else side
        self.fixed = self.side < SMALLEST_FREE

    def make(self, *size: int) -> tuple[Tensor, ...]:
        batch, height, width = size
        generator = torch.Generator().manual_seed(height * width + batch)
        return (torch.randn(batch, self.channels, height, width, generator=generator),)

    def example(self) -> tuple[Tensor, ...]:
        if self.single:
            return self.make(1, *DETECTOR_EXAMPLE)
        return self.make(2, self.side, self.side + (0 if self.fixed else 32))

    def free_sizes(self) -> tuple[dict[int, Any], ...]:
        sizes: dict[int, Any] = {}
        if not self.single:
            sizes[0] = Dim("batch", min=1, max=LARGEST_BATCH)
        if not self.fixed:
            sizes[2] = Dim("height", min=SMALLEST_FREE, max=WIDEST)
            sizes[3] = Dim("width", min=SMALLEST_FREE, max=WIDEST)
        return (sizes,)

    def checked(self) -> list[tuple[int, ...]]:
        """Whole windows, odd sizes, both shapes."""
        side = self.side
        if self.fixed:
            sizes = [(1, side, side), (3, side, side)]
        else:
            sizes = [
                (1, side, side),
                (3, side + 13, max(SMALLEST_FREE, side - 23)),
                (2, SMALLEST_FREE, side + 32),
            ]
        return [(1 if self.single else batch, *sides) for batch, *sides in sizes]

    def describe(self, *size: int) -> str:
        return f"{size[0]} images of {size[1]} x {size[2]} pixels"


class Sequences(Inputs):
    """Tokens (batch, n) int64, or (batch, n, channels) float32, and a mask (batch, n), True if real."""

    names = ("tokens", "mask")
    axes = "batch x tokens"

    def __init__(self, model: SequenceClassifier):
        if model.pair:
            raise ValueError("encoders of pairs of sequences (task retrieval) can't be exported")
        if any(isinstance(module, ReformerAttention) for module in model.modules()):
            raise ValueError(
                "encoders with `attention` reformer can't be exported: they sort tokens"
            )
        self.model, self.length = model, model.length
        self.shortest = max(map(_shortest, model.modules()))

    def make(self, *size: int) -> tuple[Tensor, ...]:
        batch, length = size
        generator = torch.Generator().manual_seed(batch * length)
        if self.model.channels:
            tokens = torch.randn(*size, self.model.channels, generator=generator)
        else:
            embedding: Any = self.model.embedding
            tokens = torch.randint(embedding.num_embeddings, size, generator=generator)
        real = torch.randint(1, length + 1, (batch, 1), generator=generator)
        real[0] = length
        return tokens, torch.arange(length) < real

    def example(self) -> tuple[Tensor, ...]:
        return self.make(2, self.length)

    def free_sizes(self) -> tuple[dict[int, Any], ...]:
        sizes: dict[int, Any] = {0: Dim("batch", min=1, max=LARGEST_BATCH)}
        if self.length > self.shortest:
            sizes[1] = Dim("length", min=self.shortest, max=self.length)
        return (sizes, sizes)

    def checked(self) -> list[tuple[int, ...]]:
        """The longest, an odd length, a short one."""
        shorter = (self.length * 2 // 3, self.length // 4 + 1)
        return [
            (1, self.length),
            *((batch, max(self.shortest, n)) for batch, n in zip((3, 2), shorter, strict=True)),
        ]

    def describe(self, *size: int) -> str:
        return f"{size[0]} sequences of {size[1]} tokens"


def _shortest(module: nn.Module) -> int:
    """The shortest sequence that a module of an encoder takes, and at which exporters take no size as constant."""
    if isinstance(module, AverageLandmarks | ConvLandmarks):
        return module.stride + 1  # two landmarks
    if isinstance(module, FirstLandmarks | RandomLandmarks | SpreadLandmarks) and module.strict:
        return module.count
    return SHORTEST


def inputs_of(model: nn.Module, img_size: int) -> Inputs:
    """The inputs of a model: images of about ``img_size`` pixels unless it is a sequence encoder."""
    if isinstance(model, SequenceClassifier):
        return Sequences(model)
    convolution = next(m for m in model.modules() if isinstance(m, nn.Conv2d))
    return Pictures(convolution.in_channels, img_size, single=isinstance(model, BoxProgram))
