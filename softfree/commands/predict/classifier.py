"""`softfree predict` for classifiers, from a checkpoint or an ONNX file."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from rich.markup import escape
from torch import Tensor

from softfree.analysis.predictions import draw_classes
from softfree.commands.predict.base import LISTED, Listing, load_model
from softfree.models.metadata import PICTURES
from softfree.models.views import AS_IS, AveragedClassifier, Views
from softfree.training.classification import (
    Classification,
    Normalize,
    eval_transform,
    set_input_size,
)


class Classifier:
    """The likeliest classes of a picture."""

    titles: Sequence[str] = ("likeliest", "probability", "then")

    def __init__(
        self,
        checkpoint: Path,
        device: torch.device,
        img_size: int | None,
        topk: int | None = None,
        views: Views = AS_IS,
    ):
        self.model, metadata = load_model(
            checkpoint, device, Classification.load, "class_names", *PICTURES
        )
        self.device = device
        self.class_names = metadata["class_names"]
        self.topk = min(topk or LISTED, len(self.class_names))
        self.normalize = Normalize(metadata["mean"], metadata["std"])
        self.prepare: Callable[[Image.Image], Tensor] = eval_transform(metadata, img_size)
        if img_size is not None:
            set_input_size(self.model, img_size)
        if views != AS_IS:
            self.model = AveragedClassifier(self.model, views)

    def predict(self, inputs: list[Tensor]) -> list[dict[str, Any]]:
        images = torch.stack(inputs).to(self.device)
        with torch.inference_mode():
            chances = self.model(self.normalize(images)).float().softmax(-1).topk(self.topk)
        return [
            {
                "predictions": [
                    {"label": self.class_names[index], "index": index, "probability": chance}
                    for chance, index in zip(*row, strict=True)
                ]
            }
            for row in zip(chances.values.tolist(), chances.indices.tolist(), strict=True)
        ]

    def cells(self, result: dict[str, Any]) -> Sequence[str | Listing]:
        best, *others = result["predictions"]
        shares = [(p["label"], f"{p['probability']:.1%}") for p in others]
        then = Listing([f"{label} {share}" for label, share in shares if share != "0.0%"])
        return f"[bold]{escape(best['label'])}[/]", f"{best['probability']:.1%}", then

    def drawing(self, picture: Image.Image, result: dict[str, Any]) -> Image.Image:
        predictions = result["predictions"]
        return draw_classes(
            picture,
            [p["label"] for p in predictions],
            [p["probability"] for p in predictions],
        )
