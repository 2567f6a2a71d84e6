"""The embedded data set: 1,797 handwritten digits of 8 x 8 pixels that come with scikit-learn."""

from typing import Literal

import numpy as np
from PIL import Image

from softfree.data.images import ImageDataset

SIDE = 32  # the smallest image the pyramids take
VALIDATION = 360
CLASS_NAMES = tuple(str(digit) for digit in range(10))


class Digits(ImageDataset):
    """Handwritten digits as RGB pictures of 32 x 32 pixels: 1,437 for training, 360 for validation.

    The split is fixed, and every digit has the same share in both parts.

    Example:
        >>> from softfree.data.digits import Digits
        >>> picture, label = Digits("val")[0]
        >>> picture.size, len(Digits("train")), len(Digits("val"))
        ((32, 32), 1437, 360)
    """

    def __init__(self, split: Literal["train", "val"]):
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        super().__init__()
        digits = load_digits()
        parts = train_test_split(
            np.arange(len(digits.target)),
            test_size=VALIDATION,
            stratify=digits.target,
            random_state=0,
        )
        chosen = np.sort(parts[("train", "val").index(split)])
        self.pixels = np.rint(digits.images[chosen] * (255 / 16)).astype(np.uint8)
        self.labels = [int(label) for label in digits.target[chosen]]
        self.split = split

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> tuple[Image.Image, int]:
        small = Image.fromarray(self.pixels[index])
        large = small.resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        return large.convert("RGB"), self.labels[index]

    def name(self, index: int) -> str:
        return f"digits/{self.split}/{index}"
