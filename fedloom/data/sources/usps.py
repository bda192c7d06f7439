"""USPS, the digits of envelopes: libsvm's text files, or one HDF5 file."""

import bz2
from pathlib import Path

import numpy as np
import torch

from fedloom.core.errors import UserError
from fedloom.core.task import Dataset
from fedloom.data import hub
from fedloom.data.sources.source import Source


class Usps(Source):
    """`usps/usps.bz2` and `usps.t.bz2` (values −1…1, labels 1…10), or `usps/usps.h5` (values 0…1)."""

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
        """Reads whichever layout is there; the text files first, because they need no extra package."""
        if self.layout(folder) == self.layouts[0]:
            parts = [_read_libsvm(folder / file) for file in self.layouts[0]]
        else:
            parts = _read_hdf5(folder / self.layouts[1][0])
        pixels = np.concatenate([x for x, _ in parts])
        return Dataset(
            name=self.name,
            images=torch.from_numpy(np.rint(pixels * 255).clip(0, 255).astype(np.uint8).reshape(-1, 1, 16, 16)),
            labels=torch.from_numpy(np.concatenate([y for _, y in parts])),
            test=torch.arange(len(pixels)) >= len(parts[0][0]),
            classes=self.classes,
        )


def _read_libsvm(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Lines such as `7 1:-1 2:-0.81 … 256:0.3`; a pixel that is left out is 0 in the file, so mid-grey."""
    try:
        lines = bz2.decompress(path.read_bytes()).decode("ascii").splitlines()
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from error
    values, labels = np.zeros((len(lines), 256)), np.empty(len(lines), np.int64)
    for row, line in enumerate(lines):
        try:
            label, *pairs = line.split()
            labels[row] = int(float(label)) - 1
            for pair in pairs:
                index, value = pair.split(":")
                values[row, int(index) - 1] = _pixel(int(index), float(value))
        except (ValueError, IndexError) as error:
            raise UserError(f"{path}: line {row + 1} is not in libsvm's format ({error})") from error
    return (values + 1) / 2, labels


def _pixel(index: int, value: float) -> float:
    if index < 1 or not np.isfinite(value):
        raise ValueError(f"pixel {index} is {value}")
    return value


def _read_hdf5(path: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    try:
        import h5py
    except ImportError as error:
        raise UserError(f"{path}: reading it needs h5py; pip install 'fedloom[hdf5]'") from error
    parts = []
    try:
        with h5py.File(path, "r") as file:
            for name in ("train", "test"):
                parts.append((file[name]["data"][:], file[name]["target"][:].reshape(-1).astype(np.int64)))
    except (OSError, KeyError) as error:
        raise UserError(f"{path}: cannot be read as USPS in HDF5 ({error})") from error
    for x, y in parts:
        if x.shape != (len(y), 256):
            raise UserError(f"{path}: data must be [{len(y)}, 256], not {list(x.shape)}")
    return parts
