"""Scikit-learn's handwritten digits: 1,797 images of 8×8 pixels that come with the library."""

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
        from sklearn.datasets import load_digits

        bunch = load_digits()
        pixels = np.rint(bunch.images * (255 / 16)).astype(np.uint8)
        return Dataset(
            name=self.name,
            inputs=torch.from_numpy(pixels).unsqueeze(1),
            labels=torch.from_numpy(bunch.target.astype(np.int64)),
            test=torch.zeros(len(pixels), dtype=torch.bool),
            classes=self.classes,
        )
