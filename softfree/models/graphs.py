"""CUDA graphs: work that the host begins in one go, where it would begin every kernel.

capture(model, example)            a callable for inference
CudaGraphs(device).record(body)    any step that waits for no number, see :mod:`softfree.training.step`
"""

import collections
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

WARM_UP = 3  # calls before a capture, until nothing is set up for the first time


class Recorder(Protocol):
    """What captures calls."""

    def warm_up(self, body: Callable[[], Any]) -> Any:
        """Call ``body`` as PyTorch asks for before a capture; return its result."""

    def record(self, body: Callable[[], Any]) -> Callable[[], Any]:
        """Capture ``body`` without running it; a call of what comes back runs it and returns its result.

        The result's tensors are the same at each call. ``body`` may ask the device for no number, and what it reads
        and writes must stay where it is.
        """


class CudaGraphs:
    """Captures calls on one device. Their graphs share memory: one may be replayed after the other, in any order."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    def warm_up(self, body: Callable[[], Any]) -> Any:
        current = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            result = body()
        current.wait_stream(self.stream)
        return result

    def record(self, body: Callable[[], Any]) -> Callable[[], Any]:
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as that of a loader which pins memory, may go on meanwhile.
        with recording(
            graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
        ):
            result = body()

        def replay() -> Any:
            graph.replay()
            return result

        return replay


@contextlib.contextmanager
def recording(graph: torch.cuda.CUDAGraph, **options: Any) -> Iterator[None]:
    """``torch.cuda.graph``, after whose failure random numbers of the current device can be drawn as before it."""
    try:
        with torch.cuda.graph(graph, **options):
            yield
    except BaseException:
        # PyTorch leaves the generator's state in the belief that the capture goes on.
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(generator.clone_state())
        raise


@contextlib.contextmanager
def explained(what: str) -> Any:
    """Inside, an error of a capture becomes a ValueError that says what could not be captured, and why."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        # The end of a capture that has failed raises an error of its own.
        reason = str(error.__context__ or error).strip().splitlines()[0]
        raise ValueError(f"{what} can't be captured as a CUDA graph ({reason})") from error


class Captured:
    """A model for inference, replayed from CUDA graphs; see :func:`capture`."""

    def __init__(self, model: nn.Module, recorder: Recorder | None, most: int):
        self.model, self.recorder, self.most = model, recorder, most
        self.seen: dict[Any, int] = {}
        self.graphs: collections.OrderedDict[Any, tuple[list[Tensor], Callable[[], Any]]] = (
            collections.OrderedDict()
        )
        self.lock = threading.Lock()
        self.done: torch.cuda.Event | None = None
        self._note_weights()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model gives, without a gradient, in memory of its own."""
        leaves, structure = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        with torch.no_grad():
            if self.recorder is None or self.model.training or not tensors:
                return self.model(*args, **kwargs)
            key = structure, *_precision(tensors[0].device), *map(_kind, leaves)
            with self.lock, _after(self.done, tensors[0].device):
                result = self._call(key, leaves, structure, tensors)
                if tensors[0].is_cuda:
                    self.done = torch.cuda.current_stream(tensors[0].device).record_event()
                return result

    def _call(self, key: Any, leaves: list[Any], structure: Any, tensors: list[Tensor]) -> Any:
        assert self.recorder is not None
        args, kwargs = tree_unflatten(leaves, structure)
        if key not in self.graphs:
            self.seen[key] = self.seen.get(key, 0) + 1
            if self.seen[key] <= WARM_UP or self._weights_moved():
                return self.recorder.warm_up(lambda: self.model(*args, **kwargs))
            self._capture(key, leaves, structure)
        self.graphs.move_to_end(key)
        inputs, replay = self.graphs[key]
        for mine, given in zip(inputs, tensors, strict=True):
            mine.copy_(given, non_blocking=True)
        # A copy: the next call writes to the same place.
        result = tree_map_only(Tensor, torch.clone, replay())
        # Looked at while the device computes.
        return self.model(*args, **kwargs) if self._weights_moved() else result

    def _capture(self, key: Any, leaves: list[Any], structure: Any) -> None:
        assert self.recorder is not None
        if len(self.graphs) == self.most:
            self.graphs.popitem(last=False)
        with torch.inference_mode(False):
            # On an ordinary tensor, which may be written to in any mode.
            static = [torch.clone(x) if isinstance(x, Tensor) else x for x in leaves]
        args, kwargs = tree_unflatten(static, structure)
        device = next(x.device for x in static if isinstance(x, Tensor))

        def body() -> Any:
            enabled, dtype = _precision(device)
            # Without its cache: what an autocast outside has kept is gone when the graph is replayed.
            with torch.autocast(device.type, dtype, enabled, cache_enabled=False):
                return self.model(*args, **kwargs)

        with explained(f"`model` {type(self.model).__name__}"):
            replay = self.recorder.record(body)
        self.graphs[key] = [x for x in static if isinstance(x, Tensor)], replay

    def _note_weights(self) -> None:
        """Keep hold of the memory that the graphs read: it may not be given away before they are."""
        self.weights = [*self.model.parameters(), *self.model.buffers()]
        self.kept = [x.detach() for x in self.weights]

    def _weights_moved(self) -> bool:
        """Whether graphs, if there were any, read where the weights no longer lie; they are then dropped."""
        pairs = zip(self.weights, self.kept, strict=True)
        moved = any(x.data_ptr() != y.data_ptr() for x, y in pairs)
        if moved:
            self.graphs.clear()
            self.seen.clear()
            self._note_weights()
        return moved


def capture(model: nn.Module, *example: Any, most: int = 4) -> Captured:
    """A callable that does what ``model`` does, in inference, replayed from a CUDA graph on a GPU.

    For small batches, whose kernels the GPU ends faster than the host begins them. There is a graph for each shape,
    dtype and layout of the inputs, and each setting of autocast: for those of ``example`` at once, for others from
    their fourth call on; before that, and for a model in training, the model is called as it is. On a CPU it always
    is. Results have no gradient, and are the caller's: the next call does not change them.

    The graphs read the weights where they lie, so these may change in place (``load_state_dict``); where they have
    moved (``model.to(...)``), graphs are captured anew. Replaced layers and hooks are not noticed: capture again. Between
    calls the graphs together keep the memory of one call, that of the largest, and their inputs and results. Under
    autocast a graph casts the weights at each call; ``model.bfloat16()`` saves that.

    Args:
        model: in ``eval()`` mode.
        example: arguments as the model takes them, on its device; tensors, or tuples, lists and dicts of them.
        most: graphs that are kept; beyond, the one used least recently is dropped.

    Example:
        >>> import softfree, timm, torch
        >>> model = timm.create_model("softpp_tiny", num_classes=10).eval()
        >>> fast = softfree.capture(model, torch.randn(1, 3, 64, 64))
        >>> fast(torch.randn(1, 3, 64, 64)).shape
        torch.Size([1, 10])
    """
    if model.training:
        raise ValueError("`model` is in training mode; capture(model.eval(), ...) works")
    if most < 1:
        raise ValueError(f"`most` must be at least 1, got {most}")
    device = next((x.device for x in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    recorder = CudaGraphs(device) if device.type == "cuda" else None
    captured = Captured(model, recorder, most)
    if recorder is not None and example:
        for _ in range(WARM_UP + 1):
            captured(*example)
    return captured


def _kind(leaf: Any) -> Any:
    """What of an argument decides on the graph."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.device, leaf.stride()
    return leaf


def _precision(device: torch.device) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)


def _after(event: Any, device: torch.device) -> contextlib.AbstractContextManager:
    """Inside, this GPU is the current one, and its stream waits for a call on another stream to end."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)
    return torch.cuda.device(device)
