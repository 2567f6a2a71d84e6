"""The interface of a task in `softfree predict`, and how results are listed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from PIL import Image
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.text import Text

from softfree.models.export import load_onnx
from softfree.models.metadata import check_fields

ONNX = ".onnx"
LISTED = 5  # default number of entries per picture in the table


@dataclass(frozen=True)
class Listing:
    """Comma-separated entries for a cell of a table; lines break after an entry, not within one."""

    entries: Sequence[str]

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, Text(", ".join(self.entries)))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        rows: list[str] = []
        for number, entry in enumerate(self.entries, start=1):
            text = entry + "," * (number < len(self.entries))
            if rows and cell_len(f"{rows[-1]} {text}") <= options.max_width:
                rows[-1] += f" {text}"
            else:
                rows.append(text)
        yield Text("\n".join(rows), overflow="fold")


def load_model(
    source: Path,
    device: torch.device,
    load: Callable[..., tuple[Any, dict[str, Any]]],
    *fields: str,
) -> tuple[Any, dict[str, Any]]:
    """The model and its metadata, from an ONNX file, or from a checkpoint with ``load``.

    Checks ``fields``.
    """
    model, metadata = load_onnx(source) if source.suffix == ONNX else load(source, device)
    check_fields(source, metadata, fields)
    return model, metadata


class Predictor(Protocol):
    """What a task does with pictures. PREDICTORS has one for each task."""

    titles: Sequence[str]

    def prepare(self, picture: Image.Image, /) -> Any:
        """Make the model's input; runs in a worker process, so what it needs must be picklable."""

    def predict(self, inputs: list[Any]) -> list[dict[str, Any]]:
        """Return a result for each input, with values that JSON can hold."""

    def cells(self, result: dict[str, Any]) -> Sequence[str | Listing]:
        """The result as table cells, one for each of ``titles``."""

    def drawing(self, picture: Image.Image, result: dict[str, Any]) -> Image.Image:
        """Draw the result on a picture."""
