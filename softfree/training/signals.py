"""Being asked to stop: by SIGTERM (schedulers, torchrun) or Ctrl-C."""

import signal
from types import FrameType
from typing import Any


class StopRequest:
    """SIGTERM and Ctrl-C as a wish that the loop grants after the step; a second Ctrl-C stops at once."""

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


def ignore_signals(worker: int) -> None:
    """Loading processes live as long as the loop: Ctrl-C reaches them, too, but is not meant for them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
