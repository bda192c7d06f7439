"""SVHN, the cropped house numbers: the original MATLAB files, or a pair of .npz."""

from pathlib import Path

import numpy as np
import torch

from fedloom.core.errors import UserError
from fedloom.core.task import Dataset
from fedloom.data import hub
from fedloom.data.sources.npz import read_pair
from fedloom.data.sources.source import Source


class Svhn(Source):
    """`svhn/{train,test}_32x32.mat`, where digit 0 has the label 10; or `svhn-subset/{train,test}.npz`."""

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
        """Reads whichever layout is there, the original first."""
        if self.layout(folder) != self.layouts[0]:
            return read_pair(self.name, folder / "svhn-subset", self.classes)
        images, labels = zip(*(_read_mat(folder / file) for file in self.layouts[0]), strict=True)
        return Dataset(
            name=self.name,
            images=torch.from_numpy(np.concatenate(images)),
            labels=torch.from_numpy(np.concatenate(labels)),
            test=torch.arange(sum(map(len, labels))) >= len(labels[0]),
            classes=self.classes,
        )


def _read_mat(path: Path) -> tuple[np.ndarray, np.ndarray]:
    from scipy.io import loadmat

    try:
        content = loadmat(path, variable_names=["X", "y"])
    # A damaged MATLAB file fails in many ways (zlib, struct, scipy's own).
    except Exception as error:
        raise UserError(f"{path}: cannot be read as a MATLAB file ({error})") from error
    if missing := {"X", "y"} - content.keys():
        raise UserError(f"{path}: has no variable '{min(missing)}'; SVHN's files have X and y")
    x, y = content["X"], content["y"].reshape(-1).astype(np.int64)
    if x.dtype != np.uint8 or x.ndim != 4 or x.shape[2:] != (3, len(y)):
        raise UserError(f"{path}: X must be uint8 [H, W, 3, {len(y)}], not {x.dtype} {list(x.shape)}")
    return np.ascontiguousarray(x.transpose(3, 2, 0, 1)), np.where(y == 10, 0, y)
