"""Datasets of images, and their division among clients."""

from pathlib import Path

from fedloom.core import trusted_code
from fedloom.core.task import Dataset, Federation
from fedloom.data import sources
from fedloom.data.dataset import combine, limit, resize
from fedloom.data.decode import OnBad
from fedloom.data.federation import counts, federate, parse_split
from fedloom.data.from_arrays import from_arrays, from_clients, from_torch
from fedloom.data.partition import PARTITIONS, Partition, Pool, parse_partition
from fedloom.data.sources import data_folder, parts

__all__ = [
    "PARTITIONS", "Dataset", "Federation", "Partition", "Pool", "combine", "counts", "data_folder", "federate",
    "from_arrays", "from_clients", "from_torch", "limit", "load", "parse_partition", "parse_split", "parts",
    "resize",
]  # fmt: skip


def load(name: str, *, folder: Path | str | None = None, size: int | None = None, on_bad: OnBad = "stop") -> Dataset:
    """Load a dataset by name.

    Args:
        name: A dataset that `fedloom datasets` lists, several joined as styles (`mnist+usps+svhn`), the path of an
            image folder or an `.npz` file, or `path/to/file.py:function`. A Python file is imported, which runs its
            code. Paths may be relative to the current folder or to the data folder.
        folder: The data folder; by default `$FEDLOOM_DATA`, then the user's cache.
        size: Height and width to which images are resized.
        on_bad: What to do about files in image folders that cannot be read: `stop` raises an error that names all of
            them, `skip` leaves them out and names them in the dataset's `notes`.

    Returns:
        The dataset.

    Raises:
        UserError: The dataset is unknown, its files are missing or damaged, or it does not fit into memory.

    Example:
        >>> len(load("digits"))
        1797
    """
    trusted_code.allow(name)
    return sources.load(name, folder=folder, size=size, on_bad=on_bad)
