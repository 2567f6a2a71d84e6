"""The size of a model and its number of multiply-adds, without running it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode


def count_parameters(model: nn.Module) -> int:
    """Number of parameters; shared ones count once.

    Example:
        >>> count_parameters(torch.nn.Linear(10, 5))
        55
    """
    return sum(parameter.numel() for parameter in model.parameters())


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context in which the model is in evaluation mode; afterwards each module has its own mode again."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def count_macs(model: nn.Module, size: int | tuple[int, int] = 224, in_chans: int = 3) -> int:
    """Multiply-adds of one image's forward pass in evaluation.

    Counts convolutions, matrix products and attention, including :func:`softfree.soft_attention` with its
    inverse, but not norms, activations and sums. Papers call this number FLOPs. Only shapes are computed, so
    it takes hardly any time or memory, and the model may be on any device, including ``"meta"``.

    Args:
        model: takes an image (1, in_chans, H, W). It is not changed.
        size: the image's side, or (H, W).
        in_chans: the image's channels.

    Example:
        >>> count_macs(torch.nn.Conv2d(3, 8, kernel_size=3, padding=1), size=10)
        21600
    """
    height, width = (size, size) if isinstance(size, int) else size
    if min(height, width) < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    # Fake tensors instead of meta tensors: they claim to be on the CPU, so that code that asks for the
    # device, as autocast does, works.
    with evaluating(model), FakeTensorMode(), torch.no_grad(), torch.device("cpu"):
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        stand_ins = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()
        }
        image = torch.empty(1, in_chans, height, width)
        # torch's counter has no formula for the CPU's fused softmax attention, so its products are counted.
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            functional_call(model, stand_ins, (image,))
    return counter.get_total_flops() // 2
