"""USPS, the digits of envelopes: libsvm's text files, or one HDF5 file."""

import bz2
from io import BytesIO
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
    from sklearn.datasets import load_svmlight_file  # here: it takes a second to import

    try:
        values, labels = load_svmlight_file(str(path), n_features=256, zero_based=False)
    except ValueError as error:
        raise UserError(f"{path}: {_wrong_line(path, error)}") from error
    except (OSError, EOFError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from error
    pixels: np.ndarray = values.toarray()
    if not np.isfinite(pixels).all():
        raise UserError(f"{path}: a pixel of line {int(np.argwhere(~np.isfinite(pixels))[0, 0]) + 1} is no number")
    return (pixels + 1) / 2, labels.astype(np.int64) - 1


def _wrong_line(path: Path, error: ValueError) -> str:
    """Which line it is that scikit-learn complains about: the first that it cannot read alone."""
    from sklearn.datasets import load_svmlight_file

    for number, line in enumerate(bz2.decompress(path.read_bytes()).splitlines(), start=1):
        try:
            load_svmlight_file(BytesIO(line), n_features=256, zero_based=False)
        except ValueError as wrong:
            return f"line {number} is not in libsvm's format ({wrong})"
    return f"cannot be read in libsvm's format ({error})"


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
