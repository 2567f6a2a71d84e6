"""torch.compile: whole graphs, few of them whatever the sizes, and no warnings of our own code.

Graphs are counted, not compiled: that takes seconds. A fake GPU shows what is traced on one.
"""

import types
import warnings

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from softfree.layers import SoftAttention
from softfree.layers.embeddings import PositionEmbedding
from softfree.ops.shared import devices

from .small import small


class Counter:
    """A backend that counts graphs and runs them as they are; ``operators`` are ours among their calls."""

    def __init__(self):
        self.graphs, self.operators = 0, set()

    def __call__(self, module, example):
        self.graphs += 1
        targets = (str(node.target) for node in module.graph.nodes)
        self.operators |= {target for target in targets if target.startswith("softfree.")}
        return module.forward


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Stage(nn.Module):
    """Positions and an attention: all of a pyramid that looks at sizes, but for torch's convolutions."""

    def __init__(self, **options):
        super().__init__()
        self.positions = PositionEmbedding((8, 8), 16)
        self.attention = SoftAttention(16, 2, value_conv=3, **options)

    def forward(self, x):
        tokens = x.flatten(2).mT
        size = x.shape[2], x.shape[3]
        return self.attention(self.positions(tokens, size), size)


# The learned size; whole and cut windows; more and fewer than 1024 tokens, and than 49 windows.
SIZES = [(24, 20), (8, 8), (9, 11), (40, 40), (33, 31), (12, 7), (64, 24), (32, 32)]


@pytest.mark.parametrize(
    "landmarks, train", [("conv", True), ("conv:9", False), ("average:9", False)]
)
def test_one_graph_serves_all_sizes(landmarks, train):
    stage, counter = Stage(landmarks=landmarks, stride=4).train(train), Counter()
    compiled = torch.compile(stage, backend=counter, fullgraph=True, dynamic=True)
    for height, width in SIZES:
        x = torch.randn(2, 16, height, width)
        with torch.set_grad_enabled(train):
            torch.testing.assert_close(compiled(x), stage(x), rtol=1e-4, atol=1e-5)
    assert counter.graphs == 1


@pytest.mark.full
def test_a_pyramid_takes_two_graphs_for_any_sizes():
    """The second is that of torch's convolutions, which choose another way on a CPU for larger pictures."""
    model, counter = small("softpp_tiny").eval(), Counter()
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for height, width in [(64, 96), (33, 65), (70, 58), (64, 64), (160, 256), (200, 136)]:
            x = torch.randn(2, 3, height, width)
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
    assert counter.graphs <= 2


@pytest.mark.full
def test_train_and_eval_have_a_graph_each_and_batches_one_more_without_a_warning():
    model, counter = small("softpp_tiny", img_size=32, depths=(1, 1, 1, 1)), Counter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in (2, 3, 5, 4):
            for train in (True, False):
                model.train(train)
                compiled(torch.randn(batch, 3, 32, 32))
    # Of a second batch size torch makes graphs for any, as for every model.
    assert counter.graphs == 4


def fake_gpu(monkeypatch):
    """Questions about the GPU are answered as by an H200."""
    properties = types.SimpleNamespace(
        major=9, shared_memory_per_block_optin=227 * 1024, multi_processor_count=132
    )
    for name, answer in [
        ("get_device_capability", (9, 0)),
        ("get_device_properties", properties),
        ("current_device", 0),
    ]:
        monkeypatch.setattr(torch.cuda, name, lambda *device, answer=answer: answer)


def fill_with_fakes(module, device, dtype):
    for part in module.modules():
        for name, old in part._parameters.items():
            if old is not None:
                new = torch.empty(old.shape, device=device, dtype=dtype)
                part._parameters[name] = nn.Parameter(new)
    return module


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="torch was built without CUDA")
@pytest.mark.parametrize("landmarks", ["conv", "conv:9"])
def test_on_a_gpu_one_graph_of_the_layers_operator_serves_all_sizes(monkeypatch, landmarks):
    fake_gpu(monkeypatch)
    counter = Counter()
    with torch.device("meta"):
        stage = Stage(landmarks=landmarks, stride=4)
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("error")
        stage = fill_with_fakes(stage, "cuda", torch.bfloat16)
        compiled = torch.compile(stage, backend=counter, fullgraph=True, dynamic=True)
        for height, width in [*SIZES, (30, 33)]:
            x = torch.empty(2, 16, height, width, device="cuda", dtype=torch.bfloat16)
            assert compiled(x).shape == (2, height * width, 16)
    assert counter.graphs == 1 and counter.operators == {"softfree.image_attention.default"}


def test_the_compiler_takes_what_is_remembered_of_a_device_for_a_constant():
    device = torch.device("cpu")

    def function(x):
        known = devices.has_matrix_units(x.device) and devices.is_hopper(x.device)
        return x + (devices.processors(x.device) if known else 0)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled = torch.compile(function, backend="eager", fullgraph=True)
        assert compiled(torch.zeros(2, device=device)).tolist() == [1, 1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("train", [False, True])
def test_on_a_gpu_reduce_overhead_gives_what_the_model_gives(train, recwarn):
    model = small("softpp_tiny").cuda().train(train)
    compiled = torch.compile(model, mode="reduce-overhead")
    for _ in range(4):
        x = torch.randn(4, 3, 64, 64, device="cuda")
        found = []
        for network in (compiled, model):
            torch.compiler.cudagraph_mark_step_begin()
            model.zero_grad()
            with torch.set_grad_enabled(train), torch.autocast("cuda", torch.bfloat16):
                logits = network(x)
            if train:
                logits.float().square().mean().backward()
                norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
                found.append((logits.detach().clone().float(), norm))
            else:
                found.append((logits.clone().float(),))
        torch.testing.assert_close(*found, rtol=5e-2, atol=5e-2)
    ours = [str(w.message) for w in recwarn if "lru_cache" in str(w.message)]
    assert not ours
