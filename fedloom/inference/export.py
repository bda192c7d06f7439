"""Export of models: ONNX and TorchScript with built-in preprocessing, or one safetensors file for fedloom.

ONNX uses torch's TorchScript-based exporter, which takes a tenth of the time of the exporter based on torch.export. It
and TorchScript are deprecated in torch 2.13, but work. Each exported model is run and compared with the original before
it is written.
"""

import importlib.util
import io
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from fedloom.core.errors import UserError, nearest
from fedloom.inference.trained_model import TrainedModel, load_model, write_anywhere

ExportFormat = Literal["onnx", "torchscript", "safetensors"]
Again = Callable[[Tensor], Any]
"""Runs the exported model, read back from its bytes."""
SUFFIXES: dict[ExportFormat, str] = {"onnx": ".onnx", "torchscript": ".pt", "safetensors": ".safetensors"}
"""File name endings by format."""
TOLERANCE = 1e-4
"""Maximum difference of the exported model's logits."""
OPSET = 17
"""Version of the ONNX operator set."""


def export(model: TrainedModel, kind: ExportFormat, path: Path) -> float:
    """Export a model to a file.

    ONNX and TorchScript models take batches of any size and return `logits`. Their input is `images`, uint8
    [batch, H, W, C], or `inputs`, float32 [batch, …], for a model that was trained on other inputs than bytes.

    Args:
        model: The model.
        kind: `onnx`, `torchscript` or `safetensors` (for `fedloom.load_model`).
        path: The file to write.

    Returns:
        The largest difference between the logits of the exported model and the original on random images.

    Raises:
        UserError: The format is unknown, its packages are missing, the model cannot be exported exactly, or the file
            cannot be written.

    Example:
        >>> export(fedloom.load("runs/mine").global_model(), "onnx", Path("model.onnx"))   # doctest: +SKIP
    """
    if kind not in SUFFIXES:
        raise UserError(f"--to {kind}: {nearest(kind, get_args(ExportFormat))}")
    if kind == "onnx":
        _need("onnx", "onnxruntime")
    made = {"onnx": _onnx, "torchscript": _torchscript, "safetensors": _safetensors}[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations, and constants in the graph, which the comparison below checks
        try:
            data, again = made(model)
        except RuntimeError as error:
            raise UserError(
                f"--to {kind}: {model.method.name} cannot be exported to this format ({error}); try another format"
            ) from error
    off = max(_difference(model, again, batch) for batch in (1, 2, 5))
    if not off <= TOLERANCE:
        raise UserError(
            f"--to {kind}: the file's logits differ from the model's by {off:.2g}, so it was not written: "
            f"{model.method.name} uses operations that this format cannot represent; try another format"
        )
    write_anywhere(path, data)
    return off


def describe(model: TrainedModel) -> dict[str, str]:
    """Return the metadata of exported files: classes, input, output, method."""
    kind = {1: ", grey", 3: ", RGB"}.get(model.form.shape[0], "") if _takes_bytes(model) else ""
    return {
        "classes": json.dumps(model.classes),
        "input": f"{_input(model)}: {model.form.dtype} [batch, {', '.join(map(str, _shape(model)))}]{kind}",
        "output": "logits: float32 [batch, labels]; apply sigmoid"
        if model.multilabel
        else ("logits: float32 [batch, classes]"),
        "method": model.method.name,
    }


def _example(model: TrainedModel, batch: int) -> Tensor:
    generator = torch.Generator().manual_seed(batch)
    if _takes_bytes(model):
        return torch.randint(0, 256, (batch, *_shape(model)), generator=generator, dtype=torch.uint8)
    mean, std = model.form.statistics
    return mean + std * torch.randn((batch, *_shape(model)), generator=generator)


def _takes_bytes(model: TrainedModel) -> bool:
    return model.form.dtype == "uint8"


def _input(model: TrainedModel) -> str:
    """Return the name of an exported model's input."""
    return "images" if _takes_bytes(model) else "inputs"


def _shape(model: TrainedModel) -> tuple[int, ...]:
    """Return the shape of one input of an exported model: images of bytes have channels last."""
    shape = tuple(model.form.shape)
    return (*shape[1:], shape[0]) if _takes_bytes(model) else shape


def _difference(model: TrainedModel, again: Again, batch: int) -> float:
    images = _example(model, batch)
    expected = model(images).numpy()
    found = np.asarray(again(images))
    if found.shape != expected.shape:
        return float("inf")
    ordinary = np.abs(expected) < 1e6  # larger logits mark classes that are never predicted: compare them relatively
    scale = np.maximum(1, np.abs(expected))
    return float((np.abs(found - expected) / np.where(ordinary, 1, scale)).max())


def _onnx(model: TrainedModel) -> tuple[bytes, Again]:
    import onnx
    import onnxruntime

    buffer: Any = io.BytesIO()
    torch.onnx.export(
        model, (_example(model, 2),), buffer, dynamo=False, opset_version=OPSET, input_names=[_input(model)],
        output_names=["logits"], dynamic_axes={_input(model): {0: "batch"}, "logits": {0: "batch"}},
    )  # fmt: skip
    graph = onnx.load_from_string(buffer.getvalue())
    onnx.helper.set_model_props(graph, describe(model))
    data = graph.SerializeToString()
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    return data, lambda inputs: session.run(["logits"], {_input(model): inputs.numpy()})[0]


def _torchscript(model: TrainedModel) -> tuple[bytes, Again]:
    traced = torch.jit.freeze(torch.jit.trace(model, (_example(model, 2),), check_trace=False))  # drops unused tensors
    buffer = io.BytesIO()
    torch.jit.save(traced, buffer, _extra_files={"fedloom.json": json.dumps(describe(model))})
    buffer.seek(0)
    loaded = torch.jit.load(buffer)
    return buffer.getvalue(), lambda images: loaded(images).numpy()


def _safetensors(model: TrainedModel) -> tuple[bytes, Again]:
    data = model.to_bytes()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        path.write_bytes(data)
        loaded = load_model(path)
    return data, lambda images: loaded(images).numpy()


def _need(*packages: str) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"--to onnx needs {' and '.join(missing)}: pip install 'fedloom[export]'")
