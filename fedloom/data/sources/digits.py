"""Scikit-learn's handwritten digits: 1,797 images of 8×8 pixels that come with the library."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from fedloom.core.dataset import Dataset
from fedloom.data.sources.source import Source


class Digits(Source):
    """Scikit-learn's digits, with pixels scaled from 0…16 to 0…255."""

    name = "digits"
    description = "scikit-learn's handwritten digits, 8×8, 1,797 images; no download"
    classes = tuple("0123456789")
    layouts = ((),)

    def read(self, folder: Path, size: int | None) -> Dataset:
        """Read the images from scikit-learn, which has no official test set of them."""
        table = _table()
        pixels = np.rint(table[:, :-1].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
        return Dataset(
            name=self.name,
            inputs=torch.from_numpy(pixels).unsqueeze(1),
            labels=torch.from_numpy(table[:, -1].astype(np.int64)),
            test=torch.zeros(len(pixels), dtype=torch.bool),
            classes=self.classes,
        )


def _table() -> np.ndarray:
    """Return 64 pixels and the label of each image.

    The file is read without importing scikit-learn, which takes 1.1 s of CPU time together with SciPy and pandas.
    """
    package = find_spec("sklearn")
    if package is not None and package.origin is not None:
        file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
        if file.exists():
            return np.loadtxt(file, delimiter=",")
    from sklearn.datasets import load_digits  # a version that stores them elsewhere

    digits = load_digits()
    return np.column_stack([digits.data, digits.target])
