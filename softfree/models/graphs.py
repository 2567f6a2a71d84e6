"""CUDA graphs: the host launches all kernels at once instead of one by one.

capture(model, example)            a callable for inference
CudaGraphs(device).record(body)    any step that reads no device value, see :mod:`softfree.training.step`
"""

import collections
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

WARM_UP = 3  # calls before a capture, so that all one-time setup is done


class Recorder(Protocol):
    """Captures calls."""

    def warm_up(self, body: Callable[[], Any]) -> Any:
        """Call ``body`` as PyTorch requires before a capture; return its result."""

    def record(self, body: Callable[[], Any]) -> Callable[[], Any]:
        """Capture ``body`` without running it; return a function that runs it and returns its result.

        The result consists of the same tensors at each call. ``body`` must not read values from the device,
        and the memory that it reads and writes must not move.
        """


class CudaGraphs:
    """Captures calls on one device. The graphs share memory, so only one may run at a time, in any order."""

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
        # Other threads, such as a data loader's pinning thread, may continue in the meantime.
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
    """``torch.cuda.graph``, but random numbers of the current device still work after a failed capture."""
    try:
        with torch.cuda.graph(graph, **options):
            yield
    except BaseException:
        # PyTorch leaves the generator in a state as if the capture were still running.
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(generator.clone_state())
        raise


@contextlib.contextmanager
def explained(what: str) -> Any:
    """A context in which a capture error becomes a ValueError that says what can't be captured and why."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        # Ending a failed capture raises another error; the original one is its context.
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
        """The model's result, without a gradient, in its own memory."""
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
        # Checked while the device computes.
        return self.model(*args, **kwargs) if self._weights_moved() else result

    def _capture(self, key: Any, leaves: list[Any], structure: Any) -> None:
        assert self.recorder is not None
        if len(self.graphs) == self.most:
            self.graphs.popitem(last=False)
        with torch.inference_mode(False):
            # Ordinary tensors can be written to in any mode.
            static = [torch.clone(x) if isinstance(x, Tensor) else x for x in leaves]
        args, kwargs = tree_unflatten(static, structure)
        device = next(x.device for x in static if isinstance(x, Tensor))

        def body() -> Any:
            enabled, dtype = _precision(device)
            # Without the cache: tensors cached by an outer autocast are gone when the graph is replayed.
            with torch.autocast(device.type, dtype, enabled, cache_enabled=False):
                return self.model(*args, **kwargs)

        with explained(f"`model` {type(self.model).__name__}"):
            replay = self.recorder.record(body)
        self.graphs[key] = [x for x in static if isinstance(x, Tensor)], replay

    def _note_weights(self) -> None:
        """Hold on to the memory that the graphs read, so that it is not freed before they are dropped."""
        self.weights = [*self.model.parameters(), *self.model.buffers()]
        self.kept = [x.detach() for x in self.weights]

    def _weights_moved(self) -> bool:
        """Whether the weights have moved in memory; if so, the graphs are dropped."""
        pairs = zip(self.weights, self.kept, strict=True)
        moved = any(x.data_ptr() != y.data_ptr() for x, y in pairs)
        if moved:
            self.graphs.clear()
            self.seen.clear()
            self._note_weights()
        return moved


def capture(model: nn.Module, *example: Any, most: int = 4) -> Captured:
    """A callable that does what ``model`` does in inference, replayed from a CUDA graph on a GPU.

    It is for small batches, whose kernels finish faster than the host can launch them. There is one graph for
    each shape, dtype and layout of the inputs and each autocast setting. The graph for ``example`` is
    captured at once, others at their fourth call. Before that, for a model in training mode, and on a CPU,
    the model is called directly. Results have no gradient and belong to the caller: the next call does not
    change them.

    The graphs read the weights in place, so weights may be changed in place (``load_state_dict``). If they
    have moved (``model.to(...)``), graphs are captured again. Replaced layers and hooks are not noticed:
    capture again. Between calls all graphs together keep the memory of the largest call, plus their inputs
    and results. Under autocast a graph casts the weights at each call; ``model.bfloat16()`` avoids that.

    Args:
        model: in ``eval()`` mode.
        example: arguments as the model takes them, on its device; tensors, or tuples, lists and dicts of
            them.
        most: number of graphs to keep; beyond that, the least recently used one is dropped.

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
    """The properties of an argument that determine the graph."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.device, leaf.stride()
    return leaf


def _precision(device: torch.device) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)


def _after(event: Any, device: torch.device) -> contextlib.AbstractContextManager:
    """A context in which this GPU is the current one.

    Its stream first waits for a call on another stream to end.
    """
    if device.type != "cuda":
        return contextlib.nullcontext()
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)
    return torch.cuda.device(device)
