"""USPS (digits scanned from envelopes), from libsvm's text files or one HDF5 file."""

import bz2
import math
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedloom.core.dataset import Dataset
from fedloom.core.errors import UserError, brief
from fedloom.core.limits import refuse_without_room
from fedloom.core.reading import CHUNK, decoding
from fedloom.data import hub
from fedloom.data.sources.source import Source


class Usps(Source):
    """USPS in `usps/usps.bz2` and `usps.t.bz2` (values −1…1, labels 1…10), or in `usps/usps.h5` (values 0…1)."""

    name = "usps"
    description = "USPS: 9,298 digits scanned from envelopes, 16×16 grey"
    classes = tuple("0123456789")
    layouts = (("usps/usps.bz2", "usps/usps.t.bz2"), ("usps/usps.h5",))
    command = (
        "curl --create-dirs --output-dir {folder}/usps -O "
        "'https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass/{{usps,usps.t}}.bz2'"
    )
    remote = hub.Table("flwrlabs/usps")

    def read(self, folder: Path, size: int | None) -> Dataset:
        """Read the text files if they exist, because they need no extra package, otherwise the HDF5 file."""
        if self.layout(folder) == self.layouts[0]:
            parts = [_read_libsvm(folder / file) for file in self.layouts[0]]
        else:
            parts = _read_hdf5(folder / self.layouts[1][0])
        pixels = np.concatenate([x for x, _ in parts])
        return Dataset(
            name=self.name,
            inputs=torch.from_numpy(np.rint(pixels * 255).clip(0, 255).astype(np.uint8).reshape(-1, 1, 16, 16)),
            labels=torch.from_numpy(np.concatenate([y for _, y in parts])),
            test=torch.arange(len(pixels)) >= len(parts[0][0]),
            classes=self.classes,
        )


REMEDY = "download it again"
LINES = 2**28
"""Maximum size of a decompressed text file, in bytes; USPS has 30 MB."""


def _read_libsvm(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read lines such as `7 1:-1 2:-0.81 … 256:0.3`; a pixel that is left out has the value 0, which is mid-grey."""
    from sklearn.datasets import load_svmlight_file  # imported here: it takes a second

    text = _unpacked(path)
    refuse_without_room(3 * 8 * 256 * (text.count(b"\n") + 1), str(path), REMEDY)
    with decoding(path, "libsvm's format", REMEDY):
        try:
            values, labels = load_svmlight_file(BytesIO(text), n_features=256, zero_based=False)
        except ValueError as error:
            raise UserError(f"{path}: {_wrong_line(text, error)}; {REMEDY}") from error
        pixels: np.ndarray = values.toarray()
    for what, numbers in (("a pixel", pixels), ("the label", labels[:, None])):
        good = np.isfinite(numbers) & (np.abs(numbers) < 2**53)
        if not good.all():
            line = int(np.argwhere(~good)[0, 0]) + 1
            raise UserError(f"{path}: {what} of line {line} is not a number; {REMEDY}")
    if (labels != np.rint(labels)).any():
        line = int(np.argmax(labels != np.rint(labels))) + 1
        raise UserError(f"{path}: the label of line {line} is {labels[line - 1]:g}, not a whole number; {REMEDY}")
    return (pixels + 1) / 2, labels.astype(np.int64) - 1


def _unpacked(path: Path) -> bytes:
    """Return the text of a bzip2 file, up to a limit: a few bytes of bzip2 can expand to gigabytes."""
    with decoding(path, "a bzip2 file", REMEDY), bz2.open(path) as file:
        parts, size = [], 0
        while part := file.read(CHUNK):
            parts.append(part)
            size += len(part)
            if size > LINES:
                raise UserError(f"{path}: has more than {LINES:,} bytes of text, which USPS does not have; {REMEDY}")
        return b"".join(parts)


def _wrong_line(text: bytes, error: ValueError) -> str:
    """Describe the first line that scikit-learn cannot read."""
    from sklearn.datasets import load_svmlight_file

    for number, line in enumerate(text.splitlines(), start=1):
        try:
            load_svmlight_file(BytesIO(line), n_features=256, zero_based=False)
        except ValueError as wrong:
            return f"line {number} is not in libsvm's format ({brief(wrong)})"
    return f"cannot be read in libsvm's format ({brief(error)})"


def _read_hdf5(path: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    try:
        import h5py
    except ImportError as error:
        raise UserError(f"{path}: reading it needs h5py; pip install 'fedloom[hdf5]'") from error
    with decoding(path, "USPS in HDF5", REMEDY), h5py.File(path, "r") as file:
        parts = [
            (_column(path, file, f"{name}/data", (256,)), _column(path, file, f"{name}/target", ()).astype(np.int64))
            for name in ("train", "test")
        ]
    for x, y in parts:
        if len(x) != len(y):
            raise UserError(f"{path}: data must be [{len(y)}, 256], not {list(x.shape)}; {REMEDY}")
    return parts


def _column(path: Path, file: Any, name: str, row: tuple[int, ...]) -> np.ndarray:
    """Read an array of numbers after a check of its type and size. Links and external data are not followed."""
    import h5py

    found = file
    for step in name.split("/"):
        if not isinstance(found.get(step, getlink=True), h5py.HardLink):
            raise UserError(f"{path}: {name} is missing or is a link; {REMEDY}")
        found = found[step]
    if not isinstance(found, h5py.Dataset) or found.dtype.kind not in "iuf" or found.external or found.is_virtual:
        raise UserError(f"{path}: {name} is not an array of numbers; {REMEDY}")
    if found.ndim == 0 or math.prod(found.shape[1:]) != math.prod(row):
        raise UserError(f"{path}: {name} must be {['N', *row]}, not {list(found.shape)}; {REMEDY}")
    refuse_without_room(4 * 8 * found.size, f"{path}: {name} of shape {list(found.shape)}", REMEDY, "it")
    values = np.asarray(found[:], np.float64)
    if not np.isfinite(values).all():
        raise UserError(f"{path}: {name} has values that are not finite numbers; {REMEDY}")
    return values.reshape(-1, *row)
