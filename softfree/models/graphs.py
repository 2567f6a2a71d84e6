"""CUDA graphs: work that the host begins in one go, where it would begin every kernel.

CudaGraphs(device).record(body)      a step that is captured, see :mod:`softfree.training.step`
"""

from collections.abc import Callable
from typing import Any

import torch

WARM_UP = 3  # calls before a capture, until nothing is set up for the first time


class CudaGraphs:
    """Captures calls on one device. Their graphs share memory: one may be replayed after the other, in any order."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    def warm_up(self, body: Callable[[], Any]) -> Any:
        """Call ``body`` beside the current stream, as PyTorch asks for before a capture; return its result."""
        current = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            result = body()
        current.wait_stream(self.stream)
        return result

    def record(self, body: Callable[[], Any]) -> Callable[[], Any]:
        """Capture ``body`` without running it; a call of what comes back runs it and returns its result.

        The result's tensors are the same at each call. ``body`` may ask the device for no number, and what it reads
        and writes must stay where it is.
        """
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as that of a loader which pins memory, may go on meanwhile.
        with torch.cuda.graph(
            graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
        ):
            result = body()

        def replay() -> Any:
            graph.replay()
            return result

        return replay
