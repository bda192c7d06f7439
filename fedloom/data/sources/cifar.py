"""CIFAR-10 and CIFAR-100 as their authors publish them: pickled batches, read without running anything."""

import pickle
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from fedloom.core.errors import UserError
from fedloom.core.task import Dataset
from fedloom.data import hub
from fedloom.data.sources.source import Source

DOWNLOAD = "mkdir -p {folder} && curl -L https://www.cs.toronto.edu/~kriz/ARCHIVE | tar xz -C {folder}"


class _Cifar(Source):
    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    meta: str
    label_key: str
    names_key: str

    def read(self, folder: Path, size: int | None) -> Dataset:
        """Reads the batches, and the class names from the meta file."""
        root = folder / self.folder
        names = _field(root / self.meta, _unpickle(root / self.meta), self.names_key)
        if not isinstance(names, (list, tuple)):
            raise UserError(
                f"{root / self.meta}: {self.names_key} is a {type(names).__name__}, where names are expected"
            )
        images, labels = zip(*(self._batch(root / file) for file in (*self.train, *self.test)), strict=True)
        test = sum(len(y) for y in labels[len(self.train) :])
        count = sum(len(y) for y in labels)
        return Dataset(
            name=self.name,
            images=torch.from_numpy(np.concatenate(images)),
            labels=torch.from_numpy(np.concatenate(labels)),
            test=torch.arange(count) >= count - test,
            classes=tuple(_text(name) for name in names),
        )

    def _batch(self, path: Path) -> tuple[np.ndarray, np.ndarray]:
        batch = _unpickle(path)
        data = np.asarray(_field(path, batch, "data"))
        labels = np.asarray(_field(path, batch, self.label_key))
        if data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != 3072:
            raise UserError(f"{path}: data must be uint8 [N, 3072], not {data.dtype} {list(data.shape)}")
        if labels.dtype.kind not in "iu" or labels.shape != data.shape[:1]:
            raise UserError(f"{path}: {labels.size} labels of type {labels.dtype} for {len(data)} images")
        return data.reshape(-1, 3, 32, 32), labels.astype(np.int64)


class Cifar10(_Cifar):
    """`cifar-10-batches-py/`."""

    name = "cifar10"
    description = "CIFAR-10: 60,000 colour pictures of 32×32, 10 kinds of things"
    count = 10
    folder = "cifar-10-batches-py"
    train = tuple(f"data_batch_{i}" for i in range(1, 6))
    test = ("test_batch",)
    meta, label_key, names_key = "batches.meta", "labels", "label_names"
    layouts = (tuple(f"cifar-10-batches-py/{f}" for f in (*train, *test, meta)),)
    command = DOWNLOAD.replace("ARCHIVE", "cifar-10-python.tar.gz")
    remote = hub.Table("uoft-cs/cifar10", image="img")


class Cifar100(_Cifar):
    """`cifar-100-python/`, with the 100 fine labels."""

    name = "cifar100"
    description = "CIFAR-100: 60,000 colour pictures of 32×32, 100 kinds of things"
    count = 100
    folder = "cifar-100-python"
    train, test = ("train",), ("test",)
    meta, label_key, names_key = "meta", "fine_labels", "fine_label_names"
    layouts = (("cifar-100-python/train", "cifar-100-python/test", "cifar-100-python/meta"),)
    command = DOWNLOAD.replace("ARCHIVE", "cifar-100-python.tar.gz")
    remote = hub.Table("uoft-cs/cifar100", image="img", label="fine_label")


def _latin1(text: str, encoding: str) -> bytes:
    # In old pickle protocols Python 3 writes bytes as a call of codecs.encode: this one, and no other codec.
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"codec '{encoding}' is not admitted")
    return text.encode("latin1")


class _ArraysOnly(pickle.Unpickler):
    """A pickle can have any function called that it names: admits those that rebuild numpy arrays."""

    admitted: ClassVar[dict[tuple[str, str], Any]] = {
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("_codecs", "encode"): _latin1,
    }
    # numpy._core since 2.0, numpy.core in older files; asked of an array, the functions fit this numpy.
    for module in ("numpy.core", "numpy._core"):
        admitted[f"{module}.multiarray", "_reconstruct"] = np.empty(0).__reduce__()[0]
        admitted[f"{module}.numeric", "_frombuffer"] = np.empty(0).__reduce_ex__(5)[0]
    del module

    def find_class(self, module: str, name: str) -> Any:
        """Called for every function or class that the pickle names."""
        if (module, name) not in self.admitted:
            raise pickle.UnpicklingError(f"it wants to call {module}.{name}, which is not admitted")
        return self.admitted[module, name]


def _unpickle(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = _ArraysOnly(file, encoding="latin1").load()
    # A damaged pickle can fail in any opcode, and so with nearly any exception.
    except Exception as error:
        raise UserError(f"{path}: is not a CIFAR batch that can be read ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds a {type(content).__name__}, where a CIFAR batch is a dict")
    return {_text(key): value for key, value in content.items()}


def _field(path: Path, content: dict[str, Any], key: str) -> Any:
    if key not in content:
        raise UserError(f"{path}: has no '{key}' (it has: {', '.join(sorted(content))})")
    return content[key]


def _text(value: object) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else str(value)
