"""Models for other programs: ONNX and TorchScript with preprocessing inside, or one safetensors file for fedloom.

ONNX goes through torch's TorchScript-based exporter: that takes a tenth of the time of the one torch.export feeds. It
and TorchScript are deprecated in torch 2.13, and work. What was written is run and compared with the model.
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
"""What was written, read back and run."""
SUFFIXES: dict[ExportFormat, str] = {"onnx": ".onnx", "torchscript": ".pt", "safetensors": ".safetensors"}
TOLERANCE = 1e-4
OPSET = 17


def export(model: TrainedModel, kind: ExportFormat, path: Path) -> float:
    """Writes a model; returns the largest difference of the file's logits from the model's, found by running it.

    ONNX and TorchScript take `images`, uint8 [batch, H, W, C] of any batch size, and give `logits`.
    """
    if kind not in SUFFIXES:
        raise UserError(f"--to {kind}: {nearest(kind, get_args(ExportFormat))}")
    if kind == "onnx":
        _need("onnx", "onnxruntime")
    made = {"onnx": _onnx, "torchscript": _torchscript, "safetensors": _safetensors}[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations; and values fixed in the graph, which the comparison covers
        try:
            data, again = made(model)
        except RuntimeError as error:
            raise UserError(f"--to {kind}: {model.method.name} cannot be written so ({error}); try another") from error
    off = max(_difference(model, again, batch) for batch in (1, 2, 5))
    if not off <= TOLERANCE:
        raise UserError(
            f"--to {kind}: the file's logits differ from the model's by {off:.2g}, so it was not written: "
            f"{model.method.name} does something that this format cannot hold; try another"
        )
    write_anywhere(path, data)
    return off


def describe(model: TrainedModel) -> dict[str, str]:
    """What goes into the files' metadata."""
    channels, height, width = model.form.shape
    return {
        "classes": json.dumps(model.classes),
        "input": f"images: uint8 [batch, {height}, {width}, {channels}], {'grey' if channels == 1 else 'RGB'}",
        "output": "logits: float32 [batch, classes]",
        "method": model.method.name,
    }


def _example(model: TrainedModel, batch: int) -> Tensor:
    channels, height, width = model.form.shape
    generator = torch.Generator().manual_seed(batch)
    return torch.randint(0, 256, (batch, height, width, channels), generator=generator, dtype=torch.uint8)


def _difference(model: TrainedModel, again: Again, batch: int) -> float:
    images = _example(model, batch)
    expected = model(images).numpy()
    found = np.asarray(again(images))
    if found.shape != expected.shape:
        return float("inf")
    ordinary = np.abs(expected) < 1e6  # beyond it are classes that are never answered
    scale = np.maximum(1, np.abs(expected))
    return float((np.abs(found - expected) / np.where(ordinary, 1, scale)).max())


def _onnx(model: TrainedModel) -> tuple[bytes, Again]:
    import onnx
    import onnxruntime

    buffer: Any = io.BytesIO()
    torch.onnx.export(
        model, (_example(model, 2),), buffer, dynamo=False, opset_version=OPSET, input_names=["images"],
        output_names=["logits"], dynamic_axes={"images": {0: "batch"}, "logits": {0: "batch"}},
    )  # fmt: skip
    graph = onnx.load_from_string(buffer.getvalue())
    onnx.helper.set_model_props(graph, describe(model))
    data = graph.SerializeToString()
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    return data, lambda images: session.run(["logits"], {"images": images.numpy()})[0]


def _torchscript(model: TrainedModel) -> tuple[bytes, Again]:
    traced = torch.jit.freeze(torch.jit.trace(model, (_example(model, 2),), check_trace=False))  # only what is read
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
