"""Photos that a test can afford: scenes of three kinds, which differ in what is seen and not in their colours."""

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

KINDS = ("discs", "stripes", "tiles")


def photo(kind: str, number: int, size: tuple[int, int] = (120, 96)) -> Image.Image:
    """One photo of a kind: two random colours, noise, and the pattern at a random place."""
    generator = np.random.default_rng([KINDS.index(kind), number])
    ground, figure = (tuple(int(c) for c in generator.integers(30, 226, 3)) for _ in range(2))
    picture = Image.new("RGB", size, ground)
    draw = ImageDraw.Draw(picture)
    step, shift = int(generator.integers(20, 32)), int(generator.integers(20))
    for x in range(shift - step, size[0], step):
        if kind == "stripes":
            draw.line((x, 0, x + size[1] // 2, size[1]), fill=figure, width=step // 3)
            continue
        for y in range(shift - step, size[1], step):
            box = (x, y, x + step // 2, y + step // 2)
            (draw.ellipse if kind == "discs" else draw.rectangle)(box, fill=figure)
    noise = generator.normal(0, 8, (size[1], size[0], 3))
    return Image.fromarray((np.asarray(picture) + noise).clip(0, 255).astype(np.uint8))


def write_photos(root: Path, count: int = 60) -> Path:
    """``count`` photos in one folder a class, without train/ and val/."""
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        (root / kind).mkdir(parents=True, exist_ok=True)
        photo(kind, number).save(root / kind / f"IMG_{number:04d}.jpg", quality=90)
    return root
