"""SVHN (cropped digits of house numbers), from the original MATLAB files or a pair of .npz files."""

from pathlib import Path

import numpy as np
import torch

from fedloom.core.dataset import Dataset
from fedloom.core.errors import UserError
from fedloom.core.limits import refuse_without_room
from fedloom.core.reading import decoding
from fedloom.data import hub
from fedloom.data.matlab import read_arrays
from fedloom.data.sources.npz import read_pair
from fedloom.data.sources.source import Source


class Svhn(Source):
    """SVHN in `svhn/{train,test}_32x32.mat`, where digit 0 has the label 10, or in `svhn-subset/{train,test}.npz`."""

    name = "svhn"
    description = "SVHN: 99,289 digits of house numbers, 32×32 colour"
    classes = tuple("0123456789")
    layouts = (("svhn/train_32x32.mat", "svhn/test_32x32.mat"), ("svhn-subset/train.npz", "svhn-subset/test.npz"))
    command = (
        "curl --create-dirs --output-dir {folder}/svhn -O "
        "'http://ufldl.stanford.edu/housenumbers/{{train,test}}_32x32.mat'"
    )
    remote = hub.Table("ufldl-stanford/svhn", config="cropped_digits")

    def read(self, folder: Path, size: int | None) -> Dataset:
        """Read the original files if they exist, otherwise the .npz files."""
        if self.layout(folder) != self.layouts[0]:
            return read_pair(self.name, folder / "svhn-subset", self.classes)
        images, labels = zip(*(_read_mat(folder / file) for file in self.layouts[0]), strict=True)
        return Dataset(
            name=self.name,
            inputs=torch.from_numpy(np.concatenate(images)),
            labels=torch.from_numpy(np.concatenate(labels)),
            test=torch.arange(sum(map(len, labels))) >= len(labels[0]),
            classes=self.classes,
        )


REMEDY = "download it again"


def _read_mat(path: Path) -> tuple[np.ndarray, np.ndarray]:
    with decoding(path, "a MATLAB file", REMEDY), path.open("rb") as file:
        found = read_arrays(file, path.stat().st_size, ("X", "y"))
    if missing := {"X", "y"} - found.keys():
        raise UserError(f"{path}: has no variable '{min(missing)}' (SVHN's files have X and y); {REMEDY}")
    x, y = found["X"], found["y"].reshape(-1)
    if x.dtype != np.uint8 or x.ndim != 4 or x.shape[2:] != (3, len(y)):
        raise UserError(f"{path}: X must be uint8 [H, W, 3, {len(y)}], not {x.dtype} {list(x.shape)}; {REMEDY}")
    if not np.isin(y, np.arange(11)).all():
        raise UserError(f"{path}: y must be whole numbers from 1 to 10 (or 0); {REMEDY}")
    y = y.astype(np.int64)
    refuse_without_room(2 * x.nbytes, str(path), "leave out images")
    return np.ascontiguousarray(x.transpose(3, 2, 0, 1)), np.where(y == 10, 0, y)
