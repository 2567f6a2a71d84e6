"""Export models to ONNX files and torch.export programs, checked against the model; load ONNX files again.

    export_onnx(model, "model.onnx", img_size=224, metadata=metadata)
    model, metadata = load_onnx("model.onnx")
    export_pt2(model, "model.pt2", img_size=224, metadata=metadata)
    program = torch.export.load("model.pt2").module()       # needs no softfree

One file takes any batch size, and any height and width of at least 33 pixels, or any sequence length up to
the model's. A :class:`BoxProgram` takes one picture at a time. Exported programs compute in float32.
"""

import copy
import importlib.util
import io
import json
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timm.layers import to_2tuple
from torch import Tensor, nn

from softfree.layers.pooling import averaging_matrix
from softfree.models.boxes import RESULTS, BoxProgram
from softfree.models.inputs import Inputs, inputs_of
from softfree.models.metadata import check_fields

TOLERANCE = 1e-4
Run = Callable[..., Sequence[Tensor]]


class ExportError(RuntimeError):
    """The exported program does not compute what the model does; nothing was written."""


class FlatOutputs(nn.Module):
    """A model whose results are a tuple of tensors, whatever container the original returns."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        out = self.model(*inputs)
        if isinstance(out, Tensor):
            return (out,)
        return tuple(out.values() if isinstance(out, dict) else out)


def export_onnx(
    model: nn.Module,
    path: str | Path,
    *,
    img_size: int = 224,
    metadata: dict[str, Any] | None = None,
    output_names: Sequence[str] = ("logits",),
) -> float:
    """Write a model as one ONNX file and check it in onnxruntime; return the largest error.

    Args:
        model: maps images (batch, channels, H, W) to a tensor, or to several in a list or dict; or a
            :class:`SequenceClassifier`, which maps tokens and mask to logits.
        path: the file.
        img_size: side of the images it was trained on. Below 33 the file takes only this size.
        metadata: information for users of the file; must be JSON-serialisable. See :func:`load_onnx`.
        output_names: names of the results, in their order.

    Raises:
        ExportError: a result differs by more than 1e-4 (times the largest value, if above 1).
    """
    if importlib.util.find_spec("onnxscript") is None:
        raise ValueError("ONNX export needs onnxscript: pip install 'softfree[export]'")
    inputs = inputs_of(model, img_size)
    flat = _prepare(model)
    with _quietly():
        program = torch.onnx.export(
            _exportable(flat),
            inputs.example(),
            dynamo=True,
            dynamic_shapes=(inputs.free_sizes(),),
            input_names=list(inputs.names),
            output_names=list(output_names),
            verbose=False,
            optimize=False,
        )
        assert program is not None
        _simplify(program.model)
    program.model.metadata_props.update(
        {key: json.dumps(value) for key, value in (metadata or {}).items()}
    )
    return _write_checked(flat, Path(path), program.save, _open_onnx, inputs)


def export_pt2(
    model: nn.Module,
    path: str | Path,
    *,
    img_size: int = 224,
    metadata: dict[str, Any] | None = None,
) -> float:
    """Write a model as a torch.export program, reload and check it; return the largest error.

    Arguments as in :func:`export_onnx`. The metadata are stored as the extra file ``metadata.json`` in the
    archive. The program contains only PyTorch's own operators, so it runs without softfree.
    """
    inputs = inputs_of(model, img_size)
    flat = _prepare(model)
    with _quietly():
        program = torch.export.export(
            _exportable(flat),
            inputs.example(),
            dynamic_shapes=(inputs.free_sizes(),),
            # As in the ONNX exporter: what can't be proved for all sizes is checked at run time.
            prefer_deferred_runtime_asserts_over_guards=True,
        )
    extra = {"metadata.json": json.dumps(metadata or {})}
    write = partial(_save_program, program, extra)
    return _write_checked(flat, Path(path), write, _open_pt2, inputs)


class OnnxModel(nn.Module):
    """An ONNX file as a model of images (batch, channels, H, W), or of tokens and mask.

    Computes on the CPU.
    """

    def __init__(self, session: Any, outputs: Sequence[str] | None = None):
        super().__init__()
        self.session, self.outputs = session, outputs  # None: all
        # Callers find a model's device through its parameters.
        self.place = nn.Parameter(torch.empty(0), requires_grad=False)

    def forward(self, *inputs: Tensor) -> Tensor | list[Tensor]:
        given = {}
        for slot, tensor in zip(self.session.get_inputs(), inputs, strict=True):
            fitting = tensor.float() if slot.type == "tensor(float)" else tensor
            given[slot.name] = fitting.cpu().numpy()
        found = self.session.run(self.outputs, given)
        tensors = [torch.from_numpy(array).to(inputs[0].device) for array in found]
        return tensors[0] if len(tensors) == 1 else tensors


def load_onnx(path: str | Path) -> tuple[nn.Module, dict[str, Any]]:
    """The model in a file of :func:`export_onnx`, and its metadata, like ``load_for_inference``."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no ONNX file at {path}")
    session = _session(path)
    properties = session.get_modelmeta().custom_metadata_map
    try:
        metadata = {key: json.loads(value) for key, value in properties.items()}
    except (ValueError, RecursionError):
        metadata = {}
    if "task" not in metadata:
        raise ValueError(
            f"{path} does not say what it is for; was it written by `softfree export`?"
        )
    check_fields(path, metadata, ())
    if metadata["task"] == "detection":
        return OnnxModel(session, RESULTS), metadata
    return OnnxModel(session), metadata


def _simplify(model: Any) -> None:
    """Remove constant, unused and duplicate nodes from an ONNX graph.

    This is the exporter's own ``optimize`` without its search for patterns, which takes a third of the whole
    export and finds one node in twenty.
    """
    import onnx_ir.passes.common as passes
    from onnx_ir.passes import Sequential
    from onnxscript import optimizer

    passes.InlinePass()(model)
    optimizer.fold_constants(model)
    Sequential(
        passes.RemoveUnusedNodesPass(),
        passes.RemoveUnusedFunctionsPass(),
        passes.RemoveUnusedOpsetsPass(),
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        passes.DeduplicateInitializersPass(),
        passes.CommonSubexpressionEliminationPass(),
        passes.OutputFixPass(),
        passes.NameFixPass(),
    )(model)


def _save_program(program: torch.export.ExportedProgram, extra: dict[str, Any], path: Path) -> None:
    # In memory first, because torch's own writer ends the process if the disk is full.
    content = io.BytesIO()
    torch.export.save(program, content, extra_files=extra)
    path.write_bytes(content.getvalue())


class MatrixPool(nn.Module):
    """``nn.AdaptiveAvgPool2d`` as products with two matrices.

    If PyTorch's version is exported, it reads past the border of images smaller than the example.
    """

    def __init__(self, size: tuple[int, int]):
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        down = averaging_matrix(x.shape[2], self.size[0], x)
        across = averaging_matrix(x.shape[3], self.size[1], x)
        return down @ x @ across.mT


def _prepare(model: nn.Module) -> nn.Module:
    """A copy of the model on the CPU, in float32 and evaluation mode, with flat outputs."""
    return FlatOutputs(copy.deepcopy(model).cpu().float().eval())


def _exportable(flat: nn.Module) -> nn.Module:
    """A copy of a prepared model without modules that exporters translate wrongly."""
    changed = copy.deepcopy(flat)
    for parent in list(changed.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.AdaptiveAvgPool2d):
                setattr(parent, name, MatrixPool(to_2tuple(child.output_size)))
    return changed


def _write_checked(
    model: nn.Module,
    path: Path,
    write: Callable[[Path], None],
    open_program: Callable[[Path], Run],
    inputs: Inputs,
) -> float:
    """Write to a file next to ``path``, compare it with the model, and only then move it to ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.stem}.new{path.suffix}")
    try:
        write(beside)
        run = open_program(beside)
        worst = max(_error(model, run, inputs, size) for size in inputs.checked())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    return worst


def _error(model: nn.Module, run: Run, inputs: Inputs, size: tuple[int, ...]) -> float:
    """The largest difference at one input size; raises :class:`ExportError` if it is too large."""
    given = inputs.make(*size)
    where = f"on {inputs.describe(*size)}"
    try:
        with torch.no_grad():
            found = run(*given)
    except Exception as error:  # runtimes have their own exception classes
        reason = str(error).splitlines()[0]
        raise ExportError(
            f"the exported program fails {where}, nothing was written: {reason}"
        ) from error
    worst = 0.0
    with torch.no_grad():
        wanted = _wanted(model, given, found)
    for own, expected in zip(found, wanted, strict=True):
        off = _largest_difference(own, expected)
        if not off <= TOLERANCE:
            raise ExportError(
                f"the exported program differs from the model by {off:.1e} {where} "
                f"(allowed: {TOLERANCE:.0e}); nothing was written"
            )
        worst = max(worst, off)
    return worst


def _wanted(model: Any, inputs: tuple[Tensor, ...], found: Sequence[Tensor]) -> Sequence[Tensor]:
    """What a program should have returned.

    Which boxes are kept may depend on the last digit of a score. For a detector, therefore, the candidates
    are compared, and its choice is compared with the model's choice among the same candidates.
    """
    program: Any = model.model
    if not isinstance(program, BoxProgram):
        return model(*inputs)
    (image,) = inputs
    boxes, scores = program.candidates(image)
    lengths = [len(own) for own in boxes]
    own_boxes, own_scores = (list(tensor.split(lengths)) for tensor in found[len(RESULTS) :])
    chosen = program.choose(own_boxes, own_scores, image.shape[2] + image.shape[3])
    return *chosen, torch.cat(boxes), torch.cat(scores)


def _largest_difference(given: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest value if that is above 1."""
    if given.shape != expected.shape:
        return math.inf
    if not given.numel():
        return 0.0
    return (given - expected).abs().max().item() / max(1.0, expected.abs().max().item())


def _open_onnx(path: Path) -> Run:
    return FlatOutputs(OnnxModel(_session(path)))


def _session(path: Path) -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise ValueError("ONNX files need onnxruntime: pip install 'softfree[export]'") from error
    try:
        return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has a separate class for each kind of bad file
        raise ValueError(f"{path} is no readable ONNX file: {error}") from error


def _open_pt2(path: Path) -> Run:
    with _quietly():
        return torch.export.load(path).module()


@contextmanager
def _quietly() -> Iterator[None]:
    """A context without the exporter's warnings about itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
