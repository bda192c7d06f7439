"""Datasets from the Hugging Face hub (`fedloom[hub]`), used if the original files are missing."""

from dataclasses import dataclass
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from fedloom.core.dataset import Dataset
from fedloom.core.errors import UserError
from fedloom.core.reading import decoding
from fedloom.data.decode import decode, open_picture


class UnreachableError(UserError):
    """A failed download from the hub: the network is down, or the dataset has moved."""


@dataclass(frozen=True)
class Table:
    """A dataset on the hub with a column of images and a column of labels."""

    repo: str
    """Repository: `owner/name`."""
    config: str | None = None
    """Configuration of the dataset, if it has several."""
    image: str = "image"
    """Column of images."""
    label: str = "label"
    """Column of labels."""
    group: str | None = None
    """Column of groups (styles), if there is one."""
    train: tuple[str, ...] = ("train",)
    """Splits that are training data."""
    test: tuple[str, ...] = ("test",)
    """Splits that are the official test set."""
    transposed: bool = False
    """Whether rows and columns of the images are swapped, as in the original files of EMNIST."""


@dataclass(frozen=True)
class Files:
    """A repository on the hub with the original files, which are copied into the data folder unchanged."""

    repo: str
    """Repository: `owner/name`."""
    names: tuple[str, ...]
    """Files in the repository."""
    into: str
    """Folder for them, relative to the data folder."""


def installed() -> bool:
    """Return whether Hugging Face `datasets` can be imported (and is not merely a folder of that name)."""
    try:
        import datasets
    except ImportError:
        return False
    return hasattr(datasets, "load_dataset")


def download(files: Files, folder: Path) -> None:
    """Download the original files into the data folder."""
    library = import_module("huggingface_hub")  # a dependency of `datasets`
    for name in files.names:
        try:
            library.hf_hub_download(files.repo, name, repo_type="dataset", local_dir=folder / files.into)
        except Exception as error:
            raise _unreachable(files.repo, error) from error


def fetch(table: Table, name: str, classes: tuple[str, ...], size: int | None) -> Dataset:
    """Download a dataset; `classes` are the names of its labels in order (by default the hub's)."""
    import datasets

    try:
        splits: Any = datasets.load_dataset(table.repo, table.config)
    except Exception as error:
        raise _unreachable(table.repo, error) from error
    wanted = (*table.train, *table.test)
    if missing := [split for split in wanted if split not in splits]:
        raise UnreachableError(f"{table.repo} on the Hugging Face hub no longer has the split '{missing[0]}'")
    rows = [(split, i) for split in wanted for i in range(len(splits[split]))]
    # Undecoded, so that `open_picture` opens them, with its limits on size and formats.
    files = {split: splits[split].cast_column(table.image, datasets.Image(decode=False)) for split in wanted}
    # One worker, because the hub's tables are not thread-safe.
    decoded = decode(
        [f"{table.repo}, {split} image {i}" for split, i in rows],
        lambda index: open_picture(_file(files[rows[index][0]][rows[index][1]][table.image])),
        size,
        workers=1,
    )
    images = decoded.images
    with decoding(f"{table.repo}, column {table.label}", "labels", "get the original files instead"):
        labels = np.concatenate([np.asarray(splits[split][table.label], np.int64) for split in wanted])
    group_names: tuple[str, ...] = ()
    groups = None
    if table.group is not None:
        values = np.concatenate([np.asarray(splits[split][table.group]) for split in wanted])
        names, inverse = np.unique(values, return_inverse=True)
        group_names = tuple(str(value) for value in names)
        groups = torch.from_numpy(inverse.astype(np.int64))
    return Dataset(
        name=name,
        inputs=images.transpose(2, 3).contiguous() if table.transposed else images,
        labels=torch.from_numpy(labels),
        test=torch.tensor([split in table.test for split, _ in rows]),
        classes=classes or tuple(splits[wanted[0]].features[table.label].names),
        groups=groups,
        group_names=group_names,
        styles=groups is not None,
        notes=(decoded.note,) if decoded.note else (),
    )


def _file(value: Any) -> IO[bytes] | Path:
    """Return the file in a cell of an undecoded image column."""
    data, path = value["bytes"], value["path"]
    return BytesIO(data) if data is not None else Path(path)


def _unreachable(repo: str, error: Exception) -> UnreachableError:
    lines = str(error).strip().splitlines() or [""]
    return UnreachableError(f"fetching {repo} from the Hugging Face hub failed ({type(error).__name__}: {lines[0]})")
