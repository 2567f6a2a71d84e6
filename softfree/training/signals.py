"""Requests to stop: SIGTERM (schedulers, torchrun), SIGHUP (a terminal that closes) or Ctrl-C."""

import os
import signal
from types import FrameType
from typing import Any

STOPPING = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name)
)


class StopRequest:
    """Notes these signals, so that the loop can stop after the step; a second Ctrl-C stops at once."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.before: dict[int, Any] = {}
        self.terminals: list[int] = []

    def __enter__(self) -> "StopRequest":
        self.terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]
        for number in STOPPING:
            # Under nohup the signal is ignored, and the run outlives its terminal.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self.before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == self.signal == signal.SIGINT:
            self.before[number](number, frame)  # raises KeyboardInterrupt
        self.signal = number
        if number not in (signal.SIGTERM, signal.SIGINT):
            # The terminal is gone. Printing to it would raise an error, and the run would not be saved.
            for descriptor in self.terminals:
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
