"""A layer as one operator in Triton's interpreter, against the layer's parts in float64.

Fresh memory is filled with NaN, so that a place no kernel writes shows. It prints one JSON line per case:
relative errors of the result and of the gradients of the tokens and of every parameter.
"""

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
from interpreted import poison

import softfree
from softfree.ops import image_attention
from softfree.ops.attention.settings import AttentionSettings
from softfree.ops.shared import devices
from softfree.ops.shared.registration import flatten

# heads, channels per head, stride, side of the values' convolution, size, tokens before the image, normalize,
# landmarks: of normed queries where they are averages
CASES = [
    (2, 16, 4, 5, (9, 7), 0, True, "conv"),
    (3, 8, 2, 3, (4, 6), 0, False, "conv"),
    (2, 16, 1, 3, (3, 4), 1, True, "conv"),
    (2, 20, 3, 3, (8, 8), 2, True, "conv"),
    (2, 16, 2, 3, (9, 7), 0, True, "conv:9"),
    (2, 16, 2, 3, (9, 8), 1, False, "conv:6"),
    (2, 16, 1, 3, (5, 4), 2, True, "conv:6"),
    (2, 16, 4, 3, (8, 8), 1, True, "conv:49"),
    (2, 16, 4, 5, (9, 7), 0, True, "average"),
    (3, 20, 2, 3, (5, 6), 2, False, "average"),
    (2, 16, 1, 3, (3, 4), 1, True, "average:49"),
    (2, 16, 1, 3, (5, 4), 2, True, "average:6"),
    (2, 16, 2, 3, (9, 8), 1, True, "average:6"),
    (2, 16, 4, 3, (9, 8), 0, True, "average, normed"),
    (2, 16, 2, 3, (9, 8), 1, True, "average:6, normed"),
    (2, 16, 2, 3, (5, 4), 0, True, "average, of a given width"),
    (2, 16, 2, 0, (4, 6), 1, True, "conv:4"),  # values that are not convolved
    (2, 16, 2, 0, (5, 6), 0, True, "average"),
    (2, 16, 1, 0, (5, 4), 1, True, "average:6"),
    (1, 16, 1, 3, (11, 12), 1, True, "average"),  # more landmarks than one program takes
]


def sampling(landmarks: str) -> dict[str, object]:
    """Settings of a layer with such landmarks."""
    spec, _, also = landmarks.partition(", ")
    if spec.startswith("conv"):
        return dict(landmarks=spec)
    return dict(
        landmarks=spec, query_norm=True, inverse="solve", landmark_norm=also == "normed",
        bandwidth=1.4 if also == "of a given width" else "learned",
    )  # fmt: skip


def gradients(layer, x, size, grad):
    out = layer(x, size)
    names, parameters = zip(*layer.named_parameters(), strict=True)
    found = torch.autograd.grad(out, (x, *parameters), grad.to(out.dtype))
    return dict(zip(("out", "x", *names), (out.detach(), *found), strict=True))


def errors(case: tuple) -> dict[str, float]:
    heads, d, stride, conv, size, prefix, normalize, landmarks = case
    layer = softfree.SoftAttention(
        heads * d,
        heads,
        stride=stride,
        value_conv=conv,
        normalize=normalize,
        qv_bias=normalize,
        **sampling(landmarks),
    )
    if landmarks.startswith("conv"):
        torch.nn.init.normal_(layer.sampler.norm.weight, 1, 0.2)
        torch.nn.init.normal_(layer.sampler.norm.bias, 0, 0.2)
    elif layer.log_bandwidth is not None:
        torch.nn.init.uniform_(layer.log_bandwidth, -0.3, 0.3)
    if prefix == 2:  # not as many channels out as in
        layer.proj = torch.nn.Linear(heads * d, heads * d + 8)
    layer.half()
    x = torch.randn(2, prefix + size[0] * size[1], heads * d).half()
    grad = torch.randn(*x.shape[:2], layer.proj.out_features).half()
    image_attention.fits = lambda x, *_: x.dtype == torch.float16
    found = gradients(layer, x.requires_grad_(), size, grad)
    with torch.no_grad():
        assert torch.equal(layer(x, size), found["out"])
    wide = x.detach().double().requires_grad_()
    wanted = gradients(layer.double(), wide, size, grad)
    return {
        name: ((found[name] - wanted[name]).norm() / wanted[name].norm()).item() for name in wanted
    }


def compiled_errors(landmarks: str) -> dict[str, float]:
    """A compiled layer with pooled landmarks, as one graph, against itself."""
    layer = softfree.SoftAttention(32, 2, stride=2, value_conv=3, **sampling(landmarks)).half()
    x, grad = torch.randn(2, 2, 72, 32).half()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    wanted, found = (gradients(f, x.requires_grad_(), (9, 8), grad) for f in (layer, compiled))
    return {
        name: (a - b).abs().max().item()
        for name, a, b in zip(wanted, wanted.values(), found.values(), strict=True)
    }


def main() -> None:
    torch.manual_seed(0)
    devices.processors = lambda device: 3  # several stretches
    shapes = ((1, 30, 32), (64, 32), (64,)), ((2, 1, 3, 3), (32, 32), (32,))
    first, last = ([torch.randn(s).half().requires_grad_() for s in part] for part in shapes)
    papers = [torch.randn(s).half().requires_grad_() for s in ((16, 16, 2, 2), (16,), (16,))]
    normed = [torch.rand(2, requires_grad=True), None, None, None]
    settings = flatten(6, 5, 6, 5, 2, 2, 1e-5, False, AttentionSettings(0.25), True)
    for of_sampler, pooling in (([None, *papers], None), (normed, torch.rand(4, 9))):
        arguments = (*first, *of_sampler, *last, pooling, *settings)
        torch.library.opcheck(torch.ops.softfree.image_attention, arguments)
    poison()
    for case in CASES:
        print(json.dumps({"case": case, "errors": errors(case)}), flush=True)
    for landmarks in ("conv:9", "average:9"):
        print(json.dumps({"case": "compiled", "errors": compiled_errors(landmarks)}))


if __name__ == "__main__":
    main()
