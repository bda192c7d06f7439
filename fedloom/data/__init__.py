"""Data: sources of images, their division among clients, and pictures of who holds what."""

from fedloom.data.dataset import Dataset, combine, limit, resize
from fedloom.data.federation import Federation, counts, federate, parse_split
from fedloom.data.partition import PARTITIONS, Partition, Pool, parse_partition
from fedloom.data.plot import plot_federation
from fedloom.data.sources import SourceInfo, data_folder, describe, load, parts

__all__ = [
    "PARTITIONS",
    "Dataset",
    "Federation",
    "Partition",
    "Pool",
    "SourceInfo",
    "combine",
    "counts",
    "data_folder",
    "describe",
    "federate",
    "limit",
    "load",
    "parse_partition",
    "parse_split",
    "parts",
    "plot_federation",
    "resize",
]
