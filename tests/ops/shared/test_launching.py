"""Launches that go straight to the kernel that Triton chose; here Triton is played by a stub."""

import threading
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need the package triton")

from softfree.ops.shared import launching
from softfree.ops.shared.launching import Chain, Launch, Part, Room, launch


class StubCompiled:
    """Notes what it is launched with."""

    def __init__(self, number: int):
        self.function, self.packed_metadata, self.launches = number, ("metadata", number), []

    def run(self, *arguments):
        self.launches.append(arguments)


class StubKernel:
    """Compiles anew at each ordinary launch, so that a stale kernel would show."""

    def __init__(self, runtime: int, compile_time: int):
        kinds = [False] * runtime + [True] * compile_time
        self.params = [SimpleNamespace(is_constexpr=kind) for kind in kinds]
        self.pre_run_hooks = []
        self.compiled = []

    def __getitem__(self, grid):
        def run(*arguments, **options):
            self.compiled.append(StubCompiled(len(self.compiled)))
            return self.compiled[-1]

        return run


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch):
    """The current GPU and its stream, which a test may change."""
    place = SimpleNamespace(gpu=0, stream=7)
    monkeypatch.setattr(launching, "_gpu", lambda tensor: place.gpu)
    monkeypatch.setattr(launching, "_stream", lambda gpu: place.stream)
    monkeypatch.setattr(launching, "_launches", {})
    monkeypatch.setattr(launching, "CompiledKernel", StubCompiled)
    monkeypatch.setattr(launching, "KNOWN_VERSION", True)
    return place


@pytest.fixture
def kernel():
    return StubKernel(4, 1)  # two tensors, two values, one option


@pytest.fixture
def tensors():
    return torch.zeros(8), torch.zeros(8)


def test_a_launch_seen_before_goes_straight_to_the_compiled_kernel(kernel, tensors):
    for _ in range(3):
        launch(kernel, (5,), tensors, (3, 0.5), BLOCK=16)
    addresses = [tensor.data_ptr() for tensor in tensors]
    (compiled,) = kernel.compiled
    expected = (5, 1, 1, 7, 0, ("metadata", 0), None, None, None, *addresses, 3, 0.5, None)
    assert compiled.launches == [expected] * 2


def test_grid_stream_and_addresses_are_those_of_the_launch(kernel, tensors, a_gpu):
    launch(kernel, (2, 3, 4), tensors, (3, 0.5), BLOCK=16)
    a_gpu.stream = 8
    others = torch.zeros(8), torch.zeros(8)
    launch(kernel, (2, 3, 4), others, (3, 0.5), BLOCK=16)
    ((*grid, stream, _, _, _, _, _, first, second, _, _, _),) = kernel.compiled[0].launches
    assert (*grid, stream) == (2, 3, 4, 8)
    assert [first, second] == [tensor.data_ptr() for tensor in others]


def moved(tensors):
    return tensors[0][1:], tensors[1]


def halved(tensors):
    return tensors[0].half(), tensors[1]


@pytest.mark.parametrize(
    "change",
    [
        dict(values=(4, 0.5)),
        dict(values=(3, 0.25)),
        dict(values=(3.0, 0.5)),
        dict(options=dict(BLOCK=32)),
        dict(options=dict(BLOCK=16, num_warps=8)),
        dict(tensors=moved),
        dict(tensors=halved),
        dict(gpu=1),
        dict(grid=(6,)),
    ],
    ids=lambda change: " ".join(f"{key}={getattr(x, '__name__', x)}" for key, x in change.items()),
)
def test_whatever_triton_looks_at_is_looked_at_again(kernel, tensors, a_gpu, change):
    launch(kernel, (5,), tensors, (3, 0.5), BLOCK=16)
    a_gpu.gpu = change.get("gpu", 0)
    inputs = change.get("tensors", lambda same: same)(tensors)
    options = change.get("options", dict(BLOCK=16))
    for _ in range(2):
        launch(kernel, change.get("grid", (5,)), inputs, change.get("values", (3, 0.5)), **options)
    first, second = kernel.compiled
    assert not first.launches and len(second.launches) == 1


def test_true_and_one_are_not_the_same_value(kernel, tensors):
    for value in (1, True, 1.0):
        launch(kernel, (5,), tensors, (value, 0.5), BLOCK=16)
    assert len(kernel.compiled) == 3


def test_equal_arguments_of_two_kernels_are_two_launches(tensors):
    kernels = StubKernel(4, 1), StubKernel(4, 1)
    for kernel in kernels * 2:
        launch(kernel, (5,), tensors, (3, 0.5), BLOCK=16)
    assert [len(kernel.compiled) for kernel in kernels] == [1, 1]


@pytest.mark.parametrize("where", ["kernel", "enter", "exit"])
def test_hooks_see_every_launch(kernel, tensors, where, monkeypatch):
    launch(kernel, (5,), tensors, (3, 0.5), BLOCK=16)
    if where == "kernel":
        kernel.pre_run_hooks.append(lambda *_: None)
    else:
        runtime = launching.triton.knobs.runtime
        monkeypatch.setattr(runtime, f"launch_{where}_hook", lambda metadata: None)
    launch(kernel, (5,), tensors, (3, 0.5), BLOCK=16)
    assert len(kernel.compiled) == 2


@pytest.mark.parametrize("why", ["version", "no gpu", "arguments", "result"])
def test_what_is_not_known_here_is_left_to_triton(kernel, tensors, a_gpu, why, monkeypatch):
    if why == "version":
        monkeypatch.setattr(launching, "KNOWN_VERSION", False)
    elif why == "no gpu":
        a_gpu.gpu = None
    elif why == "arguments":
        kernel.params.reverse()
    else:
        monkeypatch.setattr(launching, "CompiledKernel", int)
    for _ in range(2):
        launch(kernel, (5,), tensors, (3, 0.5), BLOCK=16)
    assert len(kernel.compiled) == 2


def test_launches_remembered_are_bounded(kernel, tensors, monkeypatch):
    monkeypatch.setattr(launching, "MOST", 10)
    for size in range(95):
        launch(kernel, (5,), tensors, (size, 0.5), BLOCK=16)
        assert len(launching._launches) <= 10


def test_threads_launch_what_they_asked_for(kernel, tensors, monkeypatch):
    monkeypatch.setattr(launching, "MOST", 3)
    wrong = []

    def work(size: int) -> None:
        for _ in range(300):
            launch(kernel, (size,), tensors, (size, 0.5), BLOCK=16)

    threads = [threading.Thread(target=work, args=(size,)) for size in range(1, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for compiled in kernel.compiled:
        sizes = {(launched[0], launched[-3]) for launched in compiled.launches}
        wrong += [pair for pair in sizes if pair[0] != pair[1]] + list(sizes)[1:]
    assert not wrong


def chain_of(kernels):
    """Each launched with the second tensor from its byte 16 on, and with float16 of the room after 300 bytes."""
    room = Room(2)
    room.part((75,))
    arguments = Part(1, 16), room.part((8,), torch.float16)
    return Chain(
        [(Launch(kernel, (5,), (3, 0.5), BLOCK=16), arguments) for kernel in kernels]
    ), room


def test_a_chain_launches_parts_of_its_tensors_as_single_launches_do(tensors):
    kernels = StubKernel(4, 1), StubKernel(4, 1)
    chain, room = chain_of(kernels)
    scratch = room.empty(torch.zeros(1))
    for _ in range(3):
        chain(*tensors, scratch)
    addresses = (
        tensors[1].data_ptr() + 16,
        scratch.data_ptr() + 512,
    )  # parts lie at multiples of 256
    for kernel in kernels:
        (compiled,) = kernel.compiled
        expected = (5, 1, 1, 7, 0, ("metadata", 0), None, None, None, *addresses, 3, 0.5, None)
        assert compiled.launches == [expected] * 2
    assert room.bytes == scratch.numel() * 4 == 768


def test_a_part_of_a_room_has_the_dtype_it_was_asked_for_and_its_own_memory():
    room = Room(0)
    first, second = room.part((3, 5)), room.part((4,), torch.float16)
    scratch = (room.empty(torch.zeros(1)),)
    first.of(scratch)[:15].fill_(1)
    halves = second.of(scratch)
    halves[:4].fill_(2)
    assert halves.dtype == torch.float16
    assert (first.of(scratch)[:15] == 1).all() and (halves[:4] == 2).all()


@pytest.mark.parametrize("change", ["dtype", "alignment", "gpu", "hook", "kernel's hook"])
def test_a_chain_asks_triton_again_where_a_launch_would(tensors, a_gpu, change, monkeypatch):
    kernels = StubKernel(4, 1), StubKernel(4, 1)
    chain, room = chain_of(kernels)
    tensors = (*tensors, room.empty(torch.zeros(1)))
    chain(*tensors)
    if change == "dtype":
        tensors = (tensors[0], torch.zeros(16).half(), tensors[2])
    elif change == "alignment":
        tensors = (tensors[0], tensors[1][1:], tensors[2])
    elif change == "gpu":
        a_gpu.gpu = 1
    elif change == "hook":
        runtime = launching.triton.knobs.runtime
        monkeypatch.setattr(runtime, "launch_enter_hook", lambda metadata: None)
    else:
        kernels[1].pre_run_hooks.append(lambda *_: None)
    chain(*tensors)
    assert len(kernels[1].compiled) == 2 and not kernels[1].compiled[0].launches


def test_a_launcher_that_needs_no_memory_is_called_past_its_request_for_it(kernel, tensors):
    launches = []
    compiled = StubCompiled(0)
    compiled.run = SimpleNamespace(
        launch=lambda *arguments: launches.append(arguments), launch_cooperative_grid=False,
        launch_pdl=True, global_scratch_size=0, profile_scratch_size=0,
    )  # fmt: skip
    kernel.__class__ = type(
        "One", (StubKernel,), {"__getitem__": lambda *_: lambda *_, **__: compiled}
    )
    for _ in range(2):
        launch(kernel, (5,), tensors, (3, 0.5), BLOCK=16)
    addresses = [tensor.data_ptr() for tensor in tensors]
    after = (("metadata", 0), None, None, None, *addresses, 3, 0.5, None)
    assert launches == [(5, 1, 1, 7, 0, False, True, None, None, *after)]
