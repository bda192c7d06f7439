"""Human activity recognition with smartphones: 30 people, 6 activities (UCI HAR)."""

from io import BytesIO
from pathlib import Path

import numpy as np
import torch

from fedloom.core.dataset import Dataset
from fedloom.core.errors import UserError
from fedloom.core.limits import refuse_without_room
from fedloom.core.reading import decoding, read_bytes
from fedloom.data.sources.source import Source

ROOT = "UCI HAR Dataset"
FEATURES = 561
REMEDY = "download it again"


class Har(Source):
    """UCI HAR in `UCI HAR Dataset/{train,test}/{X,y,subject}_{train,test}.txt`: 561 features of 10,299 windows.

    Natural clients are the 30 people. The official test set has nine people that are not in the training set, so for
    natural clients use a split such as `pooled:0.75`.
    """

    name = "har"
    description = "UCI HAR: 10,299 windows of smartphone sensors of 30 people, 561 features, 6 activities"
    classes = ("walking", "walking upstairs", "walking downstairs", "sitting", "standing", "laying")
    layouts = (
        tuple(f"{ROOT}/{part}/{name}_{part}.txt" for part in ("train", "test") for name in ("X", "y", "subject")),
    )
    command = (
        "curl -L -o har.zip https://archive.ics.uci.edu/static/public/240/human+activity+recognition+using+smartphones.zip"
        " && unzip har.zip && unzip 'UCI HAR Dataset.zip' -d {folder}"
    )
    inputs = "a table"
    takes = ()

    def read(self, folder: Path, size: int | None) -> Dataset:
        """Read the two parts."""
        x, y, people = [], [], []
        for part in ("train", "test"):
            place = folder / ROOT / part
            x.append(_numbers(place / f"X_{part}.txt", FEATURES))
            y.append(_whole(place / f"y_{part}.txt", len(x[-1]), len(self.classes)))
            people.append(_whole(place / f"subject_{part}.txt", len(x[-1]), 1000))
        values, owners = np.unique(np.concatenate(people), return_inverse=True)
        count = len(x[0])
        return Dataset(
            name=self.name,
            inputs=torch.from_numpy(np.concatenate(x).astype(np.float32)),
            labels=torch.from_numpy(np.concatenate(y) - 1),
            test=torch.arange(count + len(x[1])) >= count,
            classes=self.classes,
            groups=torch.from_numpy(owners.astype(np.int64)),
            group_names=tuple(f"person {value}" for value in values),
        )


def _numbers(path: Path, columns: int) -> np.ndarray:
    """Read lines of numbers, separated by spaces."""
    with decoding(path, "lines of numbers", REMEDY):
        refuse_without_room(4 * path.stat().st_size, str(path), REMEDY, "it")
        values = np.loadtxt(BytesIO(read_bytes(path, "lines of numbers", REMEDY)), ndmin=2)
    if values.shape[1:] != (columns,) or not len(values):
        raise UserError(f"{path}: expected lines of {columns} numbers, not the shape {list(values.shape)}; {REMEDY}")
    if not (np.abs(values) < 1e30).all():
        raise UserError(f"{path}: has values that are not finite numbers; {REMEDY}")
    return values


def _whole(path: Path, count: int, largest: int) -> np.ndarray:
    """Read whole numbers from 1 on, one per line."""
    values = _numbers(path, 1)[:, 0]
    if len(values) != count or not ((values >= 1) & (values <= largest) & (values == np.rint(values))).all():
        raise UserError(f"{path}: expected {count} whole numbers from 1 to {largest}; {REMEDY}")
    return values.astype(np.int64)
