"""The embedded data set: pictures of shapes on a textured background, with boxes, masks and class maps.

Pictures are drawn on access, from a seed, so every dense command runs without any files. The same pictures
are used for detection, instance segmentation and semantic segmentation.
"""

import functools
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

CLASSES = ("circle", "square", "triangle", "star", "cross")
SPLITS = ("train", "val")
SIDE = 96
SHAPES = (1000, 200)  # default number of pictures for training and for validation
# Pictures are drawn this much larger and then reduced, which makes edges smooth.
_OVERSAMPLING = 4
# A shape is placed only if at least this share of every earlier one stays visible.
_VISIBLE = 0.6


@dataclass(frozen=True)
class ShapePicture:
    """One picture: RGB (side, side, 3) uint8, labels from 1 (n,) and visible masks (n, side, side) bool."""

    image: np.ndarray
    labels: np.ndarray
    masks: np.ndarray

    @property
    def class_map(self) -> np.ndarray:
        """(side, side) uint8: 0 for the background, a shape's label where it is visible."""
        painted = np.zeros(self.image.shape[:2], np.uint8)
        for label, mask in zip(self.labels, self.masks, strict=True):
            painted[mask] = label
        return painted


# A run reads the same pictures again and again; one takes 5 ms to draw and 100 kB to keep.
@functools.lru_cache(maxsize=4096)
def draw_shapes(
    index: int, *, split: str = "train", seed: int = 0, side: int = SIDE
) -> ShapePicture:
    """Draw picture ``index`` of a split: 1 to 4 shapes, randomly tilted and coloured, some overlapping.

    The same arguments give the same picture.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    random = np.random.default_rng([seed, SPLITS.index(split), index])
    picture = _ground(random, side)
    labels: list[int] = []
    masks: list[np.ndarray] = []
    areas: list[int] = []
    for _ in range(random.integers(1, 5)):
        label = int(random.integers(len(CLASSES)))
        outline = _outline(CLASSES[label], random, side)
        cover = _rasterize(outline, side)
        mask = cover >= 0.5
        remaining = [earlier & ~mask for earlier in masks]
        if any(seen.sum() < _VISIBLE * area for seen, area in zip(remaining, areas, strict=True)):
            continue
        below = picture[mask].mean(0)
        colour = random.uniform(0, 255, 3)
        while np.abs(colour - below).mean() < 60:
            colour = random.uniform(0, 255, 3)
        paint = colour + random.normal(0, 8, (side, side, 1)) + _stripes(random, side)
        picture = picture + cover[..., None] * (paint - picture)
        masks = [*remaining, mask]
        areas.append(int(mask.sum()))
        labels.append(label + 1)
    return ShapePicture(
        picture.clip(0, 255).astype(np.uint8), np.array(labels, np.int64), np.array(masks)
    )


def _ground(random: np.random.Generator, side: int) -> np.ndarray:
    """A colour gradient under soft blotches and grain, (side, side, 3) float."""
    corners = random.uniform(40, 215, (2, 2, 3)).astype(np.uint8)
    blotches = random.uniform(0, 255, (8, 8, 3)).astype(np.uint8)
    size = (side, side)
    ground = np.asarray(Image.fromarray(corners).resize(size, Image.Resampling.BILINEAR), float)
    soft = np.asarray(Image.fromarray(blotches).resize(size, Image.Resampling.BICUBIC), float)
    return ground + 0.25 * (soft - 128) + random.normal(0, 6, (side, side, 3))


def _stripes(random: np.random.Generator, side: int) -> np.ndarray:
    """Faint parallel stripes, (side, side, 1)."""
    angle, period = random.uniform(0, np.pi), random.uniform(4, 10)
    rows, columns = np.mgrid[:side, :side]
    phase = (rows * np.sin(angle) + columns * np.cos(angle)) * 2 * np.pi / period
    return 12 * np.sin(phase)[..., None]


def _outline(shape: str, random: np.random.Generator, side: int) -> np.ndarray:
    """Corners (n, 2) of a shape that is completely inside the picture, x before y."""
    radius = side * random.uniform(0.15, 0.3)
    centre = random.uniform(radius, side - radius, 2)
    turn = random.uniform(-np.pi / 8, np.pi / 8)
    if shape == "cross":
        arm = 0.33
        unit = np.array(
            [(arm, 1), (arm, arm), (1, arm), (1, -arm), (arm, -arm), (arm, -1),
             (-arm, -1), (-arm, -arm), (-1, -arm), (-1, arm), (-arm, arm), (-arm, 1)]
        ) / np.hypot(1, arm)  # fmt: skip
    else:
        corners = {"circle": 48, "square": 4, "triangle": 3, "star": 10}[shape]
        # The first corner is at the top, that of a square at the upper right.
        first = -np.pi / 4 if shape == "square" else -np.pi / 2
        angles = first + np.arange(corners) * 2 * np.pi / corners
        reach = np.where(np.arange(corners) % 2, 0.45, 1.0) if shape == "star" else 1.0
        unit = np.stack([reach * np.cos(angles), reach * np.sin(angles)], 1)
    rotation = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
    return centre + radius * unit @ rotation.T


def _rasterize(outline: np.ndarray, side: int) -> np.ndarray:
    """How much of each pixel lies inside, (side, side) in 0..1."""
    large = Image.new("L", (side * _OVERSAMPLING,) * 2)
    points = [(float(x), float(y)) for x, y in outline * _OVERSAMPLING - 0.5]
    ImageDraw.Draw(large).polygon(points, fill=255)
    return np.asarray(large.resize((side, side), Image.Resampling.BOX), float) / 255
