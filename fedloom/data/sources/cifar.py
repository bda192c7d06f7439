"""CIFAR-10 and CIFAR-100 in the published form: pickled batches, read without running code from the pickles."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedloom.core.dataset import Dataset
from fedloom.core.errors import UserError
from fedloom.core.reading import decoding, read_bytes
from fedloom.data import hub, plain_pickle
from fedloom.data.sources.source import Source

DOWNLOAD = "mkdir -p {folder} && curl -L https://www.cs.toronto.edu/~kriz/ARCHIVE | tar xz -C {folder}"

REMEDY = "unpack the archive again"


class _Cifar(Source):
    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    meta: str
    label_key: str
    names_key: str

    def read(self, folder: Path, size: int | None) -> Dataset:
        """Read the batches, and the class names from the meta file."""
        root = folder / self.folder
        names = _field(root / self.meta, _read(root / self.meta), self.names_key)
        if not isinstance(names, (list, tuple)):
            raise UserError(
                f"{root / self.meta}: {self.names_key} must be a list of names, not a {type(names).__name__}; {REMEDY}"
            )
        images, labels = zip(*(self._batch(root / file) for file in (*self.train, *self.test)), strict=True)
        test = sum(len(y) for y in labels[len(self.train) :])
        count = sum(len(y) for y in labels)
        return Dataset(
            name=self.name,
            inputs=torch.from_numpy(np.concatenate(images)),
            labels=torch.from_numpy(np.concatenate(labels)),
            test=torch.arange(count) >= count - test,
            classes=tuple(_text(name) for name in names),
        )

    def _batch(self, path: Path) -> tuple[np.ndarray, np.ndarray]:
        batch = _read(path)
        data, labels = _field(path, batch, "data"), _field(path, batch, self.label_key)
        if not isinstance(data, np.ndarray):
            raise UserError(f"{path}: data must be uint8 [N, 3072], not a {type(data).__name__}; {REMEDY}")
        with decoding(path, "a CIFAR batch", REMEDY):
            labels = np.asarray(labels)
        if data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != 3072:
            raise UserError(f"{path}: data must be uint8 [N, 3072], not {data.dtype} {list(data.shape)}; {REMEDY}")
        if labels.dtype.kind not in "iu" or labels.shape != data.shape[:1]:
            raise UserError(f"{path}: {labels.size} labels of type {labels.dtype} for {len(data)} images; {REMEDY}")
        return data.reshape(-1, 3, 32, 32), labels.astype(np.int64)


class Cifar10(_Cifar):
    """CIFAR-10 in `cifar-10-batches-py/`."""

    name = "cifar10"
    description = "CIFAR-10: 60,000 colour pictures of 32×32, 10 classes of objects and animals"
    count = 10
    folder = "cifar-10-batches-py"
    train = tuple(f"data_batch_{i}" for i in range(1, 6))
    test = ("test_batch",)
    meta, label_key, names_key = "batches.meta", "labels", "label_names"
    layouts = (tuple(f"cifar-10-batches-py/{f}" for f in (*train, *test, meta)),)
    command = DOWNLOAD.replace("ARCHIVE", "cifar-10-python.tar.gz")
    remote = hub.Table("uoft-cs/cifar10", image="img")


class Cifar100(_Cifar):
    """CIFAR-100 in `cifar-100-python/`, with the 100 fine labels."""

    name = "cifar100"
    description = "CIFAR-100: 60,000 colour pictures of 32×32, 100 classes of objects and animals"
    count = 100
    folder = "cifar-100-python"
    train, test = ("train",), ("test",)
    meta, label_key, names_key = "meta", "fine_labels", "fine_label_names"
    layouts = (("cifar-100-python/train", "cifar-100-python/test", "cifar-100-python/meta"),)
    command = DOWNLOAD.replace("ARCHIVE", "cifar-100-python.tar.gz")
    remote = hub.Table("uoft-cs/cifar100", image="img", label="fine_label")


def _read(path: Path) -> dict[str, Any]:
    data = read_bytes(path, "a CIFAR batch", REMEDY)
    with decoding(path, "a CIFAR batch", REMEDY):
        content = plain_pickle.load(data)
    if not isinstance(content, dict):
        raise UserError(f"{path}: a CIFAR batch must be a dict, not a {type(content).__name__}; {REMEDY}")
    return content


def _field(path: Path, content: dict[str, Any], key: str) -> Any:
    if key not in content:
        names = ", ".join(sorted(name[:40] for name in content)[:20])
        raise UserError(f"{path}: has no '{key}' (it has: {names or 'nothing'}); {REMEDY}")
    return content[key]


def _text(value: object) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else str(value)
