"""Datasets from the Hugging Face hub (`fedloom[hub]`), for when the original files are not there."""

from dataclasses import dataclass
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from fedloom.core.errors import UserError
from fedloom.core.reading import decoding
from fedloom.core.task import Dataset
from fedloom.data.decode import decode, open_picture


class UnreachableError(UserError):
    """The hub did not give what was asked of it: no network, or the dataset has moved."""


@dataclass(frozen=True)
class Table:
    """A hub dataset with a column of images and one of labels."""

    repo: str
    config: str | None = None
    image: str = "image"
    label: str = "label"
    group: str | None = None
    train: tuple[str, ...] = ("train",)
    test: tuple[str, ...] = ("test",)
    transposed: bool = False
    """rows and columns of the pictures are swapped, as in the original files of EMNIST"""


@dataclass(frozen=True)
class Files:
    """A hub repository that holds the original files: they are copied into the data folder as they are."""

    repo: str
    names: tuple[str, ...]
    into: str


def installed() -> bool:
    """Whether Hugging Face `datasets` can be imported (a folder of that name in the way does not count)."""
    try:
        import datasets
    except ImportError:
        return False
    return hasattr(datasets, "load_dataset")


def download(files: Files, folder: Path) -> None:
    """Copies the original files into the data folder."""
    library = import_module("huggingface_hub")  # `datasets` brings it along
    for name in files.names:
        try:
            library.hf_hub_download(files.repo, name, repo_type="dataset", local_dir=folder / files.into)
        except Exception as error:
            raise _unreachable(files.repo, error) from error


def fetch(table: Table, name: str, classes: tuple[str, ...], size: int | None) -> Dataset:
    """The hub's dataset as one of ours; `classes` name its labels, in order (empty: the hub's own names)."""
    import datasets

    try:
        splits: Any = datasets.load_dataset(table.repo, table.config)
    except Exception as error:
        raise _unreachable(table.repo, error) from error
    wanted = (*table.train, *table.test)
    if missing := [split for split in wanted if split not in splits]:
        raise UnreachableError(f"{table.repo} on the Hugging Face hub has no split '{missing[0]}' any more")
    rows = [(split, i) for split in wanted for i in range(len(splits[split]))]
    # Pictures as the files they are, so that they are opened like any other: with a limit, and not all formats.
    files = {split: splits[split].cast_column(table.image, datasets.Image(decode=False)) for split in wanted}
    # One worker: the hub's tables are not meant to be read from several threads.
    images = decode(
        [f"{table.repo}, {split} image {i}" for split, i in rows],
        lambda index: open_picture(_file(files[rows[index][0]][rows[index][1]][table.image])),
        size,
        workers=1,
    )
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
        images=images.transpose(2, 3).contiguous() if table.transposed else images,
        labels=torch.from_numpy(labels),
        test=torch.tensor([split in table.test for split, _ in rows]),
        classes=classes or tuple(splits[wanted[0]].features[table.label].names),
        groups=groups,
        group_names=group_names,
    )


def _file(value: Any) -> IO[bytes] | Path:
    """A cell of an image column that is not decoded."""
    data, path = value["bytes"], value["path"]
    return BytesIO(data) if data is not None else Path(path)


def _unreachable(repo: str, error: Exception) -> UnreachableError:
    lines = str(error).strip().splitlines() or [""]
    return UnreachableError(f"fetching {repo} from the Hugging Face hub failed ({type(error).__name__}: {lines[0]})")
