"""A picture to look at that needs no file: evening over a lake, drawn with numpy."""

import numpy as np
from PIL import Image

HORIZON = 0.58
SUN = (0.68, 0.36)  # across and down, as parts of the width and the height
SKY = np.array([[38, 54, 110], [236, 138, 92], [255, 214, 140]], dtype=np.float64)
HILLS = [((0.40, 0.13), (112, 86, 124)), ((0.47, 0.08), (72, 60, 98)), ((0.53, 0.05), (36, 38, 66))]


def landscape(width: int = 640, height: int = 480) -> Image.Image:
    """An RGB picture of this size, the same at every call."""
    x = np.linspace(0, 1, width)[None, :]
    y = np.linspace(0, 1, height)[:, None]
    # What lies below the horizon is the sky and the hills again, upside down.
    above = np.where(y < HORIZON, y, 2 * HORIZON - y)
    ripples = 0.006 * np.sin(240 * y**2 + 9 * np.sin(5 * x)) * (y > HORIZON)
    across = np.broadcast_to(x, (height, width)) + ripples
    stops = np.array([0, 0.75, 1]) * HORIZON
    sky = np.stack([np.interp(above, stops, SKY[:, channel]) for channel in range(3)], -1)
    picture = np.broadcast_to(sky, (height, width, 3)).copy()
    distance = np.hypot((across - SUN[0]) * width / height, above - SUN[1])
    glow = np.exp(-((distance / 0.18) ** 2))[..., None]
    picture += glow * (np.array([255, 226, 170]) - picture) * 0.7
    picture[distance < 0.05] = (255, 246, 214)
    for (base, size), colour in HILLS:
        waves = np.sin(7 * across + 11 * base) + 0.5 * np.sin(19 * across + 5 * base)
        ridge = base + size * (1 - waves / 1.5) / 2
        picture[above > ridge] = colour
    water = (y > HORIZON) & np.ones_like(x, dtype=bool)
    picture[water] = picture[water] * 0.78 + np.array([6, 14, 26])
    grain = np.random.default_rng(0).normal(0, 3, picture.shape)
    return Image.fromarray((picture + grain).clip(0, 255).astype(np.uint8))
