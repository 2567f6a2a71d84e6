"""Being asked to stop: by SIGTERM (schedulers, torchrun) or Ctrl-C."""

import signal
from types import FrameType
from typing import Any


class StopRequest:
    """Notes SIGTERM and Ctrl-C, so that the loop can stop after the step; a second Ctrl-C stops at once."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        self.before = {s: signal.signal(s, self._note) for s in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == self.signal == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number
