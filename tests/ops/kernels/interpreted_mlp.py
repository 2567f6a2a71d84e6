"""A block's MLP in Triton's interpreter, against PyTorch's in float64.

Fresh memory is filled with NaN, so that a place no kernel writes shows. It prints one JSON line per case:
relative errors of the result and of the gradients of the tokens and of every parameter, and how many
tensors as wide as the hidden layer were kept for the backward pass.
"""

import copy
import functools
import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
from interpreted import poisoned

from softfree.layers.block import TanhMlp
from softfree.ops.shared import devices

CHANNELS, OUT = 6, 10
CASES = [  # batch, tokens, hidden channels, how
    (5, 7, 20, "half"),
    (1, 1, 128, "half"),
    (3, 50, 130, "half"),
    (0, 5, 20, "half"),
    (3, 7, 20, "autocast"),
    (2, 6, 20, "compiled"),
]


def gradients(module, run, x, grad):
    out = run(x)
    names, parameters = zip(*module.named_parameters(), strict=True)
    found = torch.autograd.grad(out, (x, *parameters), grad.to(out.dtype))
    for gradient, of in zip(found, (x, *parameters), strict=True):
        assert gradient.dtype == of.dtype and gradient.shape == of.shape
    return dict(zip(("out", "x", *names), (out.detach(), *found), strict=True))


def evaluate(batch: int, tokens: int, hidden: int, how: str) -> dict:
    module = TanhMlp(
        CHANNELS, hidden, OUT, functools.partial(torch.nn.GELU, approximate="tanh")
    ).half()
    x = torch.randn(batch, tokens, CHANNELS).half().requires_grad_()
    grad = torch.randn(OUT, batch, tokens).half().permute(1, 2, 0)  # not contiguous
    wide = copy.deepcopy(module).double()
    devices.usable = lambda x, **_: False
    wanted = gradients(wide, wide, x.detach().double().requires_grad_(), grad)
    if how == "autocast":
        module, x = module.float(), x.detach().float().requires_grad_()
    run = module
    if how == "compiled":
        run = torch.compile(module, backend="aot_eager", fullgraph=True)
    kept = []

    def keep(tensor):
        if tensor.shape[-1] == hidden and tensor.numel() == batch * tokens * hidden:
            kept.append(tensor)
        return tensor

    devices.usable = lambda x, **_: True
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.float16, enabled=how == "autocast"),
    ):
        found = gradients(module, run, x, grad)
    errors = {
        name: ((found[name] - wanted[name]).norm() / wanted[name].norm().clamp(min=1e-30)).item()
        for name in wanted
    }
    return {"case": [batch, tokens, hidden, how], "kept": len(kept), "errors": errors}


def main() -> None:
    torch.manual_seed(0)
    devices.processors = lambda device: 1  # several stretches of several steps
    shapes = ((9, CHANNELS), (20, CHANNELS), (20,), (OUT, 20), (OUT,))
    inputs = [torch.randn(shape).half().requires_grad_() for shape in shapes]
    torch.library.opcheck(torch.ops.softfree.mlp, inputs)
    inputs[0] = torch.randn(CHANNELS, 9).half().T.requires_grad_()
    inputs[2], inputs[4] = (inputs[i].detach().float().requires_grad_() for i in (2, 4))
    torch.library.opcheck(torch.ops.softfree.mlp, inputs)
    torch.empty = poisoned(torch.empty)
    torch.empty_like = poisoned(torch.empty_like)
    for case in CASES:
        print(json.dumps(evaluate(*case)), flush=True)


if __name__ == "__main__":
    main()
