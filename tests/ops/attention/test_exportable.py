"""An exported program holds no operator of this package and gives what eager gives."""

import pytest
import torch
from torch import Tensor

import softfree

from .problems import Problem, attend, random_problem, relative_error, solve


class Attention(torch.nn.Module):
    def __init__(self, **settings):
        super().__init__()
        self.settings = settings

    def forward(self, q, k, v, landmarks, key_mask=None, landmark_mask=None) -> Tensor:
        return softfree.soft_attention(
            q, k, v, landmarks, key_mask=key_mask, landmark_mask=landmark_mask, **self.settings
        )


def arguments(problem: Problem) -> tuple[Tensor | None, ...]:
    masks = (problem.key_mask, problem.landmark_mask)
    return (problem.q, problem.k, problem.v, problem.landmarks, *masks)


def export(module: torch.nn.Module, problem: Problem, **settings) -> torch.nn.Module:
    """The program of ``module`` as exported; no node may be an operator of this package."""
    program = torch.export.export(module, arguments(problem), **settings)
    names = [str(node.target) for node in program.graph.nodes]
    assert not any("softfree" in name for name in names)
    return program.module()


SHAPES = {
    "self": {},
    "cross": {"n_k": 23, "d_v": 5},
    "masks": {"masked": True, "landmarks_masked": True},
    "cross, masks": {"n_k": 23, "masked": True, "landmarks_masked": True},
}


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_exported_equals_the_definition(shape, normalize):
    problem = random_problem(**SHAPES[shape])
    program = export(Attention(normalize=normalize, ridge=0.01), problem)
    expected = attend(problem, normalize=normalize, ridge=0.01)
    assert relative_error(program(*arguments(problem)), expected) < 1e-12


def test_batch_and_tokens_may_change_after_export():
    batch, tokens = torch.export.Dim("batch", min=1), torch.export.Dim("tokens", min=2)
    problem = random_problem(n=17, batch=2, masked=True)
    free = {0: batch, 2: tokens}
    dynamic = (free, None, free, {0: batch}, {0: batch, 1: tokens}, None)
    program = export(Attention(), problem, dynamic_shapes=dynamic)
    for n, samples in ((17, 2), (40, 3), (785, 1)):
        other = random_problem(n=n, batch=samples, masked=True)
        assert relative_error(program(*arguments(other)), attend(other)) < 1e-12


def test_the_exported_program_can_be_differentiated():
    problem = random_problem(spread=1.5)
    inputs = problem.map(lambda t: t.requires_grad_())
    out = export(Attention(), problem)(*arguments(inputs))
    (grad,) = torch.autograd.grad(out, inputs.v, problem.grad.detach())
    assert relative_error(grad, solve(problem)["v"]) < 1e-12


@pytest.mark.parametrize("content", [float("nan"), float("inf"), 1e30])
def test_what_a_mask_leaves_out_does_not_matter_after_export(content):
    problem = random_problem(n_k=23, masked=True, landmarks_masked=True).map(lambda t: t.float())
    program = export(Attention(), problem)
    keys = ~problem.key_mask[:, None, :, None]
    marks = ~problem.landmark_mask[:, None, :, None]
    spoilt = (
        problem.q,
        problem.k.masked_fill(keys, content),
        problem.v.masked_fill(keys, content),
        problem.landmarks.masked_fill(marks, content),
        problem.key_mask,
        problem.landmark_mask,
    )
    assert relative_error(program(*spoilt), attend(problem.rounded(torch.float32))) < 1e-5


def test_half_precision_is_exported_with_float32_inside():
    problem = random_problem(n=196, m=49, d=32, smooth=True).map(lambda t: t.bfloat16())
    out = export(Attention(), problem)(*arguments(problem))
    assert out.dtype == torch.bfloat16
    assert relative_error(out, attend(problem.rounded(torch.bfloat16))) < 5e-3


class UnderAutocast(Attention):
    def forward(self, *inputs) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(*inputs)


def test_autocast_is_exported_with_float32_inside():
    problem = random_problem(n=196, m=49, d=32, smooth=True).map(lambda t: t.float())
    out = export(UnderAutocast(), problem)(*arguments(problem))
    assert out.dtype == torch.bfloat16
    assert relative_error(out, attend(problem.rounded(torch.bfloat16))) < 5e-3
