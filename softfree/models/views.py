"""Test-time augmentation: a picture is shown at several sizes and mirrored, and the results are merged.

    views = Views((0.75, 1.0, 1.25), mirrored=True)     six ways to show a picture
    AveragedClassifier(network, views)                  a classifier that sees them all

Segmenters also average their class probabilities over the views (:mod:`softfree.training.segmentation`).
Detectors keep the best detections from all views (:mod:`softfree.training.detection`).
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class Views:
    """How a picture is shown: at each scale unchanged and, if ``mirrored``, also flipped left to right.

    Example:
        >>> list(Views((1.0, 0.5), mirrored=True))
        [(1.0, False), (1.0, True), (0.5, False), (0.5, True)]
    """

    scales: tuple[float, ...] = (1.0,)
    mirrored: bool = False

    @classmethod
    def of(cls, tta: bool, tta_scales: Sequence[float]) -> "Views":
        """The views that a user asks for; without scales, only the model's usual size."""
        if wrong := [scale for scale in tta_scales if not 0 < scale < math.inf]:
            raise ValueError(f"`tta_scales` must be above 0, got {wrong[0]:g}")
        return cls(tuple(dict.fromkeys(tta_scales)) or (1.0,), tta)

    def __iter__(self) -> Iterator[tuple[float, bool]]:
        for scale in self.scales:
            yield scale, False
            if self.mirrored:
                yield scale, True

    def __len__(self) -> int:
        return len(self.scales) * (1 + self.mirrored)

    def loaded_at(self, side: int) -> tuple[int, "Views"]:
        """The side at which to load pictures that are seen at ``side``, and the views of the loaded pictures.

        It is the side of the largest view, which would otherwise be enlarged from a smaller copy. A side of
        0, which means pictures at their own size, stays 0.

        Example:
            >>> Views((0.5, 1.0, 2.0)).loaded_at(512)
            (1024, Views(scales=(0.25, 0.5, 1.0), mirrored=False))
        """
        largest = max(self.scales)
        if not side or largest <= 1:
            return side, self
        scales = tuple(scale / largest for scale in self.scales)
        return round(side * largest), dataclasses.replace(self, scales=scales)

    def show(self, images: Tensor) -> Iterator[tuple[Tensor, Callable[[Tensor], Tensor]]]:
        """The views of pictures (b, 3, H, W), each with a function that turns a map of the view back."""
        for scale, mirrored in self:
            shown = rescale(images, scale)
            yield (mirror(shown), mirror) if mirrored else (shown, lambda x: x)


AS_IS = Views()


def rescale(images: Tensor, scale: float) -> Tensor:
    """Pictures (b, 3, H, W) at ``scale`` times their size."""
    if scale == 1:
        return images
    size = [max(1, round(side * scale)) for side in images.shape[-2:]]
    return F.interpolate(images, size, mode="bilinear", antialias=True)


def mirror(images: Tensor) -> Tensor:
    """Pictures, or maps of them, mirrored from left to right."""
    return images.flip(-1)


class AveragedClassifier(nn.Module):
    """A classifier (b, 3, H, W) -> (b, classes) that returns the log of mean probabilities over the views.

    Example:
        >>> network = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        >>> averaged = AveragedClassifier(network, Views((1.0,), mirrored=True))
        >>> images = torch.rand(2, 3, 8, 8)
        >>> torch.allclose(averaged(images), network(images).log_softmax(-1))
        True
    """

    def __init__(self, network: nn.Module, views: Views):
        super().__init__()
        if views.scales != (1.0,) and hasattr(network, "set_input_size"):
            scales = " ".join(f"{scale:g}" for scale in views.scales)
            raise ValueError(
                f"`tta_scales` {scales}: {type(network).__name__} takes pictures of one size, "
                "leave them out"
            )
        self.network, self.views = network, views

    def forward(self, images: Tensor) -> Tensor:
        shown = [self.network(view).float().log_softmax(-1) for view, _ in self.views.show(images)]
        return torch.stack(shown).logsumexp(0) - math.log(len(shown))
