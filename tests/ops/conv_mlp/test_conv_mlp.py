"""The MLP with a convolution by the library, and what is known of the operator without a GPU; its kernels are in ``kernels/``."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from softfree.ops.conv_mlp import Weights, operator, over_grid
from softfree.ops.conv_mlp.operator import FORWARD

SIZE = (4, 3)
SHAPES = {
    "x": (2, 12, 4), "weight1": (7, 4), "bias1": (7,), "filters": (7, 1, 3, 3), "bias": (7,),
    "weight2": (5, 7), "bias2": (5,),
}  # fmt: skip


def drawn(**other: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape).double() for name, shape in {**SHAPES, **other}.items()}


def conv_mlp(x, size, **weights):
    return operator.conv_mlp(x, Weights(**weights), size)


def by_hand(x, weight1, bias1, filters, bias, weight2, bias2, size):
    """Token by token."""
    hidden = x @ weight1.T + bias1
    height, width = size
    half = filters.shape[-1] // 2
    convolved = []
    for y in range(height):
        for column in range(width):
            total = bias.expand(len(x), -1)
            for dy in range(-half, half + 1):
                for dx in range(-half, half + 1):
                    if 0 <= y + dy < height and 0 <= column + dx < width:
                        neighbour = hidden[:, (y + dy) * width + column + dx]
                        total = total + filters[:, 0, half + dy, half + dx] * neighbour
            convolved.append(total)
    return F.gelu(torch.stack(convolved, 1), approximate="tanh") @ weight2.T + bias2


@pytest.mark.parametrize("side", [1, 3, 5])
def test_hidden_tokens_see_their_neighbours_before_gelu(side):
    inputs = drawn(filters=(7, 1, side, side))
    torch.testing.assert_close(conv_mlp(**inputs, size=SIZE), by_hand(**inputs, size=SIZE))


@pytest.mark.parametrize("frozen", [None, *SHAPES])
def test_gradients_are_right_with_any_of_its_inputs_frozen(frozen):
    inputs = drawn()
    trained = [t.requires_grad_() for name, t in inputs.items() if name != frozen]
    found, expected = conv_mlp(**inputs, size=SIZE), by_hand(**inputs, size=SIZE)
    grad = torch.randn_like(found)
    for a, b in zip(
        torch.autograd.grad(found, trained, grad),
        torch.autograd.grad(expected, trained, grad),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_tokens_before_the_image_are_not_convolved():
    inputs = drawn(x=(2, 2 + 12, 4))
    out = conv_mlp(**inputs, size=SIZE)
    x = inputs.pop("x")
    torch.testing.assert_close(out[:, 2:], by_hand(x[:, 2:], **inputs, size=SIZE))
    hidden = F.linear(x[:, :2], inputs["weight1"], inputs["bias1"])
    hidden = F.gelu(hidden, approximate="tanh")
    torch.testing.assert_close(out[:, :2], F.linear(hidden, inputs["weight2"], inputs["bias2"]))


@pytest.mark.parametrize("size", [(12,), (3, 4), (3, 2, 2)])
def test_sequences_images_and_volumes_keep_their_order(size):
    x = torch.randn(2, 1 + 12, 5)
    torch.testing.assert_close(over_grid(x, size, lambda grid: 1 * grid), x)
    shapes = []
    over_grid(x, size, lambda grid: shapes.append(grid.shape) or grid)
    assert shapes == [(2, 5, *size)]


@pytest.mark.parametrize("batch", [0, 1, 5, 8])
def test_parts_of_the_images_are_all_of_them(batch, monkeypatch):
    inputs = drawn(x=(batch, 12, 4))
    monkeypatch.setattr(operator, "PART_BYTES", 2 * 12 * 7 * 8 * 2)  # two images before and after
    lengths = []

    def conv_gelu(hidden, filters, bias, images, height, width):
        lengths.append(images)
        assert hidden.shape == (images * 12, 7)
        image = hidden.view(images, height, width, 7).permute(0, 3, 1, 2)
        out = F.conv2d(image, filters, bias, padding=1, groups=7)
        return F.gelu(out.permute(0, 2, 3, 1).reshape(-1, 7), approximate="tanh")

    monkeypatch.setattr(operator, "_conv_gelu", conv_gelu)
    x = inputs.pop("x")
    found = operator._in_parts(x, Weights(**inputs), *SIZE)
    torch.testing.assert_close(found, by_hand(x, **inputs, size=SIZE))
    assert sum(lengths) == batch and max(lengths, default=0) <= 2


def test_the_operators_flops_are_those_of_products_and_convolution():
    x, *weights = (
        torch.empty(shape, device="meta", requires_grad=True) for shape in SHAPES.values()
    )
    with FlopCounterMode(display=False) as forward:
        out = FORWARD(x, Weights(*weights), *SIZE)[0]
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    once = 2 * 24 * 7 * (4 + 5 + 9)
    assert (forward.get_total_flops(), backward.get_total_flops()) == (once, 2 * once)
    by_library = {name: torch.empty(shape, device="meta") for name, shape in SHAPES.items()}
    with FlopCounterMode(display=False) as counter:
        conv_mlp(**by_library, size=SIZE)
    assert counter.get_total_flops() == once
