"""Datasets of images, tables, recordings and other inputs, and their division among clients."""

from pathlib import Path

from fedloom.core import trusted_code
from fedloom.core.dataset import Dataset
from fedloom.core.federation import Federation
from fedloom.data import sources
from fedloom.data.dataset import combine, limit, resize
from fedloom.data.decode import OnBad
from fedloom.data.federation import counts, federate, parse_split
from fedloom.data.from_arrays import from_arrays
from fedloom.data.from_clients import from_clients, from_splits
from fedloom.data.from_objects import from_frame
from fedloom.data.from_torch import from_torch
from fedloom.data.partitions import PARTITIONS, Partition, Pool, parse_partition
from fedloom.data.sources import data_folder, parts

__all__ = [
    "PARTITIONS", "Dataset", "Federation", "Partition", "Pool", "combine", "counts", "data_folder", "federate",
    "from_arrays", "from_clients", "from_frame", "from_splits", "from_torch", "limit", "load", "parse_partition",
    "parse_split", "parts", "resize",
]  # fmt: skip


def load(
    name: str,
    *,
    folder: Path | str | None = None,
    size: int | None = None,
    on_bad: OnBad = "stop",
    label: str | None = None,
    client: str | None = None,
    seconds: float | None = None,
    mels: int | None = None,
) -> Dataset:
    """Load a dataset by name.

    Args:
        name: A dataset that `fedloom datasets` lists, several joined as styles (`mnist+usps+svhn`), the path of a
            folder of images, recordings or tables, of an `.npz`, `.csv` or `.parquet` file, or
            `path/to/file.py:function`. A Python file is imported, which runs its code. Paths may be relative to the
            current folder or to the data folder.
        folder: The data folder; by default `$FEDLOOM_DATA`, then the user's cache.
        size: Height and width to which images are resized.
        on_bad: What to do about images or recordings in folders that cannot be read: `stop` raises an error that names
            all of them, `skip` leaves them out and names them in the dataset's `notes`.
        label: Column of the label in a table; by default the only one called label, labels, target, class or y.
        client: Column of the client in a table, whose values are the groups of the dataset.
        seconds: Length to which recordings are cut or padded; by default 1.
        mels: Number of frequency bands of recordings; by default 32.

    Returns:
        The dataset.

    Raises:
        UserError: The dataset is unknown, its files are missing or damaged, an option is for other data, or it does not
            fit into memory.

    Example:
        >>> len(load("digits"))
        1797
    """
    trusted_code.allow(name)
    return sources.load(name, folder=folder, options=sources.ReadOptions(size, on_bad, label, client, seconds, mels))
