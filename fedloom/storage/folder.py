"""A run's folder: recipe, versions, metrics as they come, per-client results, summary, final models."""

import json
import math
import platform
from collections.abc import Iterable, Mapping
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from fedloom.errors import UserError

PACKAGES = ("fedloom", "torch", "numpy", "scikit-learn", "safetensors", "pydantic")


class RunFolder:
    """Writes; a folder that holds a run already is refused."""

    def __init__(self, path: Path):
        self.path = path
        try:
            taken = (path / "recipe.yaml").exists()
        except OSError as error:
            raise UserError(f"out = '{path}' cannot be made: {error.strerror}; choose another folder") from None
        if taken:
            raise UserError(f"out = '{path}' holds a run already: choose another folder, or remove it")
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"out = '{path}' cannot be made: {error.strerror}; choose another folder") from None
        self._metrics = (path / "metrics.jsonl").open("a", encoding="utf-8")

    @staticmethod
    def fresh(parent: Path, name: str) -> Path:
        """A path under `parent` that nothing has yet: the time, then the name."""
        stem = f"{datetime.now():%Y%m%d-%H%M%S}-{name}"
        candidates = (parent / (stem if i == 0 else f"{stem}-{i}") for i in range(10_000))
        return next(path for path in candidates if not path.exists())

    def describe(self, recipe: str) -> None:
        """The resolved recipe and the versions that ran it."""
        (self.path / "recipe.yaml").write_text(recipe, encoding="utf-8")
        self.write_json("versions.json", versions())

    def record(self, line: Mapping[str, Any]) -> None:
        """One more round."""
        self._metrics.write(json.dumps(without_nan(line)) + "\n")
        self._metrics.flush()

    def write_json(self, name: str, value: Any) -> None:
        """A small JSON file, indented."""
        (self.path / name).write_text(json.dumps(without_nan(value), indent=1) + "\n", encoding="utf-8")

    def write_lines(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """JSON lines."""
        text = "".join(json.dumps(without_nan(row)) + "\n" for row in rows)
        (self.path / name).write_text(text, encoding="utf-8")

    def write_model(self, name: str, state: Mapping[str, Tensor]) -> None:
        """Named tensors as safetensors, under models/."""
        path = self.path / "models" / f"{name}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({key: tensor.detach().cpu().clone().contiguous() for key, tensor in state.items()}, path)

    def close(self) -> None:
        """No more rounds."""
        self._metrics.close()


def versions() -> dict[str, str]:
    """What this ran on."""
    found = {"python": platform.python_version(), "machine": platform.machine(), "system": platform.system()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed as a package"
    return found | {"torch": torch.__version__}  # its own word tells the build (cpu, cu130)


def without_nan(value: Any) -> Any:
    """JSON has no NaN: null instead."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(item) for item in value]
    return value
