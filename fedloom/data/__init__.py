"""Data: sources of images, and their division among clients."""

from pathlib import Path

from fedloom.core import trusted_code
from fedloom.core.task import Dataset, Federation
from fedloom.data import sources
from fedloom.data.dataset import combine, limit, resize
from fedloom.data.federation import counts, federate, parse_split
from fedloom.data.partition import PARTITIONS, Partition, Pool, parse_partition
from fedloom.data.sources import data_folder, parts

__all__ = [
    "PARTITIONS", "Dataset", "Federation", "Partition", "Pool", "combine", "counts", "data_folder",
    "federate", "limit", "load", "parse_partition", "parse_split", "parts", "resize",
]  # fmt: skip


def load(name: str, *, folder: Path | str | None = None, size: int | None = None) -> Dataset:
    """Loads a dataset as `fedloom.data.sources.load` does; a file that the name gives, `file.py:name`, is imported."""
    trusted_code.allow(name)
    return sources.load(name, folder=folder, size=size)
