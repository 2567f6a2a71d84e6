"""Whole models under everything PyTorch does to a model: compiling, exporting, casting, distributing."""

import copy
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.export import Dim
from torch.nn.parallel import DistributedDataParallel

from .small import KINDS, small


def image(*size: int, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, 3, *(size or (64, 64)))


def relative_error(given: torch.Tensor, expected: torch.Tensor) -> float:
    return ((given.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()


@pytest.mark.full
@pytest.mark.parametrize("name", ["softfree_tiny", "softpp_tiny_release", "softpp_vit_small"])
def test_a_model_compiles_as_one_graph_for_training(name):
    model = small(name)
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
    x = image()
    out, expected = compiled(x), model(x)
    assert relative_error(out, expected) < 1e-4
    out.square().sum().backward()
    expected.square().sum().backward()
    for (key, given), wanted in zip(compiled.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(given.grad, wanted.grad, atol=1e-4, rtol=1e-2, msg=key)


@pytest.mark.parametrize("landmarks", ["conv:9", "average", "random:9", "first:9"])
def test_a_model_with_any_landmarks_compiles_as_one_graph(landmarks):
    model = small("softpp_vit_small", landmarks=landmarks, depth=1).eval()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = image()
    with torch.no_grad():
        assert relative_error(compiled(x), model(x)) < 1e-4


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's compiler needs a C++ compiler")
def test_a_model_compiles_to_machine_code():
    model = small("softpp_vit_small", depth=1).eval()
    compiled = torch.compile(model, fullgraph=True)
    x = image()
    with torch.no_grad():
        assert relative_error(compiled(x), model(x)) < 1e-4


# Fewer Newton steps than usual, since each is unrolled in the exported graph.
@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "landmarks"),
    [
        ("softfree_tiny", "average:9"),
        ("soft_vit_small", "conv:9"),
        ("softpp_vit_small", "random:9"),
    ],
)
def test_one_exported_program_serves_any_batch_and_size(name, landmarks):
    model = small(name, landmarks=landmarks, iterations=2).eval()
    # Beyond 32, where the last map of a pyramid has a side of 1: exporters treat 1 as a constant.
    sizes = {0: Dim("batch", min=1, max=64), 2: Dim("height", min=33), 3: Dim("width", min=33)}
    program = torch.export.export(model, (image(96, 64),), dynamic_shapes=(sizes,))
    targets = [str(node.target) for node in program.graph.nodes]
    assert not [target for target in targets if "softfree" in target]
    run = program.module()
    with torch.no_grad():
        for x in (image(96, 64), image(97, 65, batch=1), image(33, 130, batch=3)):
            assert relative_error(run(x), model(x)) < 1e-4


@pytest.mark.parametrize("name", KINDS)
def test_autocast_is_close_to_float32(name):
    model = small(name).train()
    x = image()
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    assert relative_error(out, model(x)) < 0.05


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.05), (torch.float16, 0.01)])
def test_a_half_precision_model_is_close_to_float32(name, dtype, tolerance):
    model = small(name).eval()
    x = image().to(dtype)
    with torch.no_grad():
        expected = model(x.float())
        out = model.to(dtype)(x)
    assert out.dtype == dtype
    assert relative_error(out, expected) < tolerance


@pytest.mark.parametrize("name", KINDS)
def test_a_float64_model_computes_in_float64(name):
    model = small(name).eval()
    x = image()
    out = copy.deepcopy(model).double()(x.double())
    assert out.dtype == torch.float64
    assert 0 < relative_error(model(x), out) < 1e-4


@pytest.mark.parametrize("name", KINDS)
def test_channels_last_changes_nothing(name):
    model = small(name).eval()
    x = image(64, 96)
    expected = model(x)
    assert torch.equal(model(x.contiguous(memory_format=torch.channels_last)), expected)
    model = model.to(memory_format=torch.channels_last)
    out = model(x.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("name", KINDS)
def test_copies_and_state_dicts_carry_the_whole_model(name, tmp_path):
    model = small(name, landmarks="random:4").eval()
    x = image()
    model.train()(x)  # so that the norms' statistics are no longer those of a new model
    model.eval()
    expected = model(x)
    duplicate = copy.deepcopy(model)
    assert torch.equal(duplicate(x), expected)
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    other = small(name, landmarks="random:4").eval()
    assert not torch.equal(other(x), expected)
    other.load_state_dict(torch.load(tmp_path / "weights.pth", weights_only=True))
    assert torch.equal(other(x), expected)


@pytest.mark.parametrize("name", KINDS)
def test_a_training_step_lowers_the_loss(name):
    model = small(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, labels = image(batch=8), torch.arange(8) % 5
    losses = []
    for _ in range(2):
        loss = torch.nn.functional.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[1] < losses[0]


def _distributed_step(rank: int, store: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", world_size=2, rank=rank)
    for name in names:
        for features_only in (False, True):
            kwargs = dict(features_only=True, out_indices=(1, 2)) if features_only else {}
            model = DistributedDataParallel(small(name, **kwargs))
            torch.manual_seed(rank)
            # A second step is where DDP complains of a parameter that got no gradient.
            for _ in range(2):
                out = model(image())
                maps = out if features_only else [out]
                sum((m * torch.randn_like(m)).sum() for m in maps).backward()
            gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
            both = [torch.empty_like(gradient) for _ in range(2)]
            dist.all_gather(both, gradient)
            assert torch.equal(*both), name
    dist.barrier()
    os._exit(0)  # gloo's shutdown may wait forever for a process that is gone


@pytest.mark.full
def test_data_parallel_training_finds_no_unused_parameters(monkeypatch, tmp_path):
    # The new processes import this file by the name it has here.
    monkeypatch.syspath_prepend(Path(__file__).parents[__name__.count(".")])
    arguments = (str(tmp_path / "store"), KINDS)
    context = mp.spawn(_distributed_step, arguments, nprocs=2, join=False)
    try:
        for _ in range(2):  # each call ends with the first process that does
            if context.join(timeout=600):
                break
        else:
            pytest.fail("the two processes did not end")
    finally:
        for process in context.processes:
            process.kill()
