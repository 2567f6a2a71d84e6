"""How large a model is and how much it computes, without computing it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode


def count_parameters(model: nn.Module) -> int:
    """Number of parameters, shared ones once.

    Example:
        >>> count_parameters(torch.nn.Linear(10, 5))
        55
    """
    return sum(parameter.numel() for parameter in model.parameters())


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode within, each module's own mode afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def count_macs(model: nn.Module, size: int | tuple[int, int] = 224, in_chans: int = 3) -> int:
    """Multiply-adds of one image's forward pass in evaluation.

    Counts convolutions, matrix products and attention, :func:`softfree.soft_attention` with its inverse
    included; not norms, activations and sums. Papers call this number FLOPs. Only shapes are computed:
    it takes no time or memory to speak of, and the model may be on any device, ``"meta"`` included.

    Args:
        model: takes an image (1, in_chans, H, W). It is left as it was.
        size: the image's side, or (H, W).
        in_chans: the image's channels.

    Example:
        >>> count_macs(torch.nn.Conv2d(3, 8, kernel_size=3, padding=1), size=10)
        21600
    """
    height, width = (size, size) if isinstance(size, int) else size
    if min(height, width) < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    # Fake tensors, not meta ones: they say they are on the CPU, and code that asks for the device, as
    # autocast does, gets an answer.
    with evaluating(model), FakeTensorMode(), torch.no_grad(), torch.device("cpu"):
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        stand_ins = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()
        }
        image = torch.empty(1, in_chans, height, width)
        # Torch's counter has no formula for the CPU's fused softmax attention: take its products.
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            functional_call(model, stand_ins, (image,))
    return counter.get_total_flops() // 2
